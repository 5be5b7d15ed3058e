"""Gradients of flex attention: `flex_attention_backward`, from its arguments to the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from .. import jit
from ..call import tracing
from ..call.arrays import READERS, Fields, NewArray, address_of, aligned_strides, read_given
from ..call.checks import as_bool, as_scale, check_kind
from ..call.memo import Memo, kind_of
from ..kernels import block_mask as mask_kernels
from ..kernels import mha_backward
from ..kernels.block_mask import BlockLists, Grid, ListAddresses
from ..kernels.flex_captured import CapturedGradient
from ..kernels.mha_backward import BackwardAddresses, BackwardCall, BackwardMods
from ..kernels.mha_backward_variants import ALL, BLOCK_ROWS, Needs
from ..mha.arguments import fresh_out_strides, walked
from .arrays import (
    FP8,
    Q_LISTS,
    FlexChecked,
    GivenLists,
    Recut,
    check_arrays,
    check_lengths,
    check_lists,
    cut_of,
    keep_lists,
    lists_of,
    recall_lists,
)
from .block_mask import lacks_columns, with_columns
from .forward import hides_nothing, read_dense
from .functions import as_reading, bound, check_on_device, header_of, packed_of, within_blocks
from .mods import Reading, reading_of
from .traced import between_graphs

__all__ = ["backpropagate", "flex_attention_backward", "gradients"]

_FURTHER = ("key", "value", "grad_out", "out", "lse", "grad_lse", *[f"block_mask.{x}" for x in Q_LISTS])
_SCRATCH_STEP = 128
_MOST_KEYS = 128
"""Of a tile."""


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
    """Gradients of `flex_attention`, from its results and their gradients.

    Scores s are computed again as there. With `p = exp(s - lse)` where a key is attended, else 0, and
    `DELTA = sum(grad_out * out) - grad_lse` of a row, the gradient of what score_mod gives is
    `p * (grad_out @ value.T - DELTA)`, and ds what its derivative makes of it, 0 where nothing is attended.
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
        `q_indices`, `full_q_num_blocks`, `full_q_indices`) say what is attended; where torch tensors or CuPy
        arrays have none, they are made of those by rows.
    out, lse : array
        Its results, lse float32 `[B, Hq, L]` with any strides. out and grad_out are read where they lie under
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
        Of the shapes of query, key and value in their dtype, dimensions in the order of strides of these.
    captured : dict of str to array
        By the name of the variable, or in `CudaMod.captures`: the gradients of tensors that score_mod reads
        and that require grad, and of other arrays in `CudaMod.capture_grads`. Of the array's shape and dtype,
        contiguous; summed in float32. None of one that the result does not depend on.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RawMLAError
        As `flex_attention`; ValueError too where other arrays than these have no lists by columns, a CudaMod
        no derivative, or a tensor that mask_mod reads requires grad. Raised before anything is allocated or
        launched, but for lists by columns.

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

    The operation is what torch derives for its function flex_attention
    (torch.nn.attention.flex_attention).
    """
    return gradients(
        ALL, grad_out, query, key, value, out, lse, score_mod, block_mask, scale, enable_gqa, grad_lse,
        deterministic,
    )  # fmt: skip


def gradients(
    needs: Needs,
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    grad_lse: Any,
    deterministic: bool | None,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """`flex_attention_backward` of those that are needed; None stands for others."""
    call = between_graphs().backpropagate if tracing.is_traced(query) else backpropagate
    return call(
        grad_out, query, key, value, out, lse, score_mod, block_mask, scale, enable_gqa, grad_lse,
        deterministic, needs,
    )  # fmt: skip


class _Inputs(NamedTuple):
    """The arrays of a call but for lists and captured ones."""

    q: Fields
    k: Fields
    v: Fields
    dout: Fields
    out: Fields
    lse: Fields
    dlse: Fields | None


class _Checked(NamedTuple):
    """What follows from the kinds of the arrays, which passed the checks."""

    forward: FlexChecked
    strides: dict[str, Any]  # as `BackwardCall` names them
    copied: tuple[bool, ...]  # q, k, v, out and dout
    lists: BlockLists | None
    list_copies: tuple[bool, bool, bool, bool]
    cut: Recut | None
    calls: Memo[_Prepared]


class _Prepared(NamedTuple):
    """What a call does."""

    allocate: Callable[[], list[Any]]
    """Makes what is needed of dq, dk, dv and the captured gradients, and the scratch, or None."""
    launch: Callable[..., None] | None
    """Enqueues the kernels, as `PreparedMhaBackward.launch`; None: all gradients are 0."""
    scratch_bytes: int


_checked: Memo[_Checked] = Memo(shared=True)


def backpropagate(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    grad_lse: Any,
    deterministic: bool | None,
    needs: Needs,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """`gradients`."""
    enable_gqa = as_bool("enable_gqa", enable_gqa)
    if deterministic is not None:
        deterministic = as_bool("deterministic", deterministic)
    scale = None if scale is None else as_scale(scale)
    q, k, v = [read_dense(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))]
    dout_view, out_view, lse_view = [
        READERS[type(x)](x, name) for x, name in ((grad_out, "grad_out"), (out, "out"), (lse, "lse"))
    ]
    inputs = _Inputs(q, k, v, dout_view, out_view, lse_view, read_given(grad_lse, "grad_lse"))
    device, framework = q[4], q[5]
    recalled = None if block_mask is None else recall_lists(block_mask, framework, Q_LISTS)
    if lacks_columns(block_mask) and lists_of(block_mask) is not None:
        block_mask = with_columns(block_mask)
    lists = recalled or lists_of(block_mask, Q_LISTS)
    kind = (*[kind_of(view) for view in inputs], None if lists is None else lists.kind, enable_gqa)
    latest_kind, checked = _checked.latest
    if latest_kind != kind:
        checked = _checked.get(kind) or _checked.keep(kind, _check(inputs, lists, enable_gqa))
        _checked.latest = kind, checked
    further = [*inputs[1:]]
    if lists is not None and recalled is None:
        further += lists.views
        if checked.lists is not None and True not in checked.list_copies:
            keep_lists(block_mask, lists, framework)
    for name, view in zip(_FURTHER, further, strict=False):
        if view is not None and view[5] is not framework:
            check_on_device(name, view, device, framework)

    score_read = as_reading(score_mod, "score_mod", device, backward=True)
    mask_read = None
    if checked.lists is not None and not hides_nothing(block_mask.mask_mod):
        mask_read = as_reading(block_mask.mask_mod, "mask_mod", device, backward=True)
    if checked.cut is not None:
        inside = within_blocks(mask_read and mask_read.mod(), checked.cut.given, by_columns=True)
        mask_read = reading_of(inside)
    of_captures, names = _gradients_of(score_read)
    if not needs.others:
        of_captures = ()
    needs = Needs(*needs[:3], bool(of_captures))
    if scale is None:
        scale = checked.forward.default_scale
    if deterministic is None:
        deterministic = framework.determinism()
    if not checked.forward.scores:
        score_read = None  # what it reads may be empty
    score = bound(score_read, "score_mod", device, framework)
    mask = bound(mask_read, "mask_mod", device, framework)
    score_bytes, mask_bytes = packed_of(score), packed_of(mask)
    variants = score and score.form.variant, mask and mask.form.variant
    call_key = (*variants, scale, deterministic, of_captures, needs)
    prepared = checked.calls.get(call_key) or checked.calls.keep(
        call_key, _prepare(checked, call_key, len(score_bytes), len(mask_bytes), inputs)
    )
    made = prepared.allocate()
    scratch = made.pop()
    dq, dk, dv = [made.pop(0) if is_needed else None for is_needed in needs[:3]]
    if prepared.launch is None:
        for array in (dq, dk, dv, *made):
            if array is not None:
                framework.fill(array, 0.0)
    else:
        copies, addresses = _addresses(checked, inputs, (dq, dk, dv))
        scratch_ptr = framework.pointer(scratch)
        list_copies, of_lists, states = _lists(checked, lists, scratch_ptr + prepared.scratch_bytes, inputs)
        if checked.cut is not None and mask is not None:
            mask_bytes = mask.with_last_address(states).packed
        prepared.launch(
            framework.current_stream(device),
            BackwardAddresses(*addresses),
            scratch_ptr,
            *of_lists,
            score_bytes,
            mask_bytes,
            [framework.pointer(x) for x in made],
        )
        del copies, list_copies  # until here
    captured = dict.fromkeys([name for name, _ in names])
    if needs.others:
        captured |= zip([name for name, has_gradient in names if has_gradient], made, strict=True)
    return dq, dk, dv, captured


def _gradients_of(
    score: Reading | None,
) -> tuple[tuple[tuple[tuple[int, ...], str], ...], list[tuple[str, bool]]]:
    """Shapes and dtypes of the captured gradients; and the names of all captures that want one, with whether
    they get it, those that do in the same order.
    """
    if score is None or not score.arrays or score.frame.mod.backward is None:
        return (), []
    captures, backward, arrays = score.frame.mod.captures, score.frame.mod.backward, score.arrays
    names = [(captures[i].name, True) for i in backward.gradients]
    names += [
        (capture.name, False)
        for i, capture in enumerate(captures)
        if i not in backward.gradients and getattr(arrays[i], "requires_grad", False)
    ]
    return tuple([(tuple(arrays[i].shape), captures[i].dtype) for i in backward.gradients]), names


def _check(inputs: _Inputs, lists: GivenLists | None, enable_gqa: bool) -> _Checked:
    """Check the arrays of a call against each other."""
    q, k, v, dout, out, lse, dlse = inputs
    for name, view in (("key", k), ("value", v)):
        if view[3] in FP8:
            raise ValueError(f"{name}: expected the dtype of query, for gradients, got {view[3]}")
    forward = check_arrays(q, k, v, None, None, enable_gqa)
    device, framework = q[4], q[5]
    for name, other in zip(_FURTHER[2:], inputs[3:], strict=False):
        if other is not None:
            check_on_device(name, other, device, framework)
    wanted = (forward.b, forward.h_q, forward.seqlen_q, forward.d_v)
    strides = dict(zip(("q_strides", "k_strides", "v_strides"), forward.strides, strict=False))
    copied = []
    for name, view in (("grad_out", dout), ("out", out)):
        check_kind(name, view, q[3], wanted)
        steps = walked(view)
        copied.append(steps is None)
        strides["dout_strides" if name == "grad_out" else "out_strides"] = _by_token(
            aligned_strides(wanted)[:-1] if steps is None else steps
        )
    strides["dlse_strides"] = (0, 0, 0)
    for name, of_rows in (("lse", lse), ("grad_lse", dlse)):
        if of_rows is not None:
            check_kind(name, of_rows, "float32", wanted[:-1])
            strides["lse_strides" if name == "lse" else "dlse_strides"] = _by_token(of_rows[2])
    for name, source in (("dq", q), ("dk", k), ("dv", v)):
        strides[f"{name}_strides"] = _by_token(fresh_out_strides(source, source[1][-1])[:-1])
    found: BlockLists | None = None
    cut: Recut | None = None
    list_copies = (False, False, False, False)
    if lists is not None:
        lengths = (forward.seqlen_q, forward.seqlen_k)
        if forward.scores:
            found, list_copies = check_lists(lists, forward.b, forward.h_q, *lengths, device, framework)
            cut = cut_of(found, *lengths, BLOCK_ROWS, _MOST_KEYS)
        else:
            check_lengths(lists, *lengths)
    return _Checked(forward, strides, (*forward.copied, *reversed(copied)), found, list_copies, cut, Memo())


def _by_token(strides: Sequence[int]) -> tuple[int, int, int]:
    """Those of (request, head, token) as (request, token, head)."""
    request, head, token = strides
    return request, token, head


def _prepare(
    checked: _Checked,
    key: tuple[Any, ...],
    score_bytes: int,
    mask_bytes: int,
    inputs: _Inputs,
) -> _Prepared:
    """Load the kernels of a call and work out their parameters."""
    *variants, scale, deterministic, of_captures, needs = key
    score, mask = [variant and variant.mod for variant in variants]
    forward = checked.forward
    device, framework = inputs.q[4], inputs.q[5]
    results: list[NewArray] = [
        (tuple(view[1]), view[3], fresh_out_strides(view, view[1][-1]))
        for view, is_needed in zip(inputs[:3], needs, strict=False)
        if is_needed
    ]
    results += of_captures
    if not forward.scores:
        return _Prepared(framework.allocator(results, 0, device), None, 0)
    capturing = framework.capture_query(device)
    lists = checked.lists
    if checked.cut is not None:
        lists = _lists_in_scratch(checked.cut.walked)
        for spec in (mask_kernels.LISTS_SPEC, mask_kernels.SCATTER_SPEC):
            jit.get_kernel(spec, device, capturing=capturing)
    sites = () if score is None or score.backward is None else score.backward.sites
    prepared = mha_backward.PreparedMhaBackward(
        BackwardCall(
            device=device,
            dtype=inputs.q[3],
            b=forward.b,
            k_batches=forward.k_batches,
            h_q=forward.h_q,
            h_kv=forward.h_kv,
            d_qk=forward.d_qk,
            d_v=forward.d_v,
            varlen=False,
            max_seqlen_q=forward.seqlen_q,
            max_seqlen_k=forward.seqlen_k,
            total_q=forward.seqlen_q,
            total_k=forward.seqlen_k,
            **checked.strides,
            softmax_scale=scale,
            deterministic=deterministic,
            needs=needs,
            mods=BackwardMods(
                header=header_of(score, mask),
                has_score_mod=score is not None,
                score_mod_bytes=score_bytes,
                mask_mod_bytes=mask_bytes,
                lists=lists,
                captured=tuple([CapturedGradient(prod(shape), dtype) for shape, dtype in of_captures]),
                sites=len(sites),
                scattered=any(site.by_q and site.by_kv for site in sites),
            ),
        ),
        capturing,
    )
    scratch_bytes = -(-prepared.scratch_bytes // _SCRATCH_STEP) * _SCRATCH_STEP
    total = scratch_bytes
    if checked.cut is not None:
        total = _ListsInScratch(scratch_bytes, checked.cut).end
    return _Prepared(framework.allocator(results, total, device), prepared.launch, scratch_bytes)


def _addresses(checked: _Checked, inputs: _Inputs, results: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The arrays that had to be copied, and the addresses of all but the lists."""
    names = ("query", "key", "value", "out", "grad_out")
    views = (inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout)
    alive, addresses = [], [view[0] for view in views]
    if True in checked.copied:
        for i, view in enumerate(views):
            if checked.copied[i]:
                alive.append(view[5].aligned_copy(view[6], names[i]))
                addresses[i] = view[5].pointer(alive[-1])
    addresses += [inputs.lse[0], address_of(inputs.dlse)]
    return alive, [*addresses, *[0 if x is None else inputs.q[5].pointer(x) for x in results]]


def _lists(
    checked: _Checked, lists: GivenLists | None, scratch: int, inputs: _Inputs
) -> tuple[list[Any], Sequence[int], int]:
    """The lists that had to be copied, the addresses of those that are walked, and that of the states of the
    given blocks where these are others; enqueues what makes them.
    """
    alive: list[Any] = []
    of_lists = [0, 0, 0, 0]
    if checked.lists is None or lists is None:
        return alive, of_lists, 0
    device, framework = inputs.q[4], inputs.q[5]
    of_lists = lists.addresses()
    if True in checked.list_copies:
        for i, given in enumerate(lists.views):
            if given is not None and checked.list_copies[i]:
                alive.append(given[5].aligned_copy(given[6], Q_LISTS[i], "int32"))
                of_lists[i] = given[5].pointer(alive[-1])
    if checked.cut is None:
        return alive, of_lists, 0
    given_blocks, walked_blocks = [_by_columns(grid) for grid in checked.cut]
    places = _ListsInScratch(scratch, checked.cut)
    stream = framework.current_stream(device)
    where: Any = {"device": device, "stream": stream, "capturing": framework.capture_query(device)}
    jit.clear(places.states, -(-given_blocks.blocks // 4) * 4, stream, device)
    mask_kernels.scatter(given_blocks, checked.lists, of_lists, places.states, **where)
    sides = (given_blocks.block_q, given_blocks.block_k)
    mask_kernels.lists(walked_blocks, places.states, places.lists, state_blocks=sides, **where)
    return alive, places.lists, places.states


def _by_columns(grid: Grid) -> Grid:
    """The same blocks, with columns for rows."""
    batches, heads, q_len, kv_len, block_q, block_k = grid
    return Grid(batches, heads, kv_len, q_len, block_k, block_q)


def _lists_in_scratch(grid: Grid) -> BlockLists:
    """How the lists by columns lie that the kernels of a call make."""
    rows, columns = grid.rows, grid.columns
    counts = (grid.heads * columns, columns, 1)
    lists = (grid.heads * rows * columns, rows * columns, rows)
    return BlockLists(
        (counts, counts), (lists, lists), (rows, rows), grid.batches, grid.heads, grid.block_q, grid.block_k
    )


class _ListsInScratch:
    """Addresses in the scratch of a call whose lists are brought to other blocks."""

    def __init__(self, address: int, cut: Recut) -> None:
        columns = 4 * cut.walked.batches * cut.walked.heads * cut.walked.columns
        blocks = 4 * cut.walked.blocks
        places = [address]
        for size in (cut.given.blocks, columns, blocks, columns, blocks):
            places.append(places[-1] + -(-size // _SCRATCH_STEP) * _SCRATCH_STEP)
        self.states, *lists, self.end = places
        self.lists = ListAddresses(*lists)
