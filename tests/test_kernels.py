"""Every kernel variant as the compiler makes it, and what its C++ and its Python side have to agree on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import kernel_variants
import numpy as np
import pytest
from cuda_probe import (
    assert_in_header,
    assert_in_kernel,
    assert_no_losses,
    assert_products_are_not_serialised,
)
from full_cases import full_unless
from kernel_params import SPARSE_DECODE, family
from kernel_variants import (
    BY_QUERY,
    CAUSAL,
    DTYPES,
    FLAGS,
    FLEX,
    GRID,
    NEEDS,
    QUICK,
    SPECS,
    VARIANTS,
    forward_spec,
    gradient_spec,
)

import rawmla
from kit import plans
from rawmla import jit, reference
from rawmla.flex.functions import header_of, within_blocks
from rawmla.flex.mods import CudaMod, reading_of
from rawmla.jit import KernelSpec
from rawmla.jit.builder import Builder
from rawmla.jit.cache import DiskCache
from rawmla.jit.sources import find_source_root
from rawmla.jit.spec import MAX_SMEM_BYTES
from rawmla.kernels import (
    block_mask,
    common,
    default_specs,
    flex_captured,
    mha_backward_variants,
    mha_forward_variants,
    mla_cache_rows,
    mla_cache_write,
    mla_combine,
    mla_metadata,
    mla_sparse,
)
from rawmla.kernels.flex_captured import IN_ANY_ORDER, IN_DIGITS, IN_UNITS, LARGEST, captured_spec
from rawmla.kernels.mha_backward_variants import BY_KEYS, BY_KEYS_WIDE, BY_PRODUCT, form_of, specs


def test_variants() -> None:
    assert len(set(SPECS)) == len(SPECS) and set(default_specs()) < set(SPECS)
    assert not any(prefill for _, prefill in map(family, default_specs()))
    wrong = (("v32", 512, 16), ("model1", 576, 16), ("bf16", 576, 8), ("v32", 576, 4), ("fp8", 576, 16))
    for arguments in wrong:
        with pytest.raises(ValueError, match="^sparse decode: expected"):
            mla_sparse.spec(*arguments)
    assert specs("bfloat16", 40, 40, True, True, True) == specs("bfloat16", 64, 64, True, True, True)


SHARED_MOVES = {
    "mla_sparse_fp8": (2, 1, 2),
    "mla_sparse_fp8_cluster": (1, 1, 2),
    "mla_sparse_fp8_few_heads": (1, 4, 1),
}
"""How many warpgroups have each setmaxnreg, in the order of the kernel, where it is not one."""


@pytest.mark.parametrize("name", full_unless(lambda name: name in QUICK, VARIANTS), ids=str)
def test_compiles_without_spills(name: str) -> None:
    """An SM has room for a CTA, and setmaxnreg moves no more registers than the launch gives: one count per
    role, in steps of 8, some up, some down.

    At d 192/128 flex attention's forward may spill if half the tile does not. Functions of users may spill.
    """
    spec = VARIANTS[name]
    if spec in kernel_variants.HALF_TILES and jit.build(spec).losses:
        spec = kernel_variants.HALF_TILES[spec]
    variant = assert_no_losses(spec)
    assert "-arch=sm_90a" in variant.built.meta["options"]
    moves = variant.moves()
    if spec.name in ("mla_dense_decode", *SPARSE_DECODE):
        shared = SHARED_MOVES.get(spec.name, (1,) * len(moves))
    elif spec.name in ("mha_forward", "mha_backward", "mha_backward_by_product", "flex_captured_gradients"):
        shared = ()  # the kernel compares the sum itself
    else:
        assert not moves
        return
    launched, counts = variant.built.meta["registers"], [count for _, count in moves]
    assert {kind for kind, _ in moves} == {"inc", "dec"}
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in counts)
    assert all((count > launched) == (kind == "inc") or count == launched for kind, count in moves)
    if shared:
        assert sum(shared) == spec.threads // 128 and len(shared) == len(moves)
        moved = sum(count * several for count, several in zip(counts, shared, strict=True))
        assert moved <= sum(shared) * launched, (moves, launched)


READING = itertools.product(kernel_variants.FLEX_DIMS, ("both read", "small blocks"))
QUICK_READING = ((256, 256), "both read")


@pytest.mark.parametrize("which", full_unless(lambda which: which == QUICK_READING, READING), ids=str)
def test_functions_that_read_along_keys(which: tuple[tuple[int, int], str]) -> None:
    """They may spill, but products do not wait for each other."""
    assert_products_are_not_serialised(jit.build(forward_spec("bfloat16", *which)))


WITH_USER_TEXT = (
    FLEX["flex states"],
    captured_spec("bfloat16", 128, 128, IN_ANY_ORDER, header_of(BY_QUERY, None)),
    mha_backward_variants.references_spec("bfloat16", 128, 128, header_of(None, None)),
)
# The variant with the most shared memory of each kernel: some of mla_combine have none.
A_VARIANT_OF_EACH = {
    spec.name: spec for spec in sorted((*WITH_USER_TEXT, *SPECS), key=lambda spec: spec.smem_bytes)
}


def test_a_variant_of_each_kernel() -> None:
    files = (find_source_root() / "kernels").glob("*.cu")
    assert set(A_VARIANT_OF_EACH) == {file.stem for file in files}


@pytest.mark.parametrize("spec", A_VARIANT_OF_EACH.values(), ids=lambda spec: spec.name)
def test_a_kernel_refuses_a_launch_that_does_not_fit(spec: KernelSpec) -> None:
    """A launch with other threads than the kernel is written for, or too little shared memory."""
    wrong = {"smem_bytes": 16} if spec.smem_bytes else {}
    texts = ["SMEM_BYTES is what the launch asks for"] * bool(spec.smem_bytes)
    if spec.name != "mla_metadata":  # takes any number of threads
        wrong["threads"] = spec.threads + 32
        texts.append("THREADS is what the launch gives")
    with pytest.raises(AssertionError) as caught:
        assert_in_kernel(replace(spec, **wrong), [])
    assert all(text in str(caught.value) for text in texts)


# ---- constants of C++ and of Python


def test_constants_of_the_plan() -> None:
    conditions = [
        f"kBlockTokens == {common.BLOCK_TOKENS}",
        f"kPlanRowInts == {mla_metadata.PLAN_COLUMNS}",
        f"kBatchInvariantMark == {reference.BATCH_INVARIANT_MARK}",
        f"TokenCounts::kUnlimited == {mla_metadata.TokenCounts(0).most}",
    ]

    def split_blocks(blocks: int) -> int:
        least = common.ceil_div(blocks, common.BATCH_INVARIANT_MAX_SPLITS)
        return max(common.BATCH_INVARIANT_MIN_BLOCKS, least)

    for blocks in (*range(600), 8191, 8192, 8193, 1 << 20, (1 << 25) + 1):
        conditions.append(f"all_tokens(nullptr).invariant_split({blocks}) == {split_blocks(blocks)}")
    for topk, extra_topk in ((1, 0), (64, 64), (512, 0), (16384, 0), (16385, 0), (8192, 8193), (1 << 20, 7)):
        room = common.ceil_div(topk, 64) + common.ceil_div(extra_topk, 64)
        tokens = f"TokenCounts{{nullptr, nullptr, {topk}, {extra_topk}}}"
        for blocks in (0, 1, room, 1 << 25):
            conditions.append(f"{tokens}.invariant_split({blocks}) == {split_blocks(room)}")
        # Scratch is enough for a request that fills the room.
        assert common.ceil_div(room, split_blocks(room)) <= (common.max_splits(1, 1, room, True) or 1)
    for splits_before, req in ((0, 0), (7, 7), (9, 5), (100_000, 1)):
        conditions.append(f"first_split({splits_before}, {req}, true) == {splits_before}")
        conditions.append(f"first_split({splits_before}, {req}, false) == {2 * (splits_before - req)}")
    assert_in_header("mla/plan.cuh", conditions, constexpr=("invariant_split", "first_split", "all_tokens"))
    assert reference.BLOCK_TOKENS == plans.BLOCK_TOKENS == common.BLOCK_TOKENS
    for name in ("BATCH_INVARIANT_MIN_BLOCKS", "BATCH_INVARIANT_MAX_SPLITS"):
        assert getattr(reference, name) == getattr(common, name)
    assert reference.PLAN_COLUMNS == mla_metadata.PLAN_COLUMNS


def constants() -> Iterator[tuple[KernelSpec, list[str]]]:
    """Numbers of Python by the names that the C++ of a variant has for them.

    Only what no wrong result shows: the cost model of plans, shared memory, and what is left out.
    """
    for b in (1, 512, 513, mla_metadata.MAX_BATCH):
        conditions = [
            f"kMaxFixedCost == {reference.MAX_FIXED_COST}",
            f"kFixedCostDivisor == {reference.FIXED_COST_DIVISOR}",
            f"kMaxShortPartition == {reference.MAX_SHORT_PART}",
            f"kShortPartFactor == {reference.SHORT_PART_FACTOR}",
            "sizeof(SharedMemoryPlan) == 4 * (2 * kMaxBatch + 1 + 2 * kWarps)",
            f"kMaxBatch >= {b}",
        ]
        yield mla_metadata.spec(b), conditions
    for spec in SPECS:
        if spec.name == "mla_combine":
            dtype = {code: name for name, code in common.DTYPES.items()}[dict(spec.defines)["DTYPE"]]
            row_bytes = mla_combine.split_row_bytes(dtype, family(spec)[1])
            yield spec, [f"16 / kVectorColumns * kDimV + 4 * (1 + kScaleHalves + MAX_LOGITS) == {row_bytes}"]
    for format in mla_cache_rows.CACHE_FORMATS:
        least = [f"kV32MinScale == {reference.V32_MIN_SCALE!r}", f"kE4m3Max == {reference.E4M3_MAX!r}"]
        least += [f"kModel1MinAmax == {float(np.float32(1e-4))!r}"]
        yield mla_cache_write.spec(format, True), least
    for dims in ((32, 32), (64, 96), (96, 96), (128, 128), (192, 128), (192, 64), (256, 256)):
        for needs in (mha_backward_variants.ALL, mha_backward_variants.ALL._replace(dq=False)):
            spec, form = specs("bfloat16", *dims, needs=needs)[1], form_of("bfloat16", *dims, *FLAGS[0])
            parts = "kChunksQK" if form.by_product else "kDqParts"
            conditions = [
                f"kTileKeys == {form.tile_keys} && kThreads == {form.threads}",
                f"kStages == {dict(spec.defines).get('STAGES', 2)}",
                f"sizeof(SharedMemoryPlan) + 2 * {mha_backward_variants._BARRIER_BYTES} > SMEM_BYTES",
                f"{parts} * kPartBytes == 4 * kBlockRows * {form.accum_columns(dims[0])}",
                f"{parts} % kPlaces == 0 || kPlaces % {parts} == 0",
            ]
            yield spec, conditions
    for dims in (*kernel_variants.FLEX_DIMS, (96, 96)):
        tile = mha_forward_variants.tile_in_blocks(*dims)
        yield forward_spec("bfloat16", dims, "both"), [f"kTileKeys == {tile.keys} && 128 % kTileKeys == 0"]
        yield gradient_spec(dims, "softcap, causal"), ["kFlex && kTrims && kHasDerivative"]
        yield gradient_spec(dims, "neither"), ["kFlex && !kTrims && !kHasDerivative"]
    conditions = [
        f"sizeof(CapturedCell) == {flex_captured._CELL_BYTES}",
        f"sizeof(CapturedDigits) == {flex_captured._DIGITS_BYTES}",
        f"kElementsTogether == {flex_captured._ELEMENTS_TOGETHER}",
        "2 * kRegisters + kProducerRegisters <= 3 * 168",
    ]
    for pass_ in (IN_ANY_ORDER, LARGEST, IN_UNITS, IN_DIGITS):
        yield captured_spec("bfloat16", 128, 128, pass_, header_of(BY_QUERY, CAUSAL)), conditions


@pytest.mark.parametrize(
    ("spec", "conditions"), [*constants()], ids=lambda x: x.label if isinstance(x, KernelSpec) else ""
)
def test_constants(spec: KernelSpec, conditions: list[str]) -> None:
    assert_in_kernel(spec, conditions)


# ---- forms of dense attention's backward

STEPS = range(32, 257, 32)  # head dimensions that have variants of their own


def test_forms_of_the_backward() -> None:
    """Every pair of head dimensions has a form, for every set of flags and of gradients. Shared memory has
    room for two stages of Q and dO at least and three where they fit, or for a place of dQ.
    """
    plain, every = FLAGS[0], FLAGS[-1]
    for dtype in DTYPES:
        assert all(form_of(dtype, 128, 128, *flags) == BY_KEYS for flags in FLAGS[:-1])
        assert form_of(dtype, 128, 96, *every) == form_of(dtype, 96, 128, *every) == BY_KEYS
        assert form_of(dtype, 128, 128, *every) == BY_PRODUCT
        assert all(form_of(dtype, *d, *plain) == BY_PRODUCT for d in ((192, 32), (32, 160), (192, 160)))
        # The wide form has no variant for dv alone, and none of float16.
        wide = BY_KEYS_WIDE if dtype == "bfloat16" else BY_PRODUCT
        for flags, needs in itertools.product(FLAGS, NEEDS):
            of_plain = wide if needs.dq or needs.dk else BY_KEYS
            assert form_of(dtype, 192, 128, *flags, needs) == (BY_PRODUCT if any(flags) else of_plain)
        for d_qk, d_v, flags, needs in itertools.product(STEPS, STEPS, FLAGS, NEEDS):
            form = form_of(dtype, d_qk, d_v, *flags, needs)
            if (d_qk, d_v) != (192, 128):
                assert form == form_of(dtype, d_qk, d_v, *flags) and form in (BY_KEYS, BY_PRODUCT)
            spec = specs(dtype, d_qk, d_v, *flags, needs)[1]
            defines = dict(spec.defines)
            assert (spec.name, spec.threads) == (form.kernel, form.threads)
            if form.by_product:
                assert -(-d_qk // 64) % defines["DQ_PLACES"] == 0 < defines["DQ_PLACES"]
            else:
                stage = 64 * (2 * 64 * (-(-d_qk // 64) - (-d_v // 64)) + 12)
                fits = spec.smem_bytes + stage <= MAX_SMEM_BYTES
                assert defines["WIDE"] == form.is_wide
                assert defines["STAGES"] == 3 or (defines["STAGES"] == 2 and not fits)
    assert mha_backward_variants.forms_of(128, 128) == (BY_KEYS, BY_PRODUCT)
    assert mha_backward_variants.forms_of(64, 129) == (BY_PRODUCT,)
    for d_qk in range(1, 257):  # all columns of dQ, and no more than the kernel computes
        assert BY_KEYS.accum_columns(d_qk) == BY_KEYS_WIDE.accum_columns(d_qk) == -(-d_qk // 32) * 32
        assert BY_PRODUCT.accum_columns(d_qk) == -(-d_qk // 64) * 64


# ---- what a user's text may have, and what is said of its mistakes


WRONG_MASK = CudaMod("int x = q_idx;\nreturn x >= wrong_name;").mod()
WRONG_GRADIENT = CudaMod("score", grad="grad * wrong_name").mod(backward=True)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (block_mask.states_spec(header_of(None, WRONG_MASK)), "return x >= wrong_name;"),
        (
            mha_backward_variants.flex_spec("bfloat16", 64, 64, BY_KEYS, header_of(WRONG_GRADIENT, None)),
            '"wrong_name" is undefined',
        ),
    ],
    ids=("mask", "gradient"),
)
def test_a_mistake_is_shown_where_it_is(tmp_path: Path, spec: KernelSpec, text: str) -> None:
    with pytest.raises(rawmla.CompileError) as caught:
        Builder(find_source_root(), DiskCache(tmp_path, 10**8)).build(spec)
    shown = caught.value.user_lines
    assert text in shown and shown in str(caught.value)
    assert re.search(r"user/mods.cuh, line (\d+): error: (?s:.)*> +\1 \| .*\n +\| +\^", shown), shown


def test_names_of_users_do_not_meet_those_of_the_kernel() -> None:
    captures = {"params": 2.0, "tile": 3, "block": 1, "kTileKeys": 5.0, "stage": 1.0}
    mod = CudaMod("score * params + tile + block + kTileKeys * stage  // all of them", captures).mod()
    score = CudaMod("const float x = score * n; return x;", {"n": 2.0}).mod()
    text = "const int x = q_idx + n, block_state = 3; return x > kv_idx + block_state;"
    mask = within_blocks(reading_of(CudaMod(text, {"n": 2}).mod()), GRID).frame.mod
    for header in (header_of(mod, None), header_of(score, mask)):
        assert_in_kernel(mha_forward_variants.flex_spec("bfloat16", 64, 64, 128, False, header), [])
