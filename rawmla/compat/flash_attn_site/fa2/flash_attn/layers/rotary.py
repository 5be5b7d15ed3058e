from rawmla.compat.flash_attn.rotary import *  # noqa: F403
from rawmla.compat.flash_attn.rotary import __all__ as __all__
