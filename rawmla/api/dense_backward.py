"""Public functions for the gradients of dense attention."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..kernels.mha_backward_variants import ALL
from ..mha import backward
from ..mha.arguments import NO_WINDOW, either
from ..mha.records import DenseArrays, Gradients, Window
from .paths import mha_operators

__all__ = ["flash_attn_backward", "flash_attn_varlen_backward"]


def flash_attn_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    is_varlen: bool = True,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    cu_seqlens_qo: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_qo: int | None = None,
    max_seqlen_kv: int | None = None,
    learnable_sink: Any = None,
) -> tuple[Any, ...]:
    """Compute the gradients of `flash_attn_varlen_func`.

    P is computed again from q, k and lse. `DELTA = sum(dout * out) - c * dlse` of a row, where c is 1, and
    with a sink `exp(logaddexp(lse, sink) - lse)`. `dS = P * (dout @ V.T - DELTA)`, with a softcap times
    `1 - (S / softcap)**2` of the capped score. `dq = softmax_scale * dS @ K`, `dk = softmax_scale * dS.T @ Q`
    and `dv = P.T @ dout`, summed in float32 over what shares a key, also the query heads of a KV head, from P
    and dS rounded to the dtype of the inputs. `dsink` of a head is the sum over its rows of
    `-exp(sink - logaddexp(lse, sink)) * sum(dout * out)`.

    Parameters
    ----------
    dout : array
        `[total_q, h_q, d_v]` in q's dtype, gradient of out.
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As given to `flash_attn_varlen_func`, also under their other names.
    out, lse : array
        Its results. lse may have tokens or heads first in memory.
        dout and out are read in place under the rules for q, or copied once.
    dq, dk, dv : array, optional
        Arrays with the shapes of q, k and v and their dtype, which are overwritten and returned. They are
        never copied: 16-byte aligned, last dimension contiguous, other strides positive multiples of 8, no
        element twice.
    causal, softmax_scale, is_varlen, window_size, softcap, attn_sink, alibi_slopes, seqused_q, seqused_k
        As given to `flash_attn_varlen_func`; `learnable_sink` is another name of attn_sink.
    dlse : array, optional
        float32 `[total_q, h_q]`, gradient of lse; None: 0.
    deterministic : bool
        dk, dv and dsink of the same call always have the same bits. dq has them with True, and under
        torch.use_deterministic_algorithms(True) where q is a torch tensor; else it is summed in any order.

    Returns
    -------
    dq, dk, dv : array
        Fresh ones have their dimensions in the order of strides of q, k and v. 0 in rows that have nothing to
        attend, that nothing attends, or that are of no request.
    dsink : array
        `[h_q]` in its dtype; only with `attn_sink`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RawMLAError
        As `flash_attn_varlen_func`, before anything is allocated or launched.

    Notes
    -----
    Allocates the copies, the results and scratch: in float32, for each query row and head, d_qk rounded up to
    32, above 128 to 64, and 2 numbers more, 3 with sinks and dlse, where rows are rounded up to 64 in every
    request. Enqueues three kernels, with cu_seqlens four, on the current stream. Never synchronises, never
    reads a length on the host.

    The operation is FlashMLA's (github.com/deepseek-ai/FlashMLA) and FlashAttention's (Dao et al., 2022,
    arxiv.org/abs/2205.14135, appendix B).
    """
    if cu_seqlens_qo is not None:
        cu_seqlens_q = either("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_qo", cu_seqlens_qo)
    if cu_seqlens_kv is not None:
        cu_seqlens_k = either("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_kv", cu_seqlens_kv)
    if max_seqlen_qo is not None:
        max_seqlen_q = either("max_seqlen_q", max_seqlen_q, "max_seqlen_qo", max_seqlen_qo)
    if max_seqlen_kv is not None:
        max_seqlen_k = either("max_seqlen_k", max_seqlen_k, "max_seqlen_kv", max_seqlen_kv)
    if learnable_sink is not None:
        attn_sink = either("attn_sink", attn_sink, "learnable_sink", learnable_sink)
    path = mha_operators() if tracing.is_traced(dout) else backward
    options = path.options_of(
        0.0, softmax_scale, causal, deterministic, is_varlen, window_size, softcap, 0,
        (max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    arrays = DenseArrays(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, attn_sink, alibi_slopes, None
    )
    gradients = Gradients(dout, out, lse, dlse, dq, dk, dv)
    made = path.backpropagate(arrays, gradients, options, ALL)
    return made if attn_sink is not None else made[:3]


def flash_attn_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    dlse: Any = None,
    deterministic: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    attn_sink: Any = None,
    alibi_slopes: Any = None,
    learnable_sink: Any = None,
) -> tuple[Any, ...]:
    """Compute the gradients of `flash_attn_func`: `flash_attn_varlen_backward` for requests of one length.

    Parameters
    ----------
    dout, q, k, v, out : array
        `[b, s_q, h_q, d_v]`, `[b, s_q, h_q, d_qk]`, `[b, s_k, h_kv, d_qk]`, `[b, s_k, h_kv, d_v]`,
        `[b, s_q, h_q, d_v]`.
    lse, dlse : array
        float32 `[b, h_q, s_q]`.

    Others, results, errors and notes: as `flash_attn_varlen_backward`.
    """
    if learnable_sink is not None:
        attn_sink = either("attn_sink", attn_sink, "learnable_sink", learnable_sink)
    path = mha_operators() if tracing.is_traced(dout) else backward
    options = path.options_of(0.0, softmax_scale, causal, deterministic, True, window_size, softcap, 0, None)
    arrays = DenseArrays(q, k, v, None, None, None, None, attn_sink, alibi_slopes, None)
    gradients = Gradients(dout, out, lse, dlse, dq, dk, dv)
    made = path.backpropagate(arrays, gradients, options, ALL)
    return made if attn_sink is not None else made[:3]
