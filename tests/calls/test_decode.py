"""Decoding, dense and sparse: what each alone refuses, and what its launches get."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawmla
from calls.fakes import (
    COPY,
    D_QK,
    EXTRA_BLOCKS,
    EXTRA_PAGE,
    EXTRA_TOPK,
    H_KV,
    H_Q,
    K_STRIDES,
    NUM_BLOCKS,
    PAGE,
    PARTS,
    S_Q,
    SPARSE_COLUMNS,
    TOPK,
    Arguments,
    B,
    FakeArray,
    World,
    both,
    change,
    contiguous,
    dense_arguments,
    empty_plan_with,
    out_array,
    prefill_arguments,
    put,
    sparse_arguments,
)
from calls.refusals import Refusal, check_all_refused
from rawmla.call import arrays, frameworks
from rawmla.kernels import mla_dense_decode

decode = rawmla.flash_mla_with_kvcache
Make = Callable[[], Arguments]
CACHES = ("k_cache", "extra_k_cache")
INDICES = ("indices", "extra_indices_in_kvcache")


def full_sparse() -> Arguments:
    """A sparse call with all that is optional."""
    return sparse_arguments(extra=True)


def plan_without_config() -> Any:
    """A plan of another library, of no class of plans."""
    return SimpleNamespace(have_initialized=False, config=None, tile_scheduler_metadata=None, num_splits=None)


both_kinds = pytest.mark.parametrize("make", (dense_arguments, full_sparse), ids=("dense", "sparse"))


def launch_of(world: World) -> Any:
    (launch,) = world.decodes + world.sparse
    return launch


# ---- what is refused


def int64(*names: str) -> list[Refusal]:
    """The dtype that indices have by mistake."""
    return [(name, TypeError, "int32 ... got int64", {"dtype": "int64"}) for name in names]


PLAN_ROWS: list[Refusal] = [
    *int64("tile_scheduler_metadata", "num_splits"),
    ("out", ValueError, "multiples of 8", out_array(strides=(16448, 8224, 514, 1))),
    ("out", ValueError, "overlap", out_array(strides=(16384, 8192, 256, 1))),
    ("out", ValueError, "16-byte aligned address", out_array(ptr=0x7008)),
    ("tile_scheduler_metadata", ValueError, "[num_sm_parts, 8]", {"shape": (0, 8)}),
    ("tile_scheduler_metadata", ValueError, "1 to 65535 rows", {"shape": (65_536, 8)}),
    ("tile_scheduler_metadata", ValueError, "contiguous", {"strides": (16, 1)}),
    ("tile_scheduler_metadata", ValueError, "16-byte aligned", {"ptr": 0x5004}),
    *[
        ("num_splits", ValueError, f"None with a {type(x).__name__}", put("tile_scheduler_metadata", x))
        for x in (rawmla.FlashMLASchedMeta(), plan_without_config())
    ],
    ("tile_scheduler_metadata", ValueError, "both arrays", empty_plan_with(num_splits=FakeArray((B + 1,)))),
    ("num_splits", TypeError, "NoneType", empty_plan_with(tile_scheduler_metadata=FakeArray((PARTS, 8)))),
    ("tile_scheduler_metadata", ValueError, "config None", empty_plan_with(have_initialized=True)),
]


@both_kinds
def test_plans_and_results_that_are_refused(world: World, make: Make) -> None:
    check_all_refused(world, decode, make, PLAN_ROWS)


def q_and_cache(s_q: int, h_q: int, h_kv: int) -> Callable[[Arguments], None]:
    return both(
        change("q", shape=(B, s_q, h_q, D_QK)), change("k_cache", shape=(NUM_BLOCKS, PAGE, h_kv, D_QK))
    )


def pages_of_4032(max_blocks: int) -> Callable[[Arguments], None]:
    """A table of this width, with pages of a size that limits it."""
    return both(
        change("k_cache", shape=(NUM_BLOCKS, 4032, H_KV, D_QK)), change("block_table", shape=(B, max_blocks))
    )


def resize(b: int, s_q: int) -> Callable[[Arguments], None]:
    """Another number of requests or of query tokens."""
    leading = dict.fromkeys(("q", *INDICES), (b, s_q))
    leading |= dict.fromkeys(("block_table", "cache_seqlens", "topk_length", "extra_topk_length"), (b,))

    def apply(arguments: Arguments) -> None:
        for name, sizes in leading.items():
            if arguments.get(name) is not None:
                change(name, shape=(*sizes, *arguments[name].shape[len(sizes) :]))(arguments)

    return apply


MOST_REQUESTS = both(resize(65_536, 1), change("num_splits", shape=(65_537,)))
DENSE_ROWS: list[Refusal] = [
    *int64("block_table", "cache_seqlens"),
    ("q", ValueError, "h_q 15 and h_kv 2", {"shape": (B, S_Q, 15, D_QK)}),
    ("q", ValueError, "h_q 0 and h_kv 2", {"shape": (B, S_Q, 0, D_QK)}),
    ("q", ValueError, "h_q 16 and h_kv 0", change("k_cache", shape=(NUM_BLOCKS, PAGE, 0, D_QK))),
    *[
        ("k_cache", ValueError, f"multiple of 64, got {page}", {"shape": (NUM_BLOCKS, page, H_KV, D_QK)})
        for page in (0, 1, 8, 61, 65, 96)
    ],
    ("k_cache", ValueError, "at least 1 block", {"shape": (0, PAGE, H_KV, D_QK)}),
    ("k_cache", ValueError, "16-byte aligned", {"ptr": 0x2008}),
    ("k_cache", ValueError, "TMA", {"strides": (2**39, *K_STRIDES[1:])}),
    ("k_cache", ValueError, "multiples of 8", {"strides": (K_STRIDES[0] + 4, *K_STRIDES[1:])}),
    ("k_cache", ValueError, "multiples of 8", {"strides": (-K_STRIDES[0], *K_STRIDES[1:])}),
    ("k_cache", ValueError, "multiples of 8", {"strides": (0, *K_STRIDES[1:])}),
    ("k_cache", ValueError, "at most 65535", q_and_cache(S_Q, 65_536, 65_536)),
    ("q", ValueError, "2**31 rows", {"shape": (B, 2**27, H_Q, D_QK)}),
    ("q", ValueError, "at most 4214848 rows", q_and_cache(4121, 1023, 1)),
    ("q", ValueError, "within 64 GiB", {"strides": (2**35 // 2 // 8 * 8 + 8, H_Q * D_QK, D_QK, 1)}),
    ("q", ValueError, "at most 16384", both(resize(16385, 1), empty_plan_with())),
    ("q", ValueError, "at most 65535 requests", both(MOST_REQUESTS, put("enable_batch_invariant", True))),
    ("block_table", ValueError, "at most 277094672 tokens", pages_of_4032(68_724)),
    *[
        (name, ValueError, "None without indices", put(name, FakeArray((B, S_Q, 64))))
        for name in ("attn_sink", *CACHES[1:], *INDICES[1:], "topk_length", "extra_topk_length")
    ],
]


def test_dense_calls_that_are_refused(world: World) -> None:
    check_all_refused(world, decode, dense_arguments, DENSE_ROWS)


@pytest.mark.parametrize(
    "largest",
    (
        q_and_cache(4120, 1023, 1),
        pages_of_4032(68_723),
        MOST_REQUESTS,
        change("tile_scheduler_metadata", shape=(65_535, 8)),
    ),
)
def test_largest_sizes(world: World, largest: Callable[[Arguments], None]) -> None:
    """One less than the rows refuse."""
    arguments = dense_arguments()
    largest(arguments)
    decode(**arguments)
    assert len(world.decodes) == 1


def without(*names: str) -> Callable[[Arguments], None]:
    """A change that gives None for these arguments."""
    return both(*[put(name, None) for name in names])


def of_layout(layout: str, spoilt: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    """The same call over a cache of another layout, spoilt afterwards."""
    return both(lambda arguments: arguments.update(sparse_arguments(layout, extra=True)), spoilt)


def cache_rows(name: str, blocks: int, page: int) -> list[Refusal]:
    """What is refused of a cache of a sparse call, or of the extra one."""
    wrong = {"v32": (584, 655, 576), "model1": (656, 576), "bf16 576": (512,), "bf16 512": (576,)}
    rows_apart, large_pages = (576, 2**31, 576, 1), (2, 3_728_271, 1, 584)
    rows = page * 576
    return [
        (name, TypeError, "is_fp8_kvcache=True", {"dtype": "bfloat16"}),
        (name, TypeError, "is_fp8_kvcache=False", of_layout("bf16 576", change(name, dtype="uint8"))),
        (name, TypeError, "is_fp8_kvcache=False", of_layout("bf16 512", change(name, dtype="float16"))),
        *[
            (
                name,
                ValueError,
                f"1, {SPARSE_COLUMNS[layout]}] for this d_qk",
                of_layout(layout, change(name, shape=(blocks, page, 1, columns))),
            )
            for layout, several in wrong.items()
            for columns in several
        ],
        (name, ValueError, "at least 1 block", {"shape": (0, page, 1, 656)}),
        (name, ValueError, "multiples of 8 bytes", {"strides": (page * 656 + 4, 656, 656, 1)}),
        (name, ValueError, "multiples of 8 bytes", {"ptr": 0x2004}),
        *[
            (name, ValueError, "multiples of 16 bytes", of_layout("bf16 576", change(name, **changes)))
            for changes in (
                {"ptr": 0x2008},
                {"strides": (rows + 4, 576, 576, 1)},
                {"strides": (page * 580, 580, 580, 1)},
                {"strides": (rows, -576, 576, 1)},
            )
        ],
        (name, ValueError, "than 4 GiB apart", of_layout("bf16 576", change(name, strides=rows_apart))),
        (name, ValueError, "less than 2 GiB", of_layout("model1", change(name, shape=large_pages))),
    ]


def index_rows(name: str, width: int, text: str) -> list[Refusal]:
    return [
        *[
            (name, ValueError, f"[{B}, {S_Q}, {text}]", {"shape": shape})
            for shape in ((B + 1, S_Q, width), (B, S_Q + 1, width), (B, S_Q, 0))
        ],
        (name, ValueError, "no negative stride", {"strides": (-2 * width, width, 1)}),
        (name, ValueError, "no negative stride", {"strides": (2 * width, -width, 1)}),
    ]


SPARSE_ROWS: list[Refusal] = [
    *int64(*INDICES, "topk_length", "extra_topk_length"),
    ("attn_sink", TypeError, "float32 ... got bfloat16", {"dtype": "bfloat16"}),
    ("q", ValueError, "576 or 512", {"shape": (B, S_Q, H_Q, 128)}),
    ("q", ValueError, "at least 1 head", {"shape": (B, S_Q, 0, 576)}),
    *cache_rows("k_cache", NUM_BLOCKS, PAGE),
    *cache_rows("extra_k_cache", EXTRA_BLOCKS, EXTRA_PAGE),
    *index_rows("indices", TOPK, "topk"),
    *index_rows("extra_indices_in_kvcache", EXTRA_TOPK, "extra_topk"),
    ("extra_indices_in_kvcache", ValueError, "None", without(INDICES[1], "extra_topk_length")),
    ("extra_k_cache", ValueError, "None", None),
    ("extra_topk_length", ValueError, "without extra_k_cache", without(CACHES[1], INDICES[1])),
    ("q", ValueError, "at most 16384", both(resize(16385, 1), empty_plan_with())),
]


def test_sparse_calls_that_are_refused(world: World) -> None:
    check_all_refused(world, decode, full_sparse, SPARSE_ROWS)


# ---- what launches get


@both_kinds
@pytest.mark.parametrize("scale", (2, np.float32(0.5), np.float64(0.5), np.int64(1), 1.7e38, 2e-38))
def test_scalars_of_numpy(world: World, make: Make, scale: Any) -> None:
    options = {"head_dim_v": np.int64(512), "enable_batch_invariant": np.True_, "causal": np.False_}
    decode(**make() | options, softmax_scale=scale)
    args = launch_of(world)
    assert args.softmax_scale == float(scale) and type(args.softmax_scale) is float
    assert args.batch_invariant is True


def single_head(stride: int) -> Callable[[Arguments], None]:
    """A cache of one head, whose stride is never stepped over."""
    return change("k_cache", shape=(NUM_BLOCKS, PAGE, 1, D_QK), strides=(PAGE * 576, 576, stride, 1))


DENSE_FIELDS: list[tuple[Callable[[Arguments], None], str, Any]] = [
    (change("q", shape=(B, 1, H_Q, D_QK), strides=(9216, 3, D_QK, 1)), "q_strides", (9216, 9216, D_QK)),
    (single_head(0), "k_strides", (PAGE * 576, 576, 576)),  # as CuPy has it
    (single_head(5), "k_strides", (PAGE * 576, 576, 576)),
    (change("block_table", shape=(B, 0), strides=(1, 1), ptr=0), "max_seqlen", 0),
    (change("block_table", shape=(B, 1)), "scratch_bytes", 0),  # nothing can be split
    (change("num_splits", shape=(100,)), "num_splits", 0x6000),
]
SPARSE_FIELDS: list[tuple[Callable[[Arguments], None], str, Any]] = [
    *[
        (of_layout("model1", change("k_cache", dtype=dtype)), "format", "model1")
        for dtype in ("uint8", "int8", "float8_e4m3fn")
    ],
    (change("k_cache", ptr=0x2008), "load_bytes", 8),
    (change("k_cache", strides=(PAGE * 656 + 8, 656, 656, 1)), "load_bytes", 8),
    (change("k_cache", strides=(PAGE * 656 + 16, 656, 656, 1)), "load_bytes", 16),
    (change("extra_k_cache", ptr=0xB008), "load_bytes", 8),
    (of_layout("model1", change("k_cache", ptr=0x2008)), "load_bytes", 8),
    (of_layout("model1", change("extra_k_cache", strides=(576 * 64, 584, 584, 1))), "load_bytes", 16),
]


@pytest.mark.parametrize(
    ("make", "apply", "field", "value"),
    [*[(dense_arguments, *row) for row in DENSE_FIELDS], *[(full_sparse, *row) for row in SPARSE_FIELDS]],
)
def test_shapes_and_strides(
    world: World, make: Make, apply: Callable[[Arguments], None], field: str, value: Any
) -> None:
    """Dimensions of one element are never stepped over: their strides are free."""
    arguments = make()
    apply(arguments)
    decode(**arguments)
    assert getattr(launch_of(world), field) == value and not world.framework.copied


@pytest.mark.parametrize("factor", (-1, 0), ids=("negative", "expanded"))
@pytest.mark.parametrize(
    ("function", "make"),
    ((decode, dense_arguments), (decode, full_sparse), (rawmla.flash_mla_sparse_fwd, prefill_arguments)),
    ids=("dense", "sparse", "prefill"),
)
def test_q_that_is_copied(world: World, function: Any, make: Make, factor: int) -> None:
    arguments = make()
    first, *others = contiguous(arguments["q"].shape)
    change("q", strides=(factor * first, *others))(arguments)
    function(**arguments)
    args = launch_of(world)
    assert world.framework.copied == [arguments["q"]]
    assert (args.q, args.q_rope) == (COPY, COPY + 2 * 512)
    wanted = (first, 0, 576) if make is prefill_arguments else (first, H_Q * 576, 576)
    assert args.q_strides == args.q_rope_strides == wanted


def test_table_and_lengths_are_not_read_with_indices(world: World) -> None:
    decode(**sparse_arguments() | {"block_table": object(), "cache_seqlens": object()})
    assert len(world.sparse) == 1 and not {"block_table", "cache_seqlens"} & set(world.reads)


# ---- what is remembered


BATCH = ("block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits")


class Exported(SimpleNamespace):
    """An array of another library: reading it makes an array of the framework's."""


class TestPlanOfTheLastCall:
    """Layers share the plan, whose arrays are read once."""

    def test_plan_is_read_once(self, world: World) -> None:
        arguments = dense_arguments()
        for layer in range(3):
            change("q", ptr=0x100000 * (layer + 1))(arguments)
            decode(**arguments)
        every_time = ["q", "k_cache", *BATCH[:2]]
        assert world.reads == [*every_time, *BATCH[2:], *every_time, *every_time]

    @pytest.mark.parametrize("name", BATCH)
    def test_changed_in_place(self, world: World, name: str) -> None:
        """A new address is launched. A new shape is checked, and so is another object."""
        arguments = dense_arguments()
        decode(**arguments)
        arguments[name].ptr = 0xF000
        decode(**arguments)
        args = world.decodes[1]
        assert 0xF000 in (args.block_table, args.cache_seqlens, args.sched_meta, args.num_splits)
        arguments[name].shape = (2, 2, 2)
        with pytest.raises(ValueError, match=rf"^{name}: expected shape"):
            decode(**arguments)
        arguments = dense_arguments()
        decode(**arguments)
        change(name, dtype="int64")(arguments)
        with pytest.raises(TypeError, match=rf"^{name}: expected dtype int32"):
            decode(**arguments)

    @pytest.mark.parametrize("name", BATCH[2:])
    def test_gone(self, world: World, name: str) -> None:
        """A forgotten array is not taken for a None that is passed next."""
        arguments = dense_arguments()
        decode(**arguments)
        arguments[name] = None
        gc.collect()
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected .* got None"):
            decode(**arguments)

    @pytest.mark.parametrize("name", BATCH)
    def test_array_of_another_library(self, world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """It is taken over anew by every call, and kept until the launch."""
        alive: list[bool] = []
        taken: list[weakref.ref[FakeArray]] = []

        def read(x: Exported, argument: str) -> frameworks.Fields:
            copy = x.array.but()
            taken.append(weakref.ref(copy))
            return arrays.READERS[FakeArray](copy, argument)

        launch = lambda *arguments: alive.append(taken[-1]() is not None)  # noqa: E731
        launched = SimpleNamespace(scratch_bytes=0, launch=launch)
        monkeypatch.setitem(arrays.READERS, Exported, read)
        monkeypatch.setattr(mla_dense_decode, "PreparedDenseDecode", lambda call, capturing: launched)
        arguments = dense_arguments()
        arguments[name] = Exported(array=arguments[name])
        for _ in range(2):
            decode(**arguments)
        assert alive == [True, True] and len(taken) == 2
