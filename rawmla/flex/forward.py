"""One call of `flex_attention`, from its arguments to the launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..call.arguments import Arg
from ..call.arrays import needs_gradient, read_given
from ..call.checks import as_bool, as_scale, show
from ..call.frameworks import NewArray
from ..call.memo import Memo
from ..kernels import mha_forward
from ..kernels.mha_forward import Mods
from ..kernels.mha_forward_variants import tile_in_blocks
from ..mha.arguments import check_out_layout, fresh_out_strides
from .arrays import addresses_of, by_token, check_arrays, kinds_of, read_dense
from .block_lists import LISTS
from .block_mask import read_mask
from .functions import IDENTITY, as_bound, bound, header_of, packed_of, reads_gradient, within_blocks
from .lists import Checked, GivenLists, Prepared, check_lists, check_streams, launch_lists, read_lists
from .mods import Bound


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
_ARGUMENTS = ("query", "key", "value", "out", *[f"block_mask.{name}" for name in LISTS])


class Arguments(NamedTuple):
    """The arguments of `flex_attention`."""

    query: Any
    key: Any
    value: Any
    score_mod: Any
    block_mask: Any
    scale: float | None
    enable_gqa: bool
    return_lse: bool
    kernel_options: dict[str, Any] | None
    return_aux: Any
    deterministic: bool | None
    out: Any


def attend(arguments: tuple[Any, ...]) -> Any:
    """`flex_attention`, with a graph of autograd where a tensor needs one. ``arguments`` has the fields of
    `Arguments`, which takes longer to make.
    """
    results = attend_alone(arguments)
    if results is not None:
        return results
    from .autograd import attention  # imports torch

    return attention(Arguments._make(arguments))


def attend_alone(arguments: tuple[Any, ...]) -> Any:
    """`flex_attention` without a graph; None where a tensor that the call reads needs one."""
    (
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux,
        deterministic, out,
    ) = arguments  # fmt: skip
    return_lse = as_bool("return_lse", return_lse)
    enable_gqa = as_bool("enable_gqa", enable_gqa)
    if deterministic is not None:
        as_bool("deterministic", deterministic)
    wants_lse, wants_max = wanted(return_lse, return_aux)
    check_options(kernel_options)
    scale = None if scale is None else as_scale(scale)
    if needs_gradient(query, key, value, out):
        return None
    q, k, v = read_dense(query, "query"), read_dense(key, "key"), read_dense(value, "value")
    device, framework = q[4], q[5]
    out_view = read_given(out, "out")
    views = (q, k, v, out_view)
    lists = read_lists(block_mask)
    kind = (enable_gqa, kinds_of(views), lists and lists.kind)
    checked = _checked.get(kind) or _checked.keep(kind, _check(views, lists, enable_gqa))
    if checked.mixes_frameworks:
        check_streams(_ARGUMENTS, views, lists)

    blocks = checked.blocks
    score_read = as_bound(score_mod, "score_mod", device, framework)
    mask_read = None if blocks is None else read_mask(block_mask, device)
    if reads_gradient(score_read, mask_read):
        return None
    if blocks is not None and blocks.recut is not None:
        mask_read = within_blocks(mask_read, blocks.recut.given)
    if not checked.scores:
        score_read = None  # what it reads may be empty
    if scale is None:
        scale = checked.call.softmax_scale
    if score_read is None and scale <= 0:
        score_read = IDENTITY  # softmax looks for maxima of unscaled scores
    score = bound(score_read, "score_mod", device, framework)
    mask = bound(mask_read, "mask_mod", device, framework)
    key_of_call = (score and score.form.frame, mask and mask.form.frame, scale, wants_lse, wants_max)
    prepared = checked.calls.get(key_of_call) or checked.calls.keep(
        key_of_call, _prepare(checked, views, score, mask, scale, wants_lse, wants_max)
    )
    made = prepared.allocate()
    scratch = made.pop()
    if out_view is None:
        out = made.pop(0)
    lse = made.pop(0) if wants_lse else None
    max_scores = made.pop(0) if wants_max else None
    if prepared.launch is not None:
        pointer = framework.pointer
        address = 0 if scratch is None else pointer(scratch)
        copies, of_inputs = addresses_of(views[:3], _ARGUMENTS, checked.copied)
        list_copies, of_lists, mask_bytes = launch_lists(
            blocks, lists, mask, address + prepared.lists_start, device, framework
        )
        prepared.launch(
            framework.current_stream(device),
            (
                *of_inputs,
                pointer(out) if out_view is None else out_view[0],
                0 if lse is None else pointer(lse),
            ),
            address,
            0 if max_scores is None else pointer(max_scores),
            *of_lists,
            packed_of(score),
            mask_bytes,
        )
        del copies, list_copies  # until here
    if return_aux is not None:
        return out, AuxOutput(lse, max_scores)
    return (out, lse) if return_lse else out


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


_checked: Memo[Checked] = Memo(shared=True)
_OUT = (Arg("out", "=query", "B Hq L Ev"),)


def _check(views: tuple[Any, ...], lists: GivenLists | None, enable_gqa: bool) -> Checked:
    """Check the arrays of a call against each other."""
    call, copied = check_arrays(dict(zip(_ARGUMENTS, views, strict=False)), _OUT, enable_gqa)
    q, _, _, out = views
    if out is not None:
        call = call._replace(out_strides=by_token(check_out_layout(out)))
    tile = tile_in_blocks(call.d_qk, call.d_v)
    blocks = check_lists(lists, call, q[5], (tile.rows, tile.keys), _SCRATCH_STEP)
    return Checked.of(call, copied, blocks, views, lists)


def _prepare(
    checked: Checked,
    views: tuple[Any, ...],
    score: Bound | None,
    mask: Bound | None,
    scale: float,
    wants_lse: bool,
    wants_max: bool,
) -> Prepared:
    """Load the kernels of a call and work out their parameters."""
    call, blocks = checked.call, checked.blocks
    q, _, _, out = views
    device, framework = q[4], q[5]
    rows = (call.b, call.h_q, call.max_seqlen_q)
    results: list[NewArray] = []
    if out is None:
        results.append(((*rows, call.d_v), call.dtype, fresh_out_strides(q, call.d_v)))
    results += [(rows, "float32")] * (wants_lse + wants_max)
    if not call.b or not call.max_seqlen_q:
        return Prepared(framework.allocator(results, 0, device), None)
    recut = blocks and blocks.recut
    mods = Mods(
        header=header_of(score and score.form.frame.mod, mask and mask.form.frame.mod),
        has_score_mod=score is not None,
        score_mod_bytes=len(packed_of(score)),
        mask_mod_bytes=len(packed_of(mask)),
        lists=blocks and blocks.load(device, framework),
        states=recut and (recut.given.rows, recut.given.columns, recut.given.block_q, recut.given.block_k),
        max_scores=wants_max,
    )
    prepared = mha_forward.PreparedMhaForward(
        call._replace(softmax_scale=scale, mods=mods), framework.capture_query(device)
    )
    return Prepared.of(prepared, results, blocks, _SCRATCH_STEP, views[0])
