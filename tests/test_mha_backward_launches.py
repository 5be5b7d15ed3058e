"""What the backward of dense attention launches: kernels, grids, scratch, and factors of scores."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_params import read_params

from rawmla import jit
from rawmla.jit import KernelSpec
from rawmla.kernels.mha_backward import BackwardAddresses, BackwardCall, PreparedMhaBackward, section_of
from rawmla.kernels.mha_backward_variants import ALL, Needs

SCRATCH = 0x100000
PREPARE, MAIN, FINISH, CLEAR = (f"mha_backward{part}" for part in ("_prepare", "", "_finish", "_clear"))
CALL = BackwardCall(
    device=0, dtype="bfloat16", b=3, k_batches=3, h_q=8, h_kv=2, d_qk=100, d_v=59, varlen=True,
    max_seqlen_q=20, max_seqlen_k=30, total_q=40, total_k=56, q_strides=(0, 800, 100),
    k_strides=(0, 200, 100), v_strides=(0, 118, 59), out_strides=(0, 472, 59), dout_strides=(0, 472, 59),
    lse_strides=(0, 1, 40), dlse_strides=(0, 0, 0), dq_strides=(0, 800, 100), dk_strides=(0, 200, 100),
    dv_strides=(0, 118, 59), softmax_scale=0.1, deterministic=False, needs=Needs(True, True, True, False),
)  # fmt: skip
ADDRESSES = BackwardAddresses(*[0x1000 * (i + 1) for i in range(len(BackwardAddresses._fields))])


class Launches:
    """What kernels were prepared with, and the launches in their order."""

    def __init__(self) -> None:
        self.grids: dict[str, tuple[int, int, int]] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.enqueued: list[tuple[str, tuple[Any, ...]]] = []

    def get_kernel(self, spec: KernelSpec, device: int, capturing: Any) -> Any:
        def prepare(grid: tuple[int, int, int], params: bytes, changing: Any, pdl: bool) -> Any:
            assert pdl and min(grid) > 0
            self.grids[spec.name] = grid
            self.params[spec.name] = read_params(spec, params)
            return SimpleNamespace(launch=lambda *given: self.enqueued.append((spec.name, given)))

        return SimpleNamespace(prepare=prepare)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(jit, "get_kernel", made.get_kernel)
    monkeypatch.setattr(jit, "tensor_map", lambda *given: given)
    return made


def launch(**changes: Any) -> int:
    """Launch a call once; returns the scratch bytes it asked for."""
    prepared = PreparedMhaBackward(CALL._replace(**changes), lambda: False)
    prepared.launch(0x51, ADDRESSES, SCRATCH)
    return prepared.scratch_bytes


@pytest.mark.parametrize("varlen", (False, True))
def test_order_and_grids(launches: Launches, varlen: bool) -> None:
    """Three launches, and a fourth for tokens of no request, whose grids cover what there is."""
    launch(varlen=varlen)
    assert [name for name, _ in launches.enqueued] == [PREPARE, MAIN, FINISH, *[CLEAR] * varlen]
    assert {given[0] for _, given in launches.enqueued} == {0x51}
    # 3 requests of up to 20 queries and 30 keys: a block and a tile each. As segments their 40 and 56 tokens
    # may lie in 3 at most.
    grids = {MAIN: (2 * 3, 1, 1), PREPARE: (8 * 3, 1, 1), FINISH: (8 * 3, 2, 1)}
    assert launches.grids == grids | ({CLEAR: (3, 1, 1)} if varlen else {})
    if varlen:
        assert launches.params[CLEAR]["first_ctas"] == (0, 1, 2)


def test_grids_of_long_segments(launches: Launches) -> None:
    """Blocks of 64 rows and tiles of 128 keys of segments that begin anywhere: one more for each request."""
    launch(total_q=6400, total_k=12800, max_seqlen_q=6400, max_seqlen_k=12800)
    assert launches.grids[PREPARE] == (8 * (100 + 3), 1, 1)
    assert launches.grids[MAIN] == (2 * (100 + 3), 1, 1)
    assert launches.grids[CLEAR] == (100 + 200 + 200, 1, 1)


@pytest.mark.parametrize("needs", [*itertools.product((False, True), repeat=4)], ids=str)
@pytest.mark.parametrize("sink_dtype", (None, "bfloat16"))
def test_some_gradients(launches: Launches, needs: Any, sink_dtype: str | None) -> None:
    """What computes no gradient that is needed is not launched; dq alone has sums and turns."""
    dq, dk, dv, dsink = needs
    given: dict[str, Any] = {"sink_dtype": sink_dtype, "deterministic": True}
    everything = launch(**given, needs=ALL)
    launches.enqueued.clear()
    scratch = launch(**given, needs=Needs(*needs))
    enqueued = dict(launches.enqueued)
    finishes = dq or (sink_dtype is not None and dsink)
    main = dq or dk or dv
    assert list(enqueued) == [PREPARE, *[MAIN] * main, *[FINISH] * finishes, *[CLEAR] * main]
    accum, turns = enqueued[PREPARE][7], enqueued[PREPARE][11]
    assert (accum != 0) == (turns != 0) == dq
    sums, turns_bytes = 4 * 8 * 3 * 64 * 128, 128  # 4 * 8 * 3, rounded up
    assert everything - scratch == (0 if dq else sums + turns_bytes)
    if main:
        assert enqueued[MAIN][8:10] == (accum, turns)
        assert launches.grids[CLEAR] == (dq + dk + dv, 1, 1)  # a CTA for the tokens of each array
    if finishes:
        assert launches.grids[FINISH][1] == (2 if dq else 1)


@pytest.mark.parametrize(("d_qk", "d_v", "columns"), ((100, 59, 128), (70, 59, 96), (70, 130, 128)))
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("sink_dtype", (None, "bfloat16"))
@pytest.mark.parametrize("has_dlse", (False, True))
def test_scratch(
    launches: Launches,
    has_dlse: bool,
    sink_dtype: str | None,
    deterministic: bool,
    d_qk: int,
    d_v: int,
    columns: int,
) -> None:
    """A row has float32 of d_qk, lse and delta, and with sinks and dlse a weight. A block has a number with
    sinks, and a turn in a fixed order.
    """
    changes: dict[str, Any] = dict(d_qk=d_qk, d_v=d_v, has_dlse=has_dlse, sink_dtype=sink_dtype)
    scratch = launch(**changes, deterministic=deterministic)
    (_, given), (_, of_main), *_ = launches.enqueued
    lse, delta, accum, *_ = given[5:8]
    weights, turns = given[10:12]
    rows, blocks = 8 * 3 * 64, 8 * 3
    weighs = has_dlse and sink_dtype is not None
    sizes = [4 * rows, 4 * rows, 4 * rows * weighs, 4 * columns * rows, 4 * blocks * (sink_dtype is not None)]
    sizes.append(4 * blocks * deterministic)
    ends = [SCRATCH + end for end in itertools.accumulate(-(-size // 128) * 128 for size in sizes)]
    assert scratch == ends[-1] - SCRATCH
    assert (lse, delta, accum) == (SCRATCH, ends[0], ends[2])
    assert weights == (ends[1] if weighs else 0) and turns == (ends[4] if deterministic else 0)
    assert of_main[2][0] == ADDRESSES.dout and of_main[5:10] == (lse, delta, weights, accum, turns)
    around = [launches.params[name]["accum_columns"] for name in (PREPARE, FINISH)]
    assert around == [columns] * 2 and launches.grids[FINISH] == (blocks, -(-columns // 64), 1)


@pytest.mark.parametrize(
    ("d_qk", "d_v", "keys"), ((128, 128, 128), (192, 128, 128), (192, 129, 64), (256, 200, 64))
)
def test_tiles_of_keys(launches: Launches, d_qk: int, d_v: int, keys: int) -> None:
    """The grid and the boxes of K and V follow the form of the schedule."""
    lengths: dict[str, int] = dict(max_seqlen_k=1000, total_k=1000)
    launch(d_qk=d_qk, d_v=d_v, varlen=False, b=2, k_batches=2, **lengths)
    tiles = -(-1000 // keys)
    main = MAIN if keys == 128 else f"{MAIN}_by_product"
    assert launches.grids[main] == (2 * 2 * tiles, 1, 1)
    assert launches.params[main]["tiles_per_head"] == tiles
    (maps,) = [given[1:5] for name, given in launches.enqueued if name == main]
    assert [one[4][:2] for one in maps] == [(64, 64), (64, 64), (64, keys), (64, keys)]


def test_sections_of_heads(launches: Launches) -> None:
    """Few KV heads have tiles that run together; in any order more of them where they are short. Sections of
    segments have equally many heads.
    """
    for readers, seqlen_q, section in (
        *((1, 0, 8), (1, 500, 8), (1, 4096, 4), (1, 8192, 2), (1, 10**6, 2)),
        *((4, 500, 8), (4, 2000, 4), (8, 10**6, 4)),
    ):
        assert section_of(readers, seqlen_q, 128, 128, False, True) == section
        for d_qk, fixed in ((59, 16), (96, 8), (128, 8), (192, 5), (256, 4)):
            assert section_of(readers, seqlen_q, d_qk, 128, True, True) == fixed
            assert section_of(readers, seqlen_q, d_qk, 128, True, False) == fixed // 2
    for h_kv, section in ((1, 1), (2, 2), (6, 6), (7, 7), (12, 6)):
        launch(h_q=h_kv, h_kv=h_kv)
        assert launches.params[MAIN]["section"] == section


@pytest.mark.parametrize("alibi", (False, True))
@pytest.mark.parametrize("softcap", (0.0, 15.0))
def test_factors_of_scores(launches: Launches, softcap: float, alibi: bool) -> None:
    """What the score step and the exponent multiply by gives scores in base 2."""
    launch(softmax_scale=0.25, softcap=softcap, has_alibi=alibi)
    params = launches.params[MAIN]
    factor = (softcap or 0.25) * 1.4426950408889634
    assert params["softmax_scale_log2"] == pytest.approx(1.0 if alibi else factor)
    assert params["score_factor"] == pytest.approx(factor)
    assert params["score_scale"] == pytest.approx(0.25 / 15 if softcap else 1.0)
    assert params["scale"] == launches.params[FINISH]["scale"] == 0.25
