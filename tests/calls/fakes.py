"""Stand-ins for arrays, their framework and the launches of kernels, and calls made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import rawmla
from rawmla import jit
from rawmla.call import arrays, frameworks, memo
from rawmla.flex import functions
from rawmla.kernels import (
    common,
    mha_backward,
    mha_decode,
    mha_forward,
    mla_cache_gather,
    mla_cache_write,
    mla_convert_indices,
    mla_merge_states,
    mla_sparse_prefill,
)
from rawmla.kernels import mla_combine as combine
from rawmla.kernels import mla_dense_decode as dense_decode
from rawmla.kernels import mla_metadata as metadata
from rawmla.kernels import mla_sparse as sparse_decode
from rawmla.mha import kvcache

SM_COUNT = 132
COPY = 0xC0000  # the address of a copy; further ones are 0x1000 apart
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
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
    index: Any = None  # what was taken of the array

    def __getitem__(self, index: Any) -> FakeArray:
        """Take a part. Of a part of the columns the shape is known, too."""
        part = dataclasses.replace(self, index=index)
        if isinstance(index, tuple) and index[0] == slice(None) and isinstance(index[1], slice):
            part.shape, part.strides = (self.shape[0], index[1].stop), contiguous(self.shape)
        return part

    def reshape(self, *shape: int) -> FakeArray:
        """Split the columns of rows that may lie apart."""
        assert self.strides is not None and shape[0] == self.shape[0]
        return dataclasses.replace(self, shape=shape, strides=(self.strides[0], *contiguous(shape)[1:]))

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
        self.filled: list[tuple[FakeArray, float]] = []
        self.asked_capturing = 0
        self.determinism = lambda: False

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> FakeArray:
        array = FakeArray(shape, dtype, device=device, ptr=(len(self.allocated) + 1) << 24, framework=self)
        self.allocated.append(array)
        return array

    def allocator(
        self, given: Sequence[frameworks.NewArray], scratch_bytes: int, device: int
    ) -> Callable[[], list[Any]]:
        def allocate() -> list[Any]:
            made = [self.empty(shape, dtype, device) for shape, dtype, *_ in given]
            for array, (_, _, *strides) in zip(made, given, strict=True):
                array.strides = strides[0] if strides else None
            return [*made, self.empty((scratch_bytes,), "uint8", device) if scratch_bytes else None]

        return allocate

    def contiguous_copy(self, array: FakeArray, name: str) -> FakeArray:
        assert name == "q"
        self.copied.append(array)
        return array.but(strides=None, ptr=COPY)

    def aligned_copy(self, array: FakeArray, name: str, dtype: str | None = None) -> FakeArray:
        flex = ("query", "key", "value", "grad_out", *LISTS, *Q_LISTS)
        assert name in ("q", "k", "v", "kv", "qkv", "out", "dout", "rotary_cos", "rotary_sin", *flex)
        self.copied.append(array)
        return array.but(strides=None, ptr=COPY + 0x1000 * len(self.copied), dtype=dtype or array.dtype)

    def fill(self, array: FakeArray, value: float) -> None:
        self.filled.append((array, value))

    def kind_check(self, given: Sequence[FakeArray]) -> Callable[[Sequence[FakeArray]], bool]:
        def kinds(arrays: Sequence[FakeArray]) -> list[Any]:
            strides = [contiguous(x.shape) if x.strides is None else x.strides for x in arrays]
            return [
                (x.shape, steps, x.dtype, x.device, x.framework)
                for x, steps in zip(arrays, strides, strict=True)
            ]

        kept = kinds(given)
        return lambda others: kinds(others) == kept

    def pointer(self, array: FakeArray) -> int:
        if array.framework not in (None, self):
            raise RuntimeError("an array of another framework")
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
    """The framework of all arrays and the launches of a test.

    A launch is everything that it depends on, by name.
    """

    framework: FakeFramework
    decodes: list[SimpleNamespace]
    sparse: list[SimpleNamespace]
    mha: list[SimpleNamespace]
    mha_backward: list[SimpleNamespace]
    prefix: list[SimpleNamespace]
    kvcache: list[SimpleNamespace]
    flex: list[SimpleNamespace]
    flex_backward: list[SimpleNamespace]
    plans: list[Arguments]
    around: list[Arguments]  # of caches, indices and merges
    reads: list[str]  # names of the arguments that were read
    loaded: list[Any]  # specs of the kernels that are launched by themselves
    enqueued: list[SimpleNamespace]  # their launches, and what was cleared

    @property
    def launched(self) -> list[Arguments]:
        """The launches of all families."""
        attention = (self.decodes, self.sparse, self.mha, self.mha_backward, self.prefix, self.kvcache)
        with_mods = (self.flex, self.flex_backward, self.enqueued)
        others = [vars(launch) for launches in (*attention, *with_mods) for launch in launches]
        return [*self.plans, *self.around, *others]

    @property
    def untouched(self) -> bool:
        """Nothing was allocated, copied, filled, loaded or launched."""
        made = self.framework
        return not (made.allocated or made.copied or made.filled or self.loaded or self.launched)

    def begin_again(self) -> None:
        """Forget what was recorded, so that the next call is recorded as a first one."""
        made = self.framework
        records = [getattr(self, field.name) for field in dataclasses.fields(self)[1:]]
        for record in (made.allocated, made.copied, made.filled, *records):
            record.clear()


class PreparedDecode:
    """Stands in for the launches of a decode call."""

    addresses: type = dense_decode.DenseDecodeAddresses
    dtype = property(lambda self: self.call.dtype)
    max_blocks = property(lambda self: common.ceil_div(self.call.max_seqlen, 64))

    def __init__(
        self,
        decodes: list[SimpleNamespace],
        call: Any,
        capturing: Callable[[], bool],
    ) -> None:
        self.decodes = decodes
        self.call = call
        self.capturing = capturing
        splits = common.max_splits(call.num_parts, call.b, self.max_blocks, call.batch_invariant)
        if hasattr(call, "uniform") and not call.uniform.cuts:
            splits = 0
        row_bytes = combine.split_row_bytes(self.dtype, getattr(call, "lse_factor", None) is not None)
        self.scratch_bytes = splits * call.s_q * call.h_q * row_bytes

    def launch(self, stream: int, addresses: Any, scratch: int) -> None:
        addresses = self.addresses(*addresses)
        self.decodes.append(
            SimpleNamespace(
                **self.call._asdict(),
                **addresses._asdict(),
                stream=stream,
                scratch=scratch,
                capturing=self.capturing,
                scratch_bytes=self.scratch_bytes,
            )
        )


class PreparedSparseDecode(PreparedDecode):
    """The same of a sparse decode call."""

    addresses = sparse_decode.SparseAddresses
    dtype = "bfloat16"
    max_blocks = property(
        lambda self: sum(common.ceil_div(cache.topk, 64) for cache in (self.call.cache, self.call.extra))
    )


class PreparedMha:
    """Stands in for the launches of attention whose V is no part of K, or of its backward."""

    def __init__(
        self,
        launches: list[SimpleNamespace],
        addresses: type,
        scratch_bytes: int,
        call: Any,
        capturing: Callable[[], bool],
    ) -> None:
        self.launches, self.addresses, self.scratch_bytes = launches, addresses, scratch_bytes
        self.call, self.capturing = call, capturing

    def launch(self, stream: int, addresses: Any, scratch: int, *of_mods: Any) -> None:
        launch = SimpleNamespace(call=self.call, stream=stream, scratch=scratch, prepared=self)
        launch.addresses = self.addresses(*addresses)
        if self.call.mods is not None:
            if self.addresses is mha_forward.MhaForwardAddresses:
                *more, launch.score_mod, launch.mask_mod = of_mods
                launch.more = mha_forward.ModAddresses(*more)
            else:
                *launch.lists, launch.score_mod, launch.mask_mod, launch.captured = of_mods
            assert len(launch.score_mod) == self.call.mods.score_mod_bytes
            assert len(launch.mask_mod) == self.call.mods.mask_mod_bytes
        self.launches.append(launch)


class PreparedCache:
    """Stands in for the launches of attention over caches."""

    scratch_bytes = 48

    def __init__(
        self,
        launches: list[SimpleNamespace],
        call: Any,
        paged: bool,
        serves_long: bool,
        capturing: Callable[[], bool],
    ) -> None:
        self.launches, self.call, self.capturing = launches, call, capturing
        self.paged, self.serves_long = paged, serves_long

    def launch(self, stream: int, addresses: Any, scratch: int, cache_length: int) -> None:
        launch = SimpleNamespace(call=self.call, stream=stream, scratch=scratch, prepared=self)
        launch.addresses = mha_decode.MhaDecodeAddresses(*addresses)
        launch.cache_length = cache_length
        self.launches.append(launch)


class LoadedKernel:
    """Stands in for a kernel that is launched by itself."""

    def __init__(self, made: World, spec: Any, device: int, capturing: Callable[[], bool]) -> None:
        assert capturing() is False
        self.made, self.spec, self.device = made, spec, device
        made.loaded.append(spec)

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        launch = SimpleNamespace(name=self.spec.name, grid=grid, params=params, stream=stream)
        self.made.enqueued.append(launch)


def make_world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Stand-ins for arrays, launches and the device, for the length of a test."""
    made = World(FakeFramework(), *[[] for _ in range(13)])

    def clear(address: int, size: int, stream: int, device: int) -> None:
        made.enqueued.append(SimpleNamespace(name="clear", address=address, size=size, stream=stream))

    def launch_around(*positional: Any, **arguments: Any) -> None:
        made.around.append({"positional": positional, **arguments})

    def read(x: FakeArray, name: str) -> frameworks.Fields:
        made.reads.append(name)
        strides = contiguous(x.shape) if x.strides is None else x.strides
        return x.ptr, x.shape, strides, x.dtype, x.device, x.framework or made.framework, x

    monkeypatch.setitem(arrays.READERS, FakeArray, read)
    memo.clear_all()
    monkeypatch.setattr(dense_decode, "PreparedDenseDecode", partial(PreparedDecode, made.decodes))
    monkeypatch.setattr(sparse_decode, "PreparedSparse", partial(PreparedSparseDecode, made.sparse))

    def prepared_forward(call: Any, capturing: Callable[[], bool]) -> PreparedMha:
        launches, scratch_bytes = made.mha, 48
        if call.mods is not None:
            launches, scratch_bytes = made.flex, 16
        elif call.cache is not None:  # with scratch in some calls, without in others
            launches, scratch_bytes = made.prefix, 0 if call.window_right == 0 else 48
        return PreparedMha(launches, mha_forward.MhaForwardAddresses, scratch_bytes, call, capturing)

    def prepared_backward(call: Any, capturing: Callable[[], bool]) -> PreparedMha:
        launches, scratch_bytes = (made.mha_backward, 48) if call.mods is None else (made.flex_backward, 200)
        return PreparedMha(launches, mha_backward.BackwardAddresses, scratch_bytes, call, capturing)

    monkeypatch.setattr(mha_forward, "PreparedMhaForward", prepared_forward)
    monkeypatch.setattr(mha_backward, "PreparedMhaBackward", prepared_backward)
    monkeypatch.setattr(kvcache, "PreparedCached", partial(PreparedCache, made.kvcache))
    monkeypatch.setattr(jit, "get_kernel", lambda *which, capturing: LoadedKernel(made, *which, capturing))
    monkeypatch.setattr(jit, "clear", clear)
    for module in (mla_cache_write, mla_cache_gather, mla_convert_indices, mla_merge_states):
        monkeypatch.setattr(module, "launch", launch_around)
    monkeypatch.setattr(metadata, "launch", lambda **arguments: made.plans.append(arguments))
    monkeypatch.setattr(metadata, "load", lambda b, device, capturing: None)
    monkeypatch.setattr(mla_sparse_prefill, "_load", lambda specs, call, capturing: None)
    monkeypatch.setattr(jit, "device_info", lambda device: SimpleNamespace(sm_count=SM_COUNT))
    return made


B, S_Q, H_Q, H_KV, D_QK, PAGE, NUM_BLOCKS, MAX_BLOCKS, PARTS = 3, 2, 16, 2, 576, 64, 40, 10, 5
K_SHAPE = (NUM_BLOCKS, PAGE, H_KV, D_QK)
K_STRIDES = contiguous(K_SHAPE)
OUT_SHAPE = (B, S_Q, H_Q, 512)


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


NOPE_PTR, ROPE_PTR = 0x1100, 0x1900


def q_pair(shape: tuple[int, ...], dtype: str = "bfloat16") -> tuple[FakeArray, FakeArray]:
    """A q of this shape in two arrays, as engines have them: the first with its heads outermost, the second
    the last columns of a larger array.
    """
    *tokens, heads, d_qk = shape
    nope = contiguous((heads, *tokens, d_qk - 64))
    rope = contiguous((*tokens, heads, 192))
    return (
        FakeArray((*tokens, heads, d_qk - 64), dtype, (*nope[1:-1], nope[0], 1), ptr=NOPE_PTR),
        FakeArray((*tokens, heads, 64), dtype, rope, ptr=ROPE_PTR),
    )


TOPK, EXTRA_TOPK, EXTRA_PAGE, EXTRA_BLOCKS = 200, 100, 61, 7
SPARSE_COLUMNS = {"v32": 656, "model1": 584, "bf16 576": 576, "bf16 512": 512}


def sparse_arguments(layout: str = "v32", *, extra: bool = False) -> Arguments:
    """A sparse call that is accepted, with a plan of bare arrays; `extra`: with all that is optional."""
    d_qk = 512 if layout in ("model1", "bf16 512") else 576
    columns = SPARSE_COLUMNS[layout]
    dtype = "bfloat16" if layout.startswith("bf16") else "uint8"
    arguments: Arguments = {
        "q": FakeArray((B, S_Q, H_Q, d_qk), "bfloat16", ptr=0x1000),
        "k_cache": FakeArray((NUM_BLOCKS, PAGE, 1, columns), dtype, ptr=0x2000),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": FakeArray((PARTS, 8), ptr=0x5000),
        "num_splits": FakeArray((B + 1,), ptr=0x6000),
        "is_fp8_kvcache": dtype == "uint8",
        "indices": FakeArray((B, S_Q, TOPK), ptr=0x8000),
    }
    if extra:
        arguments.update(
            topk_length=FakeArray((B,), ptr=0x9000),
            attn_sink=FakeArray((H_Q,), "float32", ptr=0xA000),
            extra_k_cache=FakeArray((EXTRA_BLOCKS, EXTRA_PAGE, 1, columns), dtype, ptr=0xB000),
            extra_indices_in_kvcache=FakeArray((B, S_Q, EXTRA_TOPK), ptr=0xD000),
            extra_topk_length=FakeArray((B,), ptr=0xE000),
        )
    return arguments


S_KV, PREFILL_S_Q = 300, 5


def prefill_arguments(layout: str = "bf16 576", *, optional: bool = False) -> Arguments:
    """A prefill call that is accepted; `optional`: with all that is optional but out."""
    fp8 = not layout.startswith("bf16")
    d_qk = 512 if layout in ("model1", "bf16 512") else 576
    kv_shape = (NUM_BLOCKS, PAGE, 1, SPARSE_COLUMNS[layout]) if fp8 else (S_KV, 1, d_qk)
    arguments: Arguments = {
        "q": FakeArray((PREFILL_S_Q, H_Q, d_qk), "bfloat16", ptr=0x1000),
        "kv": FakeArray(kv_shape, "uint8" if fp8 else "bfloat16", ptr=0x2000),
        "indices": FakeArray((PREFILL_S_Q, 1, TOPK), ptr=0x8000),
        "sm_scale": 0.25,
        "is_fp8_kvcache": fp8,
    }
    if optional:
        arguments.update(
            topk_length=FakeArray((PREFILL_S_Q,), ptr=0x9000),
            attn_sink=FakeArray((H_Q,), "float32", ptr=0xA000),
        )
    return arguments


def out_array(**changes: Any) -> FakeArray:
    return FakeArray((B, S_Q, H_Q, 512), "bfloat16", ptr=0x7000).but(**changes)


def trace_on_device_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls on any device trace functions as on device 0: torch looks for the device of a fake tensor,
    and there may be no other.
    """
    memo_for = functions._memo_for
    monkeypatch.setattr(functions, "_memo_for", lambda kind, device: memo_for(kind, 0))


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
