"""Flex attention: cases, their inputs, and the reference on the device in torch.

The reference computes what `rawmla.reference` computes (the tests hold one against the other), for several
heads at a time. In the inputs' own dtype it is the plain torch that bounds of errors are measured by.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan, prod
from typing import Any

from rawmla.flex.block_mask import BlockMask

from .functions import BIASES, MASKS, SCORES, Function, Sizes
from .generators import Case
from .mha import in_gaps, problems_of_lse, problems_of_out

CHUNK_SCORES = 1 << 25
"""Scores of one step of the reference (256 MiB in float64), unless a single head has more."""


# ---- cases


@dataclass(frozen=True)
class FlexCase(Case):
    """One call.

    Attributes:
        b, b_kv: requests of q, and of k and v: b or 1; 0 is b.
        h_q, h_kv, s_q, s_k, d_qk, d_v: heads, tokens and head dimensions.
        dtype, kv_dtype: the dtype of q, and the one of k and v if it is another.
        score, mask: names in SCORES or BIASES, and in MASKS; "": none. With a mask there are lists of its
            blocks.
        block: query tokens and keys of a block.
        separate: whether full blocks have lists of their own.
        layout: of q, k and v: "plain" (contiguous), "slice" (of a larger array, all dimensions), "tokens"
            (the heads of a token one after the other).
        scale: as in the call.
        gap: what memory holds that no result may depend on: around the arrays, K of keys that no query
            attends, V of keys in no listed block.
        gap_keys: V holds it only in runs of this many keys, none of which is in a listed block.
    """

    b: int = 2
    b_kv: int = 0
    h_q: int = 4
    h_kv: int = 4
    s_q: int = 256
    s_k: int = 256
    d_qk: int = 64
    d_v: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    score: str = ""
    mask: str = ""
    block: tuple[int, int] = (128, 128)
    separate: bool = True
    layout: str = "plain"
    scale: float | None = None
    gap: float = nan
    gap_keys: int = 128
    seed: int = 0

    def sizes(self, device: str) -> Sizes:
        """For its functions."""
        return Sizes(self.b, self.h_q, self.s_q, self.s_k, self.seed, device)


@dataclass
class FlexInputs:
    """The arrays and functions of a call; `block_mask` has the mask as a function of Python."""

    case: FlexCase
    q: Any
    k: Any
    v: Any
    score: Function | None
    mask: Function | None
    block_mask: BlockMask | None

    def keywords(self, form: str = "python") -> dict[str, Any]:
        """Arguments of the call that say how scores are made; functions in one form: "python" or "cuda"."""
        block_mask = self.block_mask
        if block_mask is not None and self.mask is not None:
            block_mask = with_mask_mod(block_mask, self.mask.form(form))
        return {
            "score_mod": None if self.score is None else self.score.form(form),
            "block_mask": block_mask,
            "scale": self.case.scale,
            "enable_gqa": self.case.h_q != self.case.h_kv,
        }


def with_mask_mod(block_mask: BlockMask, mask_mod: Any) -> BlockMask:
    """The same lists with another function."""
    parts: list[Any] = [*block_mask.as_tuple(flatten=False)[:-1], mask_mod]
    return BlockMask(*parts)


def make_flex_inputs(case: FlexCase, device: str = "cuda") -> FlexInputs:
    """Inputs of normal random numbers, of their absolute values where scores have to be positive."""
    import torch

    score, mask = (
        None if not name else table[name](case.sizes(device))
        for name, table in ((case.score, BIASES | SCORES), (case.mask, MASKS))
    )
    b_kv = case.b_kv or case.b
    draw = torch.Generator(device).manual_seed(case.seed)
    shapes = {
        "q": (case.b, case.h_q, case.s_q, case.d_qk),
        "k": (b_kv, case.h_kv, case.s_k, case.d_qk),
        "v": (b_kv, case.h_kv, case.s_k, case.d_v),
    }
    values = {name: torch.randn(shape, generator=draw, device=device) for name, shape in shapes.items()}
    if score is not None and score.positive:
        values["q"], values["k"] = values["q"].abs(), values["k"].abs()
    block_mask = None
    if mask is not None:
        seen = attended(mask, case, device)
        block_mask = block_mask_of_case(case, mask, device)
        if case.s_q and case.s_k:
            some, full = listed_positions(block_mask)
            listed = _whole_runs(_of_kv_heads((some | full).any(2), case), case.gap_keys)
            hidden = ~_of_kv_heads(seen.any(2), case), ~listed
            values["k"][hidden[0]], values["v"][hidden[1]] = case.gap, case.gap
    made = []
    for name in ("q", "k", "v"):
        dtype = case.kv_dtype if case.kv_dtype and name != "q" else case.dtype
        array = empty_array(shapes[name], case.layout, case.gap, getattr(torch, dtype), device)
        made.append(array.copy_(values[name]))
    q, k, v = made
    return FlexInputs(case, q, k, v, score, mask, block_mask)


def empty_array(shape: tuple[int, ...], layout: str, gap: float, dtype: Any, device: str) -> Any:
    """An array `[b, heads, tokens, columns]` full of `gap`, and around it as the layout has it."""
    b, heads, tokens, columns = shape
    if layout == "tokens":
        return in_gaps((b, tokens, heads, columns), "plain", gap, dtype, device).transpose(1, 2)
    return in_gaps(shape, layout, gap, dtype, device)


def attended(mask: Function, case: FlexCase, device: str) -> Any:
    """bool `[B, H, s_q, s_k]`, B and H 1 where the mask does not depend on the request or head."""
    import torch

    extents = (case.b, case.h_q, case.s_q, case.s_k)
    at = [
        torch.arange(extent, device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, extent in enumerate(extents)
    ]
    seen = mask.torch()(*at)
    batches, heads = ((1, 1) + tuple(seen.shape))[-4:-2]
    return seen.expand(batches, heads, case.s_q, case.s_k)


def block_mask_of_case(case: FlexCase, mask: Function, device: str, *, by_columns: bool = False) -> BlockMask:
    """The block mask of a case's mask."""
    seen, lengths = attended(mask, case, device), (case.s_q, case.s_k)
    return block_mask_of(
        seen, lengths, case.block, mask.python, separate=case.separate, by_columns=by_columns
    )


def _of_kv_heads(keys: Any, case: FlexCase) -> Any:
    """From `[B, H, s_k]`, by query heads, to `[b_kv, h_kv, s_k]`: those that a query head marks."""
    keys = keys.expand(case.b, case.h_q, case.s_k).unflatten(1, (case.h_kv, -1)).any(2)
    return keys.any(0, keepdim=True) if case.b_kv == 1 else keys


def _whole_runs(keys: Any, size: int) -> Any:
    """bool `[.., s_k]`: the keys of aligned runs of which one is marked."""
    runs = keys.new_zeros((*keys.shape[:-1], -(-keys.shape[-1] // size), size))
    runs.flatten(-2)[..., : keys.shape[-1]] = keys
    return runs.any(-1).repeat_interleave(size, -1)[..., : keys.shape[-1]]


def block_mask_of(
    seen: Any,
    lengths: tuple[int, int],
    block: tuple[int, int],
    mask_mod: Any,
    *,
    separate: bool = True,
    by_columns: bool = False,
) -> BlockMask:
    """The mask of attended pairs, bool `[B, H, s_q, s_k]`; `by_columns`: with what a backward pass reads."""
    import torch

    rows, columns = (-(-length // size) for length, size in zip(lengths, block, strict=True))
    padded = seen.new_zeros((*seen.shape[:2], rows * block[0], columns * block[1]))
    padded[:, :, : lengths[0], : lengths[1]] = seen
    blocks = padded.view(*seen.shape[:2], rows, block[0], columns, block[1])
    some, full = blocks.any(5).any(3), blocks.all(5).all(3)
    kinds = [some & ~full, full] if separate else [some, None]
    kinds += [None if x is None else x.mT for x in kinds] if by_columns else [None, None]
    parts: list[Any] = [lengths]
    for listed in kinds:
        if listed is None:
            parts += [None, None]
            continue
        order = torch.argsort((~listed).int(), dim=-1, stable=True)
        parts += [listed.sum(-1, dtype=torch.int32), order.int()]
    parts += [block, mask_mod]
    return BlockMask(*parts)


def listed_positions(block_mask: Any) -> tuple[Any, Any]:
    """bool `[B, H, s_q, s_k]`, of partial and of full blocks: the positions in listed ones."""
    import torch

    (s_q, s_k), (size_q, size_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    found: list[Any] = []
    for name in ("kv", "full_kv"):
        counts, indices = (getattr(block_mask, f"{name}_{what}") for what in ("num_blocks", "indices"))
        if counts is None:
            found.append(torch.zeros_like(found[0]))
            continue
        columns = -(-s_k // size_k)
        order = torch.arange(indices.shape[-1], device=indices.device)
        valid = (order < counts[..., None]) & (indices >= 0) & (indices < columns)
        dense = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
        dense.scatter_(-1, torch.where(valid, indices, columns).long(), True)
        at_q = torch.arange(s_q, device=indices.device) // size_q
        at_k = torch.arange(s_k, device=indices.device) // size_k
        found.append(dense[..., at_q, :][..., at_k])
    return found[0], found[1]


# ---- reference


def reference(inputs: FlexInputs, dtype: Any = None, captures: Any = None) -> tuple[Any, Any, Any]:
    """out `[B, Hq, L, Ev]`, lse and max_scores `[B, Hq, L]`, as `rawmla.reference` defines them.

    Products have the type `dtype`, None: float64. Their scores are float32 at least. `captures` replace the
    captures of the score function. What requires grad gets a graph.
    """
    import torch

    case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
    dtype = torch.float64 if dtype is None else dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    (b, h_q, s_q, d_qk), (b_kv, h_kv, s_k, d_v) = q.shape, v.shape
    scale = d_qk**-0.5 if case.scale is None else case.scale
    if case.kv_dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    out = torch.zeros((b, h_q, s_q, d_v), dtype=dtype, device=q.device)
    lse = torch.full((b, h_q, s_q), -inf, dtype=torch.float64, device=q.device)
    top = lse.clone()
    if not prod((b, s_q, s_k)):
        return out, lse, top
    score_mod = None if inputs.score is None else inputs.score.torch(captures)
    mask_mod = None if inputs.mask is None else inputs.mask.torch()
    lists = None if inputs.block_mask is None else listed_positions(inputs.block_mask)
    i, j = torch.arange(s_q, device=q.device)[:, None], torch.arange(s_k, device=q.device)
    for part in torch.arange(b * h_q, device=q.device).split(max(1, CHUNK_SCORES // (s_q * s_k))):
        request, head = part // h_q, part % h_q
        request_k, head_k = request % b_kv, head // (h_q // h_kv)
        at = (request[:, None, None], head[:, None, None], i, j)
        products = q[request, head].to(dtype) @ k[request_k, head_k].to(dtype).transpose(1, 2)
        scores = products.to(exact) * scale
        if score_mod is not None:
            scores = score_mod(scores, *at).to(exact)
        values = v[request_k, head_k].to(dtype)
        if lists is not None:
            some, full = (x[request % x.shape[0], head % x.shape[1]] for x in lists)
            visible = full | some & mask_mod(*at) if mask_mod is not None else full | some
            scores = scores.masked_fill(~visible, -inf)
            values = values.masked_fill(~visible.any(1)[..., None], 0.0)
        most = scores.amax(-1)
        weights = torch.softmax(scores, dim=-1).masked_fill((most == -inf)[..., None], 0.0)
        out[request, head] = weights.to(dtype) @ values
        largest = most.detach().masked_fill(most == -inf, 0.0)  # else -1e9 would hide the sum
        lse[request, head] = (torch.logsumexp(scores - largest[..., None], dim=-1) + largest).double()
        top[request, head] = most.double()
    return out, lse, top


# ---- comparison


def check_flex(
    inputs: FlexInputs,
    got: tuple[Any, Any, Any],
    want: tuple[Any, Any, Any] | None = None,
    *,
    plain: bool = False,
) -> None:
    """Raise AssertionError unless a call's out, lse and max_scores (None: not given) are as exact as products
    in the inputs' dtype allow.

    The bounds are as in `check_mha`; max_scores has the bound of lse. Functions for which kernels have
    approximate instructions have the bounds of a softcap. With `plain` the mean error of out is also held
    against plain torch in the inputs' dtype: at most 2.1 times as much.
    """
    import torch

    case = inputs.case
    want = reference(inputs) if want is None else want
    if got[0].dtype != getattr(torch, case.dtype) or got[0].shape != want[0].shape:
        raise AssertionError(f"{case.id}: out is {got[0].dtype} {tuple(got[0].shape)}")
    if not want[0].numel():
        return
    approximate = any(f is not None and f.approximate for f in (inputs.score, inputs.mask))
    problems = problems_of_out(got[0], want[0], case.dtype, 4.0 if approximate else 1.0)
    if plain:
        in_torch = reference(inputs, got[0].dtype)[0]
        error, allowed = ((x.double() - want[0]).abs().mean().item() for x in (got[0], in_torch))
        if not error <= 2.1 * allowed:
            problems.append(f"mean error of out {error:.3g}, plain torch has {allowed:.3g}")
    for name, one, wanted in (("lse", got[1], want[1]), ("max_scores", got[2], want[2])):
        if one is None:
            continue
        if one.dtype != torch.float32 or one.shape != wanted.shape:
            raise AssertionError(f"{case.id}: {name} is {one.dtype} {tuple(one.shape)}")
        problems += problems_of_lse(name, one, wanted, approximate=approximate)
    if problems:
        raise AssertionError(f"{case.id}: {'; '.join(problems)}")
