"""`flash_attn.cute` computed by rawmla: see docs/flash_attn.md of rawmla."""

from rawmla import __version__ as __rawmla__  # noqa: F401
from rawmla.compat.flash_attn.fa4 import *  # noqa: F403
from rawmla.compat.flash_attn.fa4 import __all__ as __all__

from . import interface as interface

__version__ = "4.0.0b36"
