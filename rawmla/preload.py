"""Loading kernels ahead of their first use."""

from __future__ import annotations

from collections.abc import Iterable

from . import jit
from .kernels.operations import specs_of

__all__ = ["warmup"]


def warmup(
    *operations: str,
    dtypes: Iterable[str] | None = None,
    d_qk: Iterable[int] | None = None,
    page_block_sizes: Iterable[int] | None = None,
    sparse_formats: Iterable[str] | None = None,
    prefill_formats: Iterable[str] | None = None,
    device: int | None = None,
) -> None:
    """Compile kernels ahead of time, or take them from the disk cache, and load them.

    A CUDA-graph capture cannot compile or load anything: before it, call this, or once the function that is
    to be captured.

    Parameters
    ----------
    *operations : str
        What to load the kernels of: "dense_decode", "sparse_decode", "sparse_prefill", "cache" (writing,
        reading, quantising), "indices" (`convert_indices`), "merge" (`merge_attn_states`), "metadata"
        (`get_mla_metadata`). None named: all of them, as far as the options below select any.
    dtypes : iterable of str, optional
        dtypes of q and the cache in dense decoding, and of what is merged: "bfloat16", "float16". None:
        "bfloat16".
    d_qk : iterable of int, optional
        576, 512, for dense decoding. None: 576.
    page_block_sizes : iterable of int, optional
        Tokens per page of the caches that dense decoding will read. None: 64, whose kernels serve every
        multiple of 64.
    sparse_formats : iterable of str, optional
        Formats of the caches that sparse decoding will read, and that will be written or gathered: "v32",
        "model1", "bf16". None: all of them if an operation is named, else none.
    prefill_formats : iterable of str, optional
        Formats of what `flash_mla_sparse_fwd` will read, the same names ("bf16" is a plain kv). None: as for
        `sparse_formats`.
    device : int, optional
        Device ordinal; None is the current device.

    Raises
    ------
    TypeError
        An option is no iterable, or a value in it is of the wrong kind.
    ValueError
        An unknown operation, dtype, d_qk, page size or format.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, CuPy.

    Notes
    -----
    Arguments are checked before a device is looked for. Blocks until everything is loaded (seconds for a cold
    cache); enqueues nothing.

    Examples
    --------
    >>> rawmla.warmup(sparse_formats=["v32"])
    >>> rawmla.warmup("sparse_prefill", prefill_formats=["bf16"])
    """
    specs = specs_of(
        operations,
        dtypes=dtypes,
        d_qk=d_qk,
        page_block_sizes=page_block_sizes,
        sparse_formats=sparse_formats,
        prefill_formats=prefill_formats,
    )
    if device is None:
        device = jit.current_device()
    for spec in specs:
        jit.get_kernel(spec, device)
