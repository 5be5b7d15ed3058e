"""`create_block_mask`: what is refused, and what it allocates and launches; arrays are stand-ins."""

from __future__ import annotations

import struct
import sys
from typing import Any

import pytest
from calls.fakes import FakeArray, FakeFramework, World, make_world
from calls.test_flex_lists import read_struct

import rawmla
from rawmla import jit
from rawmla.flex import create
from rawmla.flex.header import HEADER_NAME
from rawmla.kernels import block_mask as kernels

torch = pytest.importorskip("torch")
HAS_TORCH = create._has_torch

CAUSAL = rawmla.CudaMod("q_idx >= kv_idx")
CURRENT = 3
STREAM = 0x51
LISTS = [f"{of}_{what}" for of in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]


@pytest.fixture
def named() -> list[str]:
    """The frameworks that were asked for by name."""
    return []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, named: list[str]) -> World:
    made = make_world(monkeypatch)
    monkeypatch.setattr(create, "framework_named", lambda name: named.append(name) or made.framework)
    monkeypatch.setattr(create, "_has_torch", lambda: True)
    monkeypatch.setattr(jit, "current_device", lambda: CURRENT)
    return made


def arrays_of(mask: Any) -> list[Any]:
    return [getattr(mask, name) for name in LISTS]


def test_results_and_launches(world: World, named: list[str]) -> None:
    """Without separate lists full blocks have none. tests/test_emulated.py has what kernels are given."""
    mask = rawmla.create_block_mask(CAUSAL, 2, 3, 300, 500, 0, (128, 64))
    assert mask.seq_lengths == (300, 500) and mask.BLOCK_SIZE == (128, 64) and mask.mask_mod is CAUSAL
    assert mask.shape == (2, 3, 300, 500)
    *lists, states = world.framework.allocated
    assert arrays_of(mask) == lists and {x.dtype for x in lists} == {"int32"}
    assert [x.shape for x in lists] == [*[(2, 3, 3), (2, 3, 3, 8)] * 2, *[(2, 3, 8), (2, 3, 8, 3)] * 2]
    assert (states.shape, states.dtype, states.device) == ((2 * 3 * 3 * 8,), "uint8", 0)
    assert [x.name for x in world.enqueued] == ["block_mask_states", *["block_mask_lists"] * 2]
    assert [x.grid for x in world.enqueued] == [(144, 1, 1), (-(-18 // 4), 1, 1), (12, 1, 1)]
    assert {x.stream for x in world.enqueued} == {STREAM} and named == ["torch"]
    # The function is part of the first kernel alone.
    ((name, text),) = dict.fromkeys(header for spec in world.loaded for header in spec.headers)
    assert name == HEADER_NAME and "return q_idx >= kv_idx" in text

    world.framework.allocated.clear()
    mask = rawmla.create_block_mask(CAUSAL, None, None, 300, 500, separate_full_blocks=False)
    *lists, _ = world.framework.allocated
    assert arrays_of(mask) == [lists[0], lists[1], None, None, lists[2], lists[3], None, None]


def test_captured_arrays(world: World, named: list[str]) -> None:
    """They tell the framework and the device, and are read where they lie."""
    other = FakeFramework("other", stream=0x90)
    ids = FakeArray((2, 800), "int32", strides=(1600, 2), device=1, ptr=0x7000, framework=other)
    mod = rawmla.CudaMod("ids(b, q_idx) == ids(b, kv_idx) && q_idx < n", {"ids": ids, "n": 7})
    mask = rawmla.create_block_mask(mod, 2, None, 300, 500)
    assert not named and not world.framework.allocated and len(other.allocated) == 9
    assert {x.device for x in other.allocated} == {1} and mask.kv_indices.framework is other
    assert {x.stream for x in world.enqueued} == {0x91}
    assert world.enqueued[0].params[:40] == struct.pack("<Q2q2iq", 0x7000, 1600, 2, 2, 800, 7)


@pytest.mark.parametrize(
    ("device", "ordinal"),
    (
        *((None, CURRENT), ("cuda", CURRENT), ("cuda:0", 0), ("cuda:2", 2), (0, 0), (2, 2)),
        *((torch.device("cuda"), CURRENT), (torch.device("cuda", 1), 1)),
    ),
)
def test_devices(world: World, device: Any, ordinal: int) -> None:
    mask = rawmla.create_block_mask(CAUSAL, None, None, 300, 500, device)
    assert {x.device for x in arrays_of(mask)} == {ordinal}
    assert {x.stream for x in world.enqueued} == {STREAM + ordinal}


def test_the_framework_of_lists(world: World, named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy without torch, and where torch has no CUDA: its tensors cannot be on a GPU."""
    for is_built in (False, True):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)  # noqa: B023
        assert HAS_TORCH() is is_built
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(create, "_has_torch", lambda: False)
    rawmla.create_block_mask("q_idx >= kv_idx", None, None, 300, 500)
    assert named == ["cupy"]


@pytest.mark.parametrize(("q_len", "kv_len"), ((0, 500), (300, 0), (0, 0)))
def test_no_tokens(world: World, q_len: int, kv_len: int) -> None:
    """There are no states to be found; counts are written wherever there are some."""
    mod = rawmla.CudaMod("ids(q_idx) == 0", {"ids": FakeArray((0,), ptr=0)})
    mask = rawmla.create_block_mask(mod, None, None, q_len, kv_len, 0)
    rows, columns = -(-q_len // 128), -(-kv_len // 128)
    assert [x.shape for x in arrays_of(mask)[:2]] == [(1, 1, rows), (1, 1, rows, columns)]
    assert [x.name for x in world.enqueued] == ["block_mask_lists"] * bool(rows or columns)
    for launch in world.enqueued:
        read = read_struct(kernels.LISTS_PARAMS, launch.params)
        assert (read["all_lines"], read["entries"]) == (rows or columns, 0)


def test_large_masks_and_blocks(world: World) -> None:
    rawmla.create_block_mask(CAUSAL, 8, 64, 2**20, 2**20, 0)
    assert [x.grid for x in world.enqueued] == [(2048, 1, 1)] * 3
    assert read_struct(kernels.LISTS_PARAMS, world.enqueued[1].params)["mask_blocks"] == 8192**2
    mask = rawmla.create_block_mask(CAUSAL, None, None, 300, 500, 0, 2**30)
    assert mask.kv_indices.shape == (1, 1, 1, 1) and mask.BLOCK_SIZE == (2**30, 2**30)


SIZES = ("B", "H", "Q_LEN", "KV_LEN")
GOOD = {"mask_mod": CAUSAL, "B": None, "H": None, "Q_LEN": 300, "KV_LEN": 500}


@pytest.mark.parametrize(
    ("argument", "value", "kind", "text"),
    (
        *[(name, 2.0, TypeError, "an int, got float 2.0") for name in SIZES],
        *[(name, True, TypeError, "an int, got bool True") for name in SIZES],
        *[(name, 0, ValueError, "1 to 2**30 - 1, got 0") for name in SIZES[:2]],
        *[(name, -1, ValueError, "0 to 2**30 - 1, got -1") for name in SIZES[2:]],
        *[(name, 2**30, ValueError, "got 1073741824") for name in SIZES],
        ("Q_LEN", None, TypeError, "got None"),
        ("mask_mod", 3, TypeError, "CUDA text, got int 3"),
        ("mask_mod", FakeArray(()), TypeError, "got FakeArray"),
        ("BLOCK_SIZE", 100, ValueError, "of 16 up to 2**30, or a pair of them, got 100"),
        ("BLOCK_SIZE", (128, -16), ValueError, "got (128, -16)"),
        ("BLOCK_SIZE", 2**30 + 16, ValueError, "got 1073741840"),
        ("BLOCK_SIZE", 128.0, TypeError, "got float 128.0"),
        ("separate_full_blocks", 1, TypeError, "a bool, got int 1"),
        ("device", "cpu", ValueError, "CUDA device, got str 'cpu'"),
        ("device", -1, ValueError, "CUDA device, got int -1"),
        ("device", FakeArray(()), ValueError, "CUDA device, got FakeArray"),
    ),
)
def test_refused(world: World, argument: str, value: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        rawmla.create_block_mask(**{**GOOD, argument: value})
    message = str(caught.value)
    assert type(caught.value) is kind and message.startswith(f"{argument}: expected ") and text in message
    assert world.untouched


def test_kernels_are_loaded_before_anything_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_kernel(spec: Any, device: int, capturing: Any) -> Any:
        if spec.name == "block_mask_lists":
            raise rawmla.KernelNotReadyError(spec.name)

    monkeypatch.setattr(jit, "get_kernel", get_kernel)
    with pytest.raises(rawmla.KernelNotReadyError):
        rawmla.create_block_mask(**GOOD, device=0)
    assert world.untouched
