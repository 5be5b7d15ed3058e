"""`flash_mla` computed by rawmla: see docs/flash_mla.md of rawmla."""

from importlib import import_module

from rawmla.compat.flash_mla import *  # noqa: F403
from rawmla.compat.flash_mla import __all__ as __all__
from rawmla.compat.flash_mla import __version__ as __version__

# Importing binds them here, in place of a module that the * above has brought.
for _name in ("cuda", "flash_mla_interface", "fused_norm_rope_attn_rope_cast"):
    import_module(f"{__name__}.{_name}")
