"""Backward calls of flex attention: what is refused, what accepted ones allocate and launch; arrays are
stand-ins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from calls.fakes import (
    Q_LISTS,
    Arguments,
    FakeArray,
    FakeFramework,
    World,
    change,
    contiguous,
    make_world,
    put,
)
from test_flex_calls import COLUMNS, EV, HKV, HQ, ROWS, B, E, L, S, dense, read_struct, steps, table
from test_flex_calls import plain as forward_plain

import rawmla
from rawmla.jit import NO_LAUNCH
from rawmla.kernels import block_mask as mask_kernels
from rawmla.kernels.block_mask import BlockLists
from rawmla.kernels.flex_captured import CapturedGradient
from rawmla.kernels.mha_backward import BackwardAddresses, BackwardCall, BackwardMods
from rawmla.kernels.mha_backward_variants import ALL

OUT, ROWS_SHAPE = (B, HQ, L, EV), (B, HQ, L)
GRAD = "grad * slope"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def mask_of(*leading: int, size: int = 128, full: bool = True, by_columns: bool = True, **more: Any) -> Any:
    """A mask whose lists have these leading dimensions, (1, 1) if there are none."""
    leading = leading or (1, 1)
    rows, columns = -(-L // size), -(-S // size)
    made: list[Any] = []
    for lines, others, first in ((rows, columns, 0x14000), (columns, rows, 0x4000)):
        for place in (0, 0x2000):
            exists = (full or not place) and (by_columns or lines == rows)
            counts, lists = (*leading, lines), (*leading, lines, others)
            made.append(FakeArray(counts, ptr=first + place) if exists else None)
            made.append(FakeArray(lists, ptr=first + place + 0x1000) if exists else None)
    options = {"BLOCK_SIZE": size, "mask_mod": rawmla.CudaMod("q_idx >= kv_idx"), **more}
    return rawmla.BlockMask((L, S), *made, **options)


def plain() -> Arguments:
    """A call that is accepted."""
    return forward_plain() | {
        "grad_out": FakeArray(OUT, "bfloat16", ptr=0xA000),
        "out": FakeArray(OUT, "bfloat16", ptr=0xB000),
        "lse": FakeArray(ROWS_SHAPE, "float32", ptr=0xD004),
    }


def score_mod(**changes: Any) -> rawmla.CudaMod:
    captures = {"slope": 0.5, "bias": table(**changes)}
    return rawmla.CudaMod(
        "score * slope + bias(h, q_idx)", captures, grad=GRAD, capture_grads={"bias": ("h, q_idx", "grad")}
    )


def optional() -> Arguments:
    """The same with all that is optional."""
    more = {"score_mod": score_mod(), "block_mask": mask_of(), "scale": 0.25}
    return plain() | more | {"grad_lse": FakeArray(ROWS_SHAPE, "float32", ptr=0xE004)}


def call(arguments: Arguments, **more: Any) -> Any:
    return rawmla.flex_attention_backward(**{**arguments, **more})


def only(world: World) -> SimpleNamespace:
    (launch,) = world.flex_backward
    return launch


def change_list(name: str, **changes: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        mask = arguments["block_mask"]
        setattr(mask, name, getattr(mask, name).but(**changes))

    return apply


def without(*names: str) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        for name in names:
            setattr(arguments["block_mask"], name, None)

    return apply


OTHER = FakeFramework("other", stream=0x99)
ARRAYS = ("query", "key", "value", "grad_out", "out", "lse", "grad_lse")
# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
Case = tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]
BAD_CALLS: list[Case] = [
    *[(f"{name} a list", name, TypeError, ("got list",), put(name, [1])) for name in ARRAYS],
    *[(f"{name} None", name, TypeError, ("got NoneType",), put(name, None)) for name in ARRAYS[:-1]],
    *[
        (f"{name} on another device", name, ValueError, ("cuda:0", "cuda:1"), change(name, device=1))
        for name in ARRAYS[1:]
    ],
    *[
        (f"{name} of another stream", name, ValueError, ("0x51", "0x99"), change(name, framework=OTHER))
        for name in ARRAYS[1:]
    ],
    *[
        (f"{name} fp16", name, TypeError, ("bfloat16", "got float16"), change(name, dtype="float16"))
        for name in ("key", "value", "grad_out", "out")
    ],
    *[
        (f"{name} bf16", name, TypeError, ("float32", "got bfloat16"), change(name, dtype="bfloat16"))
        for name in ("lse", "grad_lse")
    ],
    *[
        (
            f"{name} FP8",
            name,
            ValueError,
            ("the dtype of query, for gradients", "float8_e4m3fn"),
            change(name, dtype="float8_e4m3fn"),
        )
        for name in ("key", "value")
    ],
    *[
        (f"{name} of E columns", name, ValueError, (str(list(OUT)),), change(name, shape=(B, HQ, L, E)))
        for name in ("grad_out", "out")
    ],
    *[
        (
            f"{name} of a token less",
            name,
            ValueError,
            (str(list(ROWS_SHAPE)),),
            change(name, shape=(B, HQ, 299)),
        )
        for name in ("lse", "grad_lse")
    ],
    (
        "query float32",
        "query",
        TypeError,
        ("float32 is not supported yet",),
        change("query", dtype="float32"),
    ),
    ("scale NaN", "scale", ValueError, ("finite",), put("scale", float("nan"))),
    ("scale times log2(e)", "scale", ValueError, ("1.7e+38 at most", "3e+38"), put("scale", 3e38)),
    ("deterministic 1", "deterministic", TypeError, ("bool",), put("deterministic", 1)),
    ("enable_gqa 1", "enable_gqa", TypeError, ("bool",), put("enable_gqa", 1)),
    ("no gqa", "query", ValueError, ("enable_gqa",), put("enable_gqa", False)),
    (
        "a mask without lists by columns",
        "block_mask",
        ValueError,
        ("q_num_blocks and q_indices", "of torch and CuPy only"),
        without(*Q_LISTS),
    ),
    (
        "without those of full blocks",
        "block_mask",
        ValueError,
        ("full_q_num_blocks and full_q_indices",),
        without("full_q_num_blocks", "full_q_indices"),
    ),
    (
        "lists of too few columns",
        "block_mask.q_indices",
        ValueError,
        (f"{COLUMNS} columns of blocks, as key has",),
        lambda arguments: [
            change_list("q_indices", shape=(1, 1, 3, 3))(arguments),
            change_list("q_num_blocks", shape=(1, 1, 3))(arguments),
        ],
    ),
    (
        "counts of another shape",
        "block_mask.q_indices",
        ValueError,
        ("[B, H, columns, rows]",),
        change_list("q_num_blocks", shape=(1, 1, 3)),
    ),
    ("float lists", "block_mask.q_indices", TypeError, ("int32",), change_list("q_indices", dtype="float32")),
    (
        "a list on another device",
        "block_mask.full_q_indices",
        ValueError,
        ("cuda:0", "cuda:1"),
        change_list("full_q_indices", device=1),
    ),
    (
        "other lengths",
        "block_mask",
        ValueError,
        ("too small",),
        lambda a: setattr(a["block_mask"], "seq_lengths", (L, 3)),
    ),
    (
        "no gradient",
        "score_mod",
        ValueError,
        ("CudaMod with grad",),
        put("score_mod", rawmla.CudaMod("score")),
    ),
    ("text", "score_mod", ValueError, ("CudaMod with grad",), put("score_mod", "2 * score")),
    (
        "a captured array elsewhere",
        "score_mod",
        ValueError,
        ("cuda:1",),
        lambda a: a.update(score_mod=score_mod(device=1)),
    ),
]


@pytest.mark.parametrize(
    ("argument", "kind", "texts", "spoil"),
    [case[1:] for case in BAD_CALLS],
    ids=[case[0] for case in BAD_CALLS],
)
def test_bad_call(
    world: World,
    argument: str,
    kind: type[Exception],
    texts: tuple[str, ...],
    spoil: Callable[[Arguments], None],
) -> None:
    arguments = optional()
    spoil(arguments)
    with pytest.raises(kind) as caught:
        call(arguments)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message.startswith(argument) and "expected " in message and ", got " in message
    for text in texts:
        assert text in message
    assert world.untouched


def test_bad_call_after_a_good_one(world: World) -> None:
    """What is known of accepted calls does not hide what differs."""
    call(optional())
    made = len(world.framework.allocated)
    for _, _, kind, _, spoil in BAD_CALLS:
        arguments = optional()
        spoil(arguments)
        with pytest.raises(kind):
            call(arguments)
    assert len(world.flex_backward) == 1 and len(world.framework.allocated) == made


def test_every_field(world: World) -> None:
    arguments = optional()
    dq, dk, dv, captured = call(arguments, deterministic=True)
    *results, bias, scratch = world.framework.allocated
    assert results == [dq, dk, dv] and captured == {"bias": bias}
    assert [(x.shape, x.dtype) for x in results] == [
        ((B, HQ, L, E), "bfloat16"), ((B, HKV, S, E), "bfloat16"), ((B, HKV, S, EV), "bfloat16"),
    ]  # fmt: skip
    assert (bias.shape, bias.dtype, bias.strides) == ((HQ, 7), "float32", None)
    launch = only(world)
    assert launch.stream == 0x51 and launch.scratch == scratch.ptr and launch.captured == [bias.ptr]
    assert scratch.shape == (256,)
    assert launch.addresses == BackwardAddresses(
        q=0x1000, k=0x2000, v=0x3000, out=0xB000, dout=0xA000, lse=0xD004, dlse=0xE004, dq=dq.ptr, dk=dk.ptr,
        dv=dv.ptr,
    )  # fmt: skip
    assert launch.lists == [0x4000, 0x5000, 0x6000, 0x7000]
    header = launch.call.mods.header

    def by_token(*shape: int) -> tuple[int, ...]:
        batch, head, token = contiguous(shape)[:3]
        return batch, token, head

    assert launch.call == BackwardCall(
        device=0, dtype="bfloat16", b=B, k_batches=B, h_q=HQ, h_kv=HKV, d_qk=E, d_v=EV, varlen=False,
        max_seqlen_q=L, max_seqlen_k=S, total_q=L, total_k=S,
        q_strides=by_token(B, HQ, L, E), k_strides=by_token(B, HKV, S, E), v_strides=by_token(B, HKV, S, EV),
        out_strides=by_token(*OUT), dout_strides=by_token(*OUT),
        lse_strides=by_token(*ROWS_SHAPE), dlse_strides=by_token(*ROWS_SHAPE),
        dq_strides=by_token(B, HQ, L, E), dk_strides=by_token(B, HKV, S, E),
        dv_strides=by_token(B, HKV, S, EV),
        softmax_scale=0.25, deterministic=True, needs=ALL,
        mods=BackwardMods(
            header=header, has_score_mod=True, score_mod_bytes=48, mask_mod_bytes=8,
            lists=BlockLists(
                (steps(1, 1, COLUMNS),) * 2, (steps(1, 1, COLUMNS, ROWS)[:3],) * 2, (ROWS, ROWS), 1, 1, 128,
                128,
            ),
            captured=(CapturedGradient(HQ * 7, "float32"),), sites=1, scattered=False,
        ),
    )  # fmt: skip
    assert "q_idx >= kv_idx" in header[1] and GRAD in header[1]
    assert launch.score_mod[-8:] == bytes(8)  # where gradients are is not known yet


@pytest.mark.parametrize(
    ("indices", "scattered"),
    (("h, q_idx", False), ("b, h", False), ("h, kv_idx", False), ("h, q_idx - kv_idx", True)),
)
def test_where_scores_are_added_one_by_one(world: World, indices: str, scattered: bool) -> None:
    mod = rawmla.CudaMod(
        f"score + bias({indices})", {"bias": table()}, grad="grad", capture_grads={"bias": (indices, "grad")}
    )
    call(plain(), score_mod=mod)
    assert only(world).call.mods.scattered == scattered


def test_nothing_optional(world: World) -> None:
    dq, dk, dv, captured = call(plain())
    launch = only(world)
    assert captured == {} and launch.captured == []
    assert launch.lists == [0, 0, 0, 0] and launch.addresses.dlse == 0
    assert launch.call.mods.lists is None and launch.call.dlse_strides == (0, 0, 0)
    assert not launch.call.mods.has_score_mod and not launch.call.deterministic
    assert launch.call.softmax_scale == E**-0.5
    assert launch.call.mods.sites == 0 and not launch.call.mods.scattered
    assert "kIsThere = false" in launch.call.mods.header[1]


def test_positional(world: World) -> None:
    given = optional()
    names = ("grad_out", "query", "key", "value", "out", "lse", "score_mod", "block_mask", "scale")
    rawmla.flex_attention_backward(*[given[name] for name in names], True, grad_lse=given["grad_lse"])
    call(given)
    first, second = world.flex_backward
    assert first.call == second.call and first.addresses[:7] == second.addresses[:7]


def test_determinism_of_the_framework(world: World) -> None:
    world.framework.determinism = lambda: True
    call(plain())
    call(plain(), deterministic=False)
    assert [launch.call.deterministic for launch in world.flex_backward] == [True, False]


@pytest.mark.parametrize("name", ("query", "key", "value", "grad_out", "out"))
def test_copies(world: World, name: str) -> None:
    """Of arrays that kernels cannot walk; lse is read in any strides."""
    arguments = plain()
    arguments[name] = arguments[name].but(ptr=arguments[name].ptr + 2)
    arguments["lse"] = arguments["lse"].but(strides=(3, 7, 11))
    call(arguments)
    launch = only(world)
    field = {"query": "q", "key": "k", "value": "v", "grad_out": "dout", "out": "out"}[name]
    assert getattr(launch.addresses, field) == 0xC1000
    assert [x.ptr for x in world.framework.copied] == [arguments[name].ptr]
    assert launch.call.lse_strides == (3, 11, 7)


def test_gradients_follow_the_order_of_strides(world: World) -> None:
    by_token = (L * HQ * E, E, HQ * E, 1)
    query = plain()["query"].but(strides=by_token)
    dq, *_ = call(plain(), query=query)
    assert dq.strides == by_token and only(world).call.dq_strides == (L * HQ * E, HQ * E, E)


def test_one_batch_of_keys(world: World) -> None:
    """Gradients have the shapes of the inputs; those of a broadcast array are dense."""
    key, value = (FakeArray((1, HKV, S, d), "bfloat16", ptr=0x2000) for d in (E, EV))
    _, dk, dv, _ = call(plain(), key=key, value=value)
    assert (dk.shape, dv.shape) == ((1, HKV, S, E), (1, HKV, S, EV))
    assert only(world).call.k_batches == 1
    wide = FakeArray((B, HKV, S, E), "bfloat16", strides=(0, S * E, E, 1), ptr=0x2000)
    _, dk, *_ = call(plain(), key=wide)
    assert dk.shape == wide.shape and dk.strides[0] > 0


@pytest.mark.parametrize(
    "changes", ({"query": (B, HQ, 0, E)}, {"key": (B, HKV, 0, E), "value": (B, HKV, 0, EV)})
)
def test_nothing_to_attend(world: World, changes: dict[str, tuple[int, ...]]) -> None:
    """Gradients are zeros, also of what the function reads, which may be empty."""
    arguments = {**plain(), **{name: plain()[name].but(shape=shape) for name, shape in changes.items()}}
    if "query" in changes:
        for name in ("grad_out", "out", "lse"):
            shape = list(arguments[name].shape)
            shape[2] = 0
            arguments[name] = arguments[name].but(shape=tuple(shape))
    *results, captured = call(arguments, score_mod=score_mod(shape=(HQ, 0)))
    assert not world.flex_backward
    assert world.framework.filled == [(x, 0.0) for x in (*results, captured["bias"])]


def test_captured_gradients(world: World) -> None:
    """In the arrays' dtypes; other numbers and arrays need no other kernel."""
    for dtype in ("float32", "float64", "bfloat16"):
        *_, captured = call(plain(), score_mod=score_mod(dtype=dtype))
        assert captured["bias"].dtype == dtype
    texts = {launch.call.mods.header for launch in world.flex_backward}
    assert len(texts) == 3
    call(plain(), score_mod=score_mod(ptr=0x99000, dtype="bfloat16"))
    assert world.flex_backward[-1].prepared is world.flex_backward[-2].prepared


def test_tensors_that_require_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors that a function reads, those get a gradient; None where nothing depends on one."""
    torch = pytest.importorskip("torch")
    from mha_on_cpu import claim_cuda

    from rawmla.call.arrays import READERS
    from rawmla.flex.backward import _gradients_of
    from rawmla.flex.functions import as_reading, bound

    claim_cuda(monkeypatch)

    used, cut = (torch.randn(300, requires_grad=True) for _ in range(2))
    without_grad = torch.randn(300)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + used[q] + cut[q].detach() + without_grad[q]

    reading = as_reading(mod, "score_mod", 0, backward=True)
    assert reading is not None
    gradients, names = _gradients_of(reading)
    assert gradients == (((300,), "float32"),) and names == ["used", "cut"]
    framework = READERS[torch.Tensor](without_grad, "without_grad")[5]
    found = bound(reading, "score_mod", 0, framework)  # reads them without, as there are gradients
    assert found is not None and found.addresses == [x.data_ptr() for x in reading.arrays]
    with pytest.raises(ValueError, match="needs no gradient here"):
        bound(as_reading(mod, "score_mod", 0), "score_mod", 0, framework)


def test_cuda_text_whose_tensors_require_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read without, since a tensor that requires grad is refused while grad is on."""
    torch = pytest.importorskip("torch")
    from rawmla.flex import mods

    read: list[Any] = []

    def inspect(x: Any, name: str) -> SimpleNamespace:
        read.append(x)
        return SimpleNamespace(dtype="float32", shape=tuple(x.shape))

    monkeypatch.setattr(mods, "inspect", inspect)
    bias = torch.randn(300, requires_grad=True)
    captures = {"bias": bias}
    mod = rawmla.CudaMod(
        "score + bias(q_idx)", captures, grad="grad", capture_grads={"bias": ("q_idx", "grad")}
    )
    assert mod.mod(backward=True).captures[0].array is bias
    assert mod.mod().captures[0].array is bias
    assert [x.requires_grad for x in read] == [False, False]
    assert read[0].data_ptr() == bias.data_ptr()


def test_lists_that_are_no_int32(world: World) -> None:
    mask = mask_of()
    mask.q_indices = mask.q_indices.but(dtype="int64")
    call(plain(), block_mask=mask)
    assert only(world).lists == [0x4000, 0xC1000, 0x6000, 0x7000]


class TestKnownLists:
    """Lists by columns that passed the checks of a call before, as those by rows in test_flex_calls."""

    NAMES = [f"block_mask.{name}" for name in Q_LISTS]

    def reads(self, world: World, mask: Any) -> list[str]:
        """The lists that a call reads."""
        world.reads.clear()
        call(plain(), block_mask=mask)
        return [name for name in world.reads if name.startswith("block_mask")]

    def test_are_not_read_again(self, world: World) -> None:
        mask = mask_of()
        assert [self.reads(world, mask) for _ in range(2)] == [self.NAMES, []]
        first, second = world.flex_backward
        assert first.lists == second.lists == [0x4000, 0x5000, 0x6000, 0x7000]
        mask.q_indices = mask.q_indices.but(ptr=0xE000)
        assert self.reads(world, mask) == self.NAMES and world.flex_backward[-1].lists[1] == 0xE000

    def test_lists_that_are_also_those_by_rows(self, world: World) -> None:
        mask = mask_of(full=False)
        lines = max(ROWS, COLUMNS)
        mask.kv_num_blocks = mask.q_num_blocks = mask.q_num_blocks.but(shape=(1, 1, lines))
        mask.kv_indices = mask.q_indices.but(shape=(1, 1, lines, COLUMNS), ptr=0xE000)
        mask.q_indices = mask.q_indices.but(shape=(1, 1, lines, ROWS))
        for _ in range(2):
            rawmla.flex_attention(**forward_plain(), block_mask=mask)
            read = self.reads(world, mask)
            assert world.flex[-1].more[1:3] == (0x4000, 0xE000)
            assert world.flex_backward[-1].lists[:2] == [0x4000, 0x5000]
        assert not read

    def test_full_lists_by_rows_that_come_later(self, world: World) -> None:
        mask = mask_of(full=False)
        self.reads(world, mask)
        mask.full_kv_num_blocks, mask.full_kv_indices = mask.kv_num_blocks, mask.kv_indices
        with pytest.raises(ValueError, match="^block_mask: expected full_q_num_blocks"):
            call(plain(), block_mask=mask)


@pytest.mark.parametrize("size", (64, 96, 32))
@pytest.mark.parametrize("leading", ((1, 1), (B, 4)))
def test_other_blocks(world: World, size: int, leading: tuple[int, int]) -> None:
    """Blocks that kernels cannot walk: lists of blocks of 128 are made of the lists by columns."""
    rows, columns = -(-L // size), -(-S // size)
    call(plain(), block_mask=mask_of(*leading, size=size))
    *_, scratch = world.framework.allocated
    clear, scatter, lists = world.enqueued
    assert [x.name for x in world.enqueued] == ["clear", "block_mask_scatter", "block_mask_lists"]
    states = math.prod(leading) * rows * columns
    assert clear.size % 4 == 0 and states <= clear.size < states + 4
    assert read_struct(mask_kernels.SCATTER_PARAMS, scatter.params) == {
        "kv_num_blocks": 0x4000,
        "kv_indices": 0x5000,
        "full_kv_num_blocks": 0x6000,
        "full_kv_indices": 0x7000,
        "states": clear.address,
        "counts_strides": steps(*leading, columns) * 2,
        "lists_strides": steps(*leading, columns, rows)[:3] * 2,
        "all_rows": math.prod(leading) * columns,
        "list_columns": (rows, rows),
        "heads": leading[1],
        "rows": columns,
        "columns": rows,
    }
    launch = only(world)
    made = launch.lists
    assert read_struct(mask_kernels.LISTS_PARAMS, lists.params) == {
        "states": clear.address,
        "partial_counts": made[0],
        "partial_blocks": made[1],
        "full_counts": made[2],
        "full_blocks": made[3],
        "all_lines": math.prod(leading) * COLUMNS,
        "mask_blocks": rows * columns,
        "line_step": rows,
        "entry_step": 1,
        "lines": COLUMNS,
        "entries": ROWS,
        "list_line": 128,
        "list_entry": 128,
        "state_line": size,
        "state_entry": size,
        "line_tokens": S,
        "entry_tokens": L,
    }
    assert launch.call.mods.lists == BlockLists(
        (dense(*leading, COLUMNS),) * 2,
        (dense(*leading, COLUMNS, ROWS)[:3],) * 2,
        (ROWS, ROWS),
        *leading,
        128,
        128,
    )
    # Every place lies in the scratch behind that of the kernels, is aligned, and overlaps no other.
    lines = 4 * math.prod(leading) * COLUMNS
    places = [
        (scratch.ptr, 256),
        (clear.address, clear.size),
        *zip(made, (lines, lines * ROWS) * 2, strict=True),
    ]
    assert not any(address % 128 for address, _ in places)
    ends = [(address, address + nbytes) for address, nbytes in sorted(places)]
    assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
    assert ends[0][0] == scratch.ptr and ends[-1][1] <= scratch.ptr + scratch.shape[0]
    # The mask function finds the states of a column of blocks one after the other.
    words = [int.from_bytes(launch.mask_mod[i : i + 8], "little") for i in range(0, 40, 8)]
    assert words == [clear.address, leading[1] * rows * columns, rows * columns, 1, rows]


@pytest.mark.parametrize("size", ((64, 128), (192, 256), (128, 2**20), (2**20, 128)))
def test_blocks_that_are_walked(world: World, size: tuple[int, int]) -> None:
    mask = mask_of()
    mask.BLOCK_SIZE = size
    for name in Q_LISTS[1::2]:
        setattr(mask, name, getattr(mask, name).but(shape=(1, 1, 8, 8)))
    for name in Q_LISTS[::2]:
        setattr(mask, name, getattr(mask, name).but(shape=(1, 1, 8)))
    call(plain(), block_mask=mask)
    assert not world.enqueued
    lists = only(world).call.mods.lists
    assert (lists.block_q, lists.block_k) == (min(size[0], 384), min(size[1], 512))


@pytest.mark.parametrize("size", (128, 32))
def test_warmup_call(world: World, size: int) -> None:
    """Loads what the call loads, and allocates and launches nothing."""
    arguments = optional() | {"block_mask": mask_of(size=size)}
    rawmla.warmup_call(rawmla.flex_attention_backward, **arguments)
    (launch,) = world.flex_backward
    assert launch.stream == NO_LAUNCH and not world.framework.allocated and not world.framework.copied
    assert {x.stream for x in world.enqueued} <= {NO_LAUNCH}
    loaded = list(world.loaded)
    call(arguments)
    assert world.flex_backward[1].call == launch.call and world.loaded == loaded * 2


def test_warmup_of_a_forward_with_its_backward(world: World) -> None:
    arguments = {name: optional()[name] for name in ("query", "key", "value", "score_mod", "block_mask")}
    for more in ({}, {"return_lse": True}, {"return_aux": rawmla.AuxRequest(lse=True)}):
        rawmla.warmup_call(rawmla.flex_attention, **arguments, **more, enable_gqa=True, backward=True)
    assert [x.stream for x in (*world.flex, *world.flex_backward)] == [NO_LAUNCH] * 6
    call(plain(), score_mod=score_mod(), block_mask=mask_of())
    assert world.flex_backward[-1].call == world.flex_backward[0].call
