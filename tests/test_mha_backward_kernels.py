"""The kernels of the backward of dense attention as the compiler makes them, and what the host gives them."""

from __future__ import annotations

import re
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_probe import assert_in_kernel, ptx
from test_mha_backward_calls import EXPECTED
from test_params import conditions_of, has_members

import rawmla
from rawmla import jit
from rawmla.jit import KernelSpec
from rawmla.jit.params import ParamStruct
from rawmla.jit.spec import MAX_SMEM_BYTES
from rawmla.kernels import mha_backward
from rawmla.kernels.mha_backward import BackwardAddresses, PreparedMhaBackward, specs
from rawmla.kernels.mha_forward import NO_BOUND

DIMS = ((64, 64), (96, 96), (128, 128), (64, 128), (128, 64), (40, 40), (8, 8))
FLAGS = ((False, False), (True, False), (False, True), (True, True))
STRUCTS: dict[str, ParamStruct] = {
    "mha_backward_prepare": mha_backward.PREPARE_PARAMS,
    "mha_backward": mha_backward.PARAMS,
    "mha_backward_finish": mha_backward.FINISH_PARAMS,
    "mha_backward_clear": mha_backward.CLEAR_PARAMS,
}
MAIN = {
    (dtype, *dims, *flags): specs(dtype, *dims, *flags)[1]
    for dims in DIMS
    for dtype in ("bfloat16", "float16")
    for flags in FLAGS
}
AROUND = [
    *(spec for dtype in ("bfloat16", "float16") for spec in specs(dtype, 64, 64)[::2]),
    mha_backward.CLEAR_SPEC,
]
BY_NAME: dict[str, KernelSpec] = {spec.name: spec for spec in (specs("bfloat16", 128, 128)[1], *AROUND)}
SPILLS = pytest.mark.xfail(
    raises=rawmla.CompileError, strict=False, reason="with softcap or ALiBi some kernels this wide spill"
)


def spills(d_qk: int, d_v: int, softcap: bool, alibi: bool) -> bool:
    """Whether a kernel is one of those of which some spill."""
    return softcap and alibi and d_qk + d_v >= 192 or (softcap or alibi) and d_qk + d_v == 256


def test_variants() -> None:
    """Only the dtype, head dimensions in steps of 32 and the two flags select one."""
    assert MAIN["bfloat16", 40, 40, True, False] == MAIN["bfloat16", 64, 64, True, False]
    assert len(set(MAIN.values())) == 2 * 4 * (len(DIMS) - 1)
    for dtype in ("bfloat16", "float16"):
        around = {specs(dtype, *dims, *flags)[::2] for dims in DIMS for flags in FLAGS}
        assert len(around) == 1
    assert {spec.name for spec in BY_NAME.values()} == set(STRUCTS)


@pytest.mark.parametrize(
    "spec",
    [
        *AROUND,
        *(
            pytest.param(spec, marks=SPILLS if spills(*key[1:]) else (), id=spec.label)
            for key, spec in MAIN.items()
            if key[1:3] != (40, 40)  # that of 64
        ),
    ],
    ids=lambda spec: spec.label,
)
def test_backward_compiles_without_spills(spec: KernelSpec) -> None:
    built = jit.build(spec)
    assert built.cubin[:4] == b"\x7fELF" and spec.name.encode() in built.cubin
    assert [built.meta[key] for key in ("spill_stores", "spill_loads", "local_bytes")] == [0, 0, 0]
    # C7504 to C7509: setmaxnreg without effect. C7510 to C7515 and C7518: wgmma serialised.
    assert not re.search(r"C75(0[4-9]|1[0-58])", built.log), built.log
    warp_registers = -(-built.meta["registers"] // 8) * 8 * 32
    assert warp_registers * spec.threads // 32 <= 65536
    assert spec.smem_bytes + built.meta["static_shared_bytes"] <= MAX_SMEM_BYTES


@pytest.mark.parametrize("spec", [*AROUND, *dict.fromkeys(MAIN.values())], ids=lambda spec: spec.label)
def test_backward_threads_and_shared_memory_fit_the_launch(spec: KernelSpec) -> None:
    conditions = [f"kThreads == {spec.threads}"]
    if spec.smem_bytes:
        conditions.append(f"sizeof(SharedMemoryPlan) <= {spec.smem_bytes}")
        conditions.append(f"sizeof(SharedMemoryPlan) + 2 * {mha_backward._BARRIER_BYTES} > {spec.smem_bytes}")
    assert_in_kernel(spec, conditions)


def test_setmaxnreg_of_the_backward() -> None:
    """A producer, two consumers and the warpgroup of dQ share what the launch gives."""
    spec = MAIN["bfloat16", 64, 64, False, False]
    moves = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+);", ptx(spec))
    launched = jit.build(spec).meta["registers"]
    assert sorted(moves) == [("dec", "32"), ("dec", "64"), ("inc", "208")] and launched == 128
    assert 32 + 64 + 2 * 208 <= 4 * launched


def test_constants_of_the_backward() -> None:
    assert_in_kernel(
        BY_NAME["mha_backward"],
        [
            f"kBlockRows == {mha_backward.BLOCK_ROWS}",
            f"kTileKeys == {mha_backward.TILE_KEYS}",
            f"kNoBound == {NO_BOUND}",
        ],
    )
    assert_in_kernel(BY_NAME["mha_backward_clear"], [f"kRows == {mha_backward._CLEARED_ROWS}"])


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
    assert launches.grids["mha_backward_prepare"] == launches.grids["mha_backward_finish"] == (8 * 3, 1, 1)
    assert {params["blocks"] for params in launches.params.values() if "blocks" in params} == {3}
    if varlen:
        assert launches.grids["mha_backward_clear"] == (3, 1, 1)
        assert launches.params["mha_backward_clear"]["first_ctas"] == (0, 1, 2)


def test_grids_of_long_segments(launches: Launches) -> None:
    """Blocks of 64 rows and tiles of 128 keys of segments that begin anywhere: one more for each request."""
    call = EXPECTED._replace(total_q=6400, total_k=12800, max_seqlen_q=6400, max_seqlen_k=12800)
    PreparedMhaBackward(call, lambda: False)
    assert launches.grids["mha_backward_prepare"] == (8 * (100 + 3), 1, 1)
    assert launches.grids["mha_backward"] == (2 * (100 + 3), 1, 1)
    assert launches.grids["mha_backward_clear"] == (100 + 200 + 200, 1, 1)


@pytest.mark.parametrize("sink_dtype", (None, "bfloat16"))
@pytest.mark.parametrize("has_dlse", (False, True))
def test_scratch_of_the_backward(launches: Launches, has_dlse: bool, sink_dtype: str | None) -> None:
    """float32 of d_qk, lse and delta a row; with sinks a number a block; with both a copy of dout."""
    call = EXPECTED._replace(d_qk=100, d_v=59, has_dlse=has_dlse, sink_dtype=sink_dtype)
    prepared = PreparedMhaBackward(call, lambda: False)
    prepared.launch(0x51, ADDRESSES, 0x100000)
    (_, given), (_, of_main), *_ = launches.enqueued
    lse, delta, accum, *_ = given[5:8]
    rows = 8 * 3 * 64
    assert (lse, delta, accum) == (0x100000, 0x100000 + 4 * rows, 0x100000 + 8 * rows)
    sizes = [4 * rows, 4 * rows, 4 * 128 * rows, 4 * 8 * 3 if sink_dtype else 0]
    copied = has_dlse and sink_dtype is not None
    sizes.append(2 * 40 * 8 * 64 if copied else 0)
    assert prepared.scratch_bytes == sum(-(-size // 128) * 128 for size in sizes)
    weighted = given[10]
    dout_map = of_main[2]
    assert (weighted != 0) == copied
    assert dout_map[0] == (weighted if copied else ADDRESSES.dout)
    assert of_main[5:8] == (lse, delta, accum)


@pytest.mark.parametrize(("softcap", "alibi"), FLAGS)
def test_factors_of_scores(launches: Launches, softcap: bool, alibi: bool) -> None:
    """What the score step and the exponent multiply by gives scores in base 2."""
    call = EXPECTED._replace(softmax_scale=0.25, softcap=15.0 if softcap else 0.0, has_alibi=alibi)
    PreparedMhaBackward(call, lambda: False)
    params = launches.params["mha_backward"]
    log2_e = 1.4426950408889634
    factor = (15.0 if softcap else 0.25) * log2_e
    assert params["softmax_scale_log2"] == pytest.approx(1.0 if alibi else factor)
    assert params["score_factor"] * params["score_inverse"] == pytest.approx(1.0)
    assert params["score_factor"] == pytest.approx(factor)
    assert params["score_scale"] == pytest.approx(0.25 / 15 if softcap else 1.0)
    assert params["scale"] == launches.params["mha_backward_finish"]["scale"] == 0.25
