"""rawmla: attention for NVIDIA Hopper, multi-head latent (MLA), dense and flex, compiled by NVRTC.

The names below are loaded on first use (PEP 562), so `import rawmla` is fast and needs no GPU, driver, CUDA
toolkit, torch or CuPy. A call names what is missing, with the remedy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it; "" for a name that is itself a module.
_MODULE_OF = {
    "AuxOutput": "flex.forward",
    "AuxRequest": "flex.forward",
    "BlockMask": "flex.block_mask",
    "CompileError": "errors",
    "CudaMod": "flex.mods",
    "FlashMLASchedMeta": "mla.plan",
    "KernelNotReadyError": "errors",
    "LaunchError": "errors",
    "MissingDependencyError": "errors",
    "NVRTCNotFoundError": "errors",
    "NoGPUError": "errors",
    "RawMLAError": "errors",
    "TracedMod": "flex.mods",
    "UnsupportedGPUError": "errors",
    "and_masks": "flex.block_mask",
    "compat": "",
    "context_attention_fwd": "api.prefix",
    "convert_indices": "api.cache",
    "create_block_mask": "api.flex",
    "dequantize_k_cache": "api.cache",
    "flash_attn_backward": "api.dense_backward",
    "flash_attn_func": "api.dense",
    "flash_attn_varlen_backward": "api.dense_backward",
    "flash_attn_varlen_func": "api.dense",
    "flash_attn_varlen_kvpacked_func": "api.dense",
    "flash_attn_varlen_qkvpacked_func": "api.dense",
    "flash_attn_with_kvcache": "api.kvcache",
    "flash_mla_sparse_fwd": "api.sparse_prefill",
    "flash_mla_with_kvcache": "api.decode",
    "flex_attention": "api.flex",
    "flex_attention_backward": "api.flex",
    "gather_kv_cache": "api.cache",
    "get_mla_metadata": "api.plan",
    "install_flash_attn": "compat",
    "install_flash_mla": "compat",
    "merge_attn_states": "api.cache",
    "noop_mask": "flex.block_mask",
    "or_masks": "flex.block_mask",
    "quantize_k_cache": "api.cache",
    "reference": "",
    "trace_mod": "api.flex",
    "transformers": "",
    "uninstall_flash_attn": "compat",
    "uninstall_flash_mla": "compat",
    "warmup": "preload",
    "warmup_call": "preload",
    "write_kv_cache": "api.cache",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604

if TYPE_CHECKING:  # for type checkers, which do not follow the table
    from . import compat as compat
    from . import reference as reference
    from . import transformers as transformers
    from .api.cache import *  # noqa: F403
    from .api.decode import *  # noqa: F403
    from .api.dense import *  # noqa: F403
    from .api.dense_backward import *  # noqa: F403
    from .api.flex import *  # noqa: F403
    from .api.kvcache import *  # noqa: F403
    from .api.plan import *  # noqa: F403
    from .api.prefix import *  # noqa: F403
    from .api.sparse_prefill import *  # noqa: F403
    from .compat import install_flash_attn as install_flash_attn
    from .compat import install_flash_mla as install_flash_mla
    from .compat import uninstall_flash_attn as uninstall_flash_attn
    from .compat import uninstall_flash_mla as uninstall_flash_mla
    from .errors import *  # noqa: F403
    from .flex.block_mask import BlockMask as BlockMask
    from .flex.block_mask import and_masks as and_masks
    from .flex.block_mask import noop_mask as noop_mask
    from .flex.block_mask import or_masks as or_masks
    from .flex.forward import AuxOutput as AuxOutput
    from .flex.forward import AuxRequest as AuxRequest
    from .flex.mods import CudaMod as CudaMod
    from .flex.mods import TracedMod as TracedMod
    from .mla.plan import FlashMLASchedMeta as FlashMLASchedMeta
    from .preload import warmup as warmup
    from .preload import warmup_call as warmup_call


def __getattr__(name: str) -> Any:
    """Load a public name on first use and keep it, so later look-ups cost nothing."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    value: Any = import_module(f".{module or name}", __name__)
    if module:
        value = getattr(value, name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """The public names close to one that does not exist, for the end of an error; empty without any."""
    if name.startswith("__"):  # what Python and tools look for in any module
        return ""
    from difflib import get_close_matches

    close = get_close_matches(name, _MODULE_OF)
    return f"; close names: {', '.join(close)}" if close else ""


def __dir__() -> list[str]:
    """The public names, loaded or not, and no others."""
    return sorted(__all__)
