from rawmla.compat.flash_mla.cuda import *  # noqa: F403
from rawmla.compat.flash_mla.cuda import __all__ as __all__
