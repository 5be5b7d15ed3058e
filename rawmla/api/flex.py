"""Public functions of flex attention."""

from __future__ import annotations

from typing import Any

from ..call import tracing
from ..flex import backward, create, forward
from ..flex.block_mask import DEFAULT_BLOCK_SIZE, BlockMask, as_ordinal
from ..flex.functions import traced
from ..flex.mods import Kind, TracedMod
from ..flex.traced import between_graphs
from ..kernels.mha_backward_variants import ALL

__all__ = ["create_block_mask", "flex_attention", "flex_attention_backward", "trace_mod"]


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    deterministic: bool | None = None,
    out: Any = None,
) -> Any:
    """Compute attention with your own score function and mask, which become part of the kernel.

    For every request b, query head h, query token and key: `s = scale * q @ k` in float32, then
    `s = score_mod(s, b, h, q_idx, kv_idx)`. Left out are positions outside of the listed blocks of
    `block_mask`, and positions of its partial blocks where `mask_mod(b, h, q_idx, kv_idx)` is False. Then
    `lse = log(sum(exp(s)))` and `out = exp(s - lse) @ v`. Products take query's dtype and add up in float32.
    Probabilities are rounded to query's dtype before the second product.

    Arrays are torch CUDA tensors, CuPy arrays, or DLPack arrays of other libraries in CUDA memory. All arrays
    are on the device of `query`, and so are the arrays that the functions read. Arrays of two frameworks in
    one call need the same current stream in both. Strides are in elements.

    Parameters
    ----------
    query : array
        bfloat16 or float16 `[B, Hq, L, E]`, E 1 to 256.
    key, value : array
        `[Bkv, Hkv, S, E]` and `[Bkv, Hkv, S, Ev]` in query's dtype, Ev 1 to 256. Bkv is B, or 1: then all
        requests read the same. With `enable_gqa` query head h reads KV head `h // (Hq / Hkv)`, and Hq is a
        multiple of Hkv. Torch tensors of float8_e4m3fn or float8_e5m2 too, which are converted once.
        query, key and value are read in place if their last dimension is contiguous, their address a
        multiple of 16 bytes, and every other stride 0 or a positive multiple of 8. Any other one is copied
        once, on the same stream.
    score_mod : callable, TracedMod, CudaMod or str, optional
        `score_mod(score, b, h, q_idx, kv_idx)`, score in natural units. A Python function works on 0-d torch
        tensors and is traced (torch is needed for it); `CudaMod` and its text are CUDA C++. Numbers and
        tensors that a function closes over are read at every call, and other values need no new kernel. A
        `TracedMod` keeps the numbers and tensors that it read when it was made.
    block_mask : BlockMask, optional
        A mask of rawmla or of torch. Its `seq_lengths` are (L, S). Batch and head are taken modulo the
        dimensions of its lists. Blocks of a multiple of 128 tokens are fast; others, of multiples of 16,
        are brought to 128 at every call. Lists in another dtype than int32, and lists of blocks whose last
        dimension is not contiguous, are copied at every call. V of a listed block has to be finite. A
        BlockMask of rawmla keeps what its function read, see there; the function of torch's is read at every
        call. None: everything is attended.
    scale : float, optional
        Finite, of magnitude 2**127 at most; None is `E**-0.5`.
    enable_gqa : bool
        Hq may be a multiple of Hkv.
    return_lse : bool
        Give (out, lse). Not together with `return_aux`.
    kernel_options : dict, optional
        torch's promises and tuning names, which change nothing here; BACKEND only as "AUTO".
    return_aux : AuxRequest, optional
        Which of lse and max_scores to give: (out, AuxOutput). torch's AuxRequest too.
    deterministic : bool, optional
        Whether dq and captured gradients, too, have the same bits always; results, dk and dv of the same call
        do. None follows torch's switch, as the backward pass finds it.
    out : array, optional
        `[B, Hq, L, Ev]` in query's dtype, written and returned. Never copied: 16-byte aligned, last dimension
        contiguous, other strides positive multiples of 8, no element twice. It must not overlap an input.
        None where a gradient is needed.

    Returns
    -------
    out : array
        `[B, Hq, L, Ev]` in query's dtype. A fresh one has its dimensions in the order of strides of `query`;
        where Ev is no multiple of 8, its rows are padded to one. 0 in a row with nothing to attend.
    lse, max_scores : array
        float32 `[B, Hq, L]`, natural logarithm of the sum of exponentials, and largest score, after score_mod
        and masks; -inf in a row with nothing to attend.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or dtype; a shape, stride, range or combination is not allowed; a
        gradient is needed that does not exist. Raised before anything is allocated or launched.
    NotImplementedError
        A Python function calls an operator that kernels do not have; the text names both. Or query, key or
        value is a nested tensor, or the call is under make_fx, torch.export or a FakeTensorMode.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, torch, a compiled kernel inside a graph capture;
        or that CUDA text does not compile, with the caller's line.

    Notes
    -----
    Allocates the copies that are named above, the results, and scratch with the framework of `query`: 16
    bytes, and with blocks that are brought to 128 one byte for each block of the mask and 8 bytes for each of
    128. Enqueues the copies, the clearing of scratch and one kernel, with such blocks three, on the current
    stream. Never synchronises, never reads a list or a captured array on the host.

    Where grad is enabled and query, key, value or a floating-point tensor that score_mod reads is one of
    torch that requires grad, out and lse have a graph, max_scores has none. Query, key and value then are
    tensors of torch and none is float8. A `CudaMod` as score_mod has `grad`, and `capture_grads` for the
    arrays that require grad. Tensors that mask_mod reads must not require grad. Where block_mask has no lists
    by columns, the backward makes them. The backward keeps inputs, out, lse, the lists, and the values that
    the functions read in this call. There is no second derivative.

    torch.compile runs the call between two graphs, through which gradients go.

    Inside a CUDA-graph capture nothing is compiled: a kernel that no call and no `rawmla.warmup_call` has
    loaded is a `KernelNotReadyError`. Replays follow lists and captured arrays that changed in place. Kernels
    that were launched there stay loaded until the process ends.

    The operation is the function of this name in torch (torch.nn.attention.flex_attention).

    Examples
    --------
    >>> mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8192, 8192)
    >>> out = rawmla.flex_attention(q, k, v, lambda s, b, h, q, k: s - 0.1 * (q - k), mask)
    """
    call = between_graphs().attend if tracing.is_traced(query) else forward.attend
    return call((
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux,
        deterministic, out,
    ))  # fmt: skip


def flex_attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    grad_lse: Any = None,
    deterministic: bool | None = None,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Compute the gradients of `flex_attention`, from its results and their gradients.

    Scores s are computed again as in the forward. With `p = exp(s - lse)` where a key is attended, else 0,
    and `DELTA = sum(grad_out * out) - grad_lse` of a row, the gradient of score_mod's result is
    `p * (grad_out @ value.T - DELTA)`. The derivative of score_mod makes ds of it, 0 where nothing is
    attended.
    `dq = scale * ds @ key`, `dk = scale * ds.T @ query`, `dv = p.T @ grad_out`, summed in float32 over what
    shares a key: the heads of a group, and all requests where Bkv is 1. p and ds are rounded to the dtype of
    query before their products. With score_mod, an lse beyond 2**14 * ln(2) in magnitude is computed again
    from the scores, since float32 rounds it too much: a row may be filled whole with -1e9.

    Parameters
    ----------
    grad_out : array
        `[B, Hq, L, Ev]` in query's dtype, gradient of out.
    query, key, value, score_mod, block_mask, scale, enable_gqa
        As given to `flex_attention`; key and value in query's dtype. `CudaMod` has `grad`, and
        `capture_grads` for arrays that have gradients. The lists by columns of block_mask (`q_num_blocks`,
        `q_indices`, `full_q_num_blocks`, `full_q_indices`) say what is attended. A mask of torch tensors or
        CuPy arrays without them gets them from its lists by rows.
    out, lse : array
        Its results, lse float32 `[B, Hq, L]` with any strides. out and grad_out are read in place under
        the rules for query, or copied once.
    grad_lse : array, optional
        float32 `[B, Hq, L]`, gradient of lse; None: 0.
    deterministic : bool, optional
        dk and dv of the same call always have the same bits. With True, so have dq and the gradients of
        captured arrays; else these are summed in any order. None is torch's
        torch.use_deterministic_algorithms where query is a torch tensor, else False.

    Returns
    -------
    dq, dk, dv : array
        Gradients of query, key and value, with their shapes, dtype and order of dimensions in memory.
    captured : dict of str to array
        By the name of the variable, or in `CudaMod.captures`: the gradients of tensors that score_mod reads
        and that require grad, and of other arrays in `CudaMod.capture_grads`. A gradient has the array's
        shape and dtype, is contiguous, and is summed in float32. It is None for an array that the result does
        not depend on.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RawMLAError
        As `flex_attention`. ValueError too where a mask of other arrays has no lists by columns, a CudaMod
        has no derivative, or a tensor that mask_mod reads requires grad. Raised before anything is allocated
        or launched, but for lists by columns.

    Notes
    -----
    Allocates the copies, the results and scratch: in float32, for each query row and head, rows rounded
    up to 64, E rounded up to 64 (32 with some functions) and 2 numbers more, 3 with score_mod; a float32
    number for each element of a captured gradient in another dtype. With `deterministic`: 5 bytes for
    each block of the mask, and for each element of captured gradients 16, or 100 where one pass sums
    them. Blocks that are no multiple of 64 x 128 take scratch as in `flex_attention`. Enqueues the
    copies, also of lists as in `flex_attention`, and three kernels, with score_mod four, on the current
    stream. For such blocks a clearing and two kernels are added, and as many with `deterministic` and a
    mask; for captured gradients one kernel, and for each of them a clearing and, if it is not summed in
    place, a kernel. With `deterministic` there is a second pass over the scores for captured gradients
    where an element's index depends on both q_idx and kv_idx, and where they have more than 2**20
    elements together or 2**39 terms. Never synchronises. Graph captures and torch.compile are as for
    `flex_attention`.

    The operation is torch's backward of its function flex_attention
    (torch.nn.attention.flex_attention).
    """
    arrays = backward.Arrays(query, key, value, out, grad_out, lse, grad_lse)
    options = backward.Options(scale, enable_gqa, deterministic)
    return backward.gradients(ALL, arrays, score_mod, block_mask, options)


def create_block_mask(
    mask_mod: Any,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Find which blocks of a mask function are empty, partial or full.

    Parameters
    ----------
    mask_mod : callable, TracedMod, CudaMod or str
        `mask_mod(b, h, q_idx, kv_idx)`: whether a query token attends a key. As for `flex_attention`.
    B, H : int or None
        Requests and heads that have masks of their own; None is 1.
    Q_LEN, KV_LEN : int
        Query tokens and keys.
    device : int, str or torch.device, optional
        A CUDA device; None is the device of the arrays of a `CudaMod` or `TracedMod`, else the current one.
    BLOCK_SIZE : int or pair of int
        Query tokens and keys of a block, multiples of 16.
    separate_full_blocks : bool
        False: all blocks that are not empty are partial.
    _compile, compute_dq_write_order, dq_kv_order
        Change nothing.

    Returns
    -------
    BlockMask
        With arrays of torch, or of CuPy where `mask_mod` is a `CudaMod` that reads arrays of CuPy, or torch
        is not installed or was built without CUDA. Lists are ascending; after their ends come the other
        blocks. A block is full if the function holds for all its positions and it is inside
        (Q_LEN, KV_LEN); a block that the end of the sequence cuts is partial. The mask keeps what `mask_mod`
        read in this call, as the Notes of `BlockMask` say.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RawMLAError
        As of `flex_attention`.

    Notes
    -----
    Allocates the lists, and one byte for each block. Time is proportional to the positions at which the
    function is called, and memory to the blocks: no mask of Q_LEN x KV_LEN is in memory. Enqueues three
    kernels on the current stream; never synchronises. It may be captured in a CUDA graph; its lists then
    follow arrays that the function reads. torch.compile runs the call between two graphs.

    The operation is the function of this name in torch (torch.nn.attention.flex_attention).

    Examples
    --------
    >>> mask = rawmla.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8192, 8192)
    >>> out = rawmla.flex_attention(q, k, v, block_mask=mask)
    """
    call = between_graphs().make if tracing.is_traced(None) else create.make
    return call(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)


def trace_mod(function: Any, kind: Kind, device: Any = None) -> TracedMod:
    """Trace a Python score or mask function once, to inspect it and to make calls with it faster.

    A call with a Python function compares all that the function reads with kept traces. A call with a
    `TracedMod` does not look at the function.

    Parameters
    ----------
    function : callable
        `score_mod(score, b, h, q_idx, kv_idx)` or `mask_mod(b, h, q_idx, kv_idx)`, as for `flex_attention`.
    kind : str
        "score_mod" or "mask_mod".
    device : int, str or torch.device, optional
        The CUDA device of the tensors that the function reads; None is the current one.

    Returns
    -------
    TracedMod
        Its `code`, `captures` and `grad` show what a kernel computes. `flex_attention`,
        `flex_attention_backward`, `create_block_mask` and `BlockMask` take it instead of the function.

    Raises
    ------
    TypeError
        `function` is no Python function, or does not take the arguments of its kind.
    ValueError
        `kind` is no kind. Or the function does what no trace can hold, as for `flex_attention`.
    NotImplementedError
        The function calls an operator that kernels do not have; the text names both.
    RawMLAError
        A subclass says what is missing: torch, or the driver where `device` is None.

    Notes
    -----
    The trace holds the numbers, the tensor objects and the sizes that the function read. Trace the function
    again when a variable gets another number or another tensor. Kernels read the values of a tensor when they
    run, so changes in place have an effect; the value of a 0-d tensor of the CPU is read at each call. A
    tensor keeps its dtype, its number of dimensions and its device, or a call raises `TypeError` or
    `ValueError`. Gradients exist for the tensors that require grad when the function is traced. A tensor that
    requires grad later is a `ValueError` where a gradient is needed. A function without gradients can be
    traced: a call that needs them raises the error that tracing them raised.

    Runs on the host, for some milliseconds. Allocates and enqueues nothing on the device, compiles nothing,
    and never synchronises.

    Examples
    --------
    >>> alibi = rawmla.trace_mod(lambda s, b, h, q, k: s - slopes[h] * (q - k), "score_mod")
    >>> print(alibi.code, alibi.captures)
    >>> out = rawmla.flex_attention(q, k, v, alibi)
    """
    return traced(function, kind, as_ordinal(device))
