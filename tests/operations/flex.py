"""Flex attention and its block masks: calls of a case's inputs, and the entries of the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import rawmla
from kit.flex import FlexCase, FlexInputs, block_mask_of_case, check_flex, make_flex_inputs

from .core import LISTS, Arguments, Call, Operation, assert_same_bits, slices, spoilt, wrong_value
from .dense import D256, ONE_KV, PAIR, ROWS, assert_untouched_around, out_buffer, renew

Results = tuple[Any, Any, Any]

__all__ = ["assert_same_results", "assert_untouched_around", "attend", "created_mask", "out_buffer"]

# ---- calls


def attend(inputs: FlexInputs, form: str = "python", *, max_scores: bool = False, **more: Any) -> Results:
    """out, lse and, if they are asked for, the largest scores; `more` are further keywords, or others."""
    keywords = {**inputs.keywords(form), **more}
    wanted = rawmla.AuxRequest(lse=True, max_scores=max_scores)
    out, aux = rawmla.flex_attention(inputs.q, inputs.k, inputs.v, return_aux=wanted, **keywords)
    return out, aux.lse, aux.max_scores


def created_mask(inputs: FlexInputs, form: str = "python", **more: Any) -> Any:
    """The block mask that rawmla makes of the case's mask, for as many requests and heads as it needs."""
    return rawmla.create_block_mask(**{**mask_arguments(inputs, form), **more})


def mask_arguments(inputs: FlexInputs, form: str) -> Arguments:
    """The arguments of the call that makes a case's block mask."""
    case, known = inputs.case, inputs.block_mask
    assert inputs.mask is not None and known is not None
    batches, heads = known.kv_num_blocks.shape[:2]
    return {
        "mask_mod": inputs.mask.form(form),
        "B": batches,
        "H": heads,
        "Q_LEN": case.s_q,
        "KV_LEN": case.s_k,
        "BLOCK_SIZE": case.block,
        "separate_full_blocks": case.separate,
    }


def assert_same_results(name: str, got: Any, want: Any) -> None:
    """Raise unless results that both calls gave have the same bits."""
    for result, one, wanted in zip(("out", "lse", "max_scores"), got, want, strict=False):
        if one is not None and wanted is not None:
            assert_same_bits(f"{name}: {result}", one, wanted)


# ---- entries


def flex_arguments(inputs: FlexInputs, form: str) -> Arguments:
    """The arguments of a call by name, functions in one form."""
    return {"query": inputs.q, "key": inputs.k, "value": inputs.v, **inputs.keywords(form)}


def make_flex_call(case: FlexCase, device: str = "cuda") -> Call:
    """The call of a case, whose functions are CUDA text."""
    inputs = make_flex_inputs(case, device)
    return Call(
        "flex_attention",
        {**flex_arguments(inputs, "cuda"), "return_lse": True},
        ("out", "lse"),
        lambda got: check_flex(inputs, (got[0], got[1], None)),
        inputs,
    )


def make_traced_call(case: FlexCase, device: str = "cuda") -> Call:
    """The call of a case, whose functions are of Python, and are traced; with the largest scores."""
    inputs = make_flex_inputs(case, device)
    wanted = rawmla.AuxRequest(lse=True, max_scores=True)
    return Call(
        "flex_attention",
        {**flex_arguments(inputs, "python"), "return_aux": wanted},
        ("out", "lse", "max_scores"),
        lambda got: check_flex(inputs, (got[0], got[1], got[2])),
        inputs,
        unpack=lambda got: (got[0], got[1].lse, got[1].max_scores),
    )


def list_again(inputs: FlexInputs) -> None:
    """Bring the lists up to date, in place, after tensors that the mask reads changed."""
    assert inputs.mask is not None and inputs.block_mask is not None
    known = inputs.block_mask
    new = block_mask_of_case(inputs.case, inputs.mask, str(inputs.q.device), by_columns=True)
    for name in LISTS:
        if getattr(known, name) is not None:
            getattr(known, name).copy_(getattr(new, name))


def change_everything(inputs: FlexInputs, turn: int) -> None:
    """Change in place all that a call reads: arrays, what functions read, and lists."""
    with torch.no_grad():
        for number, x in enumerate((inputs.q, inputs.k, inputs.v)):
            renew(x, 10 * turn + number)
        for x in () if inputs.score is None else inputs.score.captures.values():
            if isinstance(x, torch.Tensor):
                x.mul_(1.5)
        if inputs.mask is not None and "documents" in inputs.mask.captures:
            documents = inputs.mask.captures["documents"]
            documents.copy_((documents * (turn + 1) + 1) // 2)
            list_again(inputs)


def flex_changes(call: Call) -> Iterator[None]:
    """Change everything, several times."""
    yield
    for turn in range(1, 4):
        change_everything(call.inputs, turn)
        yield


def make_mask_call(case: FlexCase, device: str = "cuda", form: str = "cuda") -> Call:
    """The call that makes the block mask of a case."""
    inputs = make_flex_inputs(case, device)
    names = LISTS if case.separate else (*LISTS[:2], *LISTS[4:6])

    def check_lists(got: tuple[Any, ...]) -> None:
        assert inputs.mask is not None
        known = block_mask_of_case(case, inputs.mask, device, by_columns=True)
        for name, one in zip(names, got, strict=True):
            assert torch.equal(one, getattr(known, name)), name

    return Call(
        "create_block_mask",
        mask_arguments(inputs, form),
        names,
        check_lists,
        inputs,
        unpack=lambda mask: tuple(getattr(mask, name) for name in names),
    )


def mask_changes(call: Call) -> Iterator[None]:
    """Change what the mask reads."""
    yield
    documents = call.inputs.mask.captures["documents"]
    for turn in range(1, 4):
        documents.copy_((documents * (turn + 1) + 1) // 2)
        yield


BIASED = FlexCase(b=3, s_q=150, s_k=200, score="alibi table", mask="documents")
SMALL_BLOCKS = FlexCase(
    h_kv=2,
    s_q=300,
    s_k=277,
    d_qk=128,
    d_v=64,
    dtype="float16",
    score="bias b h q k",
    mask="window",
    block=(64, 64),
    layout="slice",
)
CASES = (
    BIASED,
    SMALL_BLOCKS,
    FlexCase(s_q=200, s_k=200, layout="tokens"),
    FlexCase(b=3, b_kv=1, s_q=200, s_k=300, mask="random", score="head scale"),
)
CHANGING = replace(BIASED, s_q=400, s_k=500, gap=0.0)
SMALL_CASES = (
    FlexCase(b=1, **PAIR, s_q=150, s_k=300, mask="causal"),
    FlexCase(b=2, **ONE_KV, s_q=140, s_k=270, score="bias b h q k", layout="slice"),
    FlexCase(b=2, **PAIR, s_q=140, s_k=270, mask="documents", score="nested", dtype="float16"),
    FlexCase(b=2, **PAIR, s_q=140, s_k=270, score="filled", dtype="float16"),
    FlexCase(b=2, b_kv=1, h_q=4, h_kv=2, s_q=70, s_k=300, mask="per batch", score="paged"),
    FlexCase(b=1, **PAIR, s_q=150, s_k=200, mask="random", block=(32, 64), score="distance"),
    FlexCase(b=1, **PAIR, s_q=150, s_k=500, mask="window", block=(256, 256), separate=False),
    FlexCase(b=2, **PAIR, s_q=70, s_k=90, mask="padding", d_qk=59, d_v=111, layout="tokens"),
    FlexCase(b=1, **PAIR, s_q=140, s_k=270, mask="checkered", **D256),
    FlexCase(b=1, **PAIR, s_q=130, s_k=140, mask="empty", score="gathered"),
    FlexCase(b=1, **PAIR, s_q=1, s_k=140, score="softcap", d_qk=128, d_v=64),
)
TILES = FlexCase(b=80, **PAIR, s_q=5, s_k=130, mask="prefix", score="head scale")

FLEX = Operation(
    name="flex",
    make=make_flex_call,
    cases=CASES,
    arrays=("query", "key", "value"),
    floats=lambda case: ("query", "key", "value"),
    small_cases=(*SMALL_CASES, TILES),
    kernels=("mha_forward",),
    rerun_cases=(
        FlexCase(b=20, s_q=257, s_k=257, mask="causal"),
        FlexCase(b=20, s_q=257, s_k=257, mask="causal", block=(64, 64)),
        FlexCase(b=20, s_q=1023, s_k=1025, mask="documents", score="alibi", d_qk=128, d_v=128),
        FlexCase(b=20, h_kv=1, s_q=97, s_k=300, mask="random", score="softcap", dtype="float16"),
        FlexCase(b=60, h_kv=1, s_q=3, s_k=799, score="bias h q k"),
        FlexCase(b=20, s_q=300, s_k=500, mask="per head", **D256),
        FlexCase(b=20, b_kv=1, s_q=799, s_k=3, score="silu"),
    ),
    repeats=500,
    graph_cases=(CHANGING, replace(CHANGING, block=(64, 32))),
    strides={"query": ROWS, "key": ROWS, "value": (*ROWS, "transposed")},
    odd_last=("query", "key", "value"),
    copied=("value",),
    ordered_like="query",
    grads=("query", "key", "value"),
    out=slices,
    empty={
        "no query tokens": (
            lambda a: {"query": a["query"][:, :, :0], "block_mask": None},
            {"out": 2, "lse": 2, "max_scores": 2},
        )
    },
    bad={
        "scale NaN": wrong_value("scale", float("nan")),
        "key of another dtype": spoilt("key", lambda x: x.double(), TypeError),
        "value of other heads": spoilt("value", lambda x: x[:, :1]),
    },
    changes=flex_changes,
)

FLEX_TRACED = replace(
    FLEX,
    name="flex_traced",
    make=make_traced_call,
    rerun_cases=FLEX.rerun_cases[:1],
    empty={name: (change, {**axes, "max_scores": 2}) for name, (change, axes) in FLEX.empty.items()},
    any_framework=False,
)

BLOCK_MASK = Operation(
    name="block_mask",
    make=make_mask_call,
    cases=(replace(BIASED, score=""), replace(BIASED, score="", block=(64, 32), separate=False)),
    arrays=(),
    floats=lambda case: (),
    small_cases=(*(replace(case, score="") for case in SMALL_CASES if case.mask), replace(TILES, score="")),
    kernels=("block_mask_states", "block_mask_lists"),
    graph_cases=(replace(CHANGING, score=""),),
    bad={"block of 0": wrong_value("BLOCK_SIZE", 0), "no function": wrong_value("mask_mod", 3, TypeError)},
    changes=mask_changes,
)

BLOCK_MASK_TRACED = replace(
    BLOCK_MASK, name="block_mask_traced", make=partial(make_mask_call, form="python"), any_framework=False
)
