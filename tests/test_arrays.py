"""Reading arrays of torch, CuPy and DLPack, and allocating in them; addresses are made up, never followed."""

import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawmla.call import arrays, frameworks
from rawmla.call.arrays import inspect
from rawmla.call.frameworks import CupyFramework, NewArray, TorchFramework
from rawmla.errors import MissingDependencyError

cupy = pytest.importorskip("cupy")

ADDRESS = 0x7F00_0000_0000


def cupy_array(shape: tuple[int, ...], dtype: Any = np.float32, device: int = 0, offset: int = 0) -> Any:
    """A CuPy array that claims device memory at `ADDRESS`."""
    memory = cupy.cuda.UnownedMemory(ADDRESS, 1 << 40, None, device_id=device)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, offset))


class Producer:
    """A DLPack array of some other library."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise AssertionError("the data was asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_import_loads_no_framework() -> None:
    program = "import sys, rawmla.call.arrays; print(sorted({'torch', 'cupy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "value", (None, 3, 1.5, "q", [1, 2], (), {}, object()), ids=lambda x: type(x).__name__
)
def test_not_an_array(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^num_splits: expected .*, got ") as caught:
        inspect(value, "num_splits")
    assert type(value).__name__ in str(caught.value)


def test_numpy_array() -> None:
    with pytest.raises(
        ValueError, match=r"^q: expected an array in CUDA memory, got numpy\.ndarray in CPU memory"
    ):
        inspect(np.zeros((2, 3), np.float32), "q")


class TestDLPack:
    def test_pinned_host_memory(self) -> None:
        with pytest.raises(ValueError, match=r"^q: expected .* memory of DLPack device type 3"):
            inspect(Producer((3, 0)), "q")

    def test_without_cupy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> CupyFramework:
            raise ImportError("No module named 'cupy'")

        monkeypatch.setattr(arrays, "_cupy", missing)
        with pytest.raises(MissingDependencyError, match=r"^q: .*Producer.*pip install .*\[cu12\]"):
            inspect(Producer((2, 0)), "q")

    @pytest.mark.parametrize("device_type", (2, 13), ids=("device", "managed"))
    def test_taken_over_by_cupy(self, monkeypatch: pytest.MonkeyPatch, device_type: int) -> None:
        taken = cupy_array((4, 6), np.int32, device=1)
        monkeypatch.setattr(cupy, "from_dlpack", lambda x: taken)
        view = inspect(Producer((device_type, 1)), "block_table")
        assert view.array is taken
        assert (view.ptr, view.shape, view.strides, view.dtype, view.device) == (
            ADDRESS,
            (4, 6),
            (6, 1),
            "int32",
            1,
        )
        assert view.framework.name == "cupy"


class TestCupy:
    @pytest.mark.parametrize("dtype", ("float16", "float32", "int32", "int64", "uint8"))
    def test_dtype(self, dtype: str) -> None:
        assert inspect(cupy_array((2,), dtype), "x").dtype == dtype

    def test_bfloat16(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        view = inspect(cupy_array((2, 3), ml_dtypes.bfloat16), "x")
        assert (view.dtype, view.strides) == ("bfloat16", (3, 1))

    def test_slice(self) -> None:
        view = inspect(cupy_array((4, 10, 6), np.float16)[1:, ::2, 2:], "x")
        assert (view.ptr, view.shape, view.strides) == (ADDRESS + 2 * (60 + 2), (3, 5, 4), (60, 12, 1))

    def test_stride_between_elements(self) -> None:
        odd = cupy.lib.stride_tricks.as_strided(cupy_array((8,)), (2,), (6,))
        with pytest.raises(ValueError, match=r"^x: expected strides that are multiples .* got \(6,\) bytes"):
            inspect(odd, "x")


class FakeStream:
    def __init__(self, capturing: bool) -> None:
        self.capturing = capturing
        self.ptr = 0xABC

    def is_capturing(self) -> bool:
        return self.capturing


def cupy_framework(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> tuple[CupyFramework, list[Any]]:
    """A framework on a made-up stream; also the list of the arrays that it allocates."""
    framework = CupyFramework(cupy)
    allocated: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        allocated.append(cupy_array(shape, dtype, offset=len(allocated) << 32))
        return allocated[-1]

    monkeypatch.setattr(cupy, "empty", empty)
    monkeypatch.setattr(framework, "_get_device", lambda: 0)
    monkeypatch.setattr(framework, "_get_stream", lambda device: FakeStream(capturing))
    return framework, allocated


class TestCupyMemory:
    def test_empty_on_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        framework, allocated = cupy_framework(monkeypatch, capturing=False)
        entered: list[int] = []

        class Device:
            def __init__(self, ordinal: int) -> None:
                self.ordinal = ordinal

            def __enter__(self) -> None:
                assert not allocated
                entered.append(self.ordinal)

            def __exit__(self, *error: object) -> None:
                assert allocated

        monkeypatch.setattr(cupy.cuda, "Device", Device)
        framework.empty((2,), "float32", 3)
        assert entered == [3]

    def test_scratch_is_separate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        framework, allocated = cupy_framework(monkeypatch, capturing=False)
        first, last, scratch = framework.allocator([((7,), "int32"), ((2, 3), "float32")], 1000, 0)()
        assert all(made is array for made, array in zip(allocated, (first, last, scratch), strict=True))
        assert (first.shape, first.dtype, last.shape, last.dtype) == ((7,), np.int32, (2, 3), np.float32)
        assert (scratch.shape, scratch.dtype) == ((1000,), np.uint8)

    @pytest.mark.parametrize("capturing", (False, True))
    def test_no_scratch(self, monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
        framework, allocated = cupy_framework(monkeypatch, capturing=capturing)
        allocate = framework.allocator([((2, 3), "float32")], 0, 0)
        for turn in (1, 2):  # the function is kept and called again
            array, scratch = allocate()
            assert scratch is None and allocated[-1] is array and len(allocated) == turn

    def test_scratch_of_a_capture_lives_with_the_last_array(self, monkeypatch: pytest.MonkeyPatch) -> None:
        framework, allocated = cupy_framework(monkeypatch, capturing=True)
        first, array, scratch = framework.allocator([((7,), "int32"), ((5, 100), "float32")], 1000, 0)()
        assert len(allocated) == 2 and allocated[0] is first and allocated[1].nbytes == 2048 + 1000
        assert (array.shape, array.dtype, array.flags.c_contiguous) == ((5, 100), np.float32, True)
        assert array.data.mem is scratch.data.mem is allocated[1].data.mem
        assert array.data.ptr == allocated[1].data.ptr
        assert (scratch.data.ptr - array.data.ptr, scratch.nbytes) == (2048, 1000)

    @pytest.mark.parametrize("capturing", (False, True))
    def test_scratch_alone(self, monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
        """That of a capture stays alive, and no other."""
        framework, allocated = cupy_framework(monkeypatch, capturing)
        assert framework.allocator([], 0, 0)() == [None] and not allocated
        (scratch,) = framework.allocator([], 1000, 0)()
        assert scratch is allocated.pop() and (scratch.shape, scratch.dtype) == ((1000,), np.uint8)
        alive = weakref.ref(scratch)
        del scratch
        assert (alive() is not None) == capturing

    @pytest.mark.parametrize("capturing", (False, True))
    @pytest.mark.parametrize("scratch_bytes", (0, 1000))
    def test_strides(self, monkeypatch: pytest.MonkeyPatch, capturing: bool, scratch_bytes: int) -> None:
        framework, allocated = cupy_framework(monkeypatch, capturing)
        # 5 rows of 24 elements but for the end of the last: 113 of 2 bytes; and a transposed array.
        wanted: list[NewArray] = [((5, 17), "float16", (24, 1)), ((6, 100), "float32", (1, 6))]
        first, last, scratch = framework.allocator(wanted, scratch_bytes, 0)()
        assert (first.shape, first.dtype, first.strides) == ((5, 17), np.float16, (48, 2))
        assert (last.shape, last.dtype, last.strides) == ((6, 100), np.float32, (4, 24))
        assert first.data.ptr == allocated[0].data.ptr and allocated[0].nbytes >= 2 * 113
        assert last.data.ptr == allocated[1].data.ptr and allocated[1].nbytes >= 2400
        if scratch_bytes:
            assert scratch.nbytes == 1000
            in_one = last.data.mem is scratch.data.mem
            assert in_one == capturing and (not in_one or scratch.data.ptr - last.data.ptr == 2560)

    def test_no_copy_in_a_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        framework, _ = cupy_framework(monkeypatch, capturing=True)
        for copy in (framework.contiguous_copy, framework.aligned_copy):
            with pytest.raises(ValueError, match=r"^q: expected, inside a CUDA-graph capture"):
                copy(cupy_array((2, 3)), "q")

    def test_what_a_capture_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        framework, _ = cupy_framework(monkeypatch, capturing=True)
        layout = "a 16-byte aligned array whose last dimension is contiguous and whose other strides are"
        with pytest.raises(ValueError, match=rf"^query: .* {layout} positive multiples of 8 elements \("):
            framework.aligned_copy(cupy_array((2, 16), np.float16, offset=2), "query")
        with pytest.raises(ValueError, match="an array of int32 whose last dimension is contiguous"):
            framework.aligned_copy(cupy_array((2, 16), np.int64), "block_mask", "int32")

    def test_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for capturing in (False, True):
            framework, _ = cupy_framework(monkeypatch, capturing)
            assert framework.current_stream(0) == 0xABC
            query = framework.capture_query(0)
            assert query() is capturing
            assert framework.capture_query(0) is query is not framework.capture_query(1)


class TestTorch:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.fixture
    def on_cuda(self, torch: Any) -> Any:
        """Makes a tensor that claims to be on a CUDA device; its address is that of its CPU memory."""

        class OnCuda(torch.Tensor):  # type: ignore[misc]
            is_cuda = True

            def get_device(self) -> int:
                return 1

        return lambda tensor: torch.Tensor._make_subclass(OnCuda, tensor)

    def test_cpu_tensor(self, torch: Any) -> None:
        with pytest.raises(ValueError, match=r"^q: expected a tensor in CUDA memory, got .* on device cpu"):
            inspect(torch.zeros(2, 3), "q")

    @pytest.mark.parametrize(
        "dtype", ("bfloat16", "float16", "float32", "int32", "int64", "uint8", "float8_e4m3fn")
    )
    def test_dtype(self, torch: Any, on_cuda: Any, dtype: str) -> None:
        assert inspect(on_cuda(torch.zeros(2, dtype=getattr(torch, dtype))), "x").dtype == dtype

    def test_slice(self, torch: Any, on_cuda: Any) -> None:
        whole = torch.zeros(4, 10, 6, dtype=torch.bfloat16)
        part = on_cuda(whole[1:, ::2, 2:])
        view = inspect(part, "x")
        assert (view.ptr, view.shape, view.strides) == (
            whole.data_ptr() + 2 * (60 + 2),
            (3, 5, 4),
            (60, 12, 1),
        )
        assert view.device == 1 and view.array is part
        assert view.framework.name == "torch"

    def test_requires_grad(self, torch: Any, on_cuda: Any) -> None:
        tensor = on_cuda(torch.zeros(2)).requires_grad_()
        with pytest.raises(ValueError, match=r"^q: expected .* needs no gradient.*torch\.no_grad\(\)"):
            inspect(tensor, "q")
        with torch.no_grad():
            assert inspect(tensor, "q").shape == (2,)
        assert inspect(tensor.detach(), "q").shape == (2,)

    def test_negative_bit(self, torch: Any, on_cuda: Any) -> None:
        """Memory holds the values with the other sign. A tensor of complex numbers cannot hide it: its dtype
        is refused by every operation.
        """
        numbers = torch.tensor([1 + 2j, 3 + 4j])
        imaginary = numbers.conj().imag
        assert imaginary.is_neg()
        with pytest.raises(ValueError, match=r"^bias: expected .* negative bit.*resolve_neg\(\)"):
            inspect(on_cuda(imaginary), "bias")
        for good in (imaginary.resolve_neg(), numbers.imag, numbers.conj().real):
            assert inspect(on_cuda(good), "bias").shape == (2,)
        assert inspect(on_cuda(numbers.conj()), "x").dtype == "complex64"

    def test_address_zero(self, torch: Any, on_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fake tensor and a wrapper subclass have a shape and strides, and no memory."""
        tensor, empty = on_cuda(torch.zeros(2, 3)), on_cuda(torch.zeros(0, 3))
        monkeypatch.setattr(type(tensor), "data_ptr", lambda self: 0)
        with pytest.raises(TypeError, match=r"^q: expected an array with memory .*OnCuda of shape \[2, 3\]"):
            inspect(tensor, "q")
        assert inspect(empty, "q").shape == (0, 3)

    def test_fake_tensor(self, torch: Any) -> None:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.empty(2, 3, device="cuda")
        with pytest.raises(TypeError, match=r"^q: expected .*FakeTensor"):
            inspect(fake, "q")

    def test_tensor_without_memory(self, torch: Any, on_cuda: Any) -> None:
        sparse = on_cuda(torch.zeros(2, 2).to_sparse())
        with pytest.raises(TypeError, match=r"^q: expected a dense torch tensor with memory, got OnCuda"):
            inspect(sparse, "q")

    @pytest.fixture(params=(True, False), ids=("fast", "plain"))
    def framework(self, torch: Any, request: Any, monkeypatch: pytest.MonkeyPatch) -> TorchFramework:
        """One whose allocations on devices 0 (the current one) and 1 come from CPU memory."""
        framework = TorchFramework(torch)

        class Torch:
            @staticmethod
            def device(kind: str, ordinal: int) -> tuple[str, int]:
                return kind, ordinal

            @staticmethod
            def empty(shape: tuple[int, ...], *, dtype: Any, device: tuple[str, int]) -> Any:
                self.allocated.append(("plain", *device))
                return torch.empty(shape, dtype=dtype)

            @staticmethod
            def empty_strided(
                shape: tuple[int, ...], strides: tuple[int, ...], *, dtype: Any, device: tuple[str, int]
            ) -> Any:
                self.allocated.append(("plain", *device))
                return torch.empty_strided(shape, strides, dtype=dtype)

        def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
            self.allocated.append(("fast", "cuda", 0))
            return torch.empty_strided(shape, strides, dtype=dtype)

        self.allocated: list[tuple[str, str, int]] = []
        monkeypatch.setattr(framework, "_torch", Torch)
        monkeypatch.setattr(framework, "_current_device", lambda: 0)
        monkeypatch.setattr(framework, "_empty_strided", empty_strided if request.param else None)
        return framework

    def test_empty(self, torch: Any, framework: TorchFramework) -> None:
        fast = "fast" if framework._empty_strided is not None else "plain"
        for device, way in ((0, fast), (1, "plain")):
            for shape in ((2, 3), (4, 1, 5), (7,), (0, 3)):
                array = framework.empty(shape, "bfloat16", device)
                assert (array.shape, array.dtype) == (shape, torch.bfloat16)
                assert array.stride() == torch.empty(shape).stride()
                assert self.allocated.pop() == (way, "cuda", device)

    @pytest.mark.parametrize("scratch_bytes", (0, 1001))
    def test_allocator(self, torch: Any, framework: TorchFramework, scratch_bytes: int) -> None:
        fast = "fast" if framework._empty_strided is not None else "plain"
        for device, way in ((0, fast), (1, "plain")):
            allocate = framework.allocator(
                [((2, 3), "float32"), ((4, 1, 5), "bfloat16")], scratch_bytes, device
            )
            for _ in range(2):  # the function is kept and called again
                first, last, scratch = allocate()
                assert (first.shape, first.dtype) == ((2, 3), torch.float32) and first.is_contiguous()
                assert (last.shape, last.dtype) == ((4, 1, 5), torch.bfloat16) and last.is_contiguous()
                count = 2 if scratch is None else 3
                assert self.allocated == [(way, "cuda", device)] * count
                self.allocated.clear()
                assert (scratch is None) == (scratch_bytes == 0)
                if scratch is not None:
                    assert (scratch.nbytes, scratch.dtype) == (1001, torch.uint8)
                    assert scratch.untyped_storage().data_ptr() != last.untyped_storage().data_ptr()

    @pytest.mark.parametrize("columns", (1, 8, 17))
    def test_aligned_copy(self, torch: Any, columns: int) -> None:
        framework = TorchFramework(torch)
        source = torch.arange(6.0 * columns, requires_grad=True).reshape(2, 3, columns)
        for array in (source, source.transpose(0, 1), source[:1].expand(5, 3, columns)):
            copy = framework.aligned_copy(array, "q")
            assert torch.equal(copy, array) and not copy.requires_grad and copy.dtype == array.dtype
            assert copy.stride() == frameworks.aligned_strides(tuple(array.shape))
            assert copy.data_ptr() != array.data_ptr()

    def test_contiguous_copy(self, torch: Any) -> None:
        framework = TorchFramework(torch)
        source = torch.arange(24.0, requires_grad=True).reshape(2, 3, 4)
        for array in (source, source.transpose(0, 2), source[:1].expand(5, 3, 4)):
            copy = framework.contiguous_copy(array, "q")
            assert copy.is_contiguous() and not copy.requires_grad and torch.equal(copy, array)
            assert copy.data_ptr() != array.data_ptr()

    def test_capture_query_asks_about_its_device(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        framework = TorchFramework(torch)
        current: list[int] = []

        class Guard:
            def __init__(self, ordinal: int) -> None:
                self.ordinal = ordinal

            def __enter__(self) -> None:
                current.append(self.ordinal)

            def __exit__(self, *error: object) -> None:
                current.pop()

        cuda = SimpleNamespace(device=Guard, is_current_stream_capturing=lambda: current == [1])
        monkeypatch.setattr(framework, "_torch", SimpleNamespace(cuda=cuda))
        assert framework.capture_query(1)() is True
        assert framework.capture_query(0)() is False
        assert framework.capture_query(1) is framework.capture_query(1)
