from rawmla.compat.flash_attn import fa2_cuda as flash_attn_gpu  # noqa: F401
from rawmla.compat.flash_attn.fa2 import *  # noqa: F403
from rawmla.compat.flash_attn.fa2 import __all__ as __all__
from rawmla.compat.flash_attn.fa2_private import USE_TRITON_ROCM as USE_TRITON_ROCM
from rawmla.compat.flash_attn.fa2_private import _get_block_size_n as _get_block_size_n
