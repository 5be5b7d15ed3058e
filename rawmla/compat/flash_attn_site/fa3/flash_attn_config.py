from rawmla.compat.flash_attn.fa3_config import *  # noqa: F403
from rawmla.compat.flash_attn.fa3_config import __all__ as __all__
