"""What the backward of dense attention launches: grids and scratch; tests/test_emulated.py runs it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from kernel_params import read_params

from rawmla import jit
from rawmla.jit import KernelSpec
from rawmla.kernels.mha_backward import BackwardAddresses, BackwardCall, PreparedMhaBackward, section_of
from rawmla.kernels.mha_backward_variants import Needs

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


def test_grids_of_long_segments(launches: Launches) -> None:
    """Blocks of 64 rows and tiles of 128 keys of segments that begin anywhere: one more for each request."""
    launch(total_q=6400, total_k=12800, max_seqlen_q=6400, max_seqlen_k=12800)
    assert launches.grids[PREPARE] == (8 * (100 + 3), 1, 1)
    assert launches.grids[MAIN] == (2 * (100 + 3), 1, 1)
    assert launches.grids[CLEAR] == (100 + 200 + 200, 1, 1)


def test_the_gradient_of_sinks_alone(launches: Launches) -> None:
    launch(sink_dtype="bfloat16", needs=Needs(False, False, False, True))
    assert [name for name, _ in launches.enqueued] == [PREPARE, FINISH]


@pytest.mark.parametrize(("d_qk", "d_v", "columns"), ((100, 59, 128), (70, 59, 96), (70, 130, 128)))
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("sink_dtype", (None, "bfloat16"))
@pytest.mark.parametrize("has_dlse", (False, True))
@pytest.mark.parametrize("dq", (False, True))
def test_scratch(
    launches: Launches,
    dq: bool,
    has_dlse: bool,
    sink_dtype: str | None,
    deterministic: bool,
    d_qk: int,
    d_v: int,
    columns: int,
) -> None:
    """A row has lse and delta, float32 of d_qk for dq, and with sinks and dlse a weight. A block has a number
    with sinks, and a turn in a fixed order of dq.
    """
    changes: dict[str, Any] = dict(d_qk=d_qk, d_v=d_v, has_dlse=has_dlse, sink_dtype=sink_dtype)
    scratch = launch(**changes, deterministic=deterministic, needs=Needs(dq, True, True, True))
    (_, given), (_, of_main), *_ = launches.enqueued
    rows, blocks, has_sinks = 8 * 3 * 64, 8 * 3, sink_dtype is not None
    sizes = {
        "lse": 4 * rows,
        "delta": 4 * rows,
        "weights": 4 * rows * (has_dlse and has_sinks),
        "accum": 4 * columns * rows * dq,
        "sums": 4 * blocks * has_sinks,
        "turns": 4 * blocks * (deterministic and dq),
    }
    ends = [*itertools.accumulate((-(-size // 128) * 128 for size in sizes.values()), initial=SCRATCH)]
    assert scratch == ends[-1] - SCRATCH
    at = {name: begin * (size > 0) for (name, size), begin in zip(sizes.items(), ends, strict=False)}
    assert given[5:8] == (at["lse"], at["delta"], at["accum"])
    assert given[9:12] == (at["sums"], at["weights"], at["turns"])
    assert of_main[5:10] == tuple(at[name] for name in ("lse", "delta", "weights", "accum", "turns"))
    chunks = -(-columns // 64) if dq else 1
    assert launches.grids.get(FINISH) == ((blocks, chunks, 1) if dq or has_sinks else None)
    assert launches.grids[CLEAR] == (2 + dq, 1, 1)  # a CTA for the tokens of each array


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
