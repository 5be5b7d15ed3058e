from rawmla.compat.flash_attn.fa2_cuda import *  # noqa: F403
from rawmla.compat.flash_attn.fa2_cuda import __all__ as __all__
