"""torch, CuPy and DLPack in; streams, devices and threads."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from gpu_support import cupy, no_kernel_loaded, to_cupy, torch

from operations import OPERATIONS, Call, Operation, assert_results, for_each, for_first

DELAY_CYCLES = 100_000_000  # about 50 ms: a call on the wrong stream has long finished by then


def takes_any(operation: Operation) -> bool:
    """Choose the operations that take arrays of every framework."""
    return operation.any_framework


# ---- arrays


@for_each("cases", only=takes_any)
def test_cupy(operation: Operation, case: Any) -> None:
    """CuPy arrays in, CuPy arrays out, with the bits that torch gets."""
    call = operation.make(case)
    in_cupy = call.mapped(to_cupy)
    for form in call.forms():
        want = call.run(form)
        call.check(want)
        got = in_cupy.run(form)
        assert all(isinstance(x, cupy.ndarray) for x in got)
        assert [x.dtype.name for x in got] == [str(x.dtype).removeprefix("torch.") for x in want]
        assert [x.strides for x in got] == [tuple(x.element_size() * n for n in x.stride()) for x in want]
        cupy.cuda.get_current_stream().synchronize()
        assert_results(f"CuPy, {form}", call, tuple(torch.from_dlpack(x) for x in got), want)
    if call.plan is not None:
        metadata, num_splits = in_cupy.make_plan("tensors")
        assert isinstance(metadata, cupy.ndarray) and isinstance(num_splits, cupy.ndarray)


class Producer:
    """An array of a library that nobody has heard of: DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@for_first(only=takes_any)
def test_dlpack_producer(operation: Operation, case: Any) -> None:
    """Taken over by CuPy, which then also holds the results; what is written in place is written there."""
    call = operation.make(case)
    torch.cuda.synchronize()
    produced = call.mapped(Producer, to_cupy)
    for form in call.forms():
        want = call.run(form)
        got = produced.run(form)
        cupy.cuda.get_current_stream().synchronize()
        if call.written is not None:
            assert_results("a producer", call, (got[0].tensor,), want)
            continue
        assert all(isinstance(x, cupy.ndarray) for x in got)
        assert_results(f"a producer, {form}", call, tuple(torch.from_dlpack(x) for x in got), want)


# ---- streams


class Late:
    """Arguments that become valid only when `restore` has run; until then they hold garbage that is safe."""

    def __init__(self, call: Call) -> None:
        self.valid = [(x, x.clone()) for x in call.all_arrays()]

    def spoil(self) -> None:
        for x, _ in self.valid:
            x.fill_(float("nan") if x.is_floating_point() else 0)

    def restore(self) -> None:
        for x, valid in self.valid:
            x.copy_(valid)


def warmed_up_stream(call: Call, form: str) -> Any:
    """An idle stream for which the allocator holds memory already: allocating may wait for the device."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call.run(form)
    torch.cuda.synchronize()
    return stream


@for_first()
def test_torch_side_stream(operation: Operation, case: Any) -> None:
    """The inputs become valid late on a side stream; only work on that stream, after them, sees them."""
    call = operation.make(case)
    for form in call.forms():
        want = call.run(form)
        late, target = Late(call), call.target()
        stream = warmed_up_stream(call, form)
        late.spoil()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            late.restore()
            got = call.run(form, **target)
            assert not stream.query(), "the call waited for the device"
            late.spoil()
        stream.synchronize()
        late.restore()
        assert_results(f"on a side stream, {form}", call, got, want)


# ---- devices


@for_first(only=takes_any)
def test_second_device(operation: Operation, case: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = operation.make(case)
    want = call.run()
    moved = call.mapped(lambda x: x.to("cuda:1"))
    torch.cuda.synchronize("cuda:1")
    for form in call.forms():
        got = moved.run(form)
        assert torch.cuda.current_device() == 0
        assert all(x.device == torch.device("cuda:1") for x in got)
        at_home = call.run(form)
        assert_results(f"on the second device, {form}", call, tuple(x.to("cuda:0") for x in got), at_home)
    with torch.cuda.device(1):
        got = call.run()
        assert torch.cuda.current_device() == 1
    assert all(x.device == torch.device("cuda:0") for x in got)
    assert_results("while the second is current", call, got, want)
    with cupy.cuda.Device(1):
        in_cupy = moved.mapped(to_cupy)
        target = in_cupy.target()
    got = in_cupy.run(**target)
    assert all(x.device.id == 1 for x in got)
    cupy.cuda.Device(1).synchronize()
    on_host = tuple(torch.from_numpy(cupy.asnumpy(x.view(cupy.uint8))) for x in map(contiguous, got))
    for name, one, wanted in zip(call.results, on_host, want, strict=True):
        assert torch.equal(one, wanted.contiguous().view(torch.uint8).cpu()), name


def contiguous(x: Any) -> Any:
    """A CuPy array without gaps, on its own device."""
    with cupy.cuda.Device(x.device.id):
        return cupy.ascontiguousarray(x)


# ---- threads


def test_threads() -> None:
    """A thread per case, each with a stream of its own, gets the bits that it would get alone."""
    # The kernel for clusters is forced for all threads or for none.
    operations = [operation for operation in OPERATIONS if not operation.name.endswith("_clusters")]
    calls = [operation.make(case) for operation in operations for case in operation.cases]
    wanted = [call.run() for call in calls]
    for call, want in zip(calls, wanted, strict=True):
        call.check(want)
    torch.cuda.synchronize()
    results: list[list[tuple[Any, ...]]] = [[] for _ in calls]
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(call: Call, own: list[tuple[Any, ...]]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                own.extend(call.run() for _ in range(20))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    # The second time every thread prepares its calls, and loads kernels.
    for prepared in (nullcontext(), no_kernel_loaded()):
        for own in results:
            own.clear()
        threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, results, strict=True)]
        with prepared:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torch.cuda.synchronize()
        assert not errors, errors
        for call, own, want in zip(calls, results, wanted, strict=True):
            assert len(own) == 20
            for got in own:
                assert_results("in a thread", call, got, want)
