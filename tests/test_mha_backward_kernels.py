"""The kernels of the backward of dense attention as the compiler makes them, and what the host gives them."""

from __future__ import annotations

import itertools
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from calls.test_dense_backward import D_QK, EXPECTED
from cuda_probe import assert_in_kernel, assert_no_losses
from full_cases import full_unless
from test_params import conditions_of, has_members

from rawmla import jit
from rawmla.jit import KernelSpec
from rawmla.jit.params import ParamStruct
from rawmla.jit.spec import MAX_SMEM_BYTES
from rawmla.kernels import mha_backward, mha_backward_variants
from rawmla.kernels.mha_backward import BackwardAddresses, PreparedMhaBackward, params_of, section_of
from rawmla.kernels.mha_backward_variants import (
    ALL,
    BY_KEYS,
    BY_KEYS_WIDE,
    BY_PRODUCT,
    Needs,
    form_of,
    specs,
)

# With every flag, and with all or none of them: the forms of the schedule at their ends.
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
MORE_DIMS = (
    *((64, 128), (128, 96), (128, 32), (96, 64), (40, 40), (8, 8)),
    *((192, 64), (96, 160), (32, 224), (64, 256), (256, 96)),
)
DTYPES = ("bfloat16", "float16")
FLAGS = tuple(itertools.product((False, True), repeat=3))  # softcap, ALiBi, sinks with dlse
STRUCTS: dict[str, ParamStruct] = {
    "mha_backward_prepare": mha_backward.PREPARE_PARAMS,
    "mha_backward": params_of(),
    "mha_backward_by_product": params_of(),
    "mha_backward_finish": mha_backward.FINISH_PARAMS,
    "mha_backward_clear": mha_backward.CLEAR_PARAMS,
}
MAIN = {
    (dtype, *dims, *flags): specs(dtype, *dims, *flags)[1]
    for dims in DIMS + MORE_DIMS
    for dtype in DTYPES
    for flags in (FLAGS if dims in DIMS else (FLAGS[0], FLAGS[-1]))
}
NEEDS = [Needs(*some, True) for some in itertools.product((False, True), repeat=3) if any(some)]
SUBSETS = [needs for needs in NEEDS if not all(needs)]
STEPS = range(32, 257, 32)  # head dimensions that have variants of their own
SOME = {
    (*dims, *flags, *needs): specs("bfloat16", *dims, *flags, needs)[1]
    for dims in DIMS
    for flags in (FLAGS[0], FLAGS[-1])
    for needs in SUBSETS
}
# All flags at each pair of dimensions; at d 128 the most that its form by keys has, at d 256 other registers;
# sets of gradients, each by another form. `compile --all` has those without flags, of both dtypes.
QUICK = {
    *(MAIN[("bfloat16", *dims, *FLAGS[-1])] for dims in DIMS if dims != (128, 128)),
    MAIN[("bfloat16", 128, 128, *FLAGS[-2])],
    MAIN[("bfloat16", 256, 256, True, False, False)],
    SOME[(96, 96, *FLAGS[-1], True, False, False, True)],
    SOME[(192, 128, *FLAGS[0], False, True, True, True)],
    SOME[(128, 128, *FLAGS[-1], False, False, True, True)],
}
AROUND = [
    *dict.fromkeys(x for dtype in DTYPES for d in (64, 128) for x in specs(dtype, d, d)[::2]),
    mha_backward_variants.CLEAR_SPEC,
]
QUICK.update((*specs("bfloat16", 128, 128)[::2], mha_backward_variants.CLEAR_SPEC))
BY_NAME: dict[str, KernelSpec] = {
    spec.name: spec for spec in (specs("bfloat16", 128, 128)[1], specs("bfloat16", 256, 256)[1], *AROUND)
}


def test_variants() -> None:
    """Only the dtype, head dimensions in steps of 32 and the three flags select one."""
    assert MAIN["bfloat16", 40, 40, True, True, True] == MAIN["bfloat16", 64, 64, True, True, True]
    assert len(set(MAIN.values())) == 2 * 8 * len(DIMS) + 2 * 2 * (len(MORE_DIMS) - 1)
    for dtype in DTYPES:
        around = {specs(dtype, *dims, *flags)[::2] for dims in DIMS for flags in FLAGS}
        assert len(around) == 2  # by d_v
    assert {spec.name for spec in BY_NAME.values()} == set(STRUCTS)


def test_forms_of_the_backward() -> None:
    """Every pair of head dimensions has one, for every set of flags and of gradients."""
    plain = (False, False, False)
    for dtype in DTYPES:
        for flags in FLAGS[:-1]:
            assert form_of(dtype, 128, 128, *flags) == BY_KEYS
        for dims in ((128, 96), (96, 128)):
            assert form_of(dtype, *dims, True, True, True) == BY_KEYS
        assert form_of(dtype, 128, 128, *FLAGS[-1]) == BY_PRODUCT
        for dims in ((192, 32), (32, 160), (192, 160)):
            assert form_of(dtype, *dims, *plain) == BY_PRODUCT
        for flags, needs in itertools.product(FLAGS, NEEDS):
            # The wide form has no variant for dv alone, and none of float16.
            wide = BY_KEYS_WIDE if dtype == "bfloat16" else BY_PRODUCT
            of_plain = wide if needs.dq or needs.dk else BY_KEYS
            assert form_of(dtype, 192, 128, *flags, needs) == (BY_PRODUCT if any(flags) else of_plain)
        for d_qk, d_v, flags, needs in itertools.product(STEPS, STEPS, FLAGS, NEEDS):
            form = form_of(dtype, d_qk, d_v, *flags, needs)
            assert form in (BY_KEYS, BY_KEYS_WIDE, BY_PRODUCT)
            assert form.by_product == (form == BY_PRODUCT)
            if (d_qk, d_v) != (192, 128):
                assert form == form_of(dtype, d_qk, d_v, *flags) != BY_KEYS_WIDE


@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_memory_of_the_backward(dtype: str) -> None:
    """There is enough for every pair of head dimensions and set of gradients, with two stages of Q and dO at
    least, and as many as fit up to three; by product with a place for dQ at least, which has its chunks.
    """
    for d_qk, d_v, flags, needs in itertools.product(STEPS, STEPS, FLAGS, NEEDS):
        form = form_of(dtype, d_qk, d_v, *flags, needs)
        spec = specs(dtype, d_qk, d_v, *flags, needs)[1]
        defines = dict(spec.defines)
        assert (spec.name, spec.threads) == (form.kernel, form.threads)
        assert spec.smem_bytes <= MAX_SMEM_BYTES
        if form.by_product:
            assert not defines.keys() & {"STAGES", "WIDE"}
            assert -(-d_qk // 64) % defines["DQ_PLACES"] == 0 < defines["DQ_PLACES"]
        else:
            assert "DQ_PLACES" not in defines and defines["WIDE"] == form.is_wide
            stage = 64 * (2 * 64 * (-(-d_qk // 64) - (-d_v // 64)) + 12)
            fits = spec.smem_bytes + stage <= MAX_SMEM_BYTES
            assert defines["STAGES"] == 3 or (defines["STAGES"] == 2 and not fits)


def test_columns_of_the_sums_of_dq() -> None:
    """All of dQ's, and no more than the kernel computes."""
    for d_qk in range(1, 257):
        by_keys = {form.accum_columns(d_qk) for form in (BY_KEYS, BY_KEYS_WIDE)}
        assert by_keys == {-(-d_qk // 32) * 32}
        assert BY_PRODUCT.accum_columns(d_qk) == -(-d_qk // 64) * 64


def test_segments_on_a_gpu_meet_every_form() -> None:
    """What a test among the GPU tests says of their cases, which needs no GPU."""
    from test_mha_varlen import test_forms_of_the_cases

    test_forms_of_the_cases()


REGISTERS = {
    (64, 64, False, False, False): (240, 240, 24),
    (128, 128, False, True, False): (240, 240, 24),
    (128, 128, True, True, False): (240, 240, 24),
    (192, 128, False, False, False): (240, 240, 24),
    (192, 128, False, True, False): (216, 208, 64, 24),
    (128, 128, True, False, True): (240, 240, 24),
    (128, 128, True, True, True): (216, 208, 64, 24),
    (256, 256, False, False, False): (208, 208, 64, 32),
    (256, 256, True, False, False): (208, 208, 64, 32),
    (256, 256, False, True, False): (216, 208, 64, 24),
    (256, 256, True, True, True): (216, 208, 64, 24),
}
REGISTERS_OF = {MAIN[("bfloat16", *variant)]: registers for variant, registers in REGISTERS.items()}


@pytest.mark.parametrize(
    "spec",
    full_unless(lambda spec: spec in QUICK, dict.fromkeys([*AROUND, *MAIN.values(), *SOME.values()])),
    ids=lambda spec: spec.label,
)
def test_backward_compiles_without_spills(spec: KernelSpec) -> None:
    """And two consumers, by product the warpgroup of dQ, and a producer share what the launch gives."""
    variant = assert_no_losses(spec)
    if spec not in REGISTERS_OF:
        return
    registers = REGISTERS_OF[spec]
    launched = 168 if len(registers) == 3 else 128
    moves = variant.moves()
    assert {count for _, count in moves} == set(registers)
    assert variant.built.meta["registers"] == launched
    assert all((move == "inc") == (count > launched) for move, count in moves)
    assert spec.threads == 128 * len(registers) and sum(registers) <= len(registers) * launched


def test_each_set_of_registers_is_compiled() -> None:
    assert {REGISTERS_OF[spec] for spec in QUICK & REGISTERS_OF.keys()} == set(REGISTERS.values())


def test_constants_of_the_backward() -> None:
    for dims, form in (((128, 128), BY_KEYS), ((192, 128), BY_KEYS_WIDE), ((256, 256), BY_PRODUCT)):
        spec = MAIN[("bfloat16", *dims, False, False, False)]
        assert_in_kernel(
            spec,
            [
                f"kBlockRows == {mha_backward_variants.BLOCK_ROWS}",
                f"kTileKeys == {form.tile_keys}",
                f"kThreads == {form.threads}",
                f"kStages == {dict(spec.defines).get('STAGES', 2)}",
                *([] if form.by_product else [f"kDsStages == {1 if form.is_wide else 2}"]),
            ],
        )
    assert_in_kernel(BY_NAME["mha_backward_clear"], [f"kRows == {mha_backward._CLEARED_ROWS}"])


EVERY_PLACE = {
    specs("bfloat16", d_qk, d_v, needs=needs)[1]: (d_qk, d_v)
    for d_qk, d_v in ((32, 32), (64, 96), (96, 96), (128, 128), (192, 128), (192, 64), (256, 256))
    for needs in (ALL, ALL._replace(dq=False))
}


@pytest.mark.parametrize("spec", EVERY_PLACE, ids=lambda spec: spec.label)
def test_layout_of_the_backward(spec: KernelSpec) -> None:
    """The launch asks for little more shared memory than the kernel has things for, and the parts of a block
    of dQ make up its sums.
    """
    d_qk, d_v = EVERY_PLACE[spec]
    form = form_of("bfloat16", d_qk, d_v, False, False, False)
    parts = "kChunksQK" if form.by_product else "kDqParts"
    assert_in_kernel(
        spec,
        [
            f"sizeof(SharedMemoryPlan) + 2 * {mha_backward_variants._BARRIER_BYTES} > SMEM_BYTES",
            f"{parts} * kPartBytes == 4 * kBlockRows * {form.accum_columns(d_qk)}",
            f"{parts} % kPlaces == 0 || kPlaces % {parts} == 0",
        ],
    )


@pytest.mark.parametrize("name", STRUCTS)
def test_cpp_has_the_same_members_in_the_backward(name: str) -> None:
    declared = STRUCTS[name]
    count = len(declared.members)
    conditions = [f"sizeof(Params) == {declared.size}", f"Has{count}<Params> && !Has{count + 1}<Params>"]
    for member in declared.members:
        conditions += conditions_of(member.name, member.type, member.length, member.offset)
    assert_in_kernel(BY_NAME[name], conditions, has_members(count) + has_members(count + 1))


# ---- launches


class Launches:
    """The kernels that are loaded, what they were prepared with, and the launches, in their order."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.grids: dict[str, tuple[int, int, int]] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.enqueued: list[tuple[str, tuple[Any, ...]]] = []

    def get_kernel(self, spec: KernelSpec, device: int, capturing: Any) -> Any:
        self.loaded.append(spec.name)
        return SimpleNamespace(
            prepare=lambda grid, params, changing, pdl: self._prepare(spec.name, grid, params, pdl)
        )

    def _prepare(self, name: str, grid: tuple[int, int, int], params: bytes, pdl: bool) -> Any:
        declared = STRUCTS[name]
        assert pdl and len(params) == declared.size and min(grid) > 0
        self.grids[name] = grid
        self.params[name] = {}
        for member in declared.members:
            values = struct.unpack_from(f"<{member.code}", params, member.offset)
            self.params[name][member.name] = values if member.length else values[0]
        return SimpleNamespace(launch=lambda *given: self.enqueued.append((name, given)))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(jit, "get_kernel", made.get_kernel)
    monkeypatch.setattr(jit, "tensor_map", lambda *given: given)
    return made


ADDRESSES = BackwardAddresses(*[0x1000 * (i + 1) for i in range(len(BackwardAddresses._fields))])


@pytest.mark.parametrize("varlen", (False, True))
def test_order_of_launches(launches: Launches, varlen: bool) -> None:
    """Three, and a fourth for tokens of no request, whose grids cover what there is."""
    prepared = PreparedMhaBackward(EXPECTED._replace(varlen=varlen), lambda: False)
    prepared.launch(0x51, ADDRESSES, 0x100000)
    names = ["mha_backward_prepare", "mha_backward", "mha_backward_finish"]
    assert [name for name, _ in launches.enqueued] == [*names, *["mha_backward_clear"] * varlen]
    assert {given[0] for _, given in launches.enqueued} == {0x51}
    # 3 requests of up to 20 queries and 30 keys: a block and a tile each. As segments their 40 and 56 tokens
    # may lie in 3 at most.
    assert launches.grids["mha_backward"] == (2 * 3, 1, 1)
    assert launches.grids["mha_backward_prepare"] == (8 * 3, 1, 1)
    assert launches.grids["mha_backward_finish"] == (8 * 3, -(-D_QK // 64), 1)
    assert {params["blocks"] for params in launches.params.values() if "blocks" in params} == {3}
    if varlen:
        assert launches.grids["mha_backward_clear"] == (3, 1, 1)
        assert launches.params["mha_backward_clear"]["first_ctas"] == (0, 1, 2)


@pytest.mark.parametrize("needs", [*itertools.product((False, True), repeat=4)], ids=str)
@pytest.mark.parametrize("sink_dtype", (None, "bfloat16"))
def test_launches_of_some_gradients(launches: Launches, needs: Any, sink_dtype: str | None) -> None:
    """What computes no gradient that is needed is not launched; dq alone has sums and turns."""
    dq, dk, dv, dsink = needs
    call = EXPECTED._replace(sink_dtype=sink_dtype, deterministic=True, needs=Needs(*needs))
    everything = PreparedMhaBackward(call._replace(needs=ALL), lambda: False)
    prepared = PreparedMhaBackward(call, lambda: False)
    prepared.launch(0x51, ADDRESSES, 0x100000)
    enqueued = dict(launches.enqueued)
    finishes = dq or (sink_dtype is not None and dsink)
    assert list(enqueued) == [
        "mha_backward_prepare",
        *["mha_backward"] * (dq or dk or dv),
        *["mha_backward_finish"] * finishes,
        *["mha_backward_clear"] * (dq or dk or dv),
    ]
    accum, turns = enqueued["mha_backward_prepare"][7], enqueued["mha_backward_prepare"][11]
    assert (accum != 0) == (turns != 0) == dq
    sums, turns_bytes = 4 * 8 * 3 * 64 * 128, 128  # 4 * 8 * 3, rounded up
    assert everything.scratch_bytes - prepared.scratch_bytes == (0 if dq else sums + turns_bytes)
    if dq or dk or dv:
        assert enqueued["mha_backward"][8:10] == (accum, turns)
        # A CTA for the tokens of each array
        assert launches.grids["mha_backward_clear"] == (dq + dk + dv, 1, 1)
    if finishes:
        assert launches.grids["mha_backward_finish"][1] == (2 if dq else 1)


def test_grids_of_long_segments(launches: Launches) -> None:
    """Blocks of 64 rows and tiles of 128 keys of segments that begin anywhere: one more for each request."""
    call = EXPECTED._replace(total_q=6400, total_k=12800, max_seqlen_q=6400, max_seqlen_k=12800)
    PreparedMhaBackward(call, lambda: False)
    assert launches.grids["mha_backward_prepare"] == (8 * (100 + 3), 1, 1)
    assert launches.grids["mha_backward"] == (2 * (100 + 3), 1, 1)
    assert launches.grids["mha_backward_clear"] == (100 + 200 + 200, 1, 1)


@pytest.mark.parametrize(("d_qk", "d_v", "columns"), ((100, 59, 128), (70, 59, 96), (70, 130, 128)))
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("sink_dtype", (None, "bfloat16"))
@pytest.mark.parametrize("has_dlse", (False, True))
def test_scratch_of_the_backward(
    launches: Launches,
    has_dlse: bool,
    sink_dtype: str | None,
    deterministic: bool,
    d_qk: int,
    d_v: int,
    columns: int,
) -> None:
    """float32 of d_qk, lse and delta a row; with sinks a number a block; with both another a row; in a fixed
    order a turn a block.
    """
    call = EXPECTED._replace(d_qk=d_qk, d_v=d_v, has_dlse=has_dlse, sink_dtype=sink_dtype)
    call = call._replace(deterministic=deterministic)
    prepared = PreparedMhaBackward(call, lambda: False)
    prepared.launch(0x51, ADDRESSES, 0x100000)
    (_, given), (_, of_main), *_ = launches.enqueued
    lse, delta, accum, *_ = given[5:8]
    rows = 8 * 3 * 64
    weighs = has_dlse and sink_dtype is not None
    after_delta = 0x100000 + 8 * rows
    assert (lse, delta, accum) == (0x100000, 0x100000 + 4 * rows, after_delta + 4 * rows * weighs)
    sizes = [4 * rows, 4 * rows, 4 * columns * rows, 4 * 8 * 3 if sink_dtype else 0]
    around = [launches.params[name] for name in ("mha_backward_prepare", "mha_backward_finish")]
    assert [params["accum_columns"] for params in around] == [columns] * 2
    assert launches.grids["mha_backward_finish"] == (8 * 3, -(-columns // 64), 1)
    sizes.append(4 * rows if weighs else 0)
    turns_bytes = 4 * 8 * 3 if deterministic else 0
    sizes.append(turns_bytes)
    assert prepared.scratch_bytes == sum(-(-size // 128) * 128 for size in sizes)
    weights, turns = given[10:12]
    assert (weights != 0) == weighs and (turns != 0) == deterministic
    end = 0x100000 + prepared.scratch_bytes - -(-turns_bytes // 128) * 128
    assert turns in (0, end)
    if weighs:
        assert weights == after_delta
    assert of_main[2][0] == ADDRESSES.dout
    assert of_main[5:10] == (lse, delta, weights, accum, turns)


@pytest.mark.parametrize(
    ("d_qk", "d_v", "keys"), ((128, 128, 128), (192, 128, 128), (192, 129, 64), (256, 200, 64))
)
def test_tiles_of_keys(launches: Launches, d_qk: int, d_v: int, keys: int) -> None:
    """The grid and the boxes of K and V follow the form of the schedule."""
    call = EXPECTED._replace(d_qk=d_qk, d_v=d_v, varlen=False, b=2, k_batches=2)
    call = call._replace(max_seqlen_k=1000, total_k=1000)
    PreparedMhaBackward(call, lambda: False).launch(0x51, ADDRESSES, 0x100000)
    tiles = -(-1000 // keys)
    main = "mha_backward" if keys == 128 else "mha_backward_by_product"
    assert set(launches.loaded) == {"mha_backward_prepare", main, "mha_backward_finish"}
    assert launches.grids[main] == (call.h_kv * call.b * tiles, 1, 1)
    assert launches.params[main]["tiles_per_head"] == tiles
    (maps,) = [given[1:5] for name, given in launches.enqueued if name == main]
    assert [one[4][:2] for one in maps] == [(64, 64), (64, 64), (64, keys), (64, keys)]


@pytest.mark.parametrize(
    ("readers", "seqlen_q", "section"),
    (
        (1, 0, 8),
        (1, 500, 8),
        (1, 4096, 4),
        (1, 8192, 2),
        (1, 10**6, 2),
        (4, 500, 8),
        (4, 2000, 4),
        (8, 10**6, 4),
    ),
)
def test_sections_of_heads(readers: int, seqlen_q: int, section: int) -> None:
    """KV heads whose tiles run together: few, and in any order more of them where they are short."""
    assert section_of(readers, seqlen_q, 128, 128, False, True) == section
    for d_qk, fixed in ((59, 16), (96, 8), (128, 8), (192, 5), (256, 4)):
        for has_masks in (False, True):
            wanted = fixed if has_masks else fixed // 2
            assert section_of(readers, seqlen_q, d_qk, 128, True, has_masks) == wanted


@pytest.mark.parametrize(("h_kv", "section"), ((1, 1), (2, 2), (6, 6), (7, 7), (12, 6)))
def test_sections_of_segments(launches: Launches, h_kv: int, section: int) -> None:
    """Sections of segments have equally many heads."""
    PreparedMhaBackward(EXPECTED._replace(varlen=True, h_q=h_kv, h_kv=h_kv), lambda: False)
    assert launches.params["mha_backward"]["section"] == section


@pytest.mark.parametrize("alibi", (False, True))
@pytest.mark.parametrize("softcap", (False, True))
def test_factors_of_scores(launches: Launches, softcap: bool, alibi: bool) -> None:
    """What the score step and the exponent multiply by gives scores in base 2."""
    call = EXPECTED._replace(softmax_scale=0.25, softcap=15.0 if softcap else 0.0, has_alibi=alibi)
    PreparedMhaBackward(call, lambda: False)
    params = launches.params["mha_backward"]
    log2_e = 1.4426950408889634
    factor = (15.0 if softcap else 0.25) * log2_e
    assert params["softmax_scale_log2"] == pytest.approx(1.0 if alibi else factor)
    assert params["score_factor"] == pytest.approx(factor)
    assert params["score_scale"] == pytest.approx(0.25 / 15 if softcap else 1.0)
    assert params["scale"] == launches.params["mha_backward_finish"]["scale"] == 0.25
