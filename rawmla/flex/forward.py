"""One call of `flex_attention`, from its arguments to the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import jit
from ..call.arrays import READERS, needs_gradient, read_given
from ..call.checks import as_bool, as_scale, show
from ..call.frameworks import Fields, NewArray
from ..call.memo import Memo, kind_of
from ..kernels import block_mask as mask_kernels
from ..kernels import mha_forward
from ..kernels.block_mask import BlockLists, Grid, ListAddresses
from ..kernels.mha_forward import MhaForwardCall, Mods
from ..mha.arguments import fresh_out_strides
from .arrays import (
    LISTS,
    FlexChecked,
    GivenLists,
    Recut,
    check_arrays,
    keep_lists,
    lists_of,
    recall_lists,
)
from .block_mask import read_mask
from .functions import (
    IDENTITY,
    Bound,
    as_reading,
    bound,
    check_on_device,
    header_of,
    packed_of,
    reads_gradient,
    within_blocks,
)
from .mods import reading_of

__all__ = [
    *("AuxOutput", "AuxRequest", "attend", "attend_alone", "check_options"),
    *("read_dense", "wanted"),
]


class AuxRequest(NamedTuple):
    """Which further results `flex_attention` gives."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Further results of `flex_attention`; None: not asked for."""

    lse: Any = None
    max_scores: Any = None


_PROMISES = {"ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "PRESCALE_QK"}
_TUNING = {
    *("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages"),
    *("USE_TMA", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION"),
}
_SCRATCH_STEP = 16
_FURTHER = ("key", "value", "out", *[f"block_mask.{name}" for name in LISTS])


def attend(*arguments: Any) -> Any:
    """`flex_attention`, of its arguments in order: with a graph of autograd where a tensor needs one."""
    results = attend_alone(*arguments)
    if results is not None:
        return results
    from .autograd import attention  # imports torch

    return attention(*arguments)


def attend_alone(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any,
    deterministic: bool | None,
    out: Any,
) -> Any:
    """`flex_attention` without a graph; None where a tensor that the call reads needs one."""
    return_lse = as_bool("return_lse", return_lse)
    enable_gqa = as_bool("enable_gqa", enable_gqa)
    if deterministic is not None:
        as_bool("deterministic", deterministic)
    wants_lse, wants_max = wanted(return_lse, return_aux)
    check_options(kernel_options)
    scale = None if scale is None else as_scale(scale)
    if needs_gradient(query, key, value, out):
        return None
    q, k, v = [read_dense(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))]
    out_view = read_given(out, "out")
    device, framework = q[4], q[5]
    recalled = None if block_mask is None else recall_lists(block_mask, framework)
    lists = recalled or lists_of(block_mask)
    of_lists = None if lists is None else lists.kind
    kind = (kind_of(q), kind_of(k), kind_of(v), kind_of(out_view), of_lists, enable_gqa)
    latest_kind, checked = _checked.latest
    if latest_kind != kind:  # layers repeat one kind, and comparing takes half the time of hashing
        found = _checked.get(kind)
        checked = found or _checked.keep(kind, check_arrays(q, k, v, out_view, lists, enable_gqa))
        _checked.latest = kind, checked
    further = [k, v, out_view]
    if lists is not None and recalled is None:
        further += lists.views
        if checked.lists is not None and True not in checked.list_copies:
            keep_lists(block_mask, lists, framework)
    for name, view in zip(_FURTHER, further, strict=False):
        if view is not None and view[5] is not framework:
            check_on_device(name, view, device, framework)

    score_read, mask_read = as_reading(score_mod, "score_mod", device), None
    if checked.lists is not None:
        mask_read = read_mask(block_mask, device)
    if reads_gradient(score_read) or reads_gradient(mask_read):
        return None
    if checked.cut is not None:
        mask_read = reading_of(within_blocks(mask_read and mask_read.mod(), checked.cut.given))
    if not checked.scores:
        score_read = None  # what it reads may be empty
    if scale is None:
        scale = checked.default_scale
    if score_read is None and scale <= 0:
        score_read = IDENTITY  # softmax looks for maxima of unscaled scores
    score = bound(score_read, "score_mod", device, framework)
    mask = bound(mask_read, "mask_mod", device, framework)
    variants = score and score.form.variant, mask and mask.form.variant
    call_key = (*variants, scale, wants_lse, wants_max)
    prepared = checked.calls.get(call_key) or checked.calls.keep(
        call_key, _prepare(checked, call_key, score, mask, q, out_view)
    )
    made = prepared.allocate()
    scratch = made.pop()
    if out_view is None:
        out = made.pop(0)
    lse = made.pop(0) if wants_lse else None
    max_scores = made.pop(0) if wants_max else None
    if prepared.launch is not None:
        pointer = framework.pointer
        results = (
            pointer(out) if out_view is None else out_view[0],
            0 if lse is None else pointer(lse),
            0 if max_scores is None else pointer(max_scores),
        )
        _launch(checked, prepared, (q, k, v), lists, results, scratch, score, mask)
    if return_aux is not None:
        return out, AuxOutput(lse, max_scores)
    return (out, lse) if return_lse else out


def read_dense(x: Any, name: str) -> Fields:
    """The fields of query, key or value."""
    if getattr(x, "is_nested", False):
        raise NotImplementedError(
            f"{name}: expected a dense tensor, got a nested one; give its parts as one request, with a mask "
            "that keeps them apart"
        )
    return READERS[type(x)](x, name)


def wanted(return_lse: bool, return_aux: Any) -> tuple[bool, bool]:
    """Whether lse and max_scores are results."""
    if return_aux is None:
        return return_lse, False
    if return_lse:
        raise ValueError("return_lse: expected False with return_aux, which has lse too, got True")
    if not hasattr(return_aux, "lse"):
        raise TypeError(f"return_aux: expected an AuxRequest, got {show(return_aux)}")
    wants_max = getattr(return_aux, "max_scores", False)
    return as_bool("return_aux.lse", return_aux.lse), as_bool("return_aux.max_scores", wants_max)


def check_options(options: dict[str, Any] | None) -> None:
    """Check the names in `kernel_options`, and its backend."""
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(f"kernel_options: expected a dict, got {show(options)}")
    for name, value in options.items():
        plain = str(name).removeprefix("fwd_").removeprefix("bwd_")
        if name == "BACKEND":
            if value != "AUTO":
                raise ValueError(f"kernel_options: expected BACKEND to be 'AUTO', got {value!r}")
        elif plain not in _TUNING and name not in _PROMISES:
            known = ", ".join(sorted({*_PROMISES, *_TUNING, "BACKEND"}))
            raise ValueError(f"kernel_options: expected names among {known}, got {name!r}")


class _Prepared(NamedTuple):
    """How to run one kind of call: an allocator for its results, and a prepared launch."""

    allocate: Callable[[], list[Any]]
    """Makes out, unless it is given, lse and max_scores where they are wanted, and the scratch, or None."""
    launch: Callable[..., None] | None
    """Enqueues the kernel; None without queries."""
    counter_bytes: int


_checked: Memo[FlexChecked] = Memo(shared=True)


def _prepare(
    checked: FlexChecked,
    key: tuple[Any, ...],
    score: Bound | None,
    mask: Bound | None,
    q: Fields,
    out: Fields | None,
) -> _Prepared:
    """Load the kernels of a call and work out their parameters."""
    *variants, scale, wants_lse, wants_max = key
    _, _, _, dtype, device, framework, _ = q
    b, h_q, seqlen_q = checked.b, checked.h_q, checked.seqlen_q
    results: list[NewArray] = []
    if out is None:
        results.append(((b, h_q, seqlen_q, checked.d_v), dtype, fresh_out_strides(q, checked.d_v)))
    results += [((b, h_q, seqlen_q), "float32")] * (wants_lse + wants_max)
    if not b or not seqlen_q:
        return _Prepared(framework.allocator(results, 0, device), None, 0)
    capturing = framework.capture_query(device)
    lists = checked.lists
    states: tuple[int, int, int, int] | None = None
    if checked.cut is not None:
        lists = _lists_in_scratch(checked.cut.walked)
        given = checked.cut.given
        states = (given.rows, given.columns, given.block_q, given.block_k)
        for spec in (mask_kernels.LISTS_SPEC, mask_kernels.SCATTER_SPEC):
            jit.get_kernel(spec, device, capturing=capturing)
    q_strides, k_strides, v_strides, out_strides = checked.strides
    prepared = mha_forward.PreparedMhaForward(
        MhaForwardCall(
            device=device,
            dtype=dtype,
            b=b,
            k_batches=checked.k_batches,
            h_q=h_q,
            h_kv=checked.h_kv,
            d_qk=checked.d_qk,
            d_v=checked.d_v,
            varlen=False,
            max_seqlen_q=seqlen_q,
            max_seqlen_k=checked.seqlen_k,
            total_q=seqlen_q,
            total_k=checked.seqlen_k,
            q_strides=q_strides,
            k_strides=k_strides,
            v_strides=v_strides,
            out_strides=out_strides,
            lse_strides=(h_q * seqlen_q, seqlen_q),
            softmax_scale=scale,
            mods=Mods(
                header=header_of(*[variant and variant.mod for variant in variants]),
                has_score_mod=score is not None,
                score_mod_bytes=len(packed_of(score)),
                mask_mod_bytes=len(packed_of(mask)),
                lists=lists,
                states=states,
                max_scores=wants_max,
            ),
        ),
        capturing,
    )
    scratch_bytes = prepared.scratch_bytes
    if checked.cut is not None:
        scratch_bytes = _Scratch(0, prepared.scratch_bytes, checked.cut).end
    return _Prepared(
        framework.allocator(results, scratch_bytes, device), prepared.launch, prepared.scratch_bytes
    )


def _lists_in_scratch(grid: Grid) -> BlockLists:
    """The layout of the lists that the kernels of a call write to its scratch."""
    rows, columns = grid.rows, grid.columns
    counts = (grid.heads * rows, rows, 1)
    lists = (grid.heads * rows * columns, rows * columns, columns)
    return BlockLists(
        (counts, counts),
        (lists, lists),
        (columns, columns),
        grid.batches,
        grid.heads,
        grid.block_q,
        grid.block_k,
    )


class _Scratch:
    """Addresses in the scratch of a call whose lists are brought to other blocks."""

    def __init__(self, address: int, counter_bytes: int, cut: Recut) -> None:
        lines = 4 * cut.walked.batches * cut.walked.heads * cut.walked.rows
        sizes = (counter_bytes, cut.given.blocks, lines, 4 * cut.walked.blocks, lines, 4 * cut.walked.blocks)
        places = [address]
        for size in sizes:
            places.append(places[-1] + -(-size // _SCRATCH_STEP) * _SCRATCH_STEP)
        self.counter, self.states, *lists, self.end = places
        self.lists = ListAddresses(*lists)


def _launch(
    checked: FlexChecked,
    prepared: _Prepared,
    views: tuple[Fields, Fields, Fields],
    lists: GivenLists | None,
    results: tuple[int, int, int],
    scratch: Any,
    score: Bound | None,
    mask: Bound | None,
) -> None:
    """Enqueue the copies and kernels of a call."""
    _, _, _, dtype, device, framework, _ = views[0]
    stream = framework.current_stream(device)
    alive = []
    addresses = [view[0] for view in views]
    if True in checked.copied:
        for i, name in enumerate(("query", "key", "value")):
            if checked.copied[i]:
                other = None if views[i][3] == dtype else dtype
                alive.append(views[i][5].aligned_copy(views[i][6], name, other))
                addresses[i] = views[i][5].pointer(alive[-1])
    of_lists = [0, 0, 0, 0, 0]
    if checked.lists is not None and lists is not None:
        of_lists = [*lists.addresses(), 0]
        if True in checked.list_copies:
            for i, given in enumerate(lists.views):
                if given is not None and checked.list_copies[i]:
                    alive.append(given[5].aligned_copy(given[6], LISTS[i], "int32"))
                    of_lists[i] = given[5].pointer(alive[-1])
    scratch_ptr = 0 if scratch is None else framework.pointer(scratch)
    if checked.cut is not None and checked.lists is not None and mask is not None:
        by_caller, by_kernel = checked.cut
        places = _Scratch(scratch_ptr, prepared.counter_bytes, checked.cut)
        where: Any = {"device": device, "stream": stream, "capturing": framework.capture_query(device)}
        jit.clear(places.states, -(-by_caller.blocks // 4) * 4, stream, device)
        mask_kernels.scatter(by_caller, checked.lists, of_lists[:4], places.states, **where)
        blocks = (by_caller.block_q, by_caller.block_k)
        mask_kernels.lists(by_kernel, places.states, places.lists, state_blocks=blocks, **where)
        of_lists = [*places.lists, places.states]
        mask = mask.with_last_address(places.states)
    assert prepared.launch is not None
    out, lse, max_scores = results
    arrays = (*addresses, out, lse)  # in the order of MhaForwardAddresses
    # In the order of ModAddresses, and the parameters of the functions.
    prepared.launch(stream, arrays, scratch_ptr, max_scores, *of_lists, packed_of(score), packed_of(mask))
