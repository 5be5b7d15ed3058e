"""Engines' operators for FlashMLA, their CUDA kernels replaced by rawmla.

Every caller in an engine ends in an operator, whichever module or name it imported before, so this way does
not depend on the order of imports. Operators of a namespace that rawmla has no kernel for are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from .flash_mla import cuda


class _Op(NamedTuple):
    schema: str
    """As `torch.ops` shows it, without the namespace. torch leaves out trailing arguments that have their
    default.
    """
    function: Callable[..., Any]


def _by_name(*operators: _Op) -> dict[str, _Op]:
    return {operator.schema.partition("(")[0]: operator for operator in operators}


def _sgl_sparse_decode_fwd(*args: Any) -> tuple[Any, Any, Any, Any]:
    with_out = [*args[:12], None, *args[12:]]
    return cuda.sparse_decode_fwd(*with_out)


def _sgl_legacy_sparse_decode_fwd(*args: Any) -> tuple[Any, Any, Any, Any]:
    base, kv_format = args[:12], args[12:] or (None,)
    return cuda.sparse_decode_fwd(*base, kv_format=kv_format[0])


def _sgl_legacy_sparse_prefill_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int,
    attn_sink: Any = None,
    topk_length: Any = None,
    return_log2_stats: bool = False,
    return_stats: bool = True,
) -> list[Any]:
    arguments = (q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
    return cuda.sparse_prefill_fwd(*arguments, return_log2_stats=return_log2_stats, return_stats=return_stats)


_SPARSE_DECODE = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, {}? "
    "tile_scheduler_metadata, {}? num_splits, Tensor? extra_kv, Tensor? extra_indices, Tensor? "
    "extra_topk_length, int d_v, float sm_scale, "
)
_VLLM_SPARSE_DECODE = _SPARSE_DECODE.format("Tensor(a)", "Tensor(b)")
_SGL_SPARSE_DECODE = _SPARSE_DECODE.format("Tensor(a!)", "Tensor(b!)")
_DENSE_DECODE = (
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, float "
    "softmax_scale, bool is_causal, "
)
_PREFILL = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink"
)
_SGL_RESULTS = "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)"
_SGL_METADATA = _Op(
    "get_mla_decoding_metadata(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, bool "
    "is_fp8_kvcache, int? topk) -> Tensor[]",
    cuda.get_mla_decoding_metadata,
)

# The schemas of vLLM 0.33's _flashmla_C and of sgl-flash-mla 1.0.0's two libraries, read from the binaries.
NAMESPACES: dict[str, dict[str, _Op]] = {
    "_flashmla_C": _by_name(
        _Op(
            f"{_VLLM_SPARSE_DECODE}Tensor(c!)? out_=None, bool enable_batch_invariant=False) -> "
            "(Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)",
            cuda.sparse_decode_fwd,
        ),
        _Op(
            f"{_DENSE_DECODE}Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor(c!)? out_) -> "
            "(Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)",
            cuda.dense_decode_fwd,
        ),
        _Op(f"{_PREFILL}, Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]", cuda.sparse_prefill_fwd),
    ),
    "flash_mla": _by_name(
        _Op(
            f"{_SGL_SPARSE_DECODE}bool enable_batch_invariant=False) {_SGL_RESULTS}",
            _sgl_sparse_decode_fwd,
        ),
        _Op(f"{_PREFILL}, Tensor? topk_length) -> Tensor[]", cuda.sparse_prefill_fwd),
        _SGL_METADATA,
    ),
    "flash_mla_legacy": _by_name(
        _Op(f"{_SGL_SPARSE_DECODE}str? kv_format=None) {_SGL_RESULTS}", _sgl_legacy_sparse_decode_fwd),
        _Op(
            f"{_DENSE_DECODE}Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits) {_SGL_RESULTS}",
            cuda.dense_decode_fwd,
        ),
        _Op(
            f"{_PREFILL}=None, Tensor? topk_length=None, bool return_log2_stats=False, bool "
            "return_stats=True) -> Tensor?[]",
            _sgl_legacy_sparse_prefill_fwd,
        ),
        _SGL_METADATA,
    ),
}
"""Operators that `patch` replaces: namespace -> name -> schema and the function that takes its place."""

_LOADED_BY = {
    "_flashmla_C": "import vllm._flashmla_C",
    "flash_mla": "import the flash_mla of sgl-flash-mla",
    "flash_mla_legacy": "import the flash_mla of sgl-flash-mla",
}


class OpPatch:
    """Replaced operators; they are the engine's again after `close`, or when this object is gone."""

    def __init__(self, operators: tuple[str, ...], library: Any) -> None:
        self.operators = operators
        self._library = library

    def close(self) -> None:
        """Give the operators back to the engine. Captured graphs keep what they have captured."""
        self._library = None  # torch undoes the registrations of a library object that is gone

    def __enter__(self) -> OpPatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def patch(namespace: str) -> OpPatch:
    """Replace the CUDA kernels of an engine's FlashMLA operators by rawmla.

    Parameters
    ----------
    namespace : str
        "_flashmla_C" (vLLM 0.33), "flash_mla" or "flash_mla_legacy" (sgl-flash-mla 1.0.0). Its library has to
        be loaded.

    Returns
    -------
    OpPatch
        Holds the replacement: keep it, and `close()` it to undo.

    Raises
    ------
    ValueError
        Another namespace.
    RuntimeError
        The namespace has none of these operators, or one of them has a schema that is not the recorded one:
        the engine is of another version. Nothing is replaced then.

    Notes
    -----
    Arguments and results are the operators', except that the `lse` of sparse decoding is contiguous, where
    the original returns a transposed view. Plan arrays that are given are the ones returned. torch may warn
    once in a process that a kernel was overridden. Operators of other purposes stay as they are: FP8 dense
    decoding in vLLM, dense prefill, fused norm and rotation. The planner of sgl-flash-mla is replaced, and
    refuses plans of FP8 dense decoding.
    """
    return patch_key(namespace, "CUDA")


def patch_key(namespace: str, dispatch_key: str) -> OpPatch:
    """`patch` for the kernels of another dispatch key, which tests without a GPU have."""
    recorded = NAMESPACES.get(namespace)
    if recorded is None:
        names = ", ".join(map(repr, NAMESPACES))
        raise ValueError(f"namespace: expected one of {names}, got {namespace!r}")
    import torch
    from torch.library import Library

    packets = getattr(torch.ops, namespace)
    found = {name: getattr(packets, name) for name in recorded if hasattr(packets, name)}
    if not found:
        raise RuntimeError(
            f"namespace: expected torch.ops.{namespace} with {', '.join(recorded)}, got none of them; load "
            f"its library first ({_LOADED_BY[namespace]})"
        )
    for name, packet in found.items():
        schema = str(packet.default._schema).removeprefix(f"{namespace}::")
        if schema != recorded[name].schema:
            raise RuntimeError(
                f"torch.ops.{namespace}.{name}: expected the schema {recorded[name].schema!r}, got "
                f"{schema!r}; this version of the engine is not known, so nothing was patched"
            )
    library = Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden is the purpose
        for name in found:
            library.impl(name, recorded[name].function, dispatch_key)
    return OpPatch(tuple(found), library)
