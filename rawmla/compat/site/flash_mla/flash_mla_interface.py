from rawmla.compat.flash_mla.flash_mla_interface import *  # noqa: F403
from rawmla.compat.flash_mla.flash_mla_interface import __all__ as __all__
