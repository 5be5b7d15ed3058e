"""`flash_mla` computed by rawmla: see docs/flash_mla.md of rawmla."""

from rawmla.compat.flash_mla import *  # noqa: F403
from rawmla.compat.flash_mla import __all__ as __all__
from rawmla.compat.flash_mla import __version__ as __version__

from . import cuda, flash_mla_interface, fused_norm_rope_attn_rope_cast  # type: ignore[no-redef]  # noqa: F401
