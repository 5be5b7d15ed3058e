"""The module `flash_mla` as rawmla gives it: `rawmla.install_flash_mla` says how programs get it.

Importing it needs no GPU, compiles nothing and does not initialise CUDA.
"""

from __future__ import annotations

import warnings

import rawmla

from ...environment import version_of
from .. import EXCLUSIVE
from . import cuda as cuda
from . import flash_mla_interface as flash_mla_interface
from . import fused_norm_rope_attn_rope_cast as fused_norm_rope_attn_rope_cast
from .flash_mla_interface import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]

__version__ = f"1.0.0+rawmla.{rawmla.__version__}"  # the version whose surface this is, of both libraries


def has_legacy() -> bool:
    """True: caches and GPUs that sgl-flash-mla serves by its second kernel set are served here."""
    return True


if all(map(version_of, EXCLUSIVE)):
    warnings.warn(
        f"{' and '.join(EXCLUSIVE)} are both installed and have overwritten each other's files; uninstall "
        "both, then install the one that you want",
        RuntimeWarning,
        stacklevel=2,
    )
