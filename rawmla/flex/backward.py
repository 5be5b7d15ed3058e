"""One call of `flex_attention_backward`, from its arguments to the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from .. import jit
from ..call import tracing
from ..call.arrays import READERS, address_of, read_given
from ..call.checks import as_bool, as_scale, check_kind
from ..call.frameworks import Fields, NewArray, aligned_strides
from ..call.memo import Memo, kind_of
from ..kernels import block_mask as mask_kernels
from ..kernels import mha_backward
from ..kernels.block_mask import BlockLists, Grid, ListAddresses
from ..kernels.flex_captured import CapturedGradient
from ..kernels.mha_backward import BackwardAddresses, BackwardCall, BackwardMods
from ..kernels.mha_backward_variants import BLOCK_ROWS, Needs
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
from .block_mask import lacks_columns, read_mask, with_columns
from .forward import read_dense
from .functions import as_reading, bound, check_on_device, header_of, packed_of, within_blocks
from .mods import Reading, reading_of
from .traced import between_graphs

__all__ = ["backpropagate", "gradients"]

_FURTHER = ("key", "value", "grad_out", "out", "lse", "grad_lse", *[f"block_mask.{x}" for x in Q_LISTS])
_SCRATCH_STEP = 128
_MOST_KEYS = 128
"""Of a tile."""


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
    """Sizes and strides of arrays that passed the checks."""

    forward: FlexChecked
    strides: dict[str, Any]  # as `BackwardCall` names them
    copied: tuple[bool, ...]  # q, k, v, out and dout
    lists: BlockLists | None
    list_copies: tuple[bool, bool, bool, bool]
    cut: Recut | None
    calls: Memo[_Prepared]


class _Prepared(NamedTuple):
    """How to run one kind of call: an allocator for its results, and a prepared launch."""

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
    by_columns = block_mask
    if lacks_columns(block_mask) and lists_of(block_mask) is not None:
        by_columns = with_columns(block_mask)
    lists = recalled or lists_of(by_columns, Q_LISTS)
    kind = (*[kind_of(view) for view in inputs], None if lists is None else lists.kind, enable_gqa)
    latest_kind, checked = _checked.latest
    if latest_kind != kind:
        checked = _checked.get(kind) or _checked.keep(kind, _check(inputs, lists, enable_gqa))
        _checked.latest = kind, checked
    further = [*inputs[1:]]
    if lists is not None and recalled is None:
        further += lists.views
        if checked.lists is not None and True not in checked.list_copies:
            keep_lists(by_columns, lists, framework)
    for name, view in zip(_FURTHER, further, strict=False):
        if view is not None and view[5] is not framework:
            check_on_device(name, view, device, framework)

    score_read = as_reading(score_mod, "score_mod", device, backward=True)
    mask_read = None
    if checked.lists is not None:
        mask_read = read_mask(block_mask, device, backward=True)
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
    """Strides of (request, head, token) in the order (request, token, head)."""
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
    """Enqueue the copies of lists, and the kernels that bring them to other blocks. Returns the copies, which
    the caller keeps alive, the addresses of the lists for the kernel, and the address of the block states.
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
    """The layout of the lists by columns that the kernels of a call write to its scratch."""
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
