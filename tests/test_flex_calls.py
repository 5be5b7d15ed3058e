"""Calls of flex attention: what is refused, what accepted ones allocate and launch; arrays are stand-ins."""

from __future__ import annotations

import gc
import math
import struct
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from calls.fakes import (
    LISTS,
    Arguments,
    FakeArray,
    FakeFramework,
    World,
    both,
    change,
    contiguous,
    make_world,
    put,
)

import rawmla
from rawmla import jit
from rawmla.call import arrays, frameworks
from rawmla.flex import functions
from rawmla.flex.header import HEADER_NAME
from rawmla.kernels import block_mask as mask_kernels
from rawmla.kernels.block_mask import BlockLists
from rawmla.kernels.mha_forward import MhaForwardAddresses, MhaForwardCall, ModAddresses, Mods

B, HQ, HKV, L, S, E, EV = 2, 8, 2, 300, 500, 128, 64
ROWS, COLUMNS = 3, 4  # of blocks of 128
NO_CHANGE = "return score;"
COPY = 0xC0000  # and 0x1000 more for every copy
SCRATCH_STEP = 16


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def plain() -> Arguments:
    """A call that is accepted."""
    return {
        "query": FakeArray((B, HQ, L, E), "bfloat16", ptr=0x1000),
        "key": FakeArray((B, HKV, S, E), "bfloat16", ptr=0x2000),
        "value": FakeArray((B, HKV, S, EV), "bfloat16", ptr=0x3000),
        "enable_gqa": True,
    }


def table(**changes: Any) -> FakeArray:
    return FakeArray((HQ, 7), "float32", ptr=0x9000).but(**changes)


def mask_of(*leading: int, rows: int = ROWS, columns: int = COLUMNS, full: bool = True, **more: Any) -> Any:
    """A mask whose lists have these leading dimensions, (1, 1) if there are none."""
    leading = leading or (1, 1)
    counts, lists = (*leading, rows), (*leading, rows, columns)
    made = [
        FakeArray(counts, ptr=0x4000),
        FakeArray(lists, ptr=0x5000),
        FakeArray(counts, ptr=0x6000) if full else None,
        FakeArray(lists, ptr=0x7000) if full else None,
    ]
    options = {"BLOCK_SIZE": 128, "mask_mod": rawmla.CudaMod("q_idx >= kv_idx"), **more}
    return rawmla.BlockMask((L, S), *made, **options)


def optional() -> Arguments:
    """The same with all that is optional, but out."""
    score = rawmla.CudaMod("score * slope + bias(h, q_idx)", {"slope": 0.5, "bias": table()})
    return plain() | {"score_mod": score, "block_mask": mask_of(), "scale": 0.25}


def call(arguments: Arguments, **more: Any) -> Any:
    return rawmla.flex_attention(**{**arguments, **more})


def out_array(**changes: Any) -> FakeArray:
    return FakeArray((B, HQ, L, EV), "bfloat16", ptr=0x8000).but(**changes)


def set_mask(name: str, value: Any) -> Callable[[Arguments], None]:
    return lambda arguments: setattr(arguments["block_mask"], name, value)


def change_list(name: str, **changes: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        mask = arguments["block_mask"]
        setattr(mask, name, getattr(mask, name).but(**changes))

    return apply


def capture(code: str = "score + bias(h, q_idx)", **changes: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update(score_mod=rawmla.CudaMod(code, {"bias": table(**changes)}))


def mask_capture(**changes: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        mod = rawmla.CudaMod("bias(h, q_idx) > 0", {"bias": table(**changes)})
        arguments["block_mask"].mask_mod = mod

    return apply


OTHER = FakeFramework("other", stream=0x99)
MASK_LISTS = [f"block_mask.{name}" for name in LISTS]
Q, K, V = (B, HQ, L, E), (B, HKV, S, E), (B, HKV, S, EV)
# name of the test, argument that the text names, exception, what the text also holds, how the call is spoilt
Case = tuple[str, str, type[Exception], tuple[str, ...], Callable[[Arguments], None]]
BAD_CALLS: list[Case] = [
    *[
        (f"{name} a list", name, TypeError, ("got list",), put(name, [1]))
        for name in ("query", "key", "value")
    ],
    *[
        (f"{name} None", name, TypeError, ("NoneType",), put(name, None))
        for name in ("query", "key", "value")
    ],
    *[
        (f"{name} on the host", name, ValueError, ("CUDA memory", "numpy"), put(name, np.zeros((1, 1, 1, 8))))
        for name in ("query", "key", "value", "out")
    ],
    *[
        (f"{name} on another device", name, ValueError, ("cuda:0", "query", "cuda:1"), change(name, device=1))
        for name in ("key", "value")
    ],
    *[
        (f"{name} of another stream", name, ValueError, ("0x51", "0x99"), change(name, framework=OTHER))
        for name in ("key", "value")
    ],
    ("query float32", "query", TypeError, ("not supported yet",), change("query", dtype="float32")),
    ("query float64", "query", TypeError, ("bfloat16 or float16",), change("query", dtype="float64")),
    ("query FP8", "query", TypeError, ("float8_e4m3fn",), change("query", dtype="float8_e4m3fn")),
    ("key fp16", "key", TypeError, ("bfloat16", "got float16"), change("key", dtype="float16")),
    (
        "key uint8",
        "key",
        TypeError,
        ("or float8_e4m3fn or float8_e5m2", "got uint8"),
        change("key", dtype="uint8"),
    ),
    ("value float32", "value", TypeError, ("got float32",), change("value", dtype="float32")),
    ("query 3-D", "query", ValueError, ("[B, Hq, L, E]",), change("query", shape=Q[1:])),
    ("query 5-D", "query", ValueError, ("[B, Hq, L, E]",), change("query", shape=(1, *Q))),
    ("key 3-D", "key", ValueError, ("[Bkv, Hkv, S, 128] (E of query)",), change("key", shape=K[1:])),
    (
        "value 3-D",
        "value",
        ValueError,
        ("[2, 2, 500, Ev] (Bkv of key, Hkv of key, S of key)",),
        change("value", shape=V[1:]),
    ),
    ("E 0", "query", ValueError, ("1 to 256", "got 0"), change("query", shape=(*Q[:3], 0))),
    ("E 257", "query", ValueError, ("1 to 256", "257"), change("query", shape=(*Q[:3], 257))),
    ("Ev 0", "value", ValueError, ("1 to 256", "got 0"), change("value", shape=(*V[:3], 0))),
    ("Ev 257", "value", ValueError, ("1 to 256", "257"), change("value", shape=(*V[:3], 257))),
    ("E of key", "key", ValueError, ("128] (E of query)",), change("key", shape=(*K[:3], 64))),
    (
        "keys of value",
        "value",
        ValueError,
        ("[2, 2, 500, Ev]", "S of key"),
        change("value", shape=(B, HKV, 499, EV)),
    ),
    ("heads of value", "value", ValueError, ("Hkv of key",), change("value", shape=(B, 4, S, EV))),
    ("batch of value", "value", ValueError, ("Bkv of key",), change("value", shape=(1, HKV, S, EV))),
    (
        "batch of key",
        "key",
        ValueError,
        ("batch of 2", "or 1"),
        both(change("key", shape=(4, *K[1:])), change("value", shape=(4, *V[1:]))),
    ),
    ("no enable_gqa", "query", ValueError, ("without enable_gqa", "Hq 8"), put("enable_gqa", False)),
    ("Hq no multiple", "query", ValueError, ("multiple", "Hq 7"), change("query", shape=(B, 7, L, E))),
    ("no query heads", "query", ValueError, ("positive", "Hq 0"), change("query", shape=(B, 0, L, E))),
    (
        "no KV heads",
        "query",
        ValueError,
        ("Hkv 0",),
        both(change("key", shape=(B, 0, S, E)), change("value", shape=(B, 0, S, EV))),
    ),
    ("2**30 queries", "query", ValueError, ("less than 2**30",), change("query", shape=(B, HQ, 2**30, E))),
    (
        "2**30 keys",
        "key",
        ValueError,
        ("less than 2**30",),
        both(change("key", shape=(B, HKV, 2**30, E)), change("value", shape=(B, HKV, 2**30, EV))),
    ),
    ("enable_gqa int", "enable_gqa", TypeError, ("bool", "int 1"), put("enable_gqa", 1)),
    ("enable_gqa None", "enable_gqa", TypeError, ("bool", "None"), put("enable_gqa", None)),
    ("return_lse int", "return_lse", TypeError, ("bool", "int 1"), put("return_lse", 1)),
    ("deterministic int", "deterministic", TypeError, ("bool", "int 0"), put("deterministic", 0)),
    (
        "return_lse and return_aux",
        "return_lse",
        ValueError,
        ("return_aux",),
        both(put("return_lse", True), put("return_aux", rawmla.AuxRequest(lse=True))),
    ),
    ("return_aux bool", "return_aux", TypeError, ("AuxRequest", "bool"), put("return_aux", True)),
    (
        "return_aux.lse int",
        "return_aux.lse",
        TypeError,
        ("bool", "int 1"),
        put("return_aux", rawmla.AuxRequest(lse=1)),  # type: ignore[arg-type]
    ),
    (
        "return_aux.max_scores None",
        "return_aux.max_scores",
        TypeError,
        ("bool", "None"),
        put("return_aux", rawmla.AuxRequest(max_scores=None)),  # type: ignore[arg-type]
    ),
    ("options a list", "kernel_options", TypeError, ("dict", "list"), put("kernel_options", ["BLOCK_M"])),
    ("unknown option", "kernel_options", ValueError, ("'BLOCK_X'",), put("kernel_options", {"BLOCK_X": 1})),
    ("option no name", "kernel_options", ValueError, ("got 3",), put("kernel_options", {3: 1})),
    (
        "backend",
        "kernel_options",
        ValueError,
        ("'AUTO'", "'TRITON'"),
        put("kernel_options", {"BACKEND": "TRITON"}),
    ),
    ("scale str", "scale", TypeError, ("float", "'1'"), put("scale", "1")),
    ("scale bool", "scale", TypeError, ("float", "True"), put("scale", True)),
    ("scale array", "scale", TypeError, ("float", "FakeArray"), put("scale", FakeArray(()))),
    ("scale NaN", "scale", ValueError, ("finite", "nan"), put("scale", math.nan)),
    ("scale infinite", "scale", ValueError, ("finite", "-inf"), put("scale", -math.inf)),
    ("scale past float32", "scale", ValueError, ("float32", "1e+39"), put("scale", 1e39)),
    ("scale times log2(e)", "scale", ValueError, ("1.7e+38 at most", "3e+38"), put("scale", 3e38)),
    ("scale below", "scale", ValueError, ("1.7e+38 at most", "-3e+38"), put("scale", -3e38)),
    ("scale past float64", "scale", ValueError, ("float32", "got inf"), put("scale", 10**400)),
    ("out a list", "out", TypeError, ("got list",), put("out", [1])),
    ("out fp16", "out", TypeError, ("bfloat16", "float16"), put("out", out_array(dtype="float16"))),
    ("out shape", "out", ValueError, ("[2, 8, 300, 64]",), put("out", out_array(shape=(B, L, HQ, EV)))),
    ("out 3-D", "out", ValueError, ("[2, 8, 300, 64]",), put("out", out_array(shape=(HQ, L, EV)))),
    ("out device", "out", ValueError, ("cuda:0", "cuda:1"), put("out", out_array(device=1))),
    ("out stream", "out", ValueError, ("0x51", "0x99"), put("out", out_array(framework=OTHER))),
    ("out address", "out", ValueError, ("16 bytes", "0x8008"), put("out", out_array(ptr=0x8008))),
    (
        "out last",
        "out",
        ValueError,
        ("contiguous last",),
        put("out", out_array(strides=(307200, 38400, 128, 2))),
    ),
    (
        "out strides",
        "out",
        ValueError,
        ("multiples of 8",),
        put("out", out_array(strides=(160000, 20000, 66, 1))),
    ),
    ("out expanded", "out", ValueError, ("positive",), put("out", out_array(strides=(0, 19200, 64, 1)))),
    ("out overlaps", "out", ValueError, ("overlap",), put("out", out_array(strides=(153600, 19200, 32, 1)))),
    ("no mask", "block_mask", TypeError, ("BlockMask", "int 3"), put("block_mask", 3)),
    (
        "mask a function",
        "block_mask",
        TypeError,
        ("BlockMask", "kv_num"),
        put("block_mask", lambda b, h, q, k: q),
    ),
    ("mask an array", "block_mask", TypeError, ("BlockMask", "FakeArray"), put("block_mask", FakeArray(()))),
    (
        "mask too small",
        "block_mask",
        ValueError,
        ("(300, 500)", "(300, 499)", "too small"),
        set_mask("seq_lengths", (L, S - 1)),
    ),
    (
        "mask too large",
        "block_mask",
        ValueError,
        ("(300, 500)", "(301, 500)", "too large", "_adjust"),
        set_mask("seq_lengths", (L + 1, S)),
    ),
    (
        "an indexed mask",
        "block_mask",
        ValueError,
        ("indexed", "assign"),
        set_mask("mask_mod", rawmla.flex.block_mask._unset_mask),
    ),
    ("no partial lists", "block_mask", ValueError, ("kv_indices",), set_mask("kv_indices", None)),
    ("half of the full lists", "block_mask", ValueError, ("full_kv",), set_mask("full_kv_num_blocks", None)),
    ("block size", "block_mask", ValueError, ("16", "(128, 100)"), set_mask("BLOCK_SIZE", (128, 100))),
    ("block size 0", "block_mask", ValueError, ("16", "(0, 128)"), set_mask("BLOCK_SIZE", (0, 128))),
    *[
        (f"{name} a list", f"block_mask.{name}", TypeError, ("got list",), set_mask(name, [1]))
        for name in LISTS
    ],
    *[
        (f"{name} elsewhere", f"block_mask.{name}", ValueError, ("cuda:1",), change_list(name, device=1))
        for name in LISTS
    ],
    *[
        (f"{name} stream", f"block_mask.{name}", ValueError, ("0x99",), change_list(name, framework=OTHER))
        for name in LISTS
    ],
    *[
        (
            f"{name} float",
            f"block_mask.{name}",
            TypeError,
            ("int32", "float"),
            change_list(name, dtype="float32"),
        )
        for name in LISTS
    ],
    (
        "counts of other rows",
        "block_mask.kv_indices",
        ValueError,
        ("[B, H, rows, columns]", "[1, 1, 4]"),
        change_list("kv_num_blocks", shape=(1, 1, 4)),
    ),
    (
        "full counts of other rows",
        "block_mask.full_kv_indices",
        ValueError,
        ("[1, 1, 2]",),
        change_list("full_kv_num_blocks", shape=(1, 1, 2)),
    ),
    (
        "lists 5-D",
        "block_mask.kv_indices",
        ValueError,
        ("[1, 1, 1, 3, 4]",),
        both(
            change_list("kv_indices", shape=(1, 1, 1, 3, 4)), change_list("kv_num_blocks", shape=(1, 1, 1, 3))
        ),
    ),
    (
        "too few rows",
        "block_mask.kv_indices",
        ValueError,
        ("at least 3 rows",),
        put("block_mask", mask_of(rows=2)),
    ),
    ("no batch", "block_mask.kv_indices", ValueError, ("one batch",), put("block_mask", mask_of(0, 1))),
    (
        "no heads",
        "block_mask.kv_indices",
        ValueError,
        ("one batch and head",),
        put("block_mask", mask_of(1, 0)),
    ),
    (
        "lists of other heads",
        "block_mask",
        ValueError,
        ("(1, 1)", "(1, 8)"),
        both(
            change_list("full_kv_indices", shape=(1, HQ, ROWS, COLUMNS)),
            change_list("full_kv_num_blocks", shape=(1, HQ, ROWS)),
        ),
    ),
    ("batch of a mask", "block_mask", ValueError, ("2 and 8", "3 and 1"), put("block_mask", mask_of(3, 1))),
    ("heads of a mask", "block_mask", ValueError, ("2 and 8", "1 and 5"), put("block_mask", mask_of(1, 5))),
    ("score_mod int", "score_mod", TypeError, ("CUDA text", "int 3"), put("score_mod", 3)),
    ("score_mod array", "score_mod", TypeError, ("function", "FakeArray"), put("score_mod", FakeArray(()))),
    ("score_mod empty", "code", TypeError, ("CUDA text", "''"), put("score_mod", "")),
    ("mask_mod int", "mask_mod", TypeError, ("CUDA text", "int 3"), set_mask("mask_mod", 3)),
    ("capture elsewhere", "score_mod: an array that it reads", ValueError, ("cuda:1",), capture(device=1)),
    (
        "capture's stream",
        "score_mod: an array that it reads",
        ValueError,
        ("0x99",),
        capture(framework=OTHER),
    ),
    ("capture empty", "score_mod: an array that it reads", ValueError, ("[8, 0]",), capture(shape=(HQ, 0))),
    (
        "capture's size",
        "score_mod: an array that it reads",
        ValueError,
        ("2**31",),
        capture(shape=(2**31, 1)),
    ),
    ("capture's dtype", "captures", TypeError, ("bias", "uint32"), capture(dtype="uint32")),
    (
        "mask's capture elsewhere",
        "mask_mod: an array that it reads",
        ValueError,
        ("cuda:1",),
        mask_capture(device=1),
    ),
    (
        "mask's capture empty",
        "mask_mod: an array that it reads",
        ValueError,
        ("[0, 7]",),
        mask_capture(shape=(0, 7)),
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
    assert message.startswith(f"{argument}: expected ")
    assert ", got " in message
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
    assert len(world.flex) == 1 and len(world.framework.allocated) == made


def test_streams_are_looked_at_in_every_call(world: World) -> None:
    """Arrays of another framework are welcome for as long as both have the same stream."""
    other = FakeFramework("other")
    for spoil in (
        change("key", framework=other),
        change_list("kv_indices", framework=other),
        capture(framework=other),
    ):
        other.stream = 0x51
        arguments = optional()
        spoil(arguments)
        call(arguments)
        other.stream = 0x99
        with pytest.raises(ValueError, match="expected a fake array, as query is, .* got a other array"):
            call(arguments)
    assert len(world.flex) == 3


EXPECTED = MhaForwardCall(
    device=0,
    dtype="bfloat16",
    b=B,
    k_batches=B,
    h_q=HQ,
    h_kv=HKV,
    d_qk=E,
    d_v=EV,
    varlen=False,
    max_seqlen_q=L,
    max_seqlen_k=S,
    total_q=L,
    total_k=S,
    q_strides=(HQ * L * E, E, L * E),
    k_strides=(HKV * S * E, E, S * E),
    v_strides=(HKV * S * EV, EV, S * EV),
    out_strides=(HQ * L * EV, EV, L * EV),
    lse_strides=(HQ * L, L),
    softmax_scale=E**-0.5,
    mods=Mods(
        header=("", ""),
        has_score_mod=False,
        score_mod_bytes=8,
        mask_mod_bytes=8,
        lists=None,
        states=None,
        max_scores=False,
    ),
)


def changed(call: MhaForwardCall, mods: Arguments, **more: Any) -> MhaForwardCall:
    """Replace members of a call; ``mods``: members of its `Mods`."""
    assert call.mods is not None
    return call._replace(mods=call.mods._replace(**mods), **more)


EXPECTED_LISTS = BlockLists(
    counts_strides=((0, 0, 1), (0, 0, 1)),
    lists_strides=((0, 0, COLUMNS), (0, 0, COLUMNS)),
    columns=(COLUMNS, COLUMNS),
    batches=1,
    heads=1,
    block_q=128,
    block_k=128,
)


def only(world: World) -> SimpleNamespace:
    """The one launch, whose header is taken apart: its name, and the text, which is not compared."""
    (launch,) = world.flex
    name, launch.text = launch.call.mods.header
    assert name == HEADER_NAME
    launch.call = changed(launch.call, {"header": ("", "")})
    return launch


class TestLaunch:
    """What an accepted call hands to the kernel."""

    def test_every_field(self, world: World) -> None:
        aux = rawmla.AuxRequest(lse=True, max_scores=True)
        out, (lse, max_scores) = call(optional(), return_aux=aux, deterministic=True)
        allocated = world.framework.allocated
        assert [out, lse, max_scores] == allocated[:3]
        assert [(x.shape, x.dtype, x.strides) for x in allocated] == [
            ((B, HQ, L, EV), "bfloat16", contiguous((B, HQ, L, EV))),
            ((B, HQ, L), "float32", None),
            ((B, HQ, L), "float32", None),
            ((16,), "uint8", None),
        ]
        launch = only(world)
        mods = {"lists": EXPECTED_LISTS, "has_score_mod": True, "score_mod_bytes": 40, "max_scores": True}
        assert launch.call == changed(EXPECTED, mods, softmax_scale=0.25)
        assert launch.addresses == MhaForwardAddresses(q=0x1000, k=0x2000, v=0x3000, out=out.ptr, lse=lse.ptr)
        assert launch.more == ModAddresses(
            max_scores=max_scores.ptr,
            kv_num_blocks=0x4000,
            kv_indices=0x5000,
            full_kv_num_blocks=0x6000,
            full_kv_indices=0x7000,
            states=0,
        )
        assert launch.score_mod == struct.pack("<Q2q2if4x", 0x9000, 7, 1, HQ, 7, 0.5)
        assert launch.mask_mod == bytes(8)
        assert "score * slope + bias(h, q_idx)" in launch.text and "q_idx >= kv_idx" in launch.text
        assert (launch.stream, launch.scratch) == (0x51, allocated[3].ptr)
        assert launch.prepared.capturing() is False
        assert not world.framework.copied and not world.framework.filled and not world.enqueued

    def test_nothing_optional(self, world: World) -> None:
        out = call(plain())
        assert out is world.framework.allocated[0] and len(world.framework.allocated) == 2
        launch = only(world)
        assert launch.call == EXPECTED and launch.addresses.lse == 0 and launch.more == (0,) * 6
        assert launch.text.count("kIsThere = false") == 2

    def test_positional(self, world: World) -> None:
        q, k, v, _ = plain().values()
        options = {"BLOCK_M": 64}
        out, lse = rawmla.flex_attention(q, k, v, "2 * score", None, 0.5, True, True, options)
        launch = only(world)
        assert launch.call == changed(EXPECTED, {"has_score_mod": True}, softmax_scale=0.5)
        assert launch.addresses[3:5] == (out.ptr, lse.ptr)

    def test_results(self, world: World) -> None:
        assert isinstance(call(plain(), return_aux=rawmla.AuxRequest())[1], rawmla.AuxOutput)
        assert call(plain(), return_aux=rawmla.AuxRequest())[1] == (None, None)
        _, (lse, max_scores) = call(plain(), return_aux=rawmla.AuxRequest(max_scores=True))
        assert lse is None and max_scores.shape == (B, HQ, L)
        _, lse = call(plain(), return_lse=True)
        assert [launch.call.mods.max_scores for launch in world.flex] == [False, False, True, False]
        assert [(launch.addresses.lse, launch.more.max_scores) for launch in world.flex] == [
            (0, 0),
            (0, 0),
            (0, max_scores.ptr),
            (lse.ptr, 0),
        ]

    def test_torchs_request(self, world: World) -> None:
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        out, aux = call(plain(), return_aux=flex.AuxRequest(lse=True, max_scores=True))
        launch = only(world)
        assert launch.addresses[3:5] == (out.ptr, aux.lse.ptr)
        assert launch.more.max_scores == aux.max_scores.ptr

    def test_given_out(self, world: World) -> None:
        strides = (HQ * L * 72, L * 72, 72, 1)
        out = out_array(strides=strides)
        assert call(plain(), out=out) is out
        launch = only(world)
        assert launch.call == EXPECTED._replace(out_strides=(HQ * L * 72, 72, L * 72))
        assert launch.addresses.out == 0x8000
        assert [x.dtype for x in world.framework.allocated] == ["uint8"]

    def test_options_change_nothing(self, world: World) -> None:
        options = dict.fromkeys(
            ("BLOCK_M", "fwd_BLOCK_N", "bwd_num_warps", "num_stages", "USE_TMA", "WRITE_DQ", "PRESCALE_QK"), 1
        )
        call(plain())
        call(plain(), kernel_options={**options, "ROWS_GUARANTEED_SAFE": True, "BACKEND": "AUTO"})
        call(plain(), kernel_options={"BLOCKS_ARE_CONTIGUOUS": True, "FORCE_USE_FLEX_ATTENTION": True})
        call(plain(), kernel_options={})
        first, *others = [launch.prepared for launch in world.flex]
        assert all(prepared is first for prepared in others)

    def test_another_device(self, world: World) -> None:
        arguments = optional()
        for name in ("query", "key", "value"):
            change(name, device=1)(arguments)
        for name in LISTS:
            change_list(name, device=1)(arguments)
        capture(device=1)(arguments)
        out = call(arguments)
        launch = only(world)
        assert (launch.call.device, launch.stream, out.device) == (1, 0x52, 1)


class TestArrays:
    """Shapes and strides of query, key and value."""

    def test_order_of_the_dimensions(self, world: World) -> None:
        """[b, s, h, d] seen as [b, h, s, d]; out has the same order."""
        arguments = plain()
        for name, heads, tokens, columns in (("query", HQ, L, E), ("key", HKV, S, E), ("value", HKV, S, EV)):
            change(name, strides=(tokens * heads * columns, columns, heads * columns, 1))(arguments)
        out = call(arguments)
        assert out.strides == (L * HQ * EV, EV, HQ * EV, 1)
        assert only(world).call == EXPECTED._replace(
            q_strides=(L * HQ * E, HQ * E, E),
            k_strides=(S * HKV * E, HKV * E, E),
            v_strides=(S * HKV * EV, HKV * EV, EV),
            out_strides=(L * HQ * EV, HQ * EV, EV),
        )
        assert not world.framework.copied

    def test_broadcast_dimensions(self, world: World) -> None:
        arguments = plain()
        change("query", strides=(0, 0, E, 1))(arguments)
        change("key", strides=(S * E, 0, E, 1))(arguments)
        out = call(arguments)
        assert out.strides == contiguous((B, HQ, L, EV))
        expected = EXPECTED._replace(q_strides=(0, E, 0), k_strides=(S * E, E, 0))
        assert only(world).call == expected and not world.framework.copied

    @pytest.mark.parametrize("batches", (B, 1, 4))
    def test_one_batch_of_keys(self, world: World, batches: int) -> None:
        arguments = plain()
        change("query", shape=(batches, HQ, L, E))(arguments)
        change("key", shape=(1, *K[1:]))(arguments)
        change("value", shape=(1, *V[1:]))(arguments)
        call(arguments)
        launch = only(world)
        assert (launch.call.b, launch.call.k_batches) == (batches, 1)

    def test_equal_heads_need_no_gqa(self, world: World) -> None:
        arguments = plain() | {"enable_gqa": False}
        change("query", shape=(B, HKV, L, E))(arguments)
        call(arguments)
        assert only(world).call == EXPECTED._replace(
            h_q=HKV,
            q_strides=(HKV * L * E, E, L * E),
            out_strides=(HKV * L * EV, EV, L * EV),
            lse_strides=(HKV * L, L),
        )

    @pytest.mark.parametrize(
        ("name", "changes"),
        (
            ("query", {"ptr": 0x1008}),
            ("query", {"strides": (2 * HQ * L * E, 2 * L * E, 2 * E, 2)}),
            ("key", {"strides": (HKV * S * 132, S * 132, 132, 1)}),
            ("value", {"strides": (HKV * S * EV, S * EV, -EV, 1)}),
        ),
    )
    def test_copies(self, world: World, name: str, changes: Any) -> None:
        arguments = plain()
        change(name, **changes)(arguments)
        call(arguments)
        launch = only(world)
        assert launch.call == EXPECTED
        assert world.framework.copied == [arguments[name]]
        addresses = dict(zip(("query", "key", "value"), launch.addresses, strict=False))
        assert addresses == {"query": 0x1000, "key": 0x2000, "value": 0x3000} | {name: COPY + 0x1000}

    def test_rows_that_are_no_multiple_of_8(self, world: World) -> None:
        """They are copied to padded rows, which fresh results have too."""
        arguments = plain()
        change("query", shape=(B, HQ, L, 17))(arguments)
        change("key", shape=(B, HKV, S, 17))(arguments)
        change("value", shape=(B, HKV, S, 10))(arguments)
        out = call(arguments)
        assert out.strides == (HQ * L * 16, L * 16, 16, 1)
        launch = only(world)
        assert launch.call == EXPECTED._replace(
            d_qk=17,
            d_v=10,
            softmax_scale=17**-0.5,
            q_strides=(HQ * L * 24, 24, L * 24),
            k_strides=(HKV * S * 24, 24, S * 24),
            v_strides=(HKV * S * 16, 16, S * 16),
            out_strides=(HQ * L * 16, 16, L * 16),
        )
        assert len(world.framework.copied) == 3

    @pytest.mark.parametrize("dtype", ("float8_e4m3fn", "float8_e5m2"))
    def test_fp8(self, world: World, dtype: str) -> None:
        """Keys and values are converted; queries are not."""
        arguments = plain()
        change("key", dtype=dtype)(arguments)
        change("value", dtype=dtype)(arguments)
        call(arguments)
        launch = only(world)
        assert launch.call == EXPECTED and launch.addresses[:3] == (0x1000, COPY + 0x1000, COPY + 0x2000)
        assert world.framework.copied == [arguments["key"], arguments["value"]]

    def test_fp8_becomes_the_dtype_of_query(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []
        plain_copy = world.framework.aligned_copy

        def copy(array: FakeArray, name: str, dtype: str | None = None) -> FakeArray:
            made.append((name, dtype))
            return plain_copy(array, name, dtype)

        monkeypatch.setattr(world.framework, "aligned_copy", copy)
        arguments = plain()
        for name, dtype in (("query", "float16"), ("key", "float8_e5m2"), ("value", "float16")):
            change(name, dtype=dtype)(arguments)
        call(arguments)
        assert made == [("key", "float16")] and only(world).call.dtype == "float16"
        change("query", dtype="float16", ptr=0x1002)(arguments)
        call(arguments)
        assert made[1:] == [("query", None), ("key", "float16")]  # that of query is no other

    @pytest.mark.parametrize("empty", ("queries", "requests"))
    def test_no_queries(self, world: World, empty: str) -> None:
        """Results of no elements, and no launch."""
        b, tokens = (B, 0) if empty == "queries" else (0, L)
        arguments = plain() | {"score_mod": "2 * score"}
        change("query", shape=(b, HQ, tokens, E))(arguments)
        change("key", shape=(b, HKV, S, E))(arguments)
        change("value", shape=(b, HKV, S, EV))(arguments)
        out, aux = call(arguments, return_aux=rawmla.AuxRequest(lse=True, max_scores=True))
        assert [x.shape for x in (out, *aux)] == [(b, HQ, tokens, EV), *[(b, HQ, tokens)] * 2]
        assert len(world.framework.allocated) == 3 and not world.flex and not world.loaded

    def test_no_keys(self, world: World) -> None:
        """The kernel writes zeros; there is nothing that functions or lists would be asked for."""
        arguments = optional()
        change("key", shape=(B, HKV, 0, E))(arguments)
        change("value", shape=(B, HKV, 0, EV))(arguments)
        arguments["block_mask"] = mask_of(columns=0)
        arguments["block_mask"].seq_lengths = (L, 0)
        mask_capture(shape=(HQ, 0))(arguments)
        capture(shape=(HQ, 0))(arguments)
        call(arguments)
        launch = only(world)
        assert (launch.call.max_seqlen_k, launch.call.mods.lists) == (0, None)
        assert not launch.call.mods.has_score_mod
        assert launch.more[1:] == (0,) * 5 and launch.text.count("kIsThere = false") == 2
        with pytest.raises(ValueError, match=r"^block_mask: expected seq_lengths of \(300, 0\).*too large"):
            call(arguments, block_mask=mask_of())


class TestScale:
    def test_values(self, world: World) -> None:
        for scale in (None, 0.5, 2, np.float32(0.25)):
            call(plain(), scale=scale)
        calls = [launch.call for launch in world.flex]
        assert [one.softmax_scale for one in calls] == [E**-0.5, 0.5, 2.0, 0.25]
        mods = [one.mods for one in calls]
        assert not any(one.has_score_mod for one in mods) and len({one.header for one in mods}) == 1

    @pytest.mark.parametrize("scale", (0, -0.5))
    def test_not_positive(self, world: World, scale: float) -> None:
        """Scores are scaled before the softmax then, which else scales them itself."""
        call(plain(), scale=scale)
        launch = only(world)
        assert launch.call == changed(EXPECTED, {"has_score_mod": True}, softmax_scale=scale)
        assert NO_CHANGE in launch.text and launch.score_mod == bytes(8)

    def test_not_positive_with_a_function(self, world: World) -> None:
        call(plain(), scale=-0.5, score_mod="score * 3")
        assert NO_CHANGE not in only(world).text


class TestReuse:
    """What needs no new launch, or at least no new kernel."""

    def prepared(self, world: World) -> list[Any]:
        return [launch.prepared for launch in world.flex]

    def headers(self, world: World) -> set[Any]:
        return {launch.call.mods.header for launch in world.flex}

    def test_other_addresses_and_numbers(self, world: World) -> None:
        for i in range(3):
            arguments = optional()
            change("query", ptr=0x10000 * (i + 1))(arguments)
            change_list("kv_indices", ptr=0x100000 * (i + 1))(arguments)
            captures = {"slope": 0.5 + i, "bias": table(ptr=0x20000 + 64 * i, shape=(HQ, 7 + i))}
            arguments["score_mod"] = rawmla.CudaMod("score * slope + bias(h, q_idx)", captures)
            call(arguments)
        first, *others = self.prepared(world)
        assert all(one is first for one in others)
        packed = [struct.unpack("<Q2q2if4x", launch.score_mod) for launch in world.flex]
        assert packed == [(0x20000 + 64 * i, 7 + i, 1, HQ, 7 + i, 0.5 + i) for i in range(3)]

    def test_other_scales_and_lengths(self, world: World) -> None:
        for scale in (0.5, 0.25):
            call(optional(), scale=scale)
        arguments = optional() | {"block_mask": None}
        change("query", shape=(B, HQ, L + 1, E))(arguments)
        call(arguments | {"block_mask": None})
        assert len(set(map(id, self.prepared(world)))) == 3
        assert len(self.headers(world)) == 2  # with a mask and without one

    def test_other_text_and_kinds(self, world: World) -> None:
        mods = [
            rawmla.CudaMod("score * x", {"x": x})
            for x in (2, 2.0, table(shape=()), table(shape=(), dtype="int32"))
        ]
        for mod in (*mods, "score * 2", "score * 3"):
            call(plain(), score_mod=mod)
        assert len(self.headers(world)) == 6 and len(set(map(id, self.prepared(world)))) == 6

    def test_results(self, world: World) -> None:
        for request in (None, rawmla.AuxRequest(lse=True), rawmla.AuxRequest(max_scores=True)):
            call(plain(), return_aux=request)
        assert len(set(map(id, self.prepared(world)))) == 3 and len(self.headers(world)) == 1


class TestKnownLists:
    """Lists that passed the checks of a call before: what else they and their mask become is seen."""

    QKV = ("query", "key", "value")

    def reads(self, world: World, mask: Any) -> list[str]:
        """What a call reads."""
        world.reads.clear()
        call(plain(), block_mask=mask)
        return [name for name in world.reads if name not in self.QKV]

    def addresses(self, world: World) -> tuple[int, ...]:
        return tuple(world.flex[-1].more[1:5])

    def test_are_not_read_again(self, world: World) -> None:
        masks = [mask_of(), mask_of(full=False)]
        assert [self.reads(world, mask) for mask in masks] == [MASK_LISTS, MASK_LISTS[:2]]
        for mask, full in ((masks[0], (0x6000, 0x7000)), (masks[1], (0, 0)), (masks[0], (0x6000, 0x7000))):
            assert self.reads(world, mask) == [] and self.addresses(world) == (0x4000, 0x5000, *full)
        same_lists = SimpleNamespace(**vars(masks[0]), mask_mod=masks[0].mask_mod)
        assert self.reads(world, same_lists) == []

    @pytest.mark.parametrize("name", LISTS)
    def test_another_list_or_address(self, world: World, name: str) -> None:
        mask = mask_of()
        self.reads(world, mask)
        setattr(mask, name, getattr(mask, name).but(ptr=0xE000))
        assert self.reads(world, mask) == MASK_LISTS
        getattr(mask, name).ptr = 0xF000
        assert self.reads(world, mask) == MASK_LISTS
        assert self.addresses(world)[LISTS.index(name)] == 0xF000

    def test_another_shape(self, world: World) -> None:
        mask = mask_of()
        self.reads(world, mask)
        mask.kv_indices.shape = (1, 1, ROWS, COLUMNS - 1)
        assert self.reads(world, mask) == MASK_LISTS
        assert world.flex[-1].call.mods.lists.columns == (COLUMNS - 1, COLUMNS)
        mask.kv_indices.shape = (1, 1, ROWS - 1, COLUMNS)
        with pytest.raises(ValueError, match=r"^block_mask\.kv_indices"):
            call(plain(), block_mask=mask)

    def test_no_full_lists_any_more(self, world: World) -> None:
        mask = mask_of()
        self.reads(world, mask)
        mask.full_kv_num_blocks = mask.full_kv_indices = None
        assert self.reads(world, mask) == MASK_LISTS[:2] and self.addresses(world)[2:] == (0, 0)

    @pytest.mark.parametrize(
        ("name", "value"),
        (
            ("seq_lengths", (L + 1, S)),
            ("BLOCK_SIZE", (128, 100)),
            ("mask_mod", rawmla.flex.block_mask._unset_mask),
            ("kv_num_blocks", None),
            ("full_kv_indices", None),
        ),
    )
    def test_what_is_refused(self, world: World, name: str, value: Any) -> None:
        mask = mask_of()
        self.reads(world, mask)
        setattr(mask, name, value)
        with pytest.raises(ValueError, match="^block_mask: expected"):
            call(plain(), block_mask=mask)

    def test_another_function(self, world: World) -> None:
        mask = mask_of()
        self.reads(world, mask)
        mask.mask_mod = rawmla.CudaMod("q_idx > kv_idx")
        assert self.reads(world, mask) == [] and "q_idx > kv_idx" in world.flex[-1].call.mods.header[1]

    def test_other_queries(self, world: World) -> None:
        """What is checked against them is checked again."""
        mask = mask_of(B, HQ)
        self.reads(world, mask)
        arguments = plain() | {"block_mask": mask}
        for name, shape in (("query", Q), ("key", K), ("value", V)):
            change(name, shape=(1, *shape[1:]))(arguments)
        with pytest.raises(ValueError, match="a batch and heads that divide"):
            call(arguments)

    def test_queries_of_another_framework(self, world: World) -> None:
        """In every call the stream of their framework is compared with the stream of the lists."""
        mask, other = mask_of(), FakeFramework("other")
        self.reads(world, mask)
        arguments = plain() | {"block_mask": mask}
        for name in self.QKV:
            change(name, framework=other)(arguments)
        for _ in range(2):
            other.stream = 0x51
            call(arguments)
            other.stream = 0x99
            with pytest.raises(ValueError, match="expected a other array, as query is, .* got a fake array"):
                call(arguments)

    def test_copied_lists_are_copied_at_every_call(self, world: World) -> None:
        mask = mask_of()
        mask.kv_indices = mask.kv_indices.but(dtype="int64")
        for count in (1, 2):
            assert self.reads(world, mask) == MASK_LISTS
            assert world.framework.copied == [mask.kv_indices] * count

    def test_are_not_kept_alive(self, world: World) -> None:
        mask = mask_of()
        self.reads(world, mask)
        lists = [weakref.ref(getattr(mask, name)) for name in LISTS]
        world.flex.clear()
        del mask
        gc.collect()
        assert [one() for one in lists] == [None] * 4


class TestLists:
    """How the lists of a mask lie."""

    def lists(self, world: World, mask: Any) -> BlockLists:
        call(plain(), block_mask=mask)
        found: BlockLists = world.flex[-1].call.mods.lists
        return found

    def test_leading_dimensions(self, world: World) -> None:
        """(batch, head, row) with steps of 0 where there is one only."""
        n = ROWS * COLUMNS
        for leading, counts, lists in (
            ((1, 1), (0, 0, 1), (0, 0, COLUMNS)),
            ((B, 1), (ROWS, 0, 1), (n, 0, COLUMNS)),
            ((1, HQ), (0, ROWS, 1), (0, n, COLUMNS)),
            ((B, HQ), (HQ * ROWS, ROWS, 1), (HQ * n, n, COLUMNS)),
            ((B, 4), (4 * ROWS, ROWS, 1), (4 * n, n, COLUMNS)),
            ((HQ,), (0, ROWS, 1), (0, n, COLUMNS)),
        ):
            found = self.lists(world, mask_of(*leading))
            assert found.counts_strides == (counts, counts) and found.lists_strides == (lists, lists)
            assert (found.batches, found.heads) == (1, 1, *leading)[-2:]

    def test_two_dimensions(self, world: World) -> None:
        mask = mask_of()
        for name in LISTS:
            array = getattr(mask, name)
            setattr(mask, name, array.but(shape=array.shape[2:]))
        assert self.lists(world, mask) == EXPECTED_LISTS

    def test_expanded_and_narrow(self, world: World) -> None:
        """Each pair has strides and columns of its own, also along batch and head that are there once."""
        mask = mask_of(B, HQ)
        mask.kv_indices = mask.kv_indices.but(strides=(0, 0, 100, 1))
        mask.kv_num_blocks = mask.kv_num_blocks.but(strides=(0, 0, 5))
        mask.full_kv_indices = mask.full_kv_indices.but(shape=(B, HQ, ROWS, 2))
        mask.full_kv_num_blocks = mask.full_kv_num_blocks.but(strides=(3, -6, 2))
        found = self.lists(world, mask)
        assert found.counts_strides == ((0, 0, 5), (3, -6, 2))
        assert found.lists_strides == ((0, 0, 100), (HQ * ROWS * 2, ROWS * 2, 2))
        assert found.columns == (COLUMNS, 2) and not world.framework.copied

    def test_no_columns(self, world: World) -> None:
        """Its array may have no address."""
        mask = mask_of()
        mask.kv_indices = mask.kv_indices.but(shape=(1, 1, ROWS, 0), ptr=0)
        assert self.lists(world, mask).columns == (0, COLUMNS)
        assert world.flex[0].more[1:] == (0x4000, 0, 0x6000, 0x7000, 0)

    def test_without_full_lists(self, world: World) -> None:
        found = self.lists(world, mask_of(full=False))
        assert found.lists_strides == ((0, 0, COLUMNS), (0, 0, 0)) and found.columns == (COLUMNS, 0)
        assert world.flex[0].more[1:] == (0x4000, 0x5000, 0, 0, 0)

    def test_more_rows_and_columns(self, world: World) -> None:
        assert self.lists(world, mask_of(rows=9, columns=20)).columns == (20, 20)

    @pytest.mark.parametrize("dtype", ("int64", "int16", "uint8"))
    def test_other_integers_are_converted(self, world: World, dtype: str) -> None:
        mask = mask_of(B, HQ)
        given = [getattr(mask, name) for name in LISTS]
        mask.kv_num_blocks = given[0].but(dtype=dtype, strides=(0, 0, 1))
        mask.full_kv_indices = given[3].but(dtype=dtype)
        found = self.lists(world, mask)
        assert world.framework.copied == [mask.kv_num_blocks, mask.full_kv_indices]
        # Rows of a copy are padded to a multiple of 8.
        assert found.counts_strides == ((HQ * 8, 8, 1), (HQ * ROWS, ROWS, 1))
        assert found.lists_strides == ((HQ * ROWS * 4, ROWS * 4, 4), (HQ * ROWS * 8, ROWS * 8, 8))
        assert world.flex[0].more[1:] == (COPY + 0x1000, 0x5000, 0x6000, COPY + 0x2000, 0)

    def test_a_last_dimension_with_steps_is_copied(self, world: World) -> None:
        mask = mask_of()
        mask.kv_indices = mask.kv_indices.but(strides=(24, 24, 8, 2))
        mask.kv_num_blocks = mask.kv_num_blocks.but(strides=(6, 6, 2))
        found = self.lists(world, mask)
        assert world.framework.copied == [mask.kv_indices]
        assert (found.counts_strides[0], found.lists_strides[0]) == ((0, 0, 2), (0, 0, 8))

    def test_torchs_mask_of_everything(self, world: World) -> None:
        """It has one huge block, and lengths of (1, 1)."""
        mask = mask_of(rows=1, columns=1, BLOCK_SIZE=2**30)
        mask.seq_lengths = (1, 1)
        call(plain(), block_mask=mask)
        launch = only(world)
        assert launch.call == EXPECTED and launch.more[1:] == (0,) * 5
        assert launch.text.count("kIsThere = false") == 2

    def test_torchs_mask(self, world: World) -> None:
        """Further attributes are not looked at, and those of a mask of torch are enough."""
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        for mask_mod, asked in ((lambda b, h, q, k: q >= 0, 1), (flex.noop_mask, 0)):
            theirs = flex.create_block_mask(mask_mod, 1, 1, L, S, device="cpu")
            for name, array in zip(LISTS, (0x4000, 0x5000, 0x6000, 0x7000), strict=True):
                setattr(theirs, name, FakeArray(tuple(getattr(theirs, name).shape), ptr=array))
            theirs.something_new = object()
            world.flex.clear()
            call(plain(), block_mask=theirs)
            launch = only(world)
            assert launch.call.mods.lists == EXPECTED_LISTS and launch.text.count("kIsThere = true") == asked

    def test_torchs_indexed_mask(self, world: World) -> None:
        flex = pytest.importorskip("torch.nn.attention.flex_attention")
        with pytest.raises(
            ValueError, match="^block_mask: expected a mask_mod .* got a mask that was indexed"
        ):
            call(
                plain(), block_mask=flex.create_block_mask(flex.noop_mask, 1, 1, L, S, device="cpu")[:, :, :1]
            )
        assert world.untouched

    def test_rawmlas_mask_of_nothing_hidden_asks_nothing(self, world: World) -> None:
        call(plain(), block_mask=mask_of(mask_mod=rawmla.noop_mask))
        assert only(world).text.count("kIsThere = false") == 2

    @pytest.mark.parametrize(
        ("size", "rows", "columns", "walked"),
        (
            ((256, 128), 2, 4, (256, 128)),
            ((128, 384), 3, 2, (128, 384)),
            ((2**20, 2**30), 1, 1, (384, 512)),
            ((304, 1024), 1, 1, (304, 512)),
            ((2**30, 128), 1, 4, (384, 128)),
        ),
    )
    def test_large_blocks(
        self, world: World, size: tuple[int, int], rows: int, columns: int, walked: tuple[int, int]
    ) -> None:
        found = self.lists(world, mask_of(rows=rows, columns=columns, BLOCK_SIZE=size))
        assert (found.block_q, found.block_k) == walked and not world.enqueued

    @pytest.mark.parametrize("d", (256, 224))
    def test_wide_heads_have_tiles_of_64_keys(self, world: World, d: int) -> None:
        arguments = plain()
        change("query", shape=(B, HQ, L, d))(arguments)
        change("key", shape=(B, HKV, S, d))(arguments)
        change("value", shape=(B, HKV, S, d))(arguments)
        call(arguments, block_mask=mask_of(columns=8, BLOCK_SIZE=(128, 64)))
        assert world.flex[0].call.mods.lists.block_k == 64 and not world.enqueued


SMALL = (
    *((16, 16), (32, 32), (64, 64), (96, 96), (128, 96), (96, 128), (32, 64), (64, 128), (128, 64)),
    *((128, 160), (144, 128), (384, 48), (80, 512)),
)


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("leading", ((1, 1), (B, 4)))
class TestOtherBlocks:
    """Blocks that the kernel cannot walk: lists of blocks of 128 are made of them at every call."""

    def test_what_is_enqueued(self, world: World, size: tuple[int, int], leading: tuple[int, int]) -> None:
        block_q, block_k = size
        rows, columns = -(-L // block_q), -(-S // block_k)
        lines, walked = math.prod(leading) * ROWS, math.prod(leading) * ROWS * COLUMNS
        call(plain(), block_mask=mask_of(*leading, rows=rows, columns=columns, BLOCK_SIZE=size))
        _, scratch = world.framework.allocated
        clear, scatter, lists = world.enqueued
        assert [x.name for x in world.enqueued] == ["clear", "block_mask_scatter", "block_mask_lists"]
        assert {x.stream for x in world.enqueued} == {0x51}

        # States, over zeros
        states = math.prod(leading) * rows * columns
        assert clear.size % 4 == 0 and states <= clear.size < states + 4
        read = read_struct(mask_kernels.SCATTER_PARAMS, scatter.params)
        all_rows = math.prod(leading) * rows
        assert read == {
            "kv_num_blocks": 0x4000,
            "kv_indices": 0x5000,
            "full_kv_num_blocks": 0x6000,
            "full_kv_indices": 0x7000,
            "states": clear.address,
            "counts_strides": steps(*leading, rows) * 2,
            "lists_strides": steps(*leading, rows, columns)[:3] * 2,
            "all_rows": all_rows,
            "list_columns": (columns, columns),
            "heads": leading[1],
            "rows": rows,
            "columns": columns,
        }
        assert scatter.grid == (min(2048, -(-all_rows // 4)), 1, 1)

        # Lists, of which the attention kernel is told
        launch = only(world)
        made = launch.more[1:5]
        assert launch.more.states == clear.address
        assert launch.call.mods.states == (rows, columns, block_q, block_k)
        assert read_struct(mask_kernels.LISTS_PARAMS, lists.params) == {
            "states": clear.address,
            "partial_counts": made[0],
            "partial_blocks": made[1],
            "full_counts": made[2],
            "full_blocks": made[3],
            "all_lines": lines,
            "mask_blocks": rows * columns,
            "line_step": columns,
            "entry_step": 1,
            "lines": ROWS,
            "entries": COLUMNS,
            "list_line": 128,
            "list_entry": 128,
            "state_line": block_q,
            "state_entry": block_k,
            "line_tokens": L,
            "entry_tokens": S,
        }
        assert launch.call.mods.lists == BlockLists(
            (dense(*leading, ROWS),) * 2,
            (dense(*leading, ROWS, COLUMNS)[:3],) * 2,
            (COLUMNS, COLUMNS),
            *leading,
            128,
            128,
        )
        assert launch.scratch == scratch.ptr

        # Every place lies in the scratch, is aligned, and overlaps no other.
        places = [
            (scratch.ptr, 16),
            (clear.address, clear.size),
            *zip(made, (4 * lines, 4 * walked) * 2, strict=True),
        ]
        assert not any(address % SCRATCH_STEP for address, _ in places)
        ends = [(address, address + nbytes) for address, nbytes in sorted(places)]
        assert all(end <= begin for (_, end), (begin, _) in zip(ends, ends[1:], strict=False))
        assert ends[0][0] == scratch.ptr and ends[-1][1] <= scratch.ptr + scratch.shape[0]

    def test_the_mask_function(self, world: World, size: tuple[int, int], leading: tuple[int, int]) -> None:
        """It is asked in partial blocks alone, of the size that the mask has: their states are read."""
        rows, columns = -(-L // size[0]), -(-S // size[1])
        mask = mask_of(*leading, rows=rows, columns=columns, BLOCK_SIZE=size)
        mask.mask_mod = rawmla.CudaMod("q_idx * x >= kv_idx", {"x": 2.5})
        call(plain(), block_mask=mask)
        launch = only(world)
        shape = (*leading, rows, columns)
        assert launch.mask_mod == struct.pack(
            "<Q4q4if4x4q", world.enqueued[0].address, *contiguous(shape), *shape, 2.5, *leading, *size
        )
        before, after = launch.text.split("return q_idx * x >= kv_idx")
        assert "if (block_state != 1) return block_state == 2;" in before

    def test_again(self, world: World, size: tuple[int, int], leading: tuple[int, int]) -> None:
        mask = mask_of(*leading, rows=-(-L // size[0]), columns=-(-S // size[1]), BLOCK_SIZE=size)
        for _ in range(2):
            call(plain(), block_mask=mask)
        first, second = world.flex
        assert first.prepared is second.prepared and len(world.enqueued) == 6
        assert first.scratch != second.scratch and first.more[1:] != second.more[1:]


def read_struct(declared: Any, params: bytes) -> dict[str, Any]:
    """The members of a parameter struct by name; arrays are tuples."""
    assert len(params) == declared.size
    found = {}
    for member in declared.members:
        values = struct.unpack_from(f"<{member.code}", params, member.offset)
        found[member.name] = values if member.length else values[0]
    return found


def dense(*shape: int) -> tuple[int, ...]:
    return contiguous(shape)


def steps(*shape: int) -> tuple[int, ...]:
    """Strides, 0 where there is one only, but for the row."""
    strides = contiguous(shape)
    return tuple(0 if extent == 1 else step for extent, step in zip(shape, strides, strict=True))


class TestOtherLists:
    """Lists of small blocks that do not lie as usual."""

    def test_without_full_lists_and_function(self, world: World) -> None:
        mask = mask_of(rows=10, columns=16, full=False, BLOCK_SIZE=32, mask_mod=rawmla.noop_mask)
        call(plain(), block_mask=mask)
        scatter = read_struct(mask_kernels.SCATTER_PARAMS, world.enqueued[1].params)
        assert (scatter["full_kv_num_blocks"], scatter["list_columns"]) == (0, (16, 0))
        launch = only(world)
        assert 0 not in launch.more[1:]
        assert "return block_state == 2;\nreturn true;" in launch.text

    def test_converted_lists(self, world: World) -> None:
        mask = mask_of(rows=10, columns=16, BLOCK_SIZE=32)
        mask.kv_indices = mask.kv_indices.but(dtype="int64")
        call(plain(), block_mask=mask)
        scatter = read_struct(mask_kernels.SCATTER_PARAMS, world.enqueued[1].params)
        assert scatter["kv_indices"] == COPY + 0x1000 and scatter["lists_strides"][:3] == (0, 0, 16)

    def test_kernels_are_loaded_before_anything_is_made(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def get_kernel(spec: Any, device: int, capturing: Any) -> Any:
            raise rawmla.KernelNotReadyError(spec.name)

        monkeypatch.setattr(jit, "get_kernel", get_kernel)
        with pytest.raises(rawmla.KernelNotReadyError):
            call(plain(), block_mask=mask_of(rows=10, columns=16, BLOCK_SIZE=32))
        assert world.untouched

    def test_which_kernels(self, world: World) -> None:
        call(plain(), block_mask=mask_of(rows=10, columns=16, BLOCK_SIZE=32))
        assert set(world.loaded) == {mask_kernels.LISTS_SPEC, mask_kernels.SCATTER_SPEC}


@pytest.mark.parametrize("layout", ("strided", "jagged"))
@pytest.mark.parametrize("name", ("query", "key", "value"))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(world: World, name: str, layout: str) -> None:
    torch = pytest.importorskip("torch")
    parts = [torch.zeros(3, 8, 64), torch.zeros(5, 8, 64)]
    nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    with pytest.raises(NotImplementedError, match=f"^{name}: expected a dense tensor, got a nested one"):
        call(plain() | {name: nested})
    assert world.untouched


class TestPythonFunctions:
    """Functions that torch traces."""

    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.fixture
    def on_device(self, torch: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tensors of the host pass for some of the device of query."""

        def read(x: Any, name: str) -> frameworks.Fields:
            return x.data_ptr(), x.shape, x.stride(), str(x.dtype)[6:], 0, world.framework, x

        monkeypatch.setitem(arrays.READERS, torch.Tensor, read)

    def test_numbers(self, world: World, torch: Any) -> None:
        """Another number is another parameter; one on the host is read."""
        for slope in (0.5, 2.5, torch.tensor(3.5)):
            call(plain(), score_mod=lambda score, b, h, q, k, s=slope: score * s)
        assert [struct.unpack("<f4x", launch.score_mod)[0] for launch in world.flex] == [0.5, 2.5, 3.5]
        assert len({launch.call.mods.header for launch in world.flex}) == 1

    def test_numbers_past_float32(self, world: World, torch: Any) -> None:
        call(plain(), score_mod=lambda score, b, h, q, k: torch.where(q >= k, score, -1e300))
        assert struct.unpack("<f4x", only(world).score_mod) == (-math.inf,)

    def test_captured_tensors(self, world: World, torch: Any, on_device: None) -> None:
        bias, ids = torch.randn(HQ, 2 * L)[:, ::2], torch.zeros(L + S, dtype=torch.int64)
        mask = mask_of(mask_mod=lambda b, h, q, k: ids[q] == ids[k])
        call(plain(), score_mod=lambda s, b, h, q, k: s + bias[h, q], block_mask=mask)
        launch = only(world)
        assert launch.score_mod == struct.pack("<Q2q2i", bias.data_ptr(), 2 * L, 2, HQ, L)
        assert launch.mask_mod == struct.pack("<Qqi4x", ids.data_ptr(), 1, L + S)

    def test_captured_tensors_of_the_same_kind(self, world: World, torch: Any, on_device: None) -> None:
        """Others of a shape are read where they are; that needs no new launch."""
        tables = [torch.randn(HQ, L) for _ in range(2)]
        for table in (*tables, tables[0]):
            call(plain(), score_mod=lambda s, b, h, q, k: s + table[h, q])  # noqa: B023
        addresses = [struct.unpack_from("<Q", launch.score_mod)[0] for launch in world.flex]
        assert addresses == [x.data_ptr() for x in (*tables, tables[0])]
        assert len({id(launch.prepared) for launch in world.flex}) == 1

    def test_captured_tensors_that_lie_otherwise(self, world: World, torch: Any, on_device: None) -> None:
        """Other strides are other parameters; rows that are no longer contiguous another layout."""
        table = torch.randn(2 * HQ, 2 * L)
        lying = (table[:HQ, :L], table[::2, :L], table[:HQ, ::2], table[:HQ, :L])
        for bias in lying:
            call(plain(), score_mod=lambda s, b, h, q, k: s + bias[h, q])  # noqa: B023
        packed = [struct.unpack("<Q2q2i", launch.score_mod) for launch in world.flex]
        assert packed == [(x.data_ptr(), *x.stride(), HQ, L) for x in lying]
        layouts = ["kSmallRows" in launch.call.mods.header[1] for launch in world.flex]
        assert layouts == [True, True, False, True]
        first, second, third, fourth = [launch.prepared for launch in world.flex]
        assert first is second is fourth is not third

    def test_a_tensor_that_changes_in_place(self, world: World, torch: Any, on_device: None) -> None:
        """The very function again: its tensor is looked at in every call."""
        bias = torch.randn(L, L)
        mod: Any = lambda s, b, h, q, k: s + bias[q, k]  # noqa: E731
        call(plain(), score_mod=mod)
        bias.t_()
        call(plain(), score_mod=mod)
        bias.set_(torch.randn(L, L))
        call(plain(), score_mod=mod)
        packed = [struct.unpack("<Q2q2i", launch.score_mod) for launch in world.flex]
        assert [one[1:3] for one in packed] == [(L, 1), (1, L), (L, 1)]
        assert packed[2][0] == bias.data_ptr() != packed[0][0]
        assert ["kSmallRows" in launch.call.mods.header[1] for launch in world.flex] == [True, False, True]

    def test_a_number_that_changes_in_place(self, world: World, torch: Any) -> None:
        slope, width = torch.tensor(0.5), torch.tensor(3)
        mask = mask_of(mask_mod=lambda b, h, q, k: q - k < width)
        for i in range(2):
            slope.fill_(0.5 + i)
            width.fill_(3 + i)
            call(plain(), score_mod=lambda s, b, h, q, k: s * slope, block_mask=mask)
        packed = [
            (struct.unpack("<f4x", x.score_mod)[0], *struct.unpack("<q", x.mask_mod)) for x in world.flex
        ]
        assert packed == [(0.5, 3), (1.5, 4)]

    def test_captured_tensors_are_not_kept_alive(self, world: World, torch: Any, on_device: None) -> None:
        bias = torch.randn(HQ)
        seen = weakref.ref(bias)
        for _ in range(2):
            call(plain(), score_mod=lambda s, b, h, q, k, bias=bias: s + bias[h])
        del bias
        gc.collect()
        assert seen() is None

    def test_empty_captured_tensors(self, world: World, torch: Any, on_device: None) -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^score_mod: an array that it reads: .*got shape \[0\]"):
                call(plain(), score_mod=rawmla.CudaMod("score + bias(h)", {"bias": torch.zeros(0)}))
        assert world.untouched

    def test_captured_tensors_on_the_host(self, world: World, torch: Any) -> None:
        bias = torch.zeros(HQ)
        with pytest.raises(
            ValueError, match="^score_mod: an array that it reads: expected a tensor in CUDA mem"
        ):
            call(plain(), score_mod=lambda s, b, h, q, k: s + bias[h])
        with pytest.raises(
            ValueError, match="^mask_mod: an array that it reads: expected a tensor in CUDA mem"
        ):
            call(plain(), block_mask=mask_of(mask_mod=lambda b, h, q, k: bias[h] > 0))
        assert world.untouched

    def test_captured_tensors_that_require_grad(self, world: World, torch: Any) -> None:
        class OnCuda(torch.Tensor):
            is_cuda = True

        for made in (torch.zeros(HQ, requires_grad=True), torch.zeros((), requires_grad=True)):
            bias = made.as_subclass(OnCuda)
            mod = rawmla.CudaMod("score + bias(h)", {"bias": bias})
            text = "^query: expected a torch tensor, as one of the arrays requires grad, got FakeArray"
            with pytest.raises(TypeError, match=text):
                call(plain(), score_mod=mod)
        assert world.untouched

    @pytest.mark.parametrize(
        ("name", "mod", "kind", "text"),
        (
            (
                "score_mod",
                lambda s, b, h, q: s,
                TypeError,
                "expected a function of (score, b, h, q_idx, kv_idx)",
            ),
            ("mask_mod", lambda s, b, h, q, k: s, TypeError, "expected a function of (b, h, q_idx, kv_idx)"),
            ("score_mod", lambda s, b, h, q, k: None, ValueError, "expected it to return a 0-d tensor"),
            ("score_mod", lambda s, b, h, q, k: s if q >= k else -s, ValueError, "does not branch"),
            ("mask_mod", lambda b, h, q, k: (q + k).bernoulli() > 0, NotImplementedError, "aten::bernoulli"),
        ),
    )
    def test_refused(self, world: World, name: str, mod: Any, kind: type[Exception], text: str) -> None:
        arguments = {"score_mod": mod} if name == "score_mod" else {"block_mask": mask_of(mask_mod=mod)}
        with pytest.raises(kind) as caught:
            call(plain(), **arguments)
        message = str(caught.value)
        assert type(caught.value) is kind and message.startswith(f"{name} ") and "<lambda>: " in message
        assert text in message and world.untouched


def test_python_functions_need_torch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(functions, "_memo_for", functions._memo_for.__wrapped__)  # not the one found before
    for arguments in (
        {"score_mod": lambda s, b, h, q, k: s},
        {"block_mask": mask_of(mask_mod=lambda b, h, q, k: q >= k)},
    ):
        with pytest.raises(rawmla.MissingDependencyError, match=r"^(score|mask)_mod: .* rawmla\.CudaMod"):
            call(plain(), **arguments)
    assert world.untouched
    call(optional())
