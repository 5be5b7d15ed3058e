"""What MLA launches: kernels, variants, grids, clusters, scratch, and the addresses of chunks.

Launches are collected instead of made. Parameters whose mistakes give wrong numbers at small sizes are left
to tests/test_emulated.py, which runs the kernels.
"""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from kernel_params import read_params

from rawmla import jit
from rawmla.jit import KernelSpec
from rawmla.kernels import (
    all_specs,
    common,
    mla_cache_rows,
    mla_combine,
    mla_dense_decode,
    mla_sparse,
    mla_sparse_prefill,
)

SPECS = set(all_specs())
NO_CACHE = mla_sparse.NO_CACHE
STREAM, SCRATCH = 0x51, 0x10000


class Launch(NamedTuple):
    """What one launch was given; `params` by the names of the kernel's members."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    params: dict[str, Any]
    cluster: tuple[int, int, int] | None
    pdl: bool

    @property
    def values(self) -> dict[str, int]:
        return dict(self.spec.defines)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """In place of kernels: notes their launches."""
    made: list[Launch] = []

    def get_kernel(spec: KernelSpec, device: int, *, capturing: Any) -> SimpleNamespace:
        assert spec in SPECS and device == 0 and capturing is not_capturing

        def launch(grid: Any, params: bytes, stream: int, *, cluster: Any = None, pdl: bool = False) -> None:
            assert stream == STREAM
            made.append(Launch(spec, grid, read_params(spec, params), cluster, pdl))

        def prepare(grid: Any, params: bytes, changing: struct.Struct, **options: Any) -> SimpleNamespace:
            def launch_prepared(stream: int, *members: int | bytes, context_is_current: bool = False) -> None:
                launch(grid, changing.pack(*members) + params[changing.size :], stream, **options)

            return SimpleNamespace(launch=launch_prepared)

        return SimpleNamespace(launch=launch, prepare=prepare)

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    monkeypatch.setattr(jit, "device_info", lambda device: SimpleNamespace(sm_count=10))
    monkeypatch.setattr(jit, "tensor_map", lambda *given: repr(given).encode().ljust(128)[:128])
    return made


def not_capturing() -> bool:
    return False


def names(launches: list[Launch]) -> list[str]:
    return [launch.spec.name for launch in launches]


# ---- plans and combines


def test_shape_of_the_combine() -> None:
    for rows, batch_invariant, grid_x, mapping in (
        (1000, False, 125, (1, 2, 2)),
        (704, False, 176, (1, 4, 1)),
        (176, False, 176, (4, 6, 1)),
        (88, False, 88, (8, 4, 1)),
        (21, False, 21, (8, 8, 1)),
        (21, True, 6, (1, 4, 1)),
        (1000, True, 250, (1, 4, 1)),
    ):
        assert mla_combine.launch_shape(rows, 3, 9, True, batch_invariant) == ((grid_x, 3, 1), mapping)
    assert mla_combine.launch_shape(8, 50, 7, False, False) == ((8, 7, 1), (8, 8, 1))


# ---- decoding


def dense_call(**changes: Any) -> mla_dense_decode.DenseDecodeCall:
    """Two tiles per KV head: 24 heads x 3 tokens."""
    values: dict[str, Any] = dict(
        device=0, dtype="bfloat16", b=7, s_q=3, h_q=48, h_kv=2, d_qk=576, page_block_size=192,
        num_blocks=1000, q_strides=(100_008, 30_008, 584), q_rope_strides=(70_008, 20_008, 200),
        k_strides=(500_000, 1160, 592), block_table_stride=33, max_seqlen=40_000, num_parts=66,
        object_layout=True, batch_invariant=False, out_strides=(80_000, 25_000, 520), softmax_scale=0.3,
        causal=False,
    )  # fmt: skip
    return mla_dense_decode.DenseDecodeCall(**{**values, **changes})


def launch_decode(call: mla_dense_decode.DenseDecodeCall) -> int:
    """Launch it once; returns the scratch bytes it asked for."""
    prepared = mla_dense_decode.PreparedDenseDecode(call, not_capturing)
    fields = mla_dense_decode.DenseDecodeAddresses._fields
    addresses = mla_dense_decode.DenseDecodeAddresses(*[0x1000 * (i + 1) for i in range(len(fields))])
    prepared.launch(STREAM, addresses, SCRATCH)
    return prepared.scratch_bytes


@pytest.mark.parametrize(
    ("changes", "kernel", "box", "cluster"),
    [
        ({}, "mla_dense_decode", 64, 2),
        ({"dtype": "float16", "d_qk": 512}, "mla_dense_decode", 64, 2),
        ({"page_block_size": 16}, "mla_dense_decode", 16, 1),
        ({"page_block_size": 32, "batch_invariant": True}, "mla_dense_decode", 32, 1),
        ({"s_q": 1, "h_q": 64, "h_kv": 1, "b": 200}, "mla_dense_decode", 64, 1),
        ({"s_q": 1, "h_q": 16, "h_kv": 1}, "mla_dense_decode_few_rows", 64, 1),
        ({"s_q": 1, "h_q": 17, "h_kv": 1}, "mla_dense_decode", 64, 1),
        ({"s_q": 1, "h_q": 3, "h_kv": 1, "page_block_size": 16}, "mla_dense_decode_few_rows", 16, 1),
    ],
    ids=str,
)
def test_dense_decode(
    launches: list[Launch], changes: dict[str, Any], kernel: str, box: int, cluster: int
) -> None:
    call = dense_call(**changes)
    scratch_bytes = launch_decode(call)
    row_bytes = {"bfloat16": 2 * 512 + 12, "float16": 4 * 512 + 12}[call.dtype]
    blocks = -(-call.max_seqlen // 64)
    max_splits = common.max_splits(call.num_parts, call.b, blocks, call.batch_invariant)
    assert scratch_bytes == max_splits * call.s_q * call.h_q * row_bytes
    main, merge = launches
    assert (main.spec.name, merge.spec.name) == (kernel, "mla_combine") and main.pdl and merge.pdl
    expected = {"BOX_ROWS": box, "D_QK": call.d_qk, "DTYPE": common.DTYPES[call.dtype], "CLUSTER": cluster}
    assert all(main.values[name] == expected[name] for name in expected.keys() & main.values.keys())
    rows = call.s_q * call.h_q // call.h_kv
    assert main.grid == (-(-rows // 64), call.h_kv, call.num_parts)
    assert main.cluster == (None if cluster == 1 else (2, 1, 1)) and merge.cluster is None
    # tests/test_division.py says for which numbers this divides exactly.
    assert main.params["page_magic"] == -(-(2**32) // (call.page_block_size // 16)) % 2**32
    assert merge.params["by_request"] == (call.batch_invariant or call.b <= call.num_parts)


def test_one_block_needs_no_combine(launches: list[Launch]) -> None:
    assert launch_decode(dense_call(max_seqlen=64)) == 0
    cache = sparse_call().cache._replace(topk=64)
    assert launch_sparse(sparse_call(cache=cache, extra=NO_CACHE)) == 0
    assert [main.params["max_splits"] for main in launches] == [0, 0]


def test_a_stride_that_is_not_used_may_be_of_any_size() -> None:
    """32 bits hold all strides but that of a single request with many tokens."""
    strides = common.q_stride_params((8 * (2**32 + 5), 576, 576), (64, 64, 64))
    assert strides["q_stride_b"] == 5 and strides["q_stride_s"] == 72 and strides["q_rope_stride_h"] == 8


def sparse_call(**changes: Any) -> mla_sparse.SparseCall:
    """Two tiles of heads per token."""
    values: dict[str, Any] = dict(
        device=0, format="v32", d_qk=576, load_bytes=16, b=7, s_q=3, h_q=70,
        cache=mla_sparse.Cache(64, 1000, 42_000, 656, 2050, 6200, 2060),
        extra=mla_sparse.Cache(61, 333, 40_016, 672, 513, 1600, 520),
        q_strides=(200_000, 45_000, 584), q_rope_strides=(100_000, 22_000, 200), num_parts=22,
        object_layout=True, batch_invariant=False, out_strides=(150_000, 40_000, 528), softmax_scale=0.3,
    )  # fmt: skip
    return mla_sparse.SparseCall(**{**values, **changes})


SPARSE_ADDRESSES = mla_sparse.SparseAddresses(
    q=0x1000, q_rope=0x1800, k_cache=0x2000, extra_k_cache=0x2100, indices=0x3000, extra_indices=0x3100,
    topk_length=0x4000, extra_topk_length=0x4100, attn_sink=0x4F00, sched_meta=0x5000, num_splits=0x6000,
    out=0x7000, lse=0x8000, max_logits=0x8F00,
)  # fmt: skip


def launch_sparse(call: mla_sparse.SparseCall) -> int:
    """Launch it once; returns the scratch bytes it asked for."""
    prepared = mla_sparse.PreparedSparse(call, not_capturing)
    prepared.launch(STREAM, SPARSE_ADDRESSES, SCRATCH)
    return prepared.scratch_bytes


LARGE = mla_sparse.Cache(576, 2**24, 377_856, 656, 64, 64, 64)  # > 2^31 slots
V4: dict[str, Any] = {"format": "model1", "d_qk": 512}
BF16: dict[str, Any] = {"format": "bf16", "extra": NO_CACHE}


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "mla_sparse_fp8_cluster"),
        ({**V4, "load_bytes": 8, "object_layout": False}, "mla_sparse_fp8_cluster"),
        ({"h_q": 64}, "mla_sparse_fp8"),  # an odd number of tiles
        ({"b": 2}, "mla_sparse_fp8"),  # short parts
        ({**V4, "b": 2, "batch_invariant": True}, "mla_sparse_fp8_cluster"),
        ({"b": 900, "s_q": 1, "extra": NO_CACHE, "lse_factor": 1.0}, "mla_sparse_fp8_cluster"),
        ({"h_q": 16, "load_bytes": 8}, "mla_sparse_fp8_few_heads"),
        ({"h_q": 16, "extra": NO_CACHE, "s_q": 1, "lse_factor": 0.5}, "mla_sparse_fp8_few_heads"),
        ({"cache": LARGE}, "mla_sparse_fp8"),
        ({"format": "bf16", "b": 200, "h_q": 64, "s_q": 1}, "mla_sparse_bf16"),
        ({**BF16, "d_qk": 512, "batch_invariant": True}, "mla_sparse_bf16 in clusters"),
        ({**BF16, "b": 900, "s_q": 1, "lse_factor": 1.0}, "mla_sparse_bf16 in clusters"),
    ],
    ids=str,
)
def test_sparse_decode(launches: list[Launch], changes: dict[str, Any], kernel: str) -> None:
    """A combine follows; clusters share tiles of heads."""
    call = sparse_call(**changes)
    scratch_bytes = launch_sparse(call)
    main, merge = launches
    prefill = call.lse_factor is not None
    blocks = sum(-(-cache.topk // 64) for cache in (call.cache, call.extra))
    max_splits = common.max_splits(call.num_parts, call.b, blocks, call.batch_invariant)
    assert max_splits and scratch_bytes == max_splits * call.s_q * call.h_q * (2 * 512 + 12 + 4 * prefill)
    tiles = 1 if "few_heads" in kernel else -(-call.h_q // 64)
    assert main.spec.name == kernel.removesuffix(" in clusters") and main.pdl and merge.pdl
    assert main.cluster == ((2, 1, 1) if "cluster" in kernel else None) and merge.cluster is None
    assert main.grid == (tiles * call.s_q, 1, call.num_parts) and main.params["head_tiles"] == tiles
    by_request = call.batch_invariant or call.b <= call.num_parts
    shape = (call.s_q * call.h_q, call.b, call.num_parts, by_request, call.batch_invariant)
    grid, mapping = mla_combine.launch_shape(*shape)
    assert (merge.grid, merge.spec) == (grid, mla_combine.spec("bfloat16", mapping, prefill))
    slots = [min(cache.num_blocks * cache.page_block_size, 2**31) for cache in (call.cache, call.extra)]
    assert [*main.params["cache_slots"]] == slots


# ---- prefill: query tokens are the requests


def prefill_call(**changes: Any) -> mla_sparse.SparseCall:
    values: dict[str, Any] = dict(
        format="bf16", d_qk=576, load_bytes=16, b=1031, s_q=1, h_q=16,
        cache=mla_sparse.Cache(1, 1000, 1280, 1280, 100, 120, 0), extra=NO_CACHE,
        q_strides=(45_000, 0, 584), q_rope_strides=(22_000, 0, 200), out_strides=(16 * 528, 0, 528),
        num_parts=66, limited=True, lse_factor=0.5,
    )  # fmt: skip
    return sparse_call(**{**values, **changes})


def launch_prefill(call: mla_sparse.SparseCall) -> int:
    """Launch it once; returns the scratch bytes it asked for."""
    prepared = mla_sparse_prefill.prepare(call, not_capturing)
    absent = ("extra_k_cache", "extra_indices", "extra_topk_length", "sched_meta", "num_splits")
    addresses = SPARSE_ADDRESSES._replace(topk_length=0x4000 * call.limited, **dict.fromkeys(absent, 0))
    prepared.launch(STREAM, addresses, SCRATCH)
    return prepared.scratch_bytes


@pytest.mark.parametrize(
    ("s_q", "topk", "uniform"),
    [
        (1, 2048, (32, 32, 1)),
        (64, 2048, (32, 32, 32)),
        (132, 640, (10, 13, 26)),
        (4096, 512, (8, 11, 683)),
    ],
)
def test_prefill_without_a_plan(
    launches: list[Launch], s_q: int, topk: int, uniform: tuple[int, ...]
) -> None:
    """Tokens that select equally many: attention, and the combine if they are cut."""
    cache = mla_sparse.Cache(1, 8192, 1152, 1152, topk, topk, 0)
    scratch = launch_prefill(prefill_call(b=s_q, h_q=128, cache=cache, limited=False))
    split = s_q in (1, 4096)
    assert names(launches) == ["mla_sparse_bf16", "mla_combine"][: 1 + split]
    assert all(launch.params["uniform"] == uniform for launch in launches)
    assert launches[0].params["max_splits"] == (132 if split else 0)
    assert scratch == (132 * 128 * (1024 + 16) if split else 0)
    assert all(merge.params["by_request"] == (s_q == 1) for merge in launches[1:])


@pytest.mark.parametrize("limited", (False, True))
def test_batch_invariant_prefill(launches: list[Launch], limited: bool) -> None:
    """Nothing but attention on whole tokens. It reads topk_length before it waits for the kernel ahead, so it
    may not start before that is complete.
    """
    assert launch_prefill(prefill_call(batch_invariant=True, limited=limited)) == 0
    (attention,) = launches
    assert attention.spec.name == "mla_sparse_bf16" and attention.pdl is not limited
    assert attention.params["uniform"] == (2, 2, 32)  # 1,031 tokens of 2 blocks in 66 parts
    assert attention.params["max_splits"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"h_q": 64},
        {"h_q": 24, "out_strides": (24 * 528, 0, 528)},
        {"b": 511},
        {"out_strides": (17 * 528, 0, 528)},
        {"cache": mla_sparse.Cache(1, 1601, 1280, 1280, 100, 120, 0)},
        {"cache": mla_sparse.Cache(1, 32_769, 1280, 1280, 4096, 4096, 0)},
        {"cache": mla_sparse.Cache(1, 1000, 1280, 1280, 4097, 4097, 0)},
    ],
    ids=(
        "groups",
        "a tile of heads",
        "no divisor",
        "few",
        "slice of heads",
        "seldom",
        "many rows",
        "many indices",
    ),
)
def test_tokens_that_are_attended_in_groups(launches: list[Launch], changes: dict[str, Any]) -> None:
    """Of four tokens, and the three that are left one by one."""
    launch_prefill(prefill_call(**changes))
    united = not changes
    grouped = [one.values["GROUP_TOKENS"] for one in launches if one.spec.name == "mla_sparse_bf16"]
    assert grouped == ([4, 1] if united else [1])
    assert ("mla_unite_selections" in names(launches)) == united
    assert all(launch.pdl for launch in launches)


@pytest.mark.parametrize("format", ("v32", "model1"))
@pytest.mark.parametrize(
    ("changes", "cache", "copied"),
    [
        ({}, {}, ("v32", "model1")),
        ({"b": 31}, {"num_blocks": 47}, ()),  # 2,491 rows, 19,840 selected
        ({"h_q": 3}, {}, ()),
        ({"load_bytes": 8}, {}, ("model1",)),
        ({"h_q": 16}, {}, ("model1",)),
        ({}, {"block_stride": 2**31}, ()),
    ],
    ids=("often", "seldom", "no room", "unaligned", "few heads", "blocks too far apart"),
)
def test_fp8_rows_that_are_selected_often_are_copied(
    launches: list[Launch], format: str, changes: dict[str, Any], cache: dict[str, int], copied: Any
) -> None:
    layout = mla_cache_rows.QUANTIZED[format]
    of_q = (64 * layout.d_qk, 0, layout.d_qk)
    call: dict[str, Any] = dict(
        format=format, d_qk=layout.d_qk, b=32, h_q=64, q_strides=of_q, q_rope_strides=of_q, num_parts=132,
        cache=mla_sparse.Cache(53, 10, 60_000, layout.row_bytes, 640, 700, 0)._replace(**cache),
        out_strides=(64 * 512, 0, 512),
    )  # fmt: skip
    launch_prefill(prefill_call(**{**call, **changes}))
    assert ("mla_cache_gather" in names(launches)) == (format in copied)
    if format in copied:
        assert names(launches)[::2][:2] == ["mla_cache_gather", "mla_sparse_bf16"]
