"""What the host sides of dense attention and prefix prefill work out for a launch, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_mha_calls import EXPECTED as MHA_CALL
from test_prefix_calls import EXPECTED as PREFIX_CALL
from test_prefix_calls import changed

from rawmla import jit
from rawmla.kernels import mha_combine, mha_forward

SMS = 132


class _Kernel:
    """A kernel that is not there; remembers the grid that it was prepared for."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def prepare(self, grid: tuple[int, int, int], params: bytes, changing: Any, pdl: bool) -> Any:
        self.grid, self.pdl = grid, pdl
        return SimpleNamespace(launch=lambda *arguments: None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[_Kernel]:
    """The kernels that are loaded."""
    loaded: list[_Kernel] = []

    def get_kernel(spec: Any, device: int, capturing: Any) -> _Kernel:
        loaded.append(_Kernel(spec))
        return loaded[-1]

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    monkeypatch.setattr(jit, "device_info", lambda device: SimpleNamespace(sm_count=SMS))
    return loaded


def test_splits() -> None:
    """Only where tiles are few; into parts of 4 blocks at least, whose results take 32 MiB at most."""
    small = mha_combine.state_bytes(32 * 100, 128)
    for tiles, key_blocks, split_bytes, splits in (
        (106, 1000, small, 1),
        (105, 1000, small, 1),
        (66, 1000, small, 2),
        (4, 1000, small, 20),
        (1, 1000, 1024, 32),
        (4, 11, small, 2),
        (4, 3, small, 1),
        (4, 0, small, 1),
        (4, 1000, mha_combine.state_bytes(32 * 8192, 128), 1),
        (4, 1000, mha_combine.MAX_SCRATCH // 3, 3),
    ):
        assert mha_combine.num_splits(tiles, key_blocks, SMS, split_bytes) == splits


@pytest.mark.parametrize("total_q", (100, 10_000, 10_000_000))
def test_scratch_is_bounded(kernels: list[_Kernel], total_q: int) -> None:
    """However many rows of q are of no request."""
    dense = MHA_CALL._replace(b=1, varlen=True, max_seqlen_q=100, max_seqlen_k=100_000, total_q=total_q)
    prefix = changed(PREFIX_CALL, {"table_columns": 10_000}, b=1, max_seqlen_q=100, total_q=total_q)
    for call in (dense, prefix):
        prepared = mha_forward.PreparedMhaForward(call, lambda: False)
        assert 0 <= prepared.scratch_bytes <= mha_combine.MAX_SCRATCH + 16
        assert (prepared.scratch_bytes > 16) == (total_q == 100)


def test_kernels_do_not_depend_on_lengths(kernels: list[_Kernel]) -> None:
    """That of splits is loaded in any case, so that a capture of another length finds it."""
    for max_seqlen_k in (1, 100_000):
        call = MHA_CALL._replace(b=1, max_seqlen_q=100, max_seqlen_k=max_seqlen_k)
        mha_forward.PreparedMhaForward(call, lambda: False)
    first, second = kernels[:2], kernels[2:]
    assert [kernel.spec for kernel in first] == [kernel.spec for kernel in second]
    assert [kernel.spec.name for kernel in first] == ["mha_forward", "mha_combine"]


@pytest.mark.parametrize("pointers", (False, True))
def test_blocks_of_a_cache_in_one_place(kernels: list[_Kernel], pointers: bool) -> None:
    """A stride of 0 between the blocks of k_cache; with a table of addresses there is none."""
    stride = 4096 if pointers else 0
    table = {"table_has_pointers": pointers, "table_bytes": 8 if pointers else 4}
    call = changed(PREFIX_CALL, {"k_strides": (stride, 64), **table})
    mha_forward.PreparedMhaForward(call, lambda: False)
    assert [kernel.spec.name for kernel in kernels] == ["mha_forward", "mha_combine"]


def test_no_keys(kernels: list[_Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA has no map of nothing: that of a token at the address of q, which nothing is read through."""
    maps: list[Any] = []
    monkeypatch.setattr(jit, "tensor_map", lambda *given: maps.append(given) or bytes(128))
    call = MHA_CALL._replace(total_k=0, max_seqlen_k=0)
    prepared = mha_forward.PreparedMhaForward(call, lambda: False)
    monkeypatch.setattr(jit, "clear", lambda *given: None)
    prepared.launch(0, (0x1000, 0, 0, 0x2000, 0x3000, 1, 1, 0, 0, 0, 0), 0x4000)
    assert [given[0] for given in maps] == [0x1000, 0x1000, 0x1000, 0x2000]
    assert all(min(given[2]) > 0 for given in maps)
