"""One call of `flex_attention_backward`, from its arguments to the launch."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..call import tracing
from ..call.arguments import Arg
from ..call.arrays import READERS, address_of, read_given
from ..call.checks import as_bool, as_scale
from ..call.frameworks import NewArray
from ..call.memo import Memo
from ..kernels import mha_backward
from ..kernels.flex_captured import CapturedGradient
from ..kernels.mha_backward import BackwardAddresses, BackwardCall, BackwardMods
from ..kernels.mha_backward_variants import ALL, BLOCK_ROWS, Needs
from ..mha.arguments import fresh_out_strides
from .arrays import FP8, addresses_of, by_token, check_arrays, kinds_of, read_dense, read_strides
from .block_lists import Q_LISTS
from .block_mask import lacks_columns, read_mask, with_columns
from .functions import as_reading, bound, header_of, packed_of, within_blocks
from .lists import Checked, GivenLists, Prepared, check_lists, check_streams, launch_lists, read_lists
from .mods import Bound, Reading
from .traced import between_graphs

_SCRATCH_STEP = 128
_MOST_KEYS = 128
"""The most keys of a tile."""


class Arrays(NamedTuple):
    """The arrays of a call but for lists and captured ones, and then what is read of them."""

    query: Any
    key: Any
    value: Any
    out: Any
    grad_out: Any
    lse: Any
    grad_lse: Any


class Options(NamedTuple):
    """The options of a call."""

    scale: float | None
    enable_gqa: bool
    deterministic: bool | None


_ARGUMENTS = (*Arrays._fields, *[f"block_mask.{name}" for name in Q_LISTS])


def gradients(
    needs: Needs, arrays: Arrays, score_mod: Any, block_mask: Any, options: Options
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """`flex_attention_backward` of the gradients that are needed; None stands for others."""
    call = between_graphs().backpropagate if tracing.is_traced(arrays.query) else backpropagate
    return call(needs, arrays, score_mod, block_mask, options)


def backpropagate(
    needs: Needs, arrays: Arrays, score_mod: Any, block_mask: Any, options: Options
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """`gradients` of a call that torch does not trace."""
    scale, enable_gqa, deterministic = options
    enable_gqa = as_bool("enable_gqa", enable_gqa)
    if deterministic is not None:
        deterministic = as_bool("deterministic", deterministic)
    scale = None if scale is None else as_scale(scale)
    q, k, v = [read_dense(x, name) for x, name in zip(arrays[:3], _ARGUMENTS, strict=False)]
    out, dout, lse = [READERS[type(x)](x, name) for x, name in zip(arrays[3:6], _ARGUMENTS[3:], strict=False)]
    views = Arrays(q, k, v, out, dout, lse, read_given(arrays.grad_lse, "grad_lse"))
    device, framework = q[4], q[5]
    by_columns = block_mask
    if lacks_columns(block_mask) and read_lists(block_mask) is not None:
        by_columns = with_columns(block_mask)
    lists = read_lists(by_columns, Q_LISTS)
    kind = (enable_gqa, kinds_of(views), lists and lists.kind)
    checked = _checked.get(kind) or _checked.keep(kind, _check(views, lists, enable_gqa))
    if checked.mixes_frameworks:
        check_streams(_ARGUMENTS, views, lists)

    blocks = checked.blocks
    score_read = as_reading(score_mod, "score_mod", device, backward=True)
    mask_read = None if blocks is None else read_mask(block_mask, device, backward=True)
    if blocks is not None and blocks.recut is not None:
        mask_read = within_blocks(mask_read, blocks.recut.given, by_columns=True)
    of_captures, names = _gradients_of(score_read)
    if not needs.others:
        of_captures = ()
    needs = Needs(*needs[:3], bool(of_captures))
    if scale is None:
        scale = checked.call.softmax_scale
    if deterministic is None:
        deterministic = framework.determinism()
    if not checked.scores:
        score_read = None  # what it reads may be empty
    score = bound(score_read, "score_mod", device, framework)
    mask = bound(mask_read, "mask_mod", device, framework)
    key = (score and score.form.frame, mask and mask.form.frame, scale, deterministic, of_captures, needs)
    prepared = checked.calls.get(key) or checked.calls.keep(
        key, _prepare(checked, views, score, mask, scale, deterministic, of_captures, needs)
    )
    made = prepared.allocate()
    scratch = made.pop()
    dq, dk, dv = [made.pop(0) if is_needed else None for is_needed in needs[:3]]
    if prepared.launch is None:
        for array in (dq, dk, dv, *made):
            if array is not None:
                framework.fill(array, 0.0)
    else:
        pointer = framework.pointer
        address = pointer(scratch)
        copies, of_inputs = addresses_of(views[:5], _ARGUMENTS, checked.copied)
        list_copies, (*of_lists, _), mask_bytes = launch_lists(
            blocks, lists, mask, address + prepared.lists_start, device, framework
        )
        of_results = [0 if x is None else pointer(x) for x in (dq, dk, dv)]
        addresses = (*of_inputs, lse[0], address_of(views.grad_lse), *of_results)
        prepared.launch(
            framework.current_stream(device),
            BackwardAddresses(*addresses),
            address,
            *of_lists,
            packed_of(score),
            mask_bytes,
            [pointer(x) for x in made],
        )
        del copies, list_copies  # until here
    return dq, dk, dv, {**dict.fromkeys(names), **dict(zip(names, made, strict=False))}


Captured = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes and dtypes of the gradients of captured arrays."""


def _gradients_of(score: Reading | None) -> tuple[Captured, list[str]]:
    """The captured gradients; and the names of all captures that want one, first of those that get it."""
    if score is None or not score.arrays or score.frame.mod.backward is None:
        return (), []
    captures, arrays, places = score.frame.mod.captures, score.arrays, score.frame.mod.backward.gradients
    names = [captures[i].name for i in places]
    names += [
        capture.name
        for i, capture in enumerate(captures)
        if i not in places and getattr(arrays[i], "requires_grad", False)
    ]
    return tuple([(tuple(arrays[i].shape), captures[i].dtype) for i in places]), names


_checked: Memo[Checked] = Memo(shared=True)
_OTHERS = (
    Arg("out", "=query", "B Hq L Ev"),
    Arg("grad_out", "=query", "B Hq L Ev"),
    Arg("lse", "float32", "B Hq L"),
    Arg("grad_lse", "float32", "B Hq L"),
)


def _check(views: Arrays, lists: GivenLists | None, enable_gqa: bool) -> Checked:
    """Check the arrays of a call against each other."""
    for name, view in (("key", views.key), ("value", views.value)):
        if view[3] in FP8:
            raise ValueError(f"{name}: expected the dtype of query, for gradients, got {view[3]}")
    forward, of_inputs = check_arrays(views._asdict(), _OTHERS, enable_gqa)
    (out_strides, dout_strides), of_results = read_strides(forward.dtype, views.out, views.grad_out)
    dq_strides, dk_strides, dv_strides = [
        by_token(fresh_out_strides(view, view[1][-1])[:-1]) for view in views[:3]
    ]
    of_both = {name: x for name, x in forward._asdict().items() if name in BackwardCall._fields}
    of_both.update(out_strides=out_strides, lse_strides=by_token(views.lse[2]))
    call = BackwardCall(
        **of_both,
        dout_strides=dout_strides,
        dlse_strides=(0, 0, 0) if views.grad_lse is None else by_token(views.grad_lse[2]),
        dq_strides=dq_strides,
        dk_strides=dk_strides,
        dv_strides=dv_strides,
        deterministic=False,
        needs=ALL,
    )
    blocks = check_lists(lists, forward, views.query[5], (BLOCK_ROWS, _MOST_KEYS), _SCRATCH_STEP)
    return Checked.of(call, (*of_inputs, *of_results), blocks, views, lists)


def _prepare(
    checked: Checked,
    views: Arrays,
    score: Bound | None,
    mask: Bound | None,
    scale: float,
    deterministic: bool,
    captured: Captured,
    needs: Needs,
) -> Prepared:
    """Load the kernels of a call and work out their parameters."""
    device, framework = views.query[4], views.query[5]
    results: list[NewArray] = [
        (tuple(view[1]), view[3], fresh_out_strides(view, view[1][-1]))
        for view, is_needed in zip(views[:3], needs, strict=False)
        if is_needed
    ]
    results += captured
    if not checked.scores:
        return Prepared(framework.allocator(results, 0, device), None)
    blocks = checked.blocks
    backward = score and score.form.frame.mod.backward
    sites = backward.sites if backward else ()
    mods = BackwardMods(
        header=header_of(score and score.form.frame.mod, mask and mask.form.frame.mod),
        has_score_mod=score is not None,
        score_mod_bytes=len(packed_of(score)),
        mask_mod_bytes=len(packed_of(mask)),
        lists=blocks and blocks.load(device, framework),
        captured=tuple([CapturedGradient(prod(shape), dtype) for shape, dtype in captured]),
        sites=len(sites),
        scattered=any(site.by_q and site.by_kv for site in sites),
    )
    call = checked.call._replace(softmax_scale=scale, deterministic=deterministic, needs=needs, mods=mods)
    prepared = mha_backward.PreparedMhaBackward(call, framework.capture_query(device))
    return Prepared.of(prepared, results, blocks, _SCRATCH_STEP, views.query)
