"""torch, CuPy and DLPack in; streams, devices and threads."""

import threading
from typing import Any

import numpy as np
import pytest
from gpu_support import (
    assert_same_bits,
    bits,
    call_arguments,
    check,
    cupy,
    decode,
    poisoned_allocations,
    torch,
)

import rawmla
from rawmla import reference
from rawmla.testing import (
    DenseCase,
    DenseInputs,
    check_close,
    lse_tolerance,
    make_dense_inputs,
    out_tolerance,
)

CUPY_CASES = (
    DenseCase(b=5, s_q=2, h_q=16, s_k=700, varlen=True, causal=True, zero_lengths=True, seed=3),
    DenseCase(b=2, h_q=128, s_k=2000, dtype="float16", sharp=True, page_block_size=16),
    DenseCase(b=3, h_q=12, h_kv=2, d_qk=512, s_k=300, varlen=True),
)
DELAY_CYCLES = 100_000_000  # about 50 ms: a call on the wrong stream has long finished by then


def numpy_reference(inputs: DenseInputs) -> tuple[Any, Any]:
    """The NumPy reference for CuPy inputs."""
    q, k_cache, block_table, cache_seqlens = (cupy.asnumpy(x) for x in call_arguments(inputs)[:4])
    return reference.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, 512, causal=inputs.case.causal
    )


def check_cupy(inputs: DenseInputs, got: tuple[Any, Any]) -> None:
    """Compare CuPy results with the NumPy reference."""
    case = inputs.case
    out, lse = got
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert out.dtype.name == case.dtype and lse.dtype == np.float32
    want_out, want_lse = numpy_reference(inputs)
    check_close(f"{case.id} out", cupy.asnumpy(out), want_out, out_tolerance(case.dtype))
    check_close(f"{case.id} lse", cupy.asnumpy(lse), want_lse, lse_tolerance(48.0 if case.sharp else 1.0))


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("case", CUPY_CASES, ids=lambda case: case.id)
def test_cupy(case: DenseCase, form: str) -> None:
    inputs = make_dense_inputs(case, "cupy")
    arguments = (inputs.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv)
    metadata, num_splits = rawmla.get_mla_metadata(*(arguments if form == "tensors" else ()))
    if form == "tensors":
        assert isinstance(metadata, cupy.ndarray) and isinstance(num_splits, cupy.ndarray)
    got = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, num_splits, causal=case.causal)
    check_cupy(inputs, got)


def test_cupy_out_slice() -> None:
    case = CUPY_CASES[0]
    inputs = make_dense_inputs(case, "cupy")
    buffer = cupy.full((case.b, case.s_q, case.h_q + 8, 512), -7.0, dtype=np.float32).astype(inputs.q.dtype)
    given = buffer[:, :, 8:]
    metadata, _ = rawmla.get_mla_metadata()
    out, lse = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True, out=given)
    assert out is given
    check_cupy(inputs, (out, lse))
    assert (cupy.asnumpy(buffer)[:, :, :8].astype(np.float32) == -7.0).all()


def test_cupy_and_torch_give_the_same_bits() -> None:
    inputs = make_dense_inputs(CUPY_CASES[1], "cupy")
    metadata, _ = rawmla.get_mla_metadata()
    out, lse = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata)
    cupy.cuda.get_current_stream().synchronize()
    shared = [torch.from_dlpack(x) for x in call_arguments(inputs)[:4]]
    metadata, _ = rawmla.get_mla_metadata()
    torch_out, torch_lse = rawmla.flash_mla_with_kvcache(*shared, 512, metadata)
    assert_same_bits("out", torch_out, torch.from_dlpack(out))
    assert_same_bits("lse", torch_lse, torch.from_dlpack(lse))


class Producer:
    """An array of a library that nobody has heard of: DLPack and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("form", ("object", "tensors"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_dlpack_producer(dtype: str, form: str) -> None:
    inputs = make_dense_inputs(DenseCase(b=4, s_q=2, h_q=16, s_k=500, varlen=True, causal=True, dtype=dtype))
    torch.cuda.synchronize()
    arrays = [Producer(x) for x in call_arguments(inputs)[:4]]
    metadata, num_splits = rawmla.get_mla_metadata(*((arrays[3], 32, 1) if form == "tensors" else ()))
    out, lse = rawmla.flash_mla_with_kvcache(*arrays, 512, metadata, num_splits, causal=True)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    cupy.cuda.get_current_stream().synchronize()
    check(inputs, (torch.from_dlpack(out), torch.from_dlpack(lse)))


def warmed_up_stream(inputs: DenseInputs, form: str) -> "torch.cuda.Stream":
    """An idle stream for which the allocator holds memory already: allocating may wait for the device."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        decode(inputs, form)
    torch.cuda.synchronize()
    return stream


@pytest.mark.parametrize("form", ("object", "tensors"))
def test_torch_side_stream(form: str) -> None:
    """The inputs become valid late on a side stream; only work on that stream, after them, sees them."""
    inputs = make_dense_inputs(DenseCase(b=6, s_q=2, h_q=128, s_k=900, varlen=True, causal=True))
    want = decode(inputs)
    valid_q, valid_lengths = inputs.q.clone(), inputs.cache_seqlens.clone()
    inputs.q.fill_(float("nan"))
    inputs.cache_seqlens.zero_()
    stream = warmed_up_stream(inputs, form)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        inputs.q.copy_(valid_q)
        inputs.cache_seqlens.copy_(valid_lengths)
        out, lse = decode(inputs, form)
        assert not stream.query(), "the call waited for the device"
        inputs.q.fill_(float("nan"))
    stream.synchronize()
    assert_same_bits("out", out, want[0])
    assert_same_bits("lse", lse, want[1])


def test_default_stream_is_not_involved() -> None:
    """A call on a side stream finishes while the default stream is held up (non-blocking streams)."""
    inputs = make_dense_inputs(DenseCase(b=6, h_q=128, s_k=900, varlen=True))
    want = decode(inputs)
    stream = warmed_up_stream(inputs, "tensors")
    torch.cuda._sleep(4 * DELAY_CYCLES)
    with torch.cuda.stream(stream):
        out, lse = decode(inputs)
    stream.synchronize()
    assert not torch.cuda.default_stream().query(), "the call waited for the default stream"
    torch.cuda.synchronize()
    assert_same_bits("out", out, want[0])
    assert_same_bits("lse", lse, want[1])


def test_cupy_side_stream() -> None:
    case = DenseCase(b=6, s_q=2, h_q=16, s_k=400, varlen=True, causal=True)
    inputs = make_dense_inputs(case, "cupy")
    valid_q = inputs.q.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:  # loads the kernels, and gives the pool memory for this stream
        metadata, _ = rawmla.get_mla_metadata()
        rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    del metadata
    stream.synchronize()
    inputs.q.view(np.uint16).fill(0x7FFF)  # NaN
    cupy.cuda.Device().synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(DELAY_CYCLES)
        inputs.q.view(np.uint16)[...] = valid_q.view(np.uint16)
        metadata, _ = rawmla.get_mla_metadata()
        got = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
        assert not stream.done, "the call waited for the device"
    stream.synchronize()
    check_cupy(inputs, got)


def test_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = DenseCase(b=5, s_q=2, h_q=128, s_k=900, varlen=True, causal=True)
    inputs = make_dense_inputs(case, "torch", "cuda:1")
    assert torch.cuda.current_device() == 0
    for form in ("object", "tensors"):
        out, lse = decode(inputs, form)
        assert out.device == lse.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        check(inputs, (out, lse))
    with cupy.cuda.Device(1):
        on_one = make_dense_inputs(CUPY_CASES[0], "cupy")
    metadata, _ = rawmla.get_mla_metadata()
    got = rawmla.flash_mla_with_kvcache(*call_arguments(on_one), metadata, causal=True)
    assert got[0].device.id == 1
    cupy.cuda.Device(1).synchronize()
    check_cupy(on_one, got)


def test_arrays_on_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_dense_inputs(DenseCase(b=2, h_q=16, s_k=100))
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    for moved in range(1, 4):
        arguments = list(call_arguments(inputs))
        arguments[moved] = arguments[moved].to("cuda:1")
        metadata, _ = rawmla.get_mla_metadata()
        with pytest.raises(ValueError, match=names[moved]):
            rawmla.flash_mla_with_kvcache(*arguments, metadata)


def test_threads() -> None:
    """Four threads, each with its own shape and stream, get the bits that they would get alone."""
    cases = (
        DenseCase(b=3, h_q=128, s_k=3000, varlen=True, seed=1),
        DenseCase(b=9, s_q=2, h_q=16, s_k=500, varlen=True, causal=True, dtype="float16", seed=2),
        DenseCase(b=1, h_q=64, s_k=9000, page_block_size=16, seed=3),
        DenseCase(b=5, h_q=12, h_kv=3, d_qk=512, s_k=700, varlen=True, page_block_size=256, seed=4),
    )
    prepared = [make_dense_inputs(case) for case in cases]
    torch.cuda.synchronize()
    results: list[list[tuple[Any, Any]]] = [[] for _ in cases]
    errors: list[BaseException] = []
    start = threading.Barrier(len(cases))

    def work(index: int) -> None:
        inputs = prepared[index]
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    metadata, _ = rawmla.get_mla_metadata()
                    results[index].append(
                        rawmla.flash_mla_with_kvcache(
                            *call_arguments(inputs), metadata, causal=inputs.case.causal
                        )
                    )
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    torch.cuda.synchronize()
    for inputs, own in zip(prepared, results, strict=True):
        want_out, want_lse = decode(inputs, "object")
        check(inputs, (want_out, want_lse))
        for out, lse in own:
            assert_same_bits(f"{inputs.case.id} out", out, want_out)
            assert_same_bits(f"{inputs.case.id} lse", lse, want_lse)


def test_inputs_are_left_alone() -> None:
    inputs = make_dense_inputs(DenseCase(b=5, s_q=2, h_q=64, s_k=700, varlen=True, causal=True))
    before = [x.clone() for x in call_arguments(inputs)[:4]]
    with poisoned_allocations():
        metadata, num_splits = rawmla.get_mla_metadata(inputs.cache_seqlens, 128, 1)
        kept = metadata.clone(), num_splits.clone()
        rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, num_splits, causal=True)
    for name, now, then in zip(("q", "k_cache"), call_arguments(inputs), before, strict=False):
        assert torch.equal(bits(now), bits(then)), name
    assert torch.equal(inputs.block_table, before[2]) and torch.equal(inputs.cache_seqlens, before[3])
    assert torch.equal(metadata, kept[0]) and torch.equal(num_splits, kept[1])
