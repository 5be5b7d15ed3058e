"""`flash_attn_3` computed by rawmla: see docs/flash_attn.md of rawmla."""

from rawmla import __version__ as __rawmla__  # noqa: F401
from rawmla.compat.flash_attn.fa3 import *  # noqa: F403
from rawmla.compat.flash_attn.fa3 import __all__ as __all__

from . import flash_attn_config as flash_attn_config
from . import flash_attn_interface as flash_attn_interface

__version__ = "3.0.0"
