"""rawmla: multi-head latent attention (MLA) for NVIDIA Hopper, compiled at run time by NVRTC.

The names below are loaded on first use (PEP 562), so `import rawmla` is fast and needs no GPU, driver, CUDA
toolkit, torch or CuPy. What a function needs and does not find is named, with the remedy, when it is called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import reference
    from .errors import (
        CompileError,
        KernelNotReadyError,
        LaunchError,
        MissingDependencyError,
        NoGPUError,
        NVRTCNotFoundError,
        RawMLAError,
        UnsupportedGPUError,
    )
    from .mla.cache import dequantize_k_cache, gather_kv_cache, quantize_k_cache, write_kv_cache
    from .mla.decode import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
    from .mla.indices import convert_indices
    from .mla.merge import merge_attn_states
    from .mla.sparse_prefill import flash_mla_sparse_fwd
    from .preload import warmup

__all__ = [
    "CompileError",
    "FlashMLASchedMeta",
    "KernelNotReadyError",
    "LaunchError",
    "MissingDependencyError",
    "NVRTCNotFoundError",
    "NoGPUError",
    "RawMLAError",
    "UnsupportedGPUError",
    "__version__",
    "convert_indices",
    "dequantize_k_cache",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "gather_kv_cache",
    "get_mla_metadata",
    "merge_attn_states",
    "quantize_k_cache",
    "reference",
    "warmup",
    "write_kv_cache",
]

# Public name -> module that defines it. `reference` is itself a module.
_MODULE_OF = {
    "CompileError": ".errors",
    "FlashMLASchedMeta": ".mla.decode",
    "KernelNotReadyError": ".errors",
    "LaunchError": ".errors",
    "MissingDependencyError": ".errors",
    "NVRTCNotFoundError": ".errors",
    "NoGPUError": ".errors",
    "RawMLAError": ".errors",
    "UnsupportedGPUError": ".errors",
    "convert_indices": ".mla.indices",
    "dequantize_k_cache": ".mla.cache",
    "flash_mla_sparse_fwd": ".mla.sparse_prefill",
    "flash_mla_with_kvcache": ".mla.decode",
    "gather_kv_cache": ".mla.cache",
    "get_mla_metadata": ".mla.decode",
    "merge_attn_states": ".mla.merge",
    "quantize_k_cache": ".mla.cache",
    "warmup": ".preload",
    "write_kv_cache": ".mla.cache",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use and keep it, so later look-ups cost nothing."""
    if name == "reference":
        return import_module(".reference", __name__)
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(set(globals()) | set(__all__))
