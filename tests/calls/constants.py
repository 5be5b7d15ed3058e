"""Attention of torch CPU tensors, whose kernels write a constant into each of their results."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from emulator.device import HostTensors

from rawmla.call import arrays, memo
from rawmla.jit import NO_LAUNCH
from rawmla.kernels import mha_backward, mha_forward

OUT, LSE, MAX_SCORES = 0.5, 0.25, 0.125
DQ, DK, DV, DSINK, FIRST_CAPTURE = 1.0, 2.0, 3.0, 4.0, 5.0


class Launch:
    """A launch: the call, the addresses, the bytes of functions, and what was in memory."""

    def __init__(self, call: Any, addresses: Any) -> None:
        self.call = call
        self.addresses = addresses
        self.score_mod = self.mask_mod = b""
        self.lists: list[int] = []  # addresses: counts, indices, and those of full blocks
        self.dout: Any = None
        self.dlse: Any = None


class Launches:
    """All launches; streams of those that only load kernels."""

    def __init__(self) -> None:
        self.forward: list[Launch] = []
        self.backward: list[Launch] = []
        self.skipped: list[int] = []


def at(address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """The tensor at an address; None at 0."""
    if not address:
        return None
    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    elements = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * kind.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=kind).as_strided(shape, strides)


def rows(call: Any, addresses: Any, name: str) -> Any:
    """The array ``name`` of queries or keys, `[(batch,) token, head, column]`."""
    of_keys, of_values = name in ("k", "v", "dk", "dv"), name in ("v", "dv", "out", "dout")
    total, heads = (call.total_k, call.h_kv) if of_keys else (call.total_q, call.h_q)
    batches = call.k_batches if of_keys else call.b
    shape = (batches, total, heads, call.d_v if of_values else call.d_qk)
    strides = (*getattr(call, f"{name}_strides"), 1)
    first = 1 if call.varlen else 0
    return at(getattr(addresses, name), call.dtype, shape[first:], strides[first:])


def logs(call: Any, address: int, strides: tuple[int, ...]) -> Any:
    """lse or dlse, `[(batch,) token, head]`."""
    first = 1 if call.varlen else 0
    return at(address, "float32", (call.b, call.total_q, call.h_q)[first:], strides[first:])


def fill(array: Any, value: float) -> None:
    if array is not None:
        array.fill_(value)


def run_forward(call: Any, addresses: Any, *of_mods: Any) -> Launch:
    launch = Launch(call, mha_forward.MhaForwardAddresses(*addresses))
    strides = (call.lse_strides[0], 1, call.lse_strides[1])
    fill(rows(call, launch.addresses, "out"), OUT)
    fill(logs(call, launch.addresses.lse, strides), LSE)
    if of_mods:
        max_scores, *launch.lists, _, launch.score_mod, launch.mask_mod = of_mods
        fill(logs(call, max_scores, strides), MAX_SCORES)
    return launch


def run_backward(call: Any, addresses: Any, *of_mods: Any) -> Launch:
    launch = Launch(call, addresses)
    launch.dout = rows(call, addresses, "dout").clone()
    launch.dlse = logs(call, addresses.dlse, call.dlse_strides)
    launch.dlse = None if launch.dlse is None else launch.dlse.clone()
    for name, value in (("dq", DQ), ("dk", DK), ("dv", DV)):
        fill(rows(call, addresses, name), value)
    if of_mods:
        *launch.lists, launch.score_mod, launch.mask_mod, captured = of_mods
        for i, (address, wanted) in enumerate(zip(captured, call.mods.captured, strict=True)):
            fill(at(address, wanted.dtype, (wanted.elements,), (1,)), FIRST_CAPTURE + i)
    elif addresses.dsink:
        fill(at(addresses.dsink, call.sink_dtype, (call.h_q,), (1,)), DSINK)
    return launch


@contextlib.contextmanager
def installed() -> Iterator[Launches]:
    """Inside, CPU tensors pass for tensors of device 0."""
    launches = Launches()

    def stand_in(run: Callable[..., Launch], launched: list[Launch]) -> type:
        class Prepared:
            scratch_bytes = 16

            def __init__(self, call: Any, capturing: Any) -> None:
                self.call = call

            def launch(self, stream: int, addresses: Any, scratch: int, *of_mods: Any) -> None:
                if stream == NO_LAUNCH:
                    launches.skipped.append(stream)
                    return
                with torch.no_grad():
                    launched.append(run(self.call, addresses, *of_mods))

        return Prepared

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(arrays._frameworks, {"torch": HostTensors(torch)}))
        stack.enter_context(mock.patch.dict(arrays.READERS))
        for known in [cls for cls in arrays.READERS if issubclass(cls, torch.Tensor)]:
            del arrays.READERS[known]
        forward = stand_in(run_forward, launches.forward)
        stack.enter_context(mock.patch.object(mha_forward, "PreparedMhaForward", forward))
        backward = stand_in(run_backward, launches.backward)
        stack.enter_context(mock.patch.object(mha_backward, "PreparedMhaBackward", backward))
        memo.clear_all()
        stack.callback(memo.clear_all)
        yield launches
