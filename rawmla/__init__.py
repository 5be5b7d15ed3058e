"""rawmla: multi-head latent attention (MLA) decoding for NVIDIA Hopper, compiled at run time by NVRTC.

The names below are loaded on first use (PEP 562), so `import rawmla` is fast and needs no GPU, driver, CUDA
toolkit, torch or CuPy. What a function needs and does not find is named, with the remedy, when it is called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import reference
    from .decode import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
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
    from .kernels import warmup

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
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "reference",
    "warmup",
]

# Public name -> module that defines it. `reference` is itself a module.
_MODULE_OF = {
    "CompileError": ".errors",
    "FlashMLASchedMeta": ".decode",
    "KernelNotReadyError": ".errors",
    "LaunchError": ".errors",
    "MissingDependencyError": ".errors",
    "NVRTCNotFoundError": ".errors",
    "NoGPUError": ".errors",
    "RawMLAError": ".errors",
    "UnsupportedGPUError": ".errors",
    "flash_mla_with_kvcache": ".decode",
    "get_mla_metadata": ".decode",
    "warmup": ".kernels",
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
