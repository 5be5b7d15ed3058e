from rawmla.compat.flash_attn.fa2 import *  # noqa: F403
from rawmla.compat.flash_attn.fa2 import __all__ as __all__
