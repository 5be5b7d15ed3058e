"""`create_block_mask`: what is refused, and what it allocates and launches; arrays are stand-ins."""

from __future__ import annotations

import struct
import sys
from typing import Any, NamedTuple

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
ATTRIBUTES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BY_COLUMNS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


@pytest.fixture
def named() -> list[str]:
    """The frameworks that were asked for by name."""
    return []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, named: list[str]) -> World:
    made = make_world(monkeypatch)

    def framework_named(name: str) -> FakeFramework:
        named.append(name)
        return made.framework

    monkeypatch.setattr(create, "framework_named", framework_named)
    monkeypatch.setattr(create, "_has_torch", lambda: True)
    monkeypatch.setattr(jit, "current_device", lambda: CURRENT)
    return made


def arrays_of(mask: Any) -> list[Any]:
    return [getattr(mask, name) for name in (*ATTRIBUTES, *BY_COLUMNS)]


def launches(world: World, mask_mod_bytes: int = 8) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The parameters of the three launches."""
    states, by_rows, by_columns = world.enqueued
    assert [x.name for x in world.enqueued] == ["block_mask_states", *["block_mask_lists"] * 2]
    return (
        read_states(states.params, mask_mod_bytes),
        read_struct(kernels.LISTS_PARAMS, by_rows.params),
        read_struct(kernels.LISTS_PARAMS, by_columns.params),
    )


def read_states(params: bytes, mask_mod_bytes: int) -> dict[str, Any]:
    declared = kernels.states_params(mask_mod_bytes)
    assert declared.members[0].type.size == mask_mod_bytes and declared.members[0].offset == 0
    found = {"mask_mod": params[:mask_mod_bytes]}
    for member in declared.members[1:]:
        (found[member.name],) = struct.unpack_from(f"<{member.code}", params, member.offset)
    return found


class Side(NamedTuple):
    """Rows or columns of a mask: blocks, their distance in the states, tokens of a block and of all."""

    blocks: int
    step: int
    block: int
    tokens: int


def wanted_lists(states: FakeArray, lists: list[FakeArray], line: Side, entry: Side) -> dict[str, int]:
    """The parameters of a launch that writes lists of entries for the lines of 2 * 3 masks."""
    pointers = ("states", "partial_counts", "partial_blocks", "full_counts", "full_blocks")
    found = dict(zip(pointers, [x.ptr for x in (states, *lists)], strict=True))
    found |= {"all_lines": 6 * line.blocks, "mask_blocks": line.blocks * entry.blocks}
    found |= {"lines": line.blocks, "entries": entry.blocks}
    for name, side in (("line", line), ("entry", entry)):
        found |= {f"{name}_step": side.step, f"{name}_tokens": side.tokens}
        found |= {f"list_{name}": side.block, f"state_{name}": side.block}
    return found


def test_results_and_launches(world: World, named: list[str]) -> None:
    """Lists of rows and of columns; without separate lists full blocks have none."""
    mask = rawmla.create_block_mask(CAUSAL, 2, 3, 300, 500, 0, (128, 64))
    rows, columns = Side(3, 8, 128, 300), Side(8, 1, 64, 500)
    assert mask.seq_lengths == (300, 500) and mask.BLOCK_SIZE == (128, 64) and mask.mask_mod is CAUSAL
    assert mask.shape == (2, 3, 300, 500)
    *lists, states = world.framework.allocated
    assert arrays_of(mask) == lists and {x.dtype for x in lists} == {"int32"}
    assert [x.shape for x in lists] == [*[(2, 3, 3), (2, 3, 3, 8)] * 2, *[(2, 3, 8), (2, 3, 8, 3)] * 2]
    assert (states.shape, states.dtype, states.device) == ((2 * 3 * 3 * 8,), "uint8", 0)

    asked, by_rows, by_columns = launches(world)
    sizes = {"heads": 3, "rows": 3, "columns": 8, "block_q": 128, "block_k": 64, "q_len": 300, "kv_len": 500}
    assert asked == {"mask_mod": bytes(8), "states": states.ptr, "blocks": 2 * 3 * 3 * 8, **sizes}
    assert by_rows == wanted_lists(states, lists[:4], rows, columns)
    assert by_columns == wanted_lists(states, lists[4:], columns, rows)
    assert [x.grid for x in world.enqueued] == [(144, 1, 1), (-(-18 // 4), 1, 1), (12, 1, 1)]
    assert {x.stream for x in world.enqueued} == {STREAM} and named == ["torch"]
    # The function is part of the first kernel alone.
    ((name, text),) = dict.fromkeys(header for spec in world.loaded for header in spec.headers)
    assert name == HEADER_NAME and "return q_idx >= kv_idx" in text

    world.framework.allocated.clear()
    world.enqueued.clear()
    mask = rawmla.create_block_mask(CAUSAL, None, None, 300, 500, separate_full_blocks=False)
    *lists, _ = world.framework.allocated
    assert arrays_of(mask) == [lists[0], lists[1], None, None, lists[2], lists[3], None, None]
    for launch in launches(world)[1:]:
        assert launch["full_counts"] == launch["full_blocks"] == 0


def test_captured_arrays(world: World, named: list[str]) -> None:
    """They tell the framework and the device, and are read where they lie."""
    other = FakeFramework("other", stream=0x90)
    ids = FakeArray((2, 800), "int32", strides=(1600, 2), device=1, ptr=0x7000, framework=other)
    mod = rawmla.CudaMod("ids(b, q_idx) == ids(b, kv_idx) && q_idx < n", {"ids": ids, "n": 7})
    mask = rawmla.create_block_mask(mod, 2, None, 300, 500)
    assert not named and not world.framework.allocated and len(other.allocated) == 9
    assert {x.device for x in other.allocated} == {1} and mask.kv_indices.framework is other
    assert {x.stream for x in world.enqueued} == {0x91}
    asked, _, _ = launches(world, 40)
    assert asked["mask_mod"] == struct.pack("<Q2q2iq", 0x7000, 1600, 2, 2, 800, 7)


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


def test_python_functions(world: World) -> None:
    limit = torch.tensor(5)

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < limit) & (q_idx >= kv_idx)

    mask = rawmla.create_block_mask(near, None, None, 300, 500, device="cuda:0")
    assert mask.mask_mod is near
    asked, *_ = launches(world)
    assert struct.unpack("<q", asked["mask_mod"]) == (5,)


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
    asked, by_rows, _ = launches(world)
    assert asked["blocks"] == 8 * 64 * 8192**2 and by_rows["mask_blocks"] == 8192**2
    mask = rawmla.create_block_mask(CAUSAL, None, None, 300, 500, 0, 2**30)
    assert mask.kv_indices.shape == (1, 1, 1, 1) and mask.BLOCK_SIZE == (2**30, 2**30)


def test_a_mask_goes_into_a_call(world: World) -> None:
    mask = rawmla.create_block_mask(CAUSAL, 2, None, 300, 500, 0)
    query, key = FakeArray((2, 4, 300, 64), "bfloat16"), FakeArray((2, 4, 500, 64), "bfloat16")
    rawmla.flex_attention(query, key, key, block_mask=mask)
    (launch,) = world.flex
    assert launch.more[1:] == (*[x.ptr for x in arrays_of(mask)[:4]], 0)
    assert launch.call.mods.lists.lists_strides == ((12, 0, 4),) * 2


GOOD = {"mask_mod": CAUSAL, "B": None, "H": None, "Q_LEN": 300, "KV_LEN": 500}


@pytest.mark.parametrize(
    ("argument", "kind", "text", "changes"),
    (
        *[(name, TypeError, "an int, got float 2.0", {name: 2.0}) for name in ("B", "H", "Q_LEN", "KV_LEN")],
        *[(name, TypeError, "an int, got bool True", {name: True}) for name in ("B", "H", "Q_LEN", "KV_LEN")],
        *[(name, ValueError, "1 to 2**30 - 1, got 0", {name: 0}) for name in ("B", "H")],
        *[(name, ValueError, "0 to 2**30 - 1, got -1", {name: -1}) for name in ("Q_LEN", "KV_LEN")],
        *[(name, ValueError, "got 1073741824", {name: 2**30}) for name in ("B", "H", "Q_LEN", "KV_LEN")],
        ("Q_LEN", TypeError, "got None", {"Q_LEN": None}),
        ("mask_mod", TypeError, "CUDA text, got int 3", {"mask_mod": 3}),
        ("mask_mod", TypeError, "got FakeArray", {"mask_mod": FakeArray(())}),
        ("code", TypeError, "CUDA text, got ''", {"mask_mod": ""}),
        ("BLOCK_SIZE", ValueError, "of 16 up to 2**30, or a pair of them, got 100", {"BLOCK_SIZE": 100}),
        ("BLOCK_SIZE", ValueError, "got (128, -16)", {"BLOCK_SIZE": (128, -16)}),
        ("BLOCK_SIZE", ValueError, "got 1073741840", {"BLOCK_SIZE": 2**30 + 16}),
        ("BLOCK_SIZE", TypeError, "got float 128.0", {"BLOCK_SIZE": 128.0}),
        ("separate_full_blocks", TypeError, "a bool, got int 1", {"separate_full_blocks": 1}),
        ("device", ValueError, "CUDA device, got str 'cpu'", {"device": "cpu"}),
        ("device", ValueError, "CUDA device, got int -1", {"device": -1}),
        ("device", ValueError, "CUDA device, got FakeArray", {"device": FakeArray(())}),
    ),
)
def test_refused(
    world: World, argument: str, kind: type[Exception], text: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(kind) as caught:
        rawmla.create_block_mask(**{**GOOD, **changes})
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
