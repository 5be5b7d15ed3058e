from rawmla.compat.flash_attn.fa4 import *  # noqa: F403
from rawmla.compat.flash_attn.fa4 import __all__ as __all__
