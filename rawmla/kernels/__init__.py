"""The kernels' host sides: which variants exist, their parameter structs and grids.

One module per file of cuda_src/kernels. They take device addresses and numbers, never arrays.
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import jit
from . import (
    mla_cache_gather,
    mla_cache_write,
    mla_combine,
    mla_convert_indices,
    mla_dense_decode,
    mla_merge_states,
    mla_metadata,
    mla_sparse,
    mla_sparse_prefill,
)
from .common import D_QK, DTYPES
from .mla_cache_rows import FORMATS

__all__ = ["all_specs", "default_specs", "warmup"]


def all_specs() -> list[jit.KernelSpec]:
    """Every variant of every kernel."""
    formats = list(FORMATS)
    return _specs(list(DTYPES), list(D_QK), list(mla_dense_decode.BOX_ROWS), formats, formats)


def default_specs() -> list[jit.KernelSpec]:
    """What dense decoding of a bf16 model with d_qk 576 and pages of 64 tokens or a multiple of it needs, and
    merging its results.
    """
    return _specs(["bfloat16"], [576], [64], [], [])


def warmup(
    *,
    dtypes: Iterable[str] = ("bfloat16",),
    d_qk: Iterable[int] = (576,),
    page_block_sizes: Iterable[int] = (64,),
    sparse_formats: Iterable[str] = (),
    prefill_formats: Iterable[str] = (),
    device: int | None = None,
) -> None:
    """Compile (or take from the disk cache) and load kernels of decoding and prefill ahead of time.

    A CUDA-graph capture cannot compile or load anything: call this, or the function itself once, before it.

    Parameters
    ----------
    dtypes : iterable of str
        Of q and the cache: "bfloat16", "float16".
    d_qk : iterable of int
        576, 512.
    page_block_sizes : iterable of int
        Tokens per page of the caches that dense decoding will use.
    sparse_formats : iterable of str
        Formats of the caches that sparse decoding, and what writes and reads caches around it, will use:
        "v32", "model1", "bf16".
    prefill_formats : iterable of str
        The same of the caches, or the kv, that `flash_mla_sparse_fwd` will read.
    device : int, optional
        Device ordinal; None is the current device.

    Raises
    ------
    ValueError
        An unknown dtype, d_qk, page size or format.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, CuPy.

    Notes
    -----
    Blocks until everything is loaded (seconds for a cold cache); enqueues nothing.
    """
    if device is None:
        device = jit.current_device()
    for spec in _specs(
        list(dtypes), list(d_qk), list(page_block_sizes), list(sparse_formats), list(prefill_formats)
    ):
        jit.get_kernel(spec, device)


def _specs(
    dtypes: list[str],
    d_qks: list[int],
    page_block_sizes: list[int],
    sparse_formats: list[str],
    prefill_formats: list[str],
) -> list[jit.KernelSpec]:
    for format in (*sparse_formats, *prefill_formats):
        if format not in FORMATS:
            raise ValueError(f"sparse formats: expected one of {list(FORMATS)}, got {format!r}")
    specs = mla_metadata.specs()
    for dtype in dtypes:
        specs += mla_combine.specs(dtype) + mla_merge_states.specs(dtype)
        for d_qk in d_qks:
            specs += mla_dense_decode.specs(dtype, d_qk, page_block_sizes)
    for format in sparse_formats:
        specs += mla_sparse.specs(format) + mla_combine.specs("bfloat16") + mla_convert_indices.specs()
        for known in FORMATS[format]:
            specs += mla_cache_write.specs(known) + mla_cache_gather.specs(known)
    for format in prefill_formats:
        specs += mla_sparse_prefill.specs(format) + mla_combine.specs("bfloat16", max_logits=True)
    return list(dict.fromkeys(specs))
