from rawmla.compat.flash_mla.fused_norm_rope_attn_rope_cast import *  # noqa: F403
from rawmla.compat.flash_mla.fused_norm_rope_attn_rope_cast import __all__ as __all__
