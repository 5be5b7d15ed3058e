"""Backward calls of flex attention: what they refuse, allocate, copy and launch beside the forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import rawmla
from calls import test_flex as forward
from calls.fakes import Q_LISTS, Arguments, FakeArray, World, both, change, put
from calls.refusals import Refusal, check_refused, each, shapes
from calls.test_flex import (
    COLUMNS,
    HQ,
    OF_SCORES,
    OUT,
    ROWS,
    B,
    L,
    Q,
    S,
    change_list,
    mask_of,
    resize,
    set_mask,
    table,
)
from calls.test_flex_lists import check_recut, of_128
from rawmla.jit import NO_LAUNCH

ROWS_SHAPE = (B, HQ, L)
GRAD = "grad * slope"


def plain() -> Arguments:
    """A call that is accepted."""
    return forward.plain() | {
        "grad_out": FakeArray(OUT, "bfloat16", ptr=0xA000),
        "out": FakeArray(OUT, "bfloat16", ptr=0xB000),
        "lse": FakeArray(ROWS_SHAPE, "float32", ptr=0xD004),
    }


def score_mod(indices: str = "h, q_idx", **changes: Any) -> rawmla.CudaMod:
    captures = {"slope": 0.5, "bias": table(**changes)}
    gradients = {"bias": (indices, "grad")}
    return rawmla.CudaMod(f"score * slope + bias({indices})", captures, grad=GRAD, capture_grads=gradients)


def optional() -> Arguments:
    """The same with all that is optional."""
    more = {"score_mod": score_mod(), "block_mask": mask_of(), "scale": 0.25}
    return plain() | more | {"grad_lse": FakeArray(ROWS_SHAPE, "float32", ptr=0xE004)}


def call(arguments: Arguments, **more: Any) -> Any:
    return rawmla.flex_attention_backward(**{**arguments, **more})


def only(world: World) -> SimpleNamespace:
    (launch,) = world.flex_backward
    return launch


WITHOUT_COLUMNS = both(*[set_mask(name, None) for name in Q_LISTS])
WITHOUT_FULL = both(*[set_mask(name, None) for name in Q_LISTS[2:]])
REFUSALS: list[Refusal] = [
    *[
        (name, ValueError, "of query, for gradients ... float8", change(name, dtype="float8_e4m3fn"))
        for name in ("key", "value")
    ],
    *[
        (name, TypeError, "bfloat16 ... got float16", change(name, dtype="float16"))
        for name in ("key", "value", "grad_out", "out")
    ],
    *[(name, ValueError, str(list(OUT)), shapes(**{name: Q})) for name in ("grad_out", "out")],
    *[(name, ValueError, "[2, 8, 300]", shapes(**{name: (B, HQ, 299)})) for name in ("lse", "grad_lse")],
    ("scale", ValueError, "1.7e+38 at most ... 3e+38", put("scale", 3e38)),
    ("deterministic", TypeError, "bool", put("deterministic", 1)),
    ("query", ValueError, "enable_gqa", put("enable_gqa", False)),
    ("block_mask", ValueError, "q_num_blocks and q_indices ... of torch and CuPy only", WITHOUT_COLUMNS),
    ("block_mask", ValueError, "full_q_num_blocks and full_q_indices", WITHOUT_FULL),
    ("block_mask.q_indices", ValueError, f"{COLUMNS} columns of blocks, as key has", resize("q", 1, 1, 3, 3)),
    ("block_mask.q_indices", ValueError, "[B, H, columns,", change_list("q_num_blocks", shape=(1, 1, 3))),
    ("block_mask.q_indices", TypeError, "int32", change_list("q_indices", dtype="float32")),
    ("block_mask.full_q_indices", ValueError, "cuda:0 ... cuda:1", change_list("full_q_indices", device=1)),
    ("block_mask", ValueError, "too small", set_mask("seq_lengths", (L, 3))),
    ("score_mod", ValueError, "CudaMod with grad", put("score_mod", rawmla.CudaMod("score"))),
    ("score_mod", ValueError, "CudaMod with grad", put("score_mod", "2 * score")),
    (OF_SCORES, ValueError, "cuda:1", lambda arguments: arguments.update(score_mod=score_mod(device=1))),
]


@each(REFUSALS)
def test_refused(world: World, refusal: Refusal) -> None:
    check_refused(world, rawmla.flex_attention_backward, optional, refusal)


# ---- launches


@pytest.mark.parametrize("name", ("query", "key"))
def test_nothing_to_attend(world: World, name: str) -> None:
    """Gradients are zeros, also of what the function reads, which may be empty."""
    others = ("grad_out", "out", "lse") if name == "query" else ("value",)
    arguments = plain()
    for one in (name, *others):
        batch, heads, _, *columns = arguments[one].shape
        change(one, shape=(batch, heads, 0, *columns))(arguments)
    *results, captured = call(arguments, score_mod=score_mod(shape=(HQ, 0)))
    assert not world.flex_backward
    assert world.framework.filled == [(x, 0.0) for x in (*results, captured["bias"])]


@pytest.mark.parametrize(
    ("indices", "scattered"),
    (("h, q_idx", False), ("b, h", False), ("h, kv_idx", False), ("h, q_idx - kv_idx", True)),
)
def test_where_scores_are_added_one_by_one(world: World, indices: str, scattered: bool) -> None:
    call(plain(), score_mod=score_mod(indices))
    assert only(world).call.mods.scattered == scattered


# ---- lists by columns


def test_lists_that_are_also_those_by_rows(world: World) -> None:
    """What is known of lists by rows is not taken for what is known of lists by columns."""
    mask = mask_of(full=False)
    lines = max(ROWS, COLUMNS)
    mask.kv_num_blocks = mask.q_num_blocks = mask.q_num_blocks.but(shape=(1, 1, lines))
    mask.kv_indices = mask.q_indices.but(shape=(1, 1, lines, COLUMNS), ptr=0xE000)
    mask.q_indices = mask.q_indices.but(shape=(1, 1, lines, ROWS))
    for _ in range(2):
        forward.call(forward.plain(), block_mask=mask)
        world.reads.clear()
        call(plain(), block_mask=mask)
        assert world.flex[-1].more[1:3] == (0x14000, 0xE000)
        assert world.flex_backward[-1].lists[:2] == [0x14000, 0x15000]
    assert not [name for name in world.reads if name.startswith("block_mask")]


def test_full_lists_by_rows_that_come_later(world: World) -> None:
    mask = mask_of(full=False)
    call(plain(), block_mask=mask)
    mask.full_kv_num_blocks, mask.full_kv_indices = mask.kv_num_blocks, mask.kv_indices
    with pytest.raises(ValueError, match="^block_mask: expected full_q_num_blocks"):
        call(plain(), block_mask=mask)


@pytest.mark.parametrize("size", (64, 96, 32))
@pytest.mark.parametrize("leading", ((1, 1), (B, 4)), ids=str)
def test_other_blocks(world: World, size: int, leading: tuple[int, int]) -> None:
    """Blocks that kernels cannot walk: lists of blocks of 128 are made of the lists by columns."""
    rows, columns = -(-L // size), -(-S // size)
    call(plain(), block_mask=mask_of(*leading, size=size))
    launch = only(world)
    clear = check_recut(world, launch, launch.lists, leading, (S, L), (size, size))
    assert not any(address % 128 for address in (clear.address, *launch.lists))
    assert launch.call.mods.lists == of_128(leading, COLUMNS, ROWS)
    # The mask function finds the states of a column of blocks one after the other.
    words = [int.from_bytes(launch.mask_mod[i : i + 8], "little") for i in range(0, 40, 8)]
    assert words == [clear.address, leading[1] * rows * columns, rows * columns, 1, rows]


def test_warmup_of_a_forward_with_its_backward(world: World) -> None:
    arguments = {name: optional()[name] for name in ("query", "key", "value", "score_mod", "block_mask")}
    for more in ({}, {"return_lse": True}, {"return_aux": rawmla.AuxRequest(lse=True)}):
        rawmla.warmup_call(rawmla.flex_attention, **arguments, **more, enable_gqa=True, backward=True)
    assert [x.stream for x in (*world.flex, *world.flex_backward)] == [NO_LAUNCH] * 6
    call(plain(), score_mod=score_mod(), block_mask=mask_of())
    assert world.flex_backward[-1].call == world.flex_backward[0].call
