from rawmla import __version__ as __rawmla__  # noqa: F401
from rawmla.compat.flash_attn.fa3 import *  # noqa: F403
from rawmla.compat.flash_attn.fa3 import __all__ as __all__
