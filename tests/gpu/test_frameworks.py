"""torch, CuPy and DLPack in; streams, devices, threads and torch.compile."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from gpu_support import cupy, no_kernel_loaded, torch

import rawmla
from kit.mha import MhaCase
from operations import OPERATIONS, Call, Operation, assert_results, for_each, for_first
from operations.core import assert_rounded_alike, change_arrays
from operations.dense import MHA
from operations.memory import Outputs
from operations.prefix import PREFIX

DELAY_CYCLES = 100_000_000  # about 50 ms: a call on the wrong stream has long finished by then


def to_cupy(x: Any) -> Any:
    """A CuPy array on the same memory; the CuPy array that it is."""
    return x if isinstance(x, cupy.ndarray) else cupy.from_dlpack(x)


def in_cupy(call: Call) -> Call:
    """The call on the same memory with CuPy arrays; lists of block masks that would be copied are copies."""
    return call.mapped(to_cupy, lambda x: to_cupy(x.contiguous()))


def as_torch(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_dlpack(x) for x in results)


def any_framework(operation: Operation) -> bool:
    """Whether arrays may be those of any framework."""
    return operation.any_framework


# ---- arrays


@for_each("cases", only=any_framework)
def test_cupy(operation: Operation, case: Any) -> None:
    """CuPy arrays in, CuPy arrays out, with the bits that torch gets."""
    call = operation.make(case)
    on_cupy = in_cupy(call)
    for form in call.forms():
        want = call.run(form)
        call.check(want)
        got = on_cupy.run(form)
        assert all(isinstance(x, cupy.ndarray) for x in got)
        assert [x.dtype.name for x in got] == [str(x.dtype).removeprefix("torch.") for x in want]
        cupy.cuda.get_current_stream().synchronize()
        assert_results(f"CuPy, {form}", call, as_torch(got), want)
    if call.plan is not None:
        metadata, num_splits = on_cupy.make_plan("tensors")
        assert isinstance(metadata, cupy.ndarray) and isinstance(num_splits, cupy.ndarray)


@for_first(only=lambda operation: operation.out and operation.any_framework)
def test_cupy_outputs(operation: Operation, case: Any) -> None:
    """They have the strides of a slice of every dimension that they may be a slice of."""
    call = operation.make(case)
    want = call.run()
    outputs = Outputs.of(operation, call, want)
    given = {name: to_cupy(x) for name, x in outputs.given.items()}
    torch.cuda.synchronize()
    got = in_cupy(call).run(**given)
    assert all(one is x for one, x in zip(got, given.values(), strict=False))
    cupy.cuda.get_current_stream().synchronize()
    assert_results("outputs given", call, as_torch(got), want)
    outputs.assert_untouched_around()


@for_first(only=lambda operation: operation.copied and operation.any_framework)
def test_cupy_copies(operation: Operation, case: Any) -> None:
    """Strides that are negative, and a last dimension that is not contiguous."""
    call = operation.make(case)
    name = operation.copied
    want = call.run()
    on_cupy = in_cupy(call)
    x = on_cupy.arguments[name]
    for way in (
        cupy.ascontiguousarray(x[::-1])[::-1],
        cupy.ascontiguousarray(x.swapaxes(-2, -1)).swapaxes(-2, -1),
    ):
        got = on_cupy.run(**{name: way})
        cupy.cuda.get_current_stream().synchronize()
        assert_results("copied by CuPy", call, as_torch(got), want)


class Producer:
    """An array of a library that nobody has heard of: DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@for_each("cases", only=any_framework)
def test_dlpack_producer(operation: Operation, case: Any) -> None:
    """Taken over by CuPy, which then also holds the results; what is written in place is written there."""
    call = operation.make(case)
    torch.cuda.synchronize()
    produced = call.mapped(Producer, lambda x: to_cupy(x.contiguous()))
    for form in call.forms():
        want = call.run(form)
        got = produced.run(form)
        cupy.cuda.get_current_stream().synchronize()
        if call.written is not None:
            assert_results("a producer", call, (got[0].tensor,), want)
            continue
        assert all(isinstance(x, cupy.ndarray) for x in got)
        assert_results(f"a producer, {form}", call, as_torch(got), want)


@for_first(only=lambda operation: operation.mixed)
def test_two_frameworks(operation: Operation, case: Any) -> None:
    """Some arrays of CuPy beside tensors: results are tensors."""
    call = operation.make(case)
    want = call.run()
    torch.cuda.synchronize()
    mixed = {name: change_arrays(call.arguments[name], to_cupy) for name in operation.mixed}
    got = call.run(**mixed)
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert_results("two frameworks", call, got, want)


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
        assert_results(f"on a side stream, {form}", call, got, want)
        late.restore()


@for_first()
def test_default_stream_is_not_involved(operation: Operation, case: Any) -> None:
    """A call on a side stream finishes while the default stream is held up (non-blocking streams)."""
    call = operation.make(case)
    want = call.run()
    target = call.target()
    stream = warmed_up_stream(call, "object")
    torch.cuda._sleep(4 * DELAY_CYCLES)
    with torch.cuda.stream(stream):
        got = call.run(**target)
    stream.synchronize()
    assert not torch.cuda.default_stream().query(), "the call waited for the default stream"
    torch.cuda.synchronize()
    assert_results("on a side stream", call, got, want)


@for_first(only=any_framework)
def test_cupy_side_stream(operation: Operation, case: Any) -> None:
    call = operation.make(case)
    want = call.run()
    late = Late(call)
    on_cupy = in_cupy(call)
    target = on_cupy.target()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:  # loads the kernels, and gives the pool memory for this stream
        on_cupy.run()
    stream.synchronize()
    late.spoil()
    cupy.cuda.Device().synchronize()
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(DELAY_CYCLES)
        late.restore()
        got = on_cupy.run(**target)
        assert not stream.done, "the call waited for the device"
    stream.synchronize()
    assert_results("on a side stream", call, as_torch(got), want)


# ---- devices


@for_first(only=any_framework)
def test_second_device(operation: Operation, case: Any) -> None:
    """Arrays are on a device that is not the current one, which stays current; and the other way round."""
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
    assert_results("while the second is current", call, got, want)
    with cupy.cuda.Device(1):
        on_cupy = in_cupy(moved)
        target = on_cupy.target()
    got = on_cupy.run(**target)
    assert all(x.device.id == 1 for x in got)
    cupy.cuda.Device(1).synchronize()
    on_host = tuple(torch.from_numpy(cupy.asnumpy(x.view(cupy.uint8))) for x in map(contiguous, got))
    for name, one, wanted in zip(call.results, on_host, want, strict=True):
        assert torch.equal(one, wanted.contiguous().view(torch.uint8).cpu()), name


def contiguous(x: Any) -> Any:
    """A CuPy array without gaps, on its own device."""
    with cupy.cuda.Device(x.device.id):
        return cupy.ascontiguousarray(x)


@for_first()
def test_arrays_on_two_devices(operation: Operation, case: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = operation.make(case)
    call.run()
    names = [*operation.arrays]
    if names and call.written is None:
        del names[0]  # where this one is, the others have to be
    for name in names:
        value = call.arguments[name]
        moved = [*value[:-1], value[-1].to("cuda:1")] if isinstance(value, list) else value.to("cuda:1")
        # The text names this array, or another where this one says which device it has to be.
        with pytest.raises(ValueError, match=r"^\w+(\[\d\])?: expected an array on device cuda:"):
            call.run(**{name: moved})


def gradients(operation: Operation, call: Call) -> tuple[Any, ...]:
    """Of a sum of the first result, through a graph of autograd."""
    given = [x for x in operation.grads if call.arguments.get(x) is not None]
    leaves = {name: call.arguments[name].detach().requires_grad_() for name in given}
    out = call.run(**leaves)[0]
    return torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))


@for_first(only=lambda operation: operation.grads and operation.any_framework)
def test_autograd_on_the_second_device(operation: Operation, case: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = operation.make(case)
    moved = call.mapped(lambda x: x.to("cuda:1"))
    torch.cuda.synchronize("cuda:1")
    got = gradients(operation, moved)
    assert torch.cuda.current_device() == 0
    for number, (one, want) in enumerate(zip(got, gradients(operation, call), strict=True)):
        assert_rounded_alike(f"gradient {number}", one.to("cuda:0"), want)


# ---- threads


def run_in_threads(calls: list[Call], times: int) -> list[list[tuple[Any, ...]]]:
    """The results of each call, made in a thread of its own on a stream of its own, all at once."""
    results: list[list[tuple[Any, ...]]] = [[] for _ in calls]
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(call: Call, own: list[tuple[Any, ...]]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                own.extend(call.run() for _ in range(times))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return results


@pytest.mark.parametrize("loaded", (True, False), ids=("loaded", "not loaded"))
def test_threads(loaded: bool) -> None:
    """A thread gets the bits that it would get alone, also where it prepares its call and loads kernels."""
    # The kernel for clusters is forced for all threads or for none.
    calls = [one.make(case) for one in OPERATIONS if not one.clusters for case in one.cases]
    wanted = [call.run() for call in calls]
    for call, want in zip(calls, wanted, strict=True):
        call.check(want)
    torch.cuda.synchronize()
    with nullcontext() if loaded else no_kernel_loaded():
        results = run_in_threads(calls, 20 if loaded else 3)
        torch.cuda.synchronize()  # before the kernels are let go of
    for call, own, want in zip(calls, results, wanted, strict=True):
        assert len(own) == (20 if loaded else 3)
        for got in own:
            assert_results("in a thread", call, got, want)


# ---- torch.compile


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize("backend", ("inductor", "aot_eager"))
@for_first(only=lambda operation: operation.compiled)
def test_compiled(operation: Operation, case: Any, backend: str) -> None:
    """A program with the call in it; what follows sees what the call wrote."""
    call = operation.make(case)
    want, target = call.run(), call.target()
    function = getattr(rawmla, call.function)

    def step(arguments: dict[str, Any]) -> Any:
        got = function(**arguments)
        got = got if call.unpack is None else call.unpack(got)
        results = got if isinstance(got, tuple) else (got,)
        return results, [x.double().nan_to_num() for x in results]

    compiled = torch.compile(step, fullgraph=operation.compiled == "whole", backend=backend)
    got, after = compiled({**call.arguments, **target})
    assert_results("compiled", call, tuple(target.values()) or tuple(got), want)
    for one, wanted in zip(after, want, strict=True):
        assert torch.equal(one, wanted.double().nan_to_num())


def compiled_with_a_slice(step: Any, buffer: Any, *arrays: Any) -> Any:
    """Call a compiled step that writes the last 4 heads of 8 of a buffer; returns them, and its result."""
    result = torch.compile(step, fullgraph=True)(buffer, *arrays)
    assert bool((buffer[..., :4, :] == 1).all())
    return buffer[..., 4:, :], result


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_nothing_compiled")
def test_compiled_with_a_slice_as_output() -> None:
    call = MHA.make(MhaCase(b=3, s_q=150, s_k=200, causal=True))
    q, k, v = (call.arguments[name] for name in ("q", "k", "v"))
    buffer = torch.ones(3, 150, 8, 128, dtype=q.dtype, device="cuda")

    def step(buffer: Any, q: Any, k: Any, v: Any) -> Any:
        return rawmla.flash_attn_func(q, k, v, causal=True, out=buffer[:, :, 4:])[1]

    assert_results("dense", call, compiled_with_a_slice(step, buffer, q, k, v), call.run())
    call = PREFIX.make(replace(PREFIX.cases[0], layout="plain"))
    buffer = torch.ones(len(call.arguments["q"]), 8, 128, dtype=q.dtype, device="cuda")

    def write(buffer: Any, arguments: dict[str, Any]) -> None:
        rawmla.context_attention_fwd(**arguments, o=buffer[:, 4:])

    got, _ = compiled_with_a_slice(write, buffer, call.arguments)
    assert_results("prefix", call, (got,), call.run())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_nothing_compiled")
def test_compiled_for_many_lengths() -> None:
    """One graph for all sizes."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def step(q: Any, k: Any, v: Any) -> Any:
        return rawmla.flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for b, s_q, s_k in ((3, 70, 90), (2, 130, 150), (5, 33, 257)):
        call = MHA.make(MhaCase(b=b, s_q=s_q, s_k=s_k, causal=True))
        arrays = [call.arguments[name] for name in ("q", "k", "v")]
        assert_results("compiled", call, compiled(*arrays), call.run())
    assert counter.frame_count <= 2
