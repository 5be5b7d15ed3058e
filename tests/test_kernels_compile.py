"""Every kernel variant as the compiler makes it, and what its C++ and its Python side have to agree on."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_probe import assert_in_header, assert_in_kernel, assert_no_losses
from full_cases import full_unless
from kernel_params import DENSE_DECODE, FP8_DECODE, SPARSE_DECODE, family, read_params
from test_flex_backward_kernels import BY_QUERY

import rawmla
from kit import plans
from rawmla import jit, reference
from rawmla.flex.functions import header_of
from rawmla.flex.mods import CudaMod
from rawmla.jit import KernelSpec
from rawmla.jit.sources import find_source_root
from rawmla.kernels import (
    all_specs,
    block_mask,
    common,
    default_specs,
    flex_captured,
    mha_backward_variants,
    mha_forward_variants,
    mla_cache_gather,
    mla_cache_rows,
    mla_combine,
    mla_dense_decode,
    mla_metadata,
    mla_sparse,
    mla_sparse_prefill,
    mla_unite_selections,
)
from rawmla.kernels.common import divisor
from rawmla.kernels.operations import OPERATIONS, OPTIONS, specs_of

SPECS = all_specs()
# One variant of each, for decoding and for prefill
BY_KERNEL = {family(spec): spec for spec in reversed(SPECS)}
BACKWARD = {
    *("mha_backward_prepare", "mha_backward", "mha_backward_by_product", "mha_backward_finish"),
    "mha_backward_clear",
}
# What every run compiles: sparse attention as for prefill, which has more to do. Kernels of the backward have
# a file of their own.
QUICK = {
    spec
    for (name, prefill), spec in BY_KERNEL.items()
    if (prefill or name not in SPARSE_DECODE) and name not in BACKWARD
}


def of(name: str) -> list[KernelSpec]:
    return [spec for spec in SPECS if spec.name == name]


def test_variants() -> None:
    assert len(set(SPECS)) == len(SPECS) and set(default_specs()) < set(SPECS)
    around = {"mla_cache_gather", "mla_cache_write", "mla_convert_indices", "mla_merge_states"}
    decoding = {"mla_metadata", "mla_combine", *DENSE_DECODE, *SPARSE_DECODE}
    prefill = {"mla_combine", *SPARSE_DECODE}
    uniting = {"mla_find_not_finite", "mla_unite_selections"}
    dense = {"mha_forward", "mha_combine", *BACKWARD}
    masks = {"block_mask_lists", "block_mask_ranks", "block_mask_scatter", "flex_captured_finish"}
    assert set(BY_KERNEL) == {(name, False) for name in decoding | around | uniting | dense | masks} | {
        (name, True) for name in prefill
    }
    assert not any(prefill for _, prefill in map(family, default_specs()))
    values = {spec: dict(spec.defines) for spec in of("mla_dense_decode")}
    found = {(v["DTYPE"], v["D_QK"], v["BOX_ROWS"], v["CLUSTER"]) for v in values.values()}
    boxes = {(64, 1), (64, 2), (32, 1), (16, 1)}
    assert found == {(dtype, d_qk, *box) for dtype in (0, 1) for d_qk in (576, 512) for box in boxes}
    few_rows = [dict(spec.defines) for spec in of("mla_dense_decode_few_rows")]
    assert {(v["DTYPE"], v["D_QK"], v["BOX_ROWS"]) for v in few_rows} == {variant[:3] for variant in found}
    formats = ((0, 576, 8), (0, 576, 16), (1, 512, 8), (1, 512, 16))
    for name in FP8_DECODE:
        values = {spec: dict(spec.defines) for spec in of(name)}
        sparse = sorted((v["FORMAT"], v["D_QK"], v["LOAD_BYTES"], v["MAX_LOGITS"]) for v in values.values())
        assert sparse == [(*format, prefill) for format in formats for prefill in (0, 1)]
    values = {spec: dict(spec.defines) for spec in of("mla_sparse_bf16")}
    sparse = sorted((v["D_QK"], v["LOAD_BYTES"], v["MAX_LOGITS"], v["GROUP_TOKENS"]) for v in values.values())
    groups = ((0, 1), (1, 1), (1, 2), (1, 4), (1, 8))
    assert sparse == [(d_qk, 16, *group) for d_qk in (512, 576) for group in groups]
    values = {spec: dict(spec.defines) for spec in of("mla_sparse_fp8_few_heads")}
    few_heads = sorted((v["LOAD_BYTES"], v["MAX_LOGITS"]) for v in values.values())
    assert few_heads == [(8, 0), (8, 1), (16, 0), (16, 1)]
    values = {spec: dict(spec.defines) for spec in of("mla_combine")}
    combines = {(v["DTYPE"], v["MAX_LOGITS"]) for v in values.values()}
    assert combines == {(0, 0), (1, 0), (0, 1)} and len(values) == 3 * len(mla_combine.MAPPINGS)
    for arguments in (
        ("v32", 512, 16),
        ("model1", 576, 16),
        ("bf16", 576, 8),
        ("v32", 576, 4),
        ("fp8", 576, 16),
    ):
        with pytest.raises(ValueError, match="^sparse decode: expected"):
            mla_sparse.spec(*arguments)


def loaded_by(monkeypatch: pytest.MonkeyPatch, *operations: str, **options: Any) -> list[KernelSpec]:
    """What warmup loads."""
    loaded: list[KernelSpec] = []
    with monkeypatch.context() as patched:
        patched.setattr(jit, "get_kernel", lambda spec, device: loaded.append(spec))
        rawmla.warmup(*operations, **options, device=0)
    assert len(set(loaded)) == len(loaded) and set(loaded) <= set(SPECS)
    return loaded


def test_warmup_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a prefill call over caches of these formats launches is loaded."""
    loaded = loaded_by(monkeypatch, dtypes=[], prefill_formats=["v32", "bf16"])
    assert set(loaded) == {
        *mla_metadata.specs(),
        *mla_combine.specs("bfloat16", max_logits=True),
        *mla_sparse.specs("v32", max_logits=True),
        *mla_sparse.specs("bf16", max_logits=True),
        *[mla_sparse.spec("bf16", d_qk, 16, True, n) for d_qk in (512, 576) for n in (2, 4, 8)],
        *mla_unite_selections.specs(),
        mla_cache_gather.spec(mla_cache_rows.V32, False),
    }


def test_warmup_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded_by(monkeypatch) == default_specs()
    by_kernel = {(spec.name, dict(spec.defines).get("DTYPE", 0)) for spec in default_specs()}
    names = ("mla_metadata", "mla_combine", "mla_merge_states", *DENSE_DECODE)
    assert by_kernel == {*((name, 0) for name in names), ("mla_merge_states", 2)}
    assert set(loaded_by(monkeypatch, dtypes=["bfloat16"], d_qk=[576], page_block_sizes=[192])) == set(
        default_specs()
    )


def test_warmup_of_every_option_is_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {name: option.every for name, option in OPTIONS.items()}
    assert loaded_by(monkeypatch, **options) == SPECS
    assert loaded_by(monkeypatch, *OPERATIONS, **options) == SPECS


@pytest.mark.parametrize(
    ("operation", "kernels"),
    [
        ("dense_decode", {"mla_metadata", "mla_combine", *DENSE_DECODE}),
        ("sparse_decode", {"mla_metadata", "mla_combine", *SPARSE_DECODE}),
        (
            "sparse_prefill",
            {
                *("mla_metadata", "mla_combine", "mla_cache_gather", "mla_find_not_finite"),
                *("mla_unite_selections", *SPARSE_DECODE),
            },
        ),
        ("cache", {"mla_cache_write", "mla_cache_gather"}),
        ("indices", {"mla_convert_indices"}),
        ("merge", {"mla_merge_states"}),
        ("metadata", {"mla_metadata"}),
        ("mha", {"mha_forward", "mha_combine"}),
        ("mha_backward", BACKWARD),
        ("prefix", {"mha_forward", "mha_combine"}),
        (
            "flex",
            {"block_mask_lists", "block_mask_ranks", "block_mask_scatter", "flex_captured_finish"},
        ),
    ],
)
def test_warmup_of_an_operation(monkeypatch: pytest.MonkeyPatch, operation: str, kernels: set[str]) -> None:
    """Its kernels alone, over every format unless some are given."""
    loaded = loaded_by(monkeypatch, operation)
    assert {spec.name for spec in loaded} == kernels
    if operation == "sparse_decode":
        assert loaded == loaded_by(monkeypatch, operation, sparse_formats=["v32", "model1", "bf16"])
        assert set(loaded) > set(loaded_by(monkeypatch, operation, sparse_formats=["v32"]))


def test_every_operation_is_tested() -> None:
    (mark,) = test_warmup_of_an_operation.pytestmark
    assert {operation for operation, _ in mark.args[1]} == set(OPERATIONS)


@pytest.mark.parametrize(
    ("operations", "options", "error", "text"),
    [
        ((), {"dtypes": "bfloat16"}, TypeError, "dtypes: expected an iterable of str, got 'bfloat16'"),
        ((), {"d_qk": 576}, TypeError, "d_qk: expected an iterable of int, got 576"),
        ((), {"d_qk": ["576"]}, TypeError, "d_qk: expected an iterable of int, got '576' in it"),
        ((), {"d_qk": [True]}, TypeError, "d_qk: expected an iterable of int, got True in it"),
        ((), {"dtypes": [16]}, TypeError, "dtypes: expected an iterable of str, got 16 in it"),
        ((), {"dtypes": ["fp8"]}, ValueError, "dtypes: expected 'bfloat16' or 'float16', got 'fp8'"),
        ((), {"d_qk": [192]}, ValueError, "d_qk: expected 576 or 512, got 192"),
        ((), {"page_block_sizes": [0]}, ValueError, "page_block_sizes: expected 16, 32 or a multiple of 64"),
        ((), {"page_block_sizes": [48]}, ValueError, "page_block_sizes: expected 16, 32 or a multiple of 64"),
        ((), {"sparse_formats": ["fp8"]}, ValueError, "sparse_formats: expected 'v32' or 'model1' or 'bf16'"),
        ((), {"prefill_formats": ["fp8"]}, ValueError, "prefill_formats: expected 'v32' or 'model1'"),
        ((), {"mha_head_dims": 128}, TypeError, "mha_head_dims: expected an iterable of tuple, got 128"),
        ((), {"mha_head_dims": [64, 64]}, TypeError, "mha_head_dims: .* of tuple, got 64 in it"),
        ((), {"mha_head_dims": [(64, 257)]}, ValueError, r"mha_head_dims: .* 1 to 256, got \(64, 257\)"),
        ((), {"mha_head_dims": [(0, 64)]}, ValueError, r"mha_head_dims: .* 1 to 256, got \(0, 64\)"),
        ((), {"mha_head_dims": [(64, 64, 64)]}, ValueError, "mha_head_dims: expected pairs"),
        ((), {"mha_head_dims": [(64, 64.0)]}, ValueError, "mha_head_dims: .* of ints"),
        (
            (),
            {"mha_backward_head_dims": [(64, 257)]},
            ValueError,
            r"mha_backward_head_dims: .* 1 to 256, got \(64, 257\)",
        ),
        (
            ("mha",),
            {"mha_backward_head_dims": [(64, 64)]},
            ValueError,
            "mha_backward_head_dims: expected None, as no operation named has this option",
        ),
        ((), {"prefix_head_dims": [257]}, ValueError, "prefix_head_dims: .* 1 to 256, got 257"),
        ((), {"prefix_head_dims": [(64, 64)]}, TypeError, "prefix_head_dims: expected an iterable of int"),
        (("decode",), {}, ValueError, "operations: expected names among dense_decode, .*, got 'decode'"),
        ((["bfloat16"],), {}, TypeError, r"operations: expected names, got \['bfloat16'\]"),
        (
            ("merge",),
            {"sparse_formats": ["v32"]},
            ValueError,
            r"sparse_formats: expected None, as no operation named has this option, got \['v32'\]",
        ),
    ],
)
def test_warmup_checks_before_it_looks_for_a_device(
    monkeypatch: pytest.MonkeyPatch,
    operations: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.setattr(jit, "current_device", lambda: pytest.fail("a device was looked for"))
    with pytest.raises(error, match=f"^{text}"):
        rawmla.warmup(*operations, **options)


def test_warmup_of_head_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MHA, which flex attention goes with, and of prefix prefill; none by default."""
    wanted = mha_forward_variants.specs("float16", [(128, 128), (192, 128)])
    dims: dict[str, Any] = {"mha_head_dims": [(128, 128), (192, 128)], "dtypes": ["float16"]}
    assert loaded_by(monkeypatch, "mha", **dims) == wanted
    others = loaded_by(monkeypatch, dtypes=["float16"])
    assert set(loaded_by(monkeypatch, **dims)) - set(others) == {*wanted, *specs_of(["flex"])}
    assert loaded_by(monkeypatch, "prefix", prefix_head_dims=[64]) == mha_forward_variants.specs(
        "bfloat16", [(64, 64)], mha_forward_variants.USUAL_CACHES
    )
    wanted = [*mha_backward_variants.specs("float16", 96, 96), mha_backward_variants.CLEAR_SPEC]
    dims = {"mha_backward_head_dims": [(96, 96)], "dtypes": ["float16"]}
    assert loaded_by(monkeypatch, "mha_backward", **dims) == wanted
    assert set(loaded_by(monkeypatch, **dims)) - set(others) == {*wanted}
    assert not BACKWARD & {spec.name for spec in loaded_by(monkeypatch, mha_head_dims=[(64, 64)])}


def test_warmup_takes_numbers_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_by(monkeypatch, d_qk=np.array([576]), page_block_sizes=iter([np.int32(64)]))
    assert loaded == default_specs()


@pytest.mark.parametrize("spec", full_unless(lambda spec: spec in QUICK, SPECS), ids=lambda spec: spec.label)
def test_compiles_without_spills(spec: KernelSpec) -> None:
    """And setmaxnreg moves what the launch gives: one per role, in steps of 8, some up, some down, and no
    more in all than what the launch gave. Warpgroups of one role share an instruction.
    """
    variant = assert_no_losses(spec)
    assert "-arch=sm_90a" in variant.built.meta["options"]
    if spec.name in ("mha_forward", *BACKWARD):  # tests/test_mha_backward_kernels.py has what they move
        return
    sharing = {
        "mla_sparse_fp8": (2, 1, 2),
        "mla_sparse_fp8_cluster": (1, 1, 2),
        "mla_sparse_fp8_few_heads": (1, 4, 1),
    }
    moves = variant.moves()
    if spec.name not in ("mla_dense_decode", *SPARSE_DECODE):
        assert not moves
        return
    launched = variant.built.meta["registers"]
    counts = [count for _, count in moves]
    warpgroups = sharing.get(spec.name, (1,) * len(moves))
    assert len(warpgroups) == len(moves) and sum(warpgroups) == spec.threads // 128, moves
    assert {kind for kind, _ in moves} == {"inc", "dec"}
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in counts)
    assert all((count >= launched) == (kind == "inc") or count == launched for kind, count in moves)
    moved = sum(count * several for count, several in zip(counts, warpgroups, strict=True))
    assert moved <= sum(warpgroups) * launched, (moves, launched)


WITH_USER_TEXT = (
    block_mask.states_spec(header_of(None, CudaMod("q_idx >= kv_idx").mod())),
    flex_captured.captured_spec("bfloat16", 128, 128, flex_captured.IN_ANY_ORDER, header_of(BY_QUERY, None)),
    mha_backward_variants.references_spec("bfloat16", 128, 128, header_of(None, None)),
)
# Of each kernel the variant with the most shared memory: some of mla_combine have none.
A_VARIANT_OF_EACH = {
    spec.name: spec for spec in sorted((*WITH_USER_TEXT, *SPECS), key=lambda spec: spec.smem_bytes)
}


def test_a_variant_of_each_kernel() -> None:
    files = (find_source_root() / "kernels").glob("*.cu")
    assert set(A_VARIANT_OF_EACH) == {file.stem for file in files}


@pytest.mark.parametrize("spec", A_VARIANT_OF_EACH.values(), ids=lambda spec: spec.name)
def test_a_kernel_refuses_a_launch_that_does_not_fit(spec: KernelSpec) -> None:
    """Other threads than it is written for, or too little shared memory: nobody gets a cubin for them."""
    wrong = {"smem_bytes": 16} if spec.smem_bytes else {}
    texts = ["SMEM_BYTES is what the launch asks for"] * bool(spec.smem_bytes)
    if spec.name != "mla_metadata":  # is written for any number
        wrong["threads"] = spec.threads + 32
        texts.append("THREADS is what the launch gives")
    with pytest.raises(AssertionError) as caught:
        assert_in_kernel(replace(spec, **wrong), [])
    assert all(text in str(caught.value) for text in texts)


def test_constants_of_the_plan_agree() -> None:
    conditions = [
        f"kBlockTokens == {common.BLOCK_TOKENS}",
        f"kPlanRowInts == {mla_metadata.PLAN_COLUMNS}",
        f"kBatchInvariantMark == {reference.BATCH_INVARIANT_MARK}",
    ]
    for blocks in (*range(600), 8191, 8192, 8193, 1 << 20, (1 << 25) + 1):
        split_blocks = max(
            common.BATCH_INVARIANT_MIN_BLOCKS, common.ceil_div(blocks, common.BATCH_INVARIANT_MAX_SPLITS)
        )
        conditions.append(f"all_tokens(nullptr).invariant_split({blocks}) == {split_blocks}")
    for topk, extra_topk in ((1, 0), (64, 64), (512, 0), (16384, 0), (16385, 0), (8192, 8193), (1 << 20, 7)):
        room = common.ceil_div(topk, 64) + common.ceil_div(extra_topk, 64)
        split_blocks = max(
            common.BATCH_INVARIANT_MIN_BLOCKS, common.ceil_div(room, common.BATCH_INVARIANT_MAX_SPLITS)
        )
        tokens = f"TokenCounts{{nullptr, nullptr, {topk}, {extra_topk}}}"
        conditions += [
            f"{tokens}.invariant_split({blocks}) == {split_blocks}" for blocks in (0, 1, room, 1 << 25)
        ]
        most = common.max_splits(1, 1, room, True) or 1
        assert common.ceil_div(room, split_blocks) <= most  # scratch for a request that fills the room
    conditions.append(f"TokenCounts::kUnlimited == {mla_metadata.TokenCounts(0).most}")
    for splits_before, req in ((0, 0), (7, 7), (9, 5), (100_000, 1)):
        conditions.append(f"first_split({splits_before}, {req}, true) == {splits_before}")
        conditions.append(f"first_split({splits_before}, {req}, false) == {2 * (splits_before - req)}")
    assert_in_header("mla/plan.cuh", conditions, constexpr=("invariant_split", "first_split", "all_tokens"))
    assert reference.BLOCK_TOKENS == plans.BLOCK_TOKENS == common.BLOCK_TOKENS
    assert reference.BATCH_INVARIANT_MIN_BLOCKS == common.BATCH_INVARIANT_MIN_BLOCKS
    assert reference.BATCH_INVARIANT_MAX_SPLITS == common.BATCH_INVARIANT_MAX_SPLITS
    assert reference.PLAN_COLUMNS == mla_metadata.PLAN_COLUMNS


def each_value_once(specs: list[KernelSpec]) -> list[KernelSpec]:
    """Few variants of a kernel that have each value of each macro among them."""
    chosen: list[KernelSpec] = []
    missing = {define for spec in specs for define in spec.defines}
    while missing:
        chosen.append(max(specs, key=lambda spec: len(missing.intersection(spec.defines))))
        missing.difference_update(chosen[-1].defines)
    return chosen


WITH_CONSTANTS = ("mla_metadata", "mla_combine", *DENSE_DECODE, *SPARSE_DECODE)
QUICK_CONSTANTS = {spec for name in WITH_CONSTANTS for spec in each_value_once(of(name))}


def constants_of(spec: KernelSpec) -> list[str]:
    """What the C++ of a variant calls the numbers that Python has."""
    values = dict(spec.defines)
    if spec.name == "mla_metadata":
        return [
            f"kMaxFixedCost == {reference.MAX_FIXED_COST}",
            f"kFixedCostDivisor == {reference.FIXED_COST_DIVISOR}",
            f"kMaxShortPartition == {reference.MAX_SHORT_PART}",
            f"kShortPartFactor == {reference.SHORT_PART_FACTOR}",
            "sizeof(SharedMemoryPlan) == 4 * (2 * kMaxBatch + 1 + 2 * kWarps)",
            *(
                f"kMaxBatch >= {b}"
                for b in (1, 512, 513, mla_metadata.MAX_BATCH)
                if mla_metadata.spec(b) == spec
            ),
        ]
    if spec.name == "mla_combine":
        dtype = {code: name for name, code in common.DTYPES.items()}[values["DTYPE"]]
        mapping = mla_combine.Mapping(
            *(values[name] for name in ("SPLIT_GROUPS", "SPLITS_AT_ONCE", "ROWS_AT_ONCE"))
        )
        row_bytes = "16 / kVectorColumns * kDimV + 4 * (1 + kScaleHalves + MAX_LOGITS)"
        return [
            f"kRows == {mapping.rows_per_cta}",
            f"{row_bytes} == {mla_combine.split_row_bytes(dtype, family(spec)[1])}",
        ]
    if spec.name == "mla_sparse_fp8_few_heads":
        return [
            f"kHeads == {mla_sparse.FEW_HEADS} && kGroups * kGroupCols == {common.D_V}",
            f"Fp8Row::kRowBytes == {mla_cache_rows.QUANTIZED['v32'].row_bytes}",
        ]
    conditions = [f"kDimV == {common.D_V}", f"kBlockM == {common.TILE_ROWS}"]
    if spec.name in DENSE_DECODE:
        names = {"bfloat16": "Dtype::kBf16", "float16": "Dtype::kF16"}
        dtype = names[{code: name for name, code in common.DTYPES.items()}[values["DTYPE"]]]
        return [
            *conditions,
            f"kDtype == {dtype}",
            f"kDimV == {reference.D_V}",
            f"kBoxes * {values['BOX_ROWS']} == {common.BLOCK_TOKENS}",
            f"kQChunks * 64 == {values['D_QK']}",
        ]
    if spec.name == "mla_sparse_bf16":
        columns = "16 * (kQSteps + (kQSingleStep >= 0)) + 64 * kQSharedChunks"
        return [*conditions, f"{columns} == {values['D_QK']}"]
    format = {layout.code: name for name, layout in mla_cache_rows.QUANTIZED.items()}[values["FORMAT"]]
    cpp_names = {"v32": "kV32", "model1": "kModel1"}
    columns = "kChunks * 64"
    if spec.name == "mla_sparse_fp8_cluster":
        columns = "kTiles * (kChunks * 64 + HalfChunk::kCols * kV32)"
    return [
        *conditions,
        f"kFormat == CacheFormat::{cpp_names[format]}",
        f"{columns} == {values['D_QK']}",
        f"Fp8Row::kRowBytes == {mla_cache_rows.QUANTIZED[format].row_bytes}",
    ]


@pytest.mark.parametrize(
    "spec",
    full_unless(lambda spec: spec in QUICK_CONSTANTS, [spec for name in WITH_CONSTANTS for spec in of(name)]),
    ids=lambda spec: spec.label,
)
def test_constants_of_the_kernels_agree(spec: KernelSpec) -> None:
    assert_in_kernel(spec, constants_of(spec))


def test_metadata_of_any_batch_has_a_variant() -> None:
    """The constants above are then those of each variant that a batch takes."""
    for b in (1, 512, 513, mla_metadata.MAX_BATCH):
        assert mla_metadata.spec(b) in QUICK_CONSTANTS


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


# What a launch hands over, read by the names that the kernel has for it


class Launch(NamedTuple):
    """What one launch was given; `params` by the names of the kernel's members."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    params: dict[str, Any]
    cluster: tuple[int, int, int] | None
    pdl: bool


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Collects launches instead of making them."""
    made: list[Launch] = []

    class Recorder:
        def __init__(self, spec: KernelSpec) -> None:
            self.spec = spec

        def launch(
            self,
            grid: tuple[int, int, int],
            params: bytes,
            stream: int,
            *,
            cluster: tuple[int, int, int] | None = None,
            pdl: bool = False,
        ) -> None:
            assert stream == 0x51
            made.append(Launch(self.spec, grid, read_params(self.spec, params), cluster, pdl))

        def prepare(
            self,
            grid: tuple[int, int, int],
            params: bytes,
            changing: struct.Struct,
            *,
            cluster: tuple[int, int, int] | None = None,
            pdl: bool = False,
        ) -> SimpleNamespace:
            def launch(stream: int, *members: int | bytes, context_is_current: bool = False) -> bool:
                filled = changing.pack(*members) + params[changing.size :]
                self.launch(grid, filled, stream, cluster=cluster, pdl=pdl)
                return context_is_current

            return SimpleNamespace(launch=launch)

    def tensor_map(*description: Any) -> bytes:
        return repr(description).encode().ljust(128)[:128]

    monkeypatch.setattr(jit, "get_kernel", lambda spec, device, *, capturing: Recorder(spec))
    monkeypatch.setattr(jit, "tensor_map", tensor_map)
    return made


def not_capturing() -> bool:
    return False


@pytest.mark.parametrize(("object_layout", "batch_invariant"), [(True, False), (False, True)])
@pytest.mark.parametrize(("b", "shares"), [(77, (2, 1)), (3, (1, 22))])
def test_metadata_launch(
    launches: list[Launch], object_layout: bool, batch_invariant: bool, b: int, shares: tuple[int, int]
) -> None:
    tokens = mla_metadata.TokenCounts(0xA000, 0xD000, 2048, 512)
    given = dict(
        tokens=tokens,
        b=b,
        num_parts=66,
        sched_meta=0xB000,
        num_splits=0xC000,
        splits_length=b + 5,
        object_layout=object_layout,
        batch_invariant=batch_invariant,
    )
    mla_metadata.launch(device=0, stream=0x51, capturing=not_capturing, **given)  # type: ignore[arg-type]
    (launched,) = launches
    divisors = {"parts": 66, "b": b, "share": shares[1]}
    for name, d in divisors.items():
        magic, shift = launched.params.pop(f"{name}_magic"), launched.params.pop(f"{name}_shift")
        assert all(n * magic >> shift == n // d for n in (0, d - 1, d, 1000, 10**6, 2**31 - 1)), name
    given |= dict(zip(("requests_per_part", "parts_per_request"), shares, strict=True))
    assert launched == Launch(mla_metadata.spec(b), (1, 1, 1), given, None, True)


def strides_of_q(call: Any) -> dict[str, int]:
    """By the names of the parameters, in units of 16 bytes."""
    pairs = (("q", call.q_strides), ("q_rope", call.q_rope_strides))
    return {f"{name}_stride_{axis}": n // 8 for name, ns in pairs for axis, n in zip("bsh", ns, strict=True)}


def test_a_stride_that_is_not_used_may_be_of_any_size() -> None:
    """That of a single request with many tokens; 32 bits hold all others."""
    strides = common.q_stride_params((8 * (2**32 + 5), 576, 576), (64, 64, 64))
    assert strides["q_stride_b"] == 5 and strides["q_stride_s"] == 72 and strides["q_rope_stride_h"] == 8


def dense_call(**changes: Any) -> mla_dense_decode.DenseDecodeCall:
    """A call in which no two values are equal. Two tiles per KV head: 24 heads x 3 tokens."""
    values: dict[str, Any] = dict(
        device=0, dtype="bfloat16", b=7, s_q=3, h_q=48, h_kv=2, d_qk=576, page_block_size=192,
        num_blocks=1000,
        q_strides=(100_008, 30_008, 584), q_rope_strides=(70_008, 20_008, 200),
        k_strides=(500_000, 1160, 592),
        block_table_stride=33, max_seqlen=40_000, num_parts=66, object_layout=True, batch_invariant=False,
        out_strides=(80_000, 25_000, 520), softmax_scale=0.3, causal=False,
    )  # fmt: skip
    return mla_dense_decode.DenseDecodeCall(**{**values, **changes})


SCRATCH = 0x9000
ADDRESSES = mla_dense_decode.DenseDecodeAddresses(
    q=0x1000, q_rope=0x1800, k_cache=0x2000, block_table=0x3000, cache_seqlens=0x4000, sched_meta=0x5000,
    num_splits=0x6000, out=0x7000, lse=0x8000,
)  # fmt: skip


def launch_decode(call: mla_dense_decode.DenseDecodeCall) -> int:
    """Launch it once; returns the scratch bytes it asked for."""
    prepared = mla_dense_decode.PreparedDenseDecode(call, not_capturing)
    prepared.launch(0x51, ADDRESSES, SCRATCH)
    return prepared.scratch_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "object_layout": False, "dtype": "float16", "d_qk": 512},
        {"page_block_size": 16},
        {"page_block_size": 32, "batch_invariant": True},
        {"s_q": 1, "h_q": 64, "h_kv": 1, "b": 200},
        {"s_q": 1, "h_q": 16, "h_kv": 1},
        {"s_q": 1, "h_q": 17, "h_kv": 1},
        {"s_q": 2, "h_q": 16, "h_kv": 2},
        {"s_q": 1, "h_q": 3, "h_kv": 1, "page_block_size": 16, "causal": True},
    ],
    ids=str,
)
def test_dense_decode_launch(launches: list[Launch], changes: dict[str, Any]) -> None:
    call = dense_call(**changes)
    scratch_bytes = launch_decode(call)
    row_bytes = {"bfloat16": 2 * 512 + 12, "float16": 4 * 512 + 12}[call.dtype]
    blocks = -(-call.max_seqlen // 64)
    max_splits = common.max_splits(call.num_parts, call.b, blocks, call.batch_invariant)
    assert scratch_bytes == max_splits * call.s_q * call.h_q * row_bytes
    lse_accum = SCRATCH + max_splits * call.s_q * call.h_q * (row_bytes - 12)
    heads_per_kv = call.h_q // call.h_kv
    rows = call.s_q * heads_per_kv
    derived = {
        "heads_per_kv": heads_per_kv,
        "heads_magic": -(-(2**32) // heads_per_kv),
        "rows": rows,
        "page_magic": -(-(2**32) // (call.page_block_size // 16)) % 2**32,
        "max_splits": max_splits,
        "o_accum": SCRATCH,
        "lse_accum_log2": lse_accum,
        "o_scale_log2": lse_accum + max_splits * call.s_q * call.h_q * 4,
        "by_request": call.batch_invariant or call.b <= call.num_parts,
        "attn_sink": 0,
        **strides_of_q(call),
        **dict(zip(("out_stride_b", "out_stride_s", "out_stride_h"), call.out_strides, strict=True)),
    }

    given = {**call._asdict(), **ADDRESSES._asdict()}
    main, merge = launches
    for launch in launches:
        for name, value in launch.params.items():
            if name in ("k_map_half", "k_map_one"):
                continue
            if name == "sm_scale_log2":
                assert value == pytest.approx(call.softmax_scale * math.log2(math.e), rel=1e-7)
                continue
            expected = derived[name] if name in derived else given[name]
            assert value == expected, f"{launch.spec.label}: {name}"
    tiles = -(-rows // 64)
    values = dict(main.spec.defines)
    box = min(call.page_block_size, 64)
    cluster = 2 if box == 64 and tiles % 2 == 0 else 1
    assert main.grid == (tiles, call.h_kv, call.num_parts) and main.pdl
    assert main.cluster == (None if cluster == 1 else (2, 1, 1))
    few_rows = rows <= 16
    assert main.spec.name == ("mla_dense_decode_few_rows" if few_rows else "mla_dense_decode")
    assert (values["BOX_ROWS"], values["D_QK"]) == (box, call.d_qk)
    assert few_rows or values["CLUSTER"] == cluster
    assert values["DTYPE"] == dict(merge.spec.defines)["DTYPE"] == common.DTYPES[call.dtype]
    assert merge.pdl and merge.cluster is None
    assert main.spec in SPECS and merge.spec in SPECS


def test_no_scratch_means_no_combine(launches: list[Launch]) -> None:
    assert launch_decode(dense_call(max_seqlen=64)) == 0
    (main,) = launches
    assert (main.params["max_splits"], main.params["lse_accum_log2"]) == (0, 0)


def sparse_call(**changes: Any) -> mla_sparse.SparseCall:
    """A call in which no two values are equal. Two tiles of heads per token."""
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
    out=0x7000, lse=0x8000,
)  # fmt: skip


def _maps_of_q(call: mla_sparse.SparseCall) -> dict[str, bytes]:
    """The tensor maps of q and its RoPE: columns of a chunk, heads, chunks, tokens, requests. Strides are in
    bytes.
    """
    maps = {}
    for name, chunks, (stride_b, stride_s, stride_h) in (
        ("q", call.d_qk // 64 - 1, call.q_strides),
        ("q_rope", 1, call.q_rope_strides),
    ):
        dims = (64, call.h_q, chunks, call.s_q, call.b)
        strides = (2 * stride_h, 128, 2 * stride_s, 2 * stride_b)
        maps[f"{name}_map"] = bytes(128)
        if call.format == "bf16":
            address = getattr(SPARSE_ADDRESSES, name)
            box = (64, 64, 1, 1, 1)
            maps[f"{name}_map"] = jit.tensor_map(address, "bfloat16", dims, strides, box, "128b", "none")
    return maps


@pytest.mark.parametrize(
    ("changes", "cluster"),
    [
        ({}, (2, 1, 1)),
        ({"format": "model1", "d_qk": 512, "load_bytes": 8, "object_layout": False}, (2, 1, 1)),
        ({"h_q": 64}, None),
        ({"b": 2}, None),
        ({"b": 2, "format": "model1", "d_qk": 512, "batch_invariant": True}, (2, 1, 1)),
        ({"b": 900, "s_q": 1, "extra": mla_sparse.NO_CACHE, "lse_factor": 1.0}, (2, 1, 1)),
        ({"format": "bf16", "b": 200, "h_q": 64, "s_q": 1}, None),
        ({"h_q": 16, "load_bytes": 8}, None),
        ({"format": "bf16", "d_qk": 512, "extra": mla_sparse.NO_CACHE, "batch_invariant": True}, (2, 1, 1)),
        ({"cache": mla_sparse.Cache(576, 2**24, 377_856, 656, 64, 64, 64)}, None),  # > 2^31 slots
        ({"format": "bf16", "extra": mla_sparse.NO_CACHE, "b": 900, "s_q": 1, "lse_factor": 1.0}, (2, 1, 1)),
        ({"h_q": 16, "extra": mla_sparse.NO_CACHE, "s_q": 1, "lse_factor": 0.5}, None),
    ],
    ids=(
        "v32",
        "model1",
        "an odd number of tiles",
        "short parts",
        "short parts, batch invariant",
        "clusters prefill",
        "bf16",
        "few heads",
        "no extra cache",
        "large cache",
        "prefill",
        "few heads prefill",
    ),
)
def test_sparse_decode_launch(
    launches: list[Launch], changes: dict[str, Any], cluster: tuple[int, int, int] | None
) -> None:
    call = sparse_call(**changes)
    prepared = mla_sparse.PreparedSparse(call, not_capturing)
    prefill = call.lse_factor is not None
    addresses = SPARSE_ADDRESSES._replace(**({"max_logits": 0x8F00} if prefill else {}))
    prepared.launch(0x51, addresses, SCRATCH)
    pairs = (call.cache, call.extra)
    blocks = sum(-(-cache.topk // 64) for cache in pairs)
    max_splits = common.max_splits(call.num_parts, call.b, blocks, call.batch_invariant)
    split_rows = max_splits * call.s_q * call.h_q
    assert max_splits and prepared.scratch_bytes == split_rows * (2 * 512 + 12 + 4 * prefill)
    few_heads = call.format == "v32" and call.h_q <= 16
    tiles = 1 if few_heads else -(-call.h_q // 64)
    expected = {
        "q": 0x1000,
        "q_rope": 0x1800,
        "cache": (0x2000, 0x2100),
        "indices": (0x3000, 0x3100),
        "lengths": (0x4000, 0x4100),
        "attn_sink": 0x4F00,
        "sched_meta": 0x5000,
        "num_splits": 0x6000,
        "out": 0x7000,
        "lse": 0x8000,
        "o_accum": SCRATCH,
        "lse_accum_log2": SCRATCH + split_rows * 1024,
        "o_scale_log2": SCRATCH + split_rows * 1028,
        **{
            name: tuple(getattr(cache, name) for cache in pairs)
            for name in ("block_stride", "token_stride", "index_stride_b", "index_stride_s", "topk")
        },
        "page_block_size": tuple(cache.page_block_size for cache in pairs),
        "cache_slots": tuple(min(cache.num_blocks * cache.page_block_size, 2**31) for cache in pairs),
        "page_magic": tuple(divisor(cache.page_block_size)[0] for cache in pairs),
        "page_shift": tuple(divisor(cache.page_block_size)[1] for cache in pairs),
        **strides_of_q(call),
        **dict(zip(("out_stride_b", "out_stride_s", "out_stride_h"), call.out_strides, strict=True)),
        **{name: getattr(call, name) for name in ("b", "s_q", "h_q", "object_layout")},
        "head_tiles": tiles,
        "max_splits": max_splits,
        "by_request": call.batch_invariant or call.b <= call.num_parts,
        "sm_scale_log2": pytest.approx(call.softmax_scale * math.log2(math.e), rel=1e-7),
        **_maps_of_q(call),
    }
    if prefill:
        expected |= {"max_accum_log2": SCRATCH + split_rows * 1036, "max_logits": 0x8F00}
        expected["lse_factor"] = call.lse_factor
        expected |= {"uniform": (0, 0, 0), "selected": 0}
    main, merge = launches
    assert set(main.params) == set(expected) - {"by_request"}
    for launch in launches:
        for name, value in launch.params.items():
            assert value == expected[name], f"{launch.spec.label}: {name}"
    if few_heads:
        assert main.spec == mla_sparse.few_heads_spec(call.load_bytes, prefill)
    elif cluster and call.format != "bf16":
        assert main.spec == mla_sparse.cluster_spec(call.format, call.load_bytes, prefill)
    else:
        assert main.spec == mla_sparse.spec(call.format, call.d_qk, call.load_bytes, prefill)
    assert main.grid == (tiles * call.s_q, 1, call.num_parts) and main.pdl and main.cluster == cluster
    assert merge.pdl and merge.cluster is None and dict(merge.spec.defines)["DTYPE"] == 0
    assert (merge.grid, merge.spec) == _combine_launch(call)
    assert main.spec in SPECS and merge.spec in SPECS


def prefill_addresses(topk_length: int, attn_sink: int) -> mla_sparse.SparseAddresses:
    return mla_sparse.SparseAddresses(
        q=0x1000, q_rope=0x1800, k_cache=0x2000, extra_k_cache=0, indices=0x3000, extra_indices=0,
        topk_length=topk_length, extra_topk_length=0, attn_sink=attn_sink, sched_meta=0, num_splits=0,
        out=0x7000, lse=0x9000, max_logits=0x8000,
    )  # fmt: skip


def prefill_call(**values: Any) -> mla_sparse.SparseCall:
    """A call whose requests are query tokens."""
    return mla_sparse.SparseCall(
        device=0, s_q=1, extra=mla_sparse.NO_CACHE, object_layout=True, batch_invariant=False,
        softmax_scale=0.3, lse_factor=0.5, **values,
    )  # fmt: skip


@pytest.mark.parametrize("topk", (64, 200))
def test_sparse_prefill_launch(launches: list[Launch], monkeypatch: pytest.MonkeyPatch, topk: int) -> None:
    """Chunk after chunk: plan, attention, and the combine where a token has more than one block."""
    monkeypatch.setattr(mla_metadata, "MAX_BATCH", 40)
    h_q, parts = 70, 66
    call = prefill_call(
        format="bf16", d_qk=576, load_bytes=16, b=100, h_q=h_q,
        cache=mla_sparse.Cache(1, 1000, 1280, 1152, topk, 300, 0),
        q_strides=(45_000, 0, 584), q_rope_strides=(22_000, 0, 200), out_strides=(40_000, 0, 528),
        num_parts=parts, limited=True,
    )  # fmt: skip
    prepared = mla_sparse_prefill.prepare(call, not_capturing)
    prepared.launch(0x51, prefill_addresses(topk_length=0x4000, attn_sink=0x4F00), 0x10000)
    split = topk > 64
    names = ["mla_metadata", "mla_sparse_bf16", "mla_combine"][: 2 + split]
    assert [launch.spec.name for launch in launches] == names * 3
    assert all(launch.spec in SPECS and launch.pdl for launch in launches)
    splits = 0x10000 + parts * 32
    accum = splits + 144  # 34 + 1 sums, in whole units of 16 bytes
    split_rows = 2 * parts * h_q if split else 0
    assert prepared.scratch_bytes == accum + split_rows * (1024 + 16) - 0x10000
    for number, launch in enumerate(launches):
        first = number // len(names) * 34
        expected = {
            "b": min(34, 100 - first),
            "sched_meta": 0x10000,
            "num_splits": splits,
            "num_parts": parts,
            "tokens": (0x4000 + 4 * first, 0, topk, 0),
            "lengths": (0x4000 + 4 * first, 0),
            "q": 0x1000 + 2 * 45_000 * first,
            "q_rope": 0x1800 + 2 * 22_000 * first,
            "cache": (0x2000, 0),
            "indices": (0x3000 + 4 * 300 * first, 0),
            "attn_sink": 0x4F00,
            "out": 0x7000 + 2 * 40_000 * first,
            "max_logits": 0x8000 + 4 * h_q * first,
            "lse": 0x9000 + 4 * h_q * first,
            "o_accum": accum,
            "lse_accum_log2": accum + split_rows * 1024,
            "o_scale_log2": accum + split_rows * 1028,
            "max_accum_log2": accum + split_rows * 1036,
            "lse_factor": 0.5,
            "s_q": 1,
            "h_q": h_q,
            "object_layout": 1,
        }
        for name in expected.keys() & launch.params.keys():
            assert launch.params[name] == expected[name], f"{launch.spec.label}: {name}"
        if launch.spec.name == "mla_sparse_bf16":
            assert launch.grid == (2, 1, parts)
            assert dict(launch.spec.defines)["MAX_LOGITS"] == 1


@pytest.mark.parametrize(
    ("s_q", "topk", "uniform"),
    [
        (1, 2048, (32, 32, 1)),
        (64, 2048, (32, 32, 32)),
        (132, 640, (10, 13, 26)),
        (4096, 512, (8, 11, 683)),
    ],
)
def test_sparse_prefill_without_a_plan(
    launches: list[Launch], s_q: int, topk: int, uniform: tuple[int, ...]
) -> None:
    """Tokens that select equally many: attention, and the combine if they are cut."""
    call = prefill_call(
        format="bf16", d_qk=576, load_bytes=16, b=s_q, h_q=128,
        cache=mla_sparse.Cache(1, 8192, 1152, 1152, topk, topk, 0),
        q_strides=(128 * 576, 0, 576), q_rope_strides=(128 * 576, 0, 576), out_strides=(128 * 512, 0, 512),
        num_parts=66, limited=False,
    )  # fmt: skip
    prepared = mla_sparse_prefill.prepare(call, not_capturing)
    prepared.launch(0x51, prefill_addresses(topk_length=0, attn_sink=0), 0x10000)
    split = s_q in (1, 4096)
    assert [launch.spec.name for launch in launches] == ["mla_sparse_bf16", "mla_combine"][: 1 + split]
    assert launches[0].params["uniform"] == uniform
    assert launches[0].params["max_splits"] == (132 if split else 0)
    assert prepared.scratch_bytes == (132 * 128 * (1024 + 16) if split else 0)
    if split:
        assert launches[1].params["uniform"] == uniform
        assert launches[1].params["by_request"] == (s_q == 1)


@pytest.mark.parametrize("limited", (False, True))
def test_batch_invariant_prefill(launches: list[Launch], limited: bool) -> None:
    """Nothing but attention on whole tokens. It reads topk_length, if there is one, before it waits for the
    kernel ahead, so it may not start before that is complete.
    """
    call = _united_call(batch_invariant=True, limited=limited)
    prepared = mla_sparse_prefill.prepare(call, not_capturing)
    prepared.launch(0x51, prefill_addresses(topk_length=0x4000 * limited, attn_sink=0), 0x10000)
    (attention,) = launches
    assert attention.spec.name == "mla_sparse_bf16" and attention.pdl is not limited
    blocks = 2
    assert attention.params["uniform"] == (blocks, blocks, 16 * blocks)  # 1,031 tokens in 66 parts
    assert (attention.params["max_splits"], prepared.scratch_bytes) == (0, 0)


def _united_call(**changes: Any) -> mla_sparse.SparseCall:
    return prefill_call(
        format="bf16", d_qk=576, load_bytes=16, b=1031, h_q=16,
        cache=mla_sparse.Cache(1, 1000, 1280, 1280, 100, 120, 0),
        q_strides=(45_000, 0, 584), q_rope_strides=(22_000, 0, 200), out_strides=(16 * 528, 0, 528),
        num_parts=66, limited=True,
    )._replace(**changes)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"h_q": 64},
        {"h_q": 24, "out_strides": (24 * 528, 0, 528)},
        {"b": 511},
        {"out_strides": (17 * 528, 0, 528)},
        {"cache": mla_sparse.Cache(1, 1601, 1280, 1280, 100, 120, 0)},
        {"cache": mla_sparse.Cache(1, 32_769, 1280, 1280, 4096, 4096, 0)},
        {"cache": mla_sparse.Cache(1, 1000, 1280, 1280, 4097, 4097, 0)},
    ],
    ids=("a tile of heads", "no divisor", "few", "slice of heads", "seldom", "many rows", "many indices"),
)
def test_tokens_that_are_attended_one_by_one(launches: list[Launch], changes: dict[str, Any]) -> None:
    prepared = mla_sparse_prefill.prepare(_united_call(**changes), not_capturing)
    prepared.launch(0x51, prefill_addresses(topk_length=0x4000, attn_sink=0), 0x10000)
    attention = next(launch for launch in launches if launch.spec.name == "mla_sparse_bf16")
    assert dict(attention.spec.defines)["GROUP_TOKENS"] == 1
    assert "mla_unite_selections" not in [launch.spec.name for launch in launches]


def test_united_prefill_launch(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk after chunk of groups of four tokens, then the three tokens that are left."""
    capacity, words = 448, 448 // 64 * 8 * 8
    monkeypatch.setattr(mla_sparse_prefill, "_UNITED_SCRATCH", 130 * (4 * capacity + words))
    prepared = mla_sparse_prefill.prepare(_united_call(), not_capturing)
    prepared.launch(0x51, prefill_addresses(topk_length=0x4000, attn_sink=0x4F00), 0x10000)
    group = ["mla_unite_selections", "mla_metadata", "mla_sparse_bf16", "mla_combine"]
    assert [launch.spec.name for launch in launches] == ["mla_find_not_finite", *group, *group, *group[1:]]
    assert all(launch.spec in SPECS and launch.pdl for launch in launches)
    find = launches[0].params
    assert (find["rows"], find["row_stride"], find["num_rows"]) == (0x2000, 1280, 1000)
    for chunk in range(2):
        unite, plan, attention, merge = launches[1 + 4 * chunk : 5 + 4 * chunk]
        first, groups = 516 * chunk, 129 - chunk
        assert unite.grid == (groups, 1, 1) and attention.grid == (1, 1, 66)
        assert dict(attention.spec.defines)["GROUP_TOKENS"] == 4
        united = unite.params
        given = ("indices", "topk_length", "attn_sink", "not_finite", "index_stride", "topk", "num_rows")
        assert [united[name] for name in given] == [
            0x3000 + 4 * 120 * first, 0x4000 + 4 * first, 0x4F00, find["not_finite"], 120, 100, 1000,
        ]  # fmt: skip
        assert (united["group_tokens"], united["capacity"]) == (4, capacity)
        places = [united[name] for name in ("not_finite", "sinks", "counts", "rows", "selected")]
        sizes = [128, 256, 4 * 129, 4 * capacity * 129, words * 129]
        ends = [place + size for place, size in zip(places, sizes, strict=True)]
        assert plan.params["num_splits"] + 4 * (groups + 1) <= places[0]
        assert all(end <= place for end, place in zip(ends[:-1], places[1:], strict=True))
        assert ends[-1] <= attention.params["o_accum"] and united["selected"] % 8 == 0
        assert attention.params["o_accum"] < 0x10000 + prepared.scratch_bytes
        assert plan.params["tokens"] == (united["counts"], 0, capacity, 0) and plan.params["b"] == groups
        expected = {
            "q": 0x1000 + 2 * 45_000 * first,
            "q_rope": 0x1800 + 2 * 22_000 * first,
            "cache": (0x2000, 0),
            "indices": (united["rows"], 0),
            "lengths": (united["counts"], 0),
            "attn_sink": united["sinks"],
            "selected": united["selected"],
            "out": 0x7000 + 2 * 16 * 528 * first,
            "max_logits": 0x8000 + 4 * 16 * first,
            "lse": 0x9000 + 4 * 16 * first,
            "topk": (capacity, 0),
            "index_stride_b": (capacity, 0),
            "out_stride_b": 4 * 16 * 528,
            "b": groups,
            "s_q": 1,
            "h_q": 64,
        }
        for name, value in expected.items():
            assert attention.params[name] == value, name
        assert merge.params["out"] == expected["out"] and merge.params["h_q"] == 64
        assert attention.params["q_map"] == jit.tensor_map(
            expected["q"], "bfloat16", (64, 16, 8, 4, groups), (1168, 128, 90_000, 360_000),
            (64, 16, 1, 4, 1), "128b", "none",
        )  # fmt: skip
        assert attention.params["q_rope_map"] == jit.tensor_map(
            expected["q_rope"], "bfloat16", (64, 16, 1, 4, groups), (400, 128, 44_000, 176_000),
            (64, 16, 1, 4, 1), "128b", "none",
        )  # fmt: skip
    rest = launches[-2].params
    assert (rest["b"], rest["h_q"], rest["q"]) == (3, 16, 0x1000 + 2 * 45_000 * 1028)
    assert rest["q_rope"] == 0x1800 + 2 * 22_000 * 1028
    assert rest["indices"] == (0x3000 + 4 * 120 * 1028, 0) and rest["lengths"] == (0x4000 + 4 * 1028, 0)
    assert rest["lse"] == 0x9000 + 4 * 16 * 1028 and rest["attn_sink"] == 0x4F00


@pytest.mark.parametrize("format", ("v32", "model1"))
@pytest.mark.parametrize(
    ("changes", "cache", "copied"),
    [
        ({}, {}, True),
        ({"b": 31}, {"num_blocks": 47}, False),  # 2,491 rows, 19,840 selected
        ({"h_q": 3}, {}, False),
        ({"load_bytes": 8}, {}, None),
        ({"h_q": 16}, {}, None),
        ({}, {"block_stride": 2**31}, False),
    ],
    ids=("often", "seldom", "no room", "unaligned", "few heads", "blocks too far apart"),
)
def test_fp8_rows_that_are_selected_often_are_copied(
    launches: list[Launch],
    format: str,
    changes: dict[str, Any],
    cache: dict[str, int],
    copied: bool | None,
) -> None:
    layout = mla_cache_rows.QUANTIZED[format]
    copied = copied if copied is not None else format == "model1"
    page = 53
    call = prefill_call(
        format=format, d_qk=layout.d_qk, load_bytes=16, b=32, h_q=64,
        cache=mla_sparse.Cache(page, 10, 60_000, layout.row_bytes, 640, 700, 0)._replace(**cache),
        q_strides=(64 * layout.d_qk, 0, layout.d_qk), q_rope_strides=(64 * layout.d_qk, 0, layout.d_qk),
        out_strides=(64 * 512, 0, 512), num_parts=132, limited=True,
    )._replace(**changes)  # fmt: skip
    prepared = mla_sparse_prefill.prepare(call, not_capturing)
    prepared.launch(0x51, prefill_addresses(topk_length=0x4000, attn_sink=0), 0x10000)
    names = [launch.spec.name for launch in launches]
    assert (names[0] == "mla_cache_gather") == copied
    attention = next(launch for launch in launches if launch.spec.name in SPARSE_DECODE)
    if not copied:
        assert attention.params["cache"] == (0x2000, 0)
        return
    assert all(launch.spec in SPECS for launch in launches) and names[2] == "mla_sparse_bf16"
    gather = launches[0].params
    rows = gather["out"]
    slots = page * 10
    assert rows % 128 == 0 and rows + slots * 2 * layout.d_qk == 0x10000 + prepared.scratch_bytes
    assert attention.params["cache"] == (rows, 0)
    assert attention.params["page_block_size"][0] == 1 and attention.params["cache_slots"][0] == slots
    assert attention.params["block_stride"][0] == 2 * layout.d_qk == 2 * gather["out_stride"]
    assert (gather["cache"], gather["block_table"], gather["rows"]) == (0x2000, 0, slots)
    assert (gather["block_stride"], gather["token_stride"]) == (60_000, layout.row_bytes)


def _combine_launch(
    call: mla_sparse.SparseCall,
) -> tuple[tuple[int, int, int], KernelSpec]:
    """The grid and the variant of the combine behind a sparse call."""
    by_request = call.batch_invariant or call.b <= call.num_parts
    rows = call.s_q * call.h_q
    grid, mapping = mla_combine.launch_shape(rows, call.b, call.num_parts, by_request, call.batch_invariant)
    return grid, mla_combine.spec("bfloat16", mapping, call.lse_factor is not None)


def test_sparse_call_of_one_block_needs_no_combine(launches: list[Launch]) -> None:
    cache = sparse_call().cache._replace(topk=64)
    prepared = mla_sparse.PreparedSparse(sparse_call(cache=cache, extra=mla_sparse.NO_CACHE), not_capturing)
    assert prepared.scratch_bytes == 0
    prepared.launch(0x51, SPARSE_ADDRESSES, 0)
    (main,) = launches
    assert [main.params[name] for name in ("max_splits", "o_accum", "lse_accum_log2")] == [0, 0, 0]


def test_tensor_maps_describe_the_cache(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dimensions: columns of a chunk, tokens, chunks, heads, pages. Strides are in bytes."""
    made: dict[bytes, tuple[Any, ...]] = {}

    def tensor_map(*description: Any) -> bytes:
        made[name := bytes([len(made)]) * 128] = description
        return name

    monkeypatch.setattr(jit, "tensor_map", tensor_map)
    for page_block_size, box_rows in ((16, 16), (32, 32), (64, 64), (192, 64)):
        launch_decode(dense_call(page_block_size=page_block_size))
        params = launches[-2].params
        for name, chunks in (("k_map_half", 4), ("k_map_one", 1)):
            address, dtype, dims, strides, box, swizzle, _ = made[params[name]]
            assert (address, dtype, swizzle) == (0x2000, "bfloat16", "128b")
            assert dims == (64, page_block_size, 9, 2, 1000)
            assert strides == (2 * 1160, 128, 2 * 592, 2 * 500_000)
            assert box == (64, box_rows, chunks, 1, 1)
