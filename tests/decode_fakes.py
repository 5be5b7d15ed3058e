"""Shared by the tests of the public calls: stand-ins for arrays, their framework, and the launches."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import rawmla
from rawmla import arrays, decode, jit
from rawmla.kernels import combine, dense_decode, metadata

SM_COUNT = 132
LAUNCH = dense_decode.PreparedDecode.launch
Arguments = dict[str, Any]


@dataclasses.dataclass(eq=False)
class FakeArray:
    """An array on a device that is not there."""

    shape: tuple[int, ...]
    dtype: str = "int32"
    strides: tuple[int, ...] | None = None
    device: int = 0
    ptr: int = 0x10000
    framework: FakeFramework | None = None

    def but(self, **changes: Any) -> FakeArray:
        """A copy with other fields; a new shape is contiguous again."""
        if "shape" in changes:
            changes.setdefault("strides", None)
        return dataclasses.replace(self, **changes)


class FakeFramework:
    """Records what is allocated; each array gets an address of its own."""

    def __init__(self, name: str = "fake", stream: int = 0x51) -> None:
        self.name = name
        self.stream = stream
        self.allocated: list[FakeArray] = []
        self.copied: list[FakeArray] = []
        self.filled: list[tuple[FakeArray, int]] = []
        self.asked_capturing = 0

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> FakeArray:
        array = FakeArray(shape, dtype, device=device, ptr=(len(self.allocated) + 1) << 24, framework=self)
        self.allocated.append(array)
        return array

    def empty_with_scratch(
        self, shape: tuple[int, ...], dtype: str, scratch_bytes: int, device: int
    ) -> tuple[FakeArray, FakeArray]:
        return self.empty(shape, dtype, device), self.empty((scratch_bytes,), "uint8", device)

    def contiguous_copy(self, array: FakeArray, name: str) -> FakeArray:
        assert name == "q"
        self.copied.append(array)
        return array.but(strides=None, ptr=0xC0000)

    def fill(self, array: FakeArray, value: int) -> None:
        self.filled.append((array, value))

    def pointer(self, array: FakeArray) -> int:
        return array.ptr

    def current_stream(self, device: int) -> int:
        return self.stream + device

    def is_capturing(self, device: int) -> bool:
        self.asked_capturing += 1
        return False

    def capture_query(self, device: int) -> Callable[[], bool]:
        return lambda: self.is_capturing(device)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return tuple(strides[: len(shape)])


@dataclasses.dataclass
class World:
    """The framework of all arrays and the launches of a test."""

    framework: FakeFramework
    decodes: list[SimpleNamespace]  # everything that the launches of a call depend on, by name
    plans: list[Arguments]
    reads: list[str]  # names of the arguments that were read

    @property
    def untouched(self) -> bool:
        """Nothing was allocated, copied, filled or launched."""
        made = self.framework
        return not (made.allocated or made.copied or made.filled or self.decodes or self.plans)


class PreparedDecode:
    """Stands in for the launches of a decode call."""

    def __init__(
        self,
        decodes: list[SimpleNamespace],
        call: dense_decode.DenseDecodeCall,
        capturing: Callable[[], bool],
    ) -> None:
        self.decodes = decodes
        self.call = call
        self.capturing = capturing
        slots = dense_decode.num_slots(call.num_parts, call.b, call.max_seqlen, call.batch_invariant)
        self.scratch_bytes = slots * call.s_q * call.h_q * combine.slot_row_bytes(call.dtype)

    def launch(self, *arrays: int) -> None:
        names = inspect.signature(LAUNCH).parameters
        given = dict(zip(list(names)[1:], arrays, strict=True))
        self.decodes.append(
            SimpleNamespace(
                **self.call._asdict(),
                **given,
                capturing=self.capturing,
                scratch_bytes=self.scratch_bytes,
            )
        )


def make_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Stand-ins for arrays, launches and the device, for the length of a test."""
    made = World(FakeFramework(), [], [], [])

    def read(x: FakeArray, name: str) -> arrays.Fields:
        made.reads.append(name)
        strides = contiguous(x.shape) if x.strides is None else x.strides
        return x.ptr, x.shape, strides, x.dtype, x.device, x.framework or made.framework, x

    monkeypatch.setitem(arrays.READERS, FakeArray, read)
    monkeypatch.setattr(decode, "_known", {})
    monkeypatch.setattr(dense_decode, "PreparedDecode", partial(PreparedDecode, made.decodes))
    monkeypatch.setattr(metadata, "launch", lambda **arguments: made.plans.append(arguments))
    monkeypatch.setattr(jit, "device_info", lambda device: SimpleNamespace(sm_count=SM_COUNT))
    return made


B, S_Q, H_Q, H_KV, D_QK, PAGE, NUM_BLOCKS, MAX_BLOCKS, PARTS = 3, 2, 16, 2, 576, 64, 40, 10, 5
Q_STRIDES = contiguous((B, S_Q, H_Q, D_QK))
K_SHAPE = (NUM_BLOCKS, PAGE, H_KV, D_QK)
K_STRIDES = contiguous(K_SHAPE)
OUT_SHAPE = (B, S_Q, H_Q, 512)
ARRAYS = ("q", "k_cache", "block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits")


def dense_arguments() -> Arguments:
    """A call that is accepted, with a plan of bare arrays."""
    return {
        "q": FakeArray((B, S_Q, H_Q, D_QK), "bfloat16", ptr=0x1000),
        "k_cache": FakeArray((NUM_BLOCKS, PAGE, H_KV, D_QK), "bfloat16", ptr=0x2000),
        "block_table": FakeArray((B, MAX_BLOCKS), ptr=0x3000),
        "cache_seqlens": FakeArray((B,), ptr=0x4000),
        "head_dim_v": 512,
        "tile_scheduler_metadata": FakeArray((PARTS, 8), ptr=0x5000),
        "num_splits": FakeArray((B + 1,), ptr=0x6000),
    }


def out_array(**changes: Any) -> FakeArray:
    return FakeArray((B, S_Q, H_Q, 512), "bfloat16", ptr=0x7000).but(**changes)


def put(name: str, value: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update({name: value})


def change(name: str, **changes: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update({name: arguments[name].but(**changes)})


def empty_plan_with(**fields: Any) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        plan = rawmla.FlashMLASchedMeta(**fields)
        arguments.update(tile_scheduler_metadata=plan, num_splits=None)

    return apply


def both(*changes: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        for one in changes:
            one(arguments)

    return apply
