"""`flash_attn` computed by rawmla: see docs/flash_attn.md of rawmla."""

from pathlib import Path
from pkgutil import extend_path

# FlashAttention-4 puts `flash_attn.cute` into a folder of the same name without an __init__.py. A folder with
# one is FlashAttention-2's, whose other modules need its extension.
__path__ = [
    folder
    for folder in extend_path(__path__, __name__)
    if folder in __path__ or not Path(folder, "__init__.py").exists()
]

from rawmla import __version__ as __rawmla__  # noqa: E402, F401
from rawmla.compat.flash_attn.fa2 import (  # noqa: E402, F401
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

from . import flash_attn_interface as flash_attn_interface  # noqa: E402

__version__ = "2.8.3"
