"""Flex attention: the rules of its arguments, functions and block masks, and what accepted calls launch."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import rawmla
from calls.fakes import LISTS, Arguments, FakeArray, FakeFramework, World, both, change, contiguous, put
from calls.refusals import Refusal, check_refused, each, shapes
from calls.test_dense import COPY, prepared
from rawmla.flex.block_mask import _unset_mask
from rawmla.flex.header import HEADER_NAME
from rawmla.kernels.block_mask import BlockLists
from rawmla.kernels.mha_forward import MhaForwardCall, Mods

B, HQ, HKV, L, S, E, EV = 2, 8, 2, 300, 500, 128, 64
Q, K, V, OUT = (B, HQ, L, E), (B, HKV, S, E), (B, HKV, S, EV), (B, HQ, L, EV)
ROWS, COLUMNS = 3, 4  # of blocks of 128
MASK_LISTS = [f"block_mask.{name}" for name in LISTS]
OTHER = FakeFramework("other", stream=0x99)


def plain() -> Arguments:
    """A call that is accepted."""
    return {
        "query": FakeArray(Q, "bfloat16", ptr=0x1000),
        "key": FakeArray(K, "bfloat16", ptr=0x2000),
        "value": FakeArray(V, "bfloat16", ptr=0x3000),
        "enable_gqa": True,
    }


def table(**changes: Any) -> FakeArray:
    return FakeArray((HQ, 7), "float32", ptr=0x9000).but(**changes)


def mask_of(
    *leading: int, size: Any = 128, lengths: tuple[int, int] = (L, S), full: bool = True, **more: Any
) -> Any:
    """A mask with lists by rows and by columns, whose leading dimensions are (1, 1) if none are given."""
    leading = leading or (1, 1)
    sizes = size if isinstance(size, tuple) else (size, size)
    rows, columns = [-(-length // one) for length, one in zip(lengths, sizes, strict=True)]
    made: list[Any] = []
    for lines, others, first in ((rows, columns, 0x4000), (columns, rows, 0x14000)):
        for place in (first, first + 0x2000):
            exists = full or place == first
            made.append(FakeArray((*leading, lines), ptr=place) if exists else None)
            made.append(FakeArray((*leading, lines, others), ptr=place + 0x1000) if exists else None)
    options = {"BLOCK_SIZE": size, "mask_mod": rawmla.CudaMod("q_idx >= kv_idx"), **more}
    return rawmla.BlockMask(lengths, *made, **options)


def optional() -> Arguments:
    """The same with all that is optional."""
    score = rawmla.CudaMod("score * slope + bias(h, q_idx)", {"slope": 0.5, "bias": table()})
    out = FakeArray(OUT, "bfloat16", ptr=0x8000)
    return plain() | {"score_mod": score, "block_mask": mask_of(), "scale": 0.25, "out": out}


def call(arguments: Arguments, **more: Any) -> Any:
    return rawmla.flex_attention(**{**arguments, **more})


def set_mask(name: str, value: Any) -> Callable[[Arguments], None]:
    return lambda arguments: setattr(arguments["block_mask"], name, value)


def change_list(name: str, **changes: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        mask = arguments["block_mask"]
        setattr(mask, name, getattr(mask, name).but(**changes))

    return apply


def resize(letters: str, *shape: int) -> Callable[[Arguments], None]:
    """Give lists of one kind of blocks another shape, and their counts the one that fits it."""
    names = f"{letters}_indices", f"{letters}_num_blocks"
    return both(change_list(names[0], shape=shape), change_list(names[1], shape=shape[:-1]))


def capture(**changes: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update(score_mod=rawmla.CudaMod("score", {"bias": table(**changes)}))


def mask_capture(**changes: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments["block_mask"].mask_mod = rawmla.CudaMod("h > 0", {"bias": table(**changes)})

    return apply


# ---- refusals

OF_SCORES, OF_MASKS = "score_mod: an array that it reads", "mask_mod: an array that it reads"
AUX = rawmla.AuxRequest(lse=True)
REFUSALS: list[Refusal] = [
    ("query", TypeError, "not supported yet", change("query", dtype="float32")),
    ("key", TypeError, "or float8_e4m3fn or float8_e5m2 ... got uint8", change("key", dtype="uint8")),
    ("query", ValueError, "1 to 256 ... 257", shapes(query=(*Q[:3], 257))),
    ("value", ValueError, "1 to 256 ... 257", shapes(value=(*V[:3], 257))),
    ("key", ValueError, "128] (E of query)", shapes(key=(*K[:3], 64))),
    ("value", ValueError, "[2, 2, 500, Ev] ... S of key", shapes(value=(B, HKV, 499, EV))),
    ("value", ValueError, "Hkv of key", shapes(value=(B, 4, S, EV))),
    ("value", ValueError, "Bkv of key", shapes(value=(1, HKV, S, EV))),
    ("key", ValueError, "batch of 2 ... or 1", shapes(key=(4, *K[1:]), value=(4, *V[1:]))),
    ("query", ValueError, "without enable_gqa ... Hq 8", put("enable_gqa", False)),
    ("query", ValueError, "multiple ... Hq 7", shapes(query=(B, 7, L, E))),
    ("query", ValueError, "Hkv 0", shapes(key=(B, 0, S, E), value=(B, 0, S, EV))),
    ("query", ValueError, "less than 2**30", shapes(query=(B, HQ, 2**30, E))),
    ("key", ValueError, "less than 2**30", shapes(key=(B, HKV, 2**30, E), value=(B, HKV, 2**30, EV))),
    ("return_lse", ValueError, "return_aux", both(put("return_lse", True), put("return_aux", AUX))),
    ("return_aux", TypeError, "AuxRequest ... bool", put("return_aux", True)),
    ("return_aux.lse", TypeError, "bool ... int 1", put("return_aux", SimpleNamespace(lse=1))),
    ("return_aux.max_scores", TypeError, "bool ... None", put("return_aux", AUX._replace(max_scores=None))),
    ("kernel_options", TypeError, "dict ... list", put("kernel_options", ["BLOCK_M"])),
    ("kernel_options", ValueError, "'BLOCK_X'", put("kernel_options", {"BLOCK_X": 1})),
    ("kernel_options", ValueError, "'AUTO' ... 'TRITON'", put("kernel_options", {"BACKEND": "TRITON"})),
    ("scale", ValueError, "1.7e+38 at most ... 3e+38", put("scale", 3e38)),
    ("out", ValueError, "16 bytes ... 0x8008", change("out", ptr=0x8008)),
    ("out", ValueError, "multiples of 8", change("out", strides=(160000, 20000, 66, 1))),
    ("out", ValueError, "overlap", change("out", strides=(153600, 19200, 32, 1))),
    ("block_mask", TypeError, "BlockMask ... int 3", put("block_mask", 3)),
    ("block_mask", TypeError, "BlockMask ... kv_num", put("block_mask", lambda b, h, q, k: q)),
    ("block_mask", ValueError, "(300, 500) ... 499) ... too small", set_mask("seq_lengths", (L, S - 1))),
    ("block_mask", ValueError, "(301, 500) ... too large ... _adjust", set_mask("seq_lengths", (L + 1, S))),
    ("block_mask", ValueError, "indexed ... assign", set_mask("mask_mod", _unset_mask)),
    ("block_mask", ValueError, "kv_indices", set_mask("kv_indices", None)),
    ("block_mask", ValueError, "full_kv", set_mask("full_kv_num_blocks", None)),
    ("block_mask", ValueError, "16 ... (128, 100)", set_mask("BLOCK_SIZE", (128, 100))),
    ("block_mask", ValueError, "16 ... (0, 128)", set_mask("BLOCK_SIZE", (0, 128))),
    *[
        (f"block_mask.{name}", error, text, spoil)
        for name in LISTS
        for error, text, spoil in (
            (TypeError, "got list", set_mask(name, [1])),
            (ValueError, "cuda:1", change_list(name, device=1)),
            (ValueError, "0x99", change_list(name, framework=OTHER)),
            (TypeError, "int32 ... float", change_list(name, dtype="float32")),
        )
    ],
    ("block_mask.kv_indices", ValueError, "[B, H, rows, col", change_list("kv_num_blocks", shape=(1, 1, 4))),
    ("block_mask.full_kv_indices", ValueError, "[1, 2]", change_list("full_kv_num_blocks", shape=(1, 2))),
    ("block_mask.kv_indices", ValueError, "[1, 1, 1, 3, 4]", put("block_mask", mask_of(1, 1, 1))),
    ("block_mask.kv_indices", ValueError, "at least 3 rows", resize("kv", 1, 1, 2, COLUMNS)),
    ("block_mask.kv_indices", ValueError, "one batch and head", put("block_mask", mask_of(1, 0))),
    ("block_mask", ValueError, "(1, 1) ... (1, 8)", resize("full_kv", 1, HQ, ROWS, COLUMNS)),
    ("block_mask", ValueError, "2 and 8 ... 1 and 5", put("block_mask", mask_of(1, 5))),
    ("score_mod", TypeError, "CUDA text ... int 3", put("score_mod", 3)),
    ("code", TypeError, "CUDA text ... ''", put("score_mod", "")),
    ("mask_mod", TypeError, "CUDA text ... int 3", set_mask("mask_mod", 3)),
    (OF_SCORES, ValueError, "cuda:1", capture(device=1)),
    (OF_SCORES, ValueError, "0x99", capture(framework=OTHER)),
    (OF_SCORES, ValueError, "[8, 0]", capture(shape=(HQ, 0))),
    (OF_SCORES, ValueError, "2**31", capture(shape=(2**31, 1))),
    ("captures", TypeError, "bias ... uint32", capture(dtype="uint32")),
    (OF_MASKS, ValueError, "cuda:1", mask_capture(device=1)),
]


@each(REFUSALS)
def test_refused(world: World, refusal: Refusal) -> None:
    check_refused(world, rawmla.flex_attention, optional, refusal)


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


# ---- launches


def by_token(*shape: int) -> tuple[int, ...]:
    """Strides for (batch, token, head) of a contiguous [batch, head, token, ...]."""
    batch, head, token = contiguous(shape)[:3]
    return batch, token, head


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
    q_strides=by_token(*Q),
    k_strides=by_token(*K),
    v_strides=by_token(*V),
    out_strides=by_token(*OUT),
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
# Of blocks of 128, once for all batches and heads.
EXPECTED_LISTS = BlockLists(((0, 0, 1),) * 2, ((0, 0, COLUMNS),) * 2, (COLUMNS, COLUMNS), 1, 1, 128, 128)


def changed(call: MhaForwardCall, mods: Arguments, **more: Any) -> MhaForwardCall:
    """Replace members of a call; ``mods``: members of its `Mods`."""
    assert call.mods is not None
    return call._replace(mods=call.mods._replace(**mods), **more)


def only(world: World) -> SimpleNamespace:
    """The one launch, whose header is taken apart: its name, and the text, which is not compared."""
    (launch,) = world.flex
    name, launch.text = launch.call.mods.header
    assert name == HEADER_NAME
    launch.call = changed(launch.call, {"header": ("", "")})
    return launch


def headers(world: World) -> set[Any]:
    return {launch.call.mods.header for launch in world.flex}


def test_nothing_optional(world: World) -> None:
    out = call(plain())
    assert out is world.framework.allocated[0] and len(world.framework.allocated) == 2
    launch = only(world)
    assert launch.call == EXPECTED and launch.addresses.lse == 0 and launch.more == (0,) * 6
    assert launch.text.count("kIsThere = false") == 2


def test_results(world: World) -> None:
    assert isinstance(call(plain(), return_aux=rawmla.AuxRequest())[1], rawmla.AuxOutput)
    assert call(plain(), return_aux=rawmla.AuxRequest())[1] == (None, None)
    _, (lse, max_scores) = call(plain(), return_aux=rawmla.AuxRequest(max_scores=True))
    assert lse is None and max_scores.shape == (B, HQ, L)
    _, lse = call(plain(), return_lse=True)
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    _, aux = call(plain(), return_aux=flex.AuxRequest(lse=True, max_scores=True))
    assert [launch.call.mods.max_scores for launch in world.flex] == [False, False, True, False, True]
    assert [(launch.addresses.lse, launch.more.max_scores) for launch in world.flex[2:]] == [
        (0, max_scores.ptr),
        (lse.ptr, 0),
        (aux.lse.ptr, aux.max_scores.ptr),
    ]


def test_options_change_nothing(world: World) -> None:
    names = ("BLOCK_M", "fwd_BLOCK_N", "bwd_num_warps", "num_stages", "USE_TMA", "WRITE_DQ", "PRESCALE_QK")
    options = {**dict.fromkeys(names, 1), "ROWS_GUARANTEED_SAFE": True, "BACKEND": "AUTO"}
    promises = {"BLOCKS_ARE_CONTIGUOUS": True, "FORCE_USE_FLEX_ATTENTION": True}
    for kernel_options in (None, options, promises, {}):
        call(plain(), kernel_options=kernel_options)
    assert prepared(world.flex) == [0] * 4


@pytest.mark.parametrize("scale", (0, -0.5, 0.5, np.float32(0.25), 2))
def test_scales(world: World, scale: float) -> None:
    """If it is not positive, scores are scaled before the softmax, which else scales them itself."""
    call(plain(), scale=scale)
    launch = only(world)
    is_positive = scale > 0
    assert launch.call == changed(EXPECTED, {"has_score_mod": not is_positive}, softmax_scale=scale)
    assert launch.text.count("kIsThere = false") == 1 + is_positive
    world.flex.clear()
    call(plain(), scale=scale, score_mod="score * 3")
    assert "return score;" not in only(world).text


# ---- layouts


def test_order_of_the_dimensions(world: World) -> None:
    """[b, s, h, d] seen as [b, h, s, d]; out has the same order."""
    arguments, names = plain(), ("query", "key", "value")
    for name in names:
        _, heads, tokens, columns = arguments[name].shape
        change(name, strides=(tokens * heads * columns, columns, heads * columns, 1))(arguments)
    out = call(arguments)
    launched = only(world).call
    assert out.strides == (L * HQ * EV, EV, HQ * EV, 1)
    for letter, x in zip(("q", "k", "v", "out"), (*map(arguments.get, names), out), strict=True):
        batch, head, token, _ = x.strides
        assert getattr(launched, f"{letter}_strides") == (batch, token, head), letter
    assert not world.framework.copied


@pytest.mark.parametrize(
    ("name", "changes"),
    (
        ("query", {"ptr": 0x1008}),
        ("query", {"strides": (2 * HQ * L * E, 2 * L * E, 2 * E, 2)}),
        ("key", {"strides": (HKV * S * 132, S * 132, 132, 1)}),
        ("value", {"strides": (HKV * S * EV, S * EV, -EV, 1)}),
        ("key", {"dtype": "float8_e4m3fn"}),
        ("value", {"dtype": "float8_e5m2"}),
    ),
)
def test_copied(world: World, name: str, changes: Arguments) -> None:
    """Also keys and values of FP8, in the dtype of query."""
    arguments = plain()
    change(name, **changes)(arguments)
    call(arguments)
    launch = only(world)
    assert launch.call == EXPECTED
    assert world.framework.copied == [arguments[name]]
    places = {"query": 0x1000, "key": 0x2000, "value": 0x3000} | {name: COPY + 0x1000}
    assert launch.addresses[:3] == tuple(places.values())


def test_fp8_becomes_the_dtype_of_query(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Mock(wraps=world.framework.aligned_copy)
    monkeypatch.setattr(world.framework, "aligned_copy", copy)
    arguments = plain()
    for name, dtype in (("query", "float16"), ("key", "float8_e5m2"), ("value", "float16")):
        change(name, dtype=dtype)(arguments)
    call(arguments)
    assert [x.args[1:] for x in copy.call_args_list] == [("key", "float16")]
    assert only(world).call.dtype == "float16"
    change("query", dtype="float16", ptr=0x1002)(arguments)
    call(arguments)
    made = [x.args[1:] for x in copy.call_args_list[1:]]
    assert made == [("query", None), ("key", "float16")]  # the copy of query has its dtype


def test_no_keys(world: World) -> None:
    """The kernel writes zeros; there is nothing that functions or lists would be asked for."""
    arguments = optional() | {"block_mask": mask_of(lengths=(L, 0))}
    shapes(key=(B, HKV, 0, E), value=(B, HKV, 0, EV))(arguments)
    mask_capture(shape=(HQ, 0))(arguments)
    capture(shape=(HQ, 0))(arguments)
    call(arguments)
    launch = only(world)
    assert (launch.call.max_seqlen_k, launch.call.mods.lists) == (0, None)
    assert not launch.call.mods.has_score_mod
    assert launch.more[1:] == (0,) * 5 and launch.text.count("kIsThere = false") == 2
    with pytest.raises(ValueError, match=r"^block_mask: expected seq_lengths of \(300, 0\).*too large"):
        call(arguments, block_mask=mask_of())


# ---- the memo


def test_other_addresses_and_numbers(world: World) -> None:
    for i in range(3):
        arguments = optional()
        change("query", ptr=0x10000 * (i + 1))(arguments)
        change_list("kv_indices", ptr=0x100000 * (i + 1))(arguments)
        captures = {"slope": 0.5 + i, "bias": table(ptr=0x20000 + 64 * i, shape=(HQ, 7 + i))}
        call(arguments, score_mod=rawmla.CudaMod("score * slope + bias(h, q_idx)", captures))
    assert prepared(world.flex) == [0, 0, 0]
    packed = [struct.unpack("<Q2q2if4x", launch.score_mod) for launch in world.flex]
    assert packed == [(0x20000 + 64 * i, 7 + i, 1, HQ, 7 + i, 0.5 + i) for i in range(3)]


def test_what_needs_another_launch(world: World) -> None:
    """Scales, lengths and results need no other text."""
    requests = (rawmla.AuxRequest(lse=True), rawmla.AuxRequest(max_scores=True))
    longer = {"query": FakeArray((B, HQ, L + 1, E), "bfloat16")}
    others: list[Arguments] = [{"scale": 0.5}, longer, *[{"return_aux": x} for x in requests]]
    for more in ({}, *others, {}):
        call(plain() | more)
    assert prepared(world.flex) == [0, 1, 2, 3, 4, 0] and len(headers(world)) == 1


def test_what_needs_another_text(world: World) -> None:
    arrays = (2, 2.0, table(shape=()), table(shape=(), dtype="int32"))
    mods = [rawmla.CudaMod("score * x", {"x": x}) for x in arrays]
    for mod in (*mods, "score * 2", "score * 3"):
        call(plain(), score_mod=mod)
    call(plain(), block_mask=mask_of())
    assert len(headers(world)) == 7 and prepared(world.flex) == [*range(7)]
