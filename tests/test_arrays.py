"""Reading arrays of torch, CuPy and DLPack, and allocating in them; addresses are made up, never followed."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawmla.call import arrays, frameworks
from rawmla.call.arrays import inspect
from rawmla.call.frameworks import CupyFramework, NewArray, TorchFramework
from rawmla.call.memo import Kind
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
        assert view[:5] == (ADDRESS, (4, 6), (6, 1), "int32", 1)
        assert view.framework.name == "cupy"


class TestCupy:
    @pytest.mark.parametrize("dtype", ("float16", "float32", "int32", "int64", "uint8", "bfloat16"))
    def test_dtype(self, dtype: str) -> None:
        kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
        assert inspect(cupy_array((2,), kind), "x").dtype == dtype

    def test_slice(self) -> None:
        view = inspect(cupy_array((4, 10, 6), np.float16)[1:, ::2, 2:], "x")
        assert (view.ptr, view.shape, view.strides) == (ADDRESS + 2 * (60 + 2), (3, 5, 4), (60, 12, 1))

    def test_stride_between_elements(self) -> None:
        odd = cupy.lib.stride_tricks.as_strided(cupy_array((8,)), (2,), (6,))
        with pytest.raises(ValueError, match=r"^x: expected strides that are multiples .* got \(6,\) bytes"):
            inspect(odd, "x")


def cupy_framework(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> tuple[CupyFramework, list[Any]]:
    """A framework on a made-up stream; also the list of the arrays that it allocates."""
    framework = CupyFramework(cupy)
    allocated: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        allocated.append(cupy_array(shape, dtype, offset=len(allocated) << 32))
        return allocated[-1]

    monkeypatch.setattr(cupy, "empty", empty)
    monkeypatch.setattr(framework, "_get_device", lambda: 0)
    stream = SimpleNamespace(ptr=0xABC, is_capturing=lambda: capturing)
    monkeypatch.setattr(framework, "_get_stream", lambda device: stream)
    return framework, allocated


class TestCupyMemory:
    def test_empty_on_another_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        framework, allocated = cupy_framework(monkeypatch, capturing=False)
        entered: list[int] = []

        @contextmanager
        def on(ordinal: int) -> Iterator[None]:
            assert not allocated
            yield
            assert allocated
            entered.append(ordinal)

        monkeypatch.setattr(cupy.cuda, "Device", on)
        framework.empty((2,), "float32", 3)
        assert entered == [3]

    # The rows of the strided float16 array have 24 elements; the float32 array is transposed.
    @pytest.mark.parametrize(
        ("wanted", "scratch_at"),
        (
            ([((7,), "int32"), ((5, 100), "float32")], 2048),
            ([((5, 17), "float16", (24, 1)), ((6, 100), "float32", (1, 6))], 2560),
        ),
        ids=("contiguous", "strided"),
    )
    @pytest.mark.parametrize("scratch_bytes", (0, 1000))
    @pytest.mark.parametrize("capturing", (False, True))
    def test_allocator(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capturing: bool,
        scratch_bytes: int,
        wanted: list[NewArray],
        scratch_at: int,
    ) -> None:
        """In a capture the scratch is part of the last array's memory; it is separate otherwise."""
        framework, allocated = cupy_framework(monkeypatch, capturing)
        allocate = framework.allocator(wanted, scratch_bytes, 0)
        for _ in range(2):  # the function is kept and called again
            allocated.clear()
            *arrays, scratch = allocate()
            for array, memory, (shape, dtype, *strides) in zip(arrays, allocated, wanted, strict=False):
                steps = strides[0] if strides else frameworks.contiguous_strides(shape)
                assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
                assert array.strides == tuple(step * array.itemsize for step in steps)
                assert array.data.ptr == memory.data.ptr and memory.nbytes >= array.nbytes
            if scratch_bytes == 0:
                assert scratch is None and len(allocated) == 2
                continue
            assert (scratch.shape, scratch.dtype) == ((1000,), np.uint8)
            if capturing:
                assert len(allocated) == 2 and allocated[1].nbytes == scratch_at + 1000
                assert arrays[1].data.mem is scratch.data.mem is allocated[1].data.mem
                assert scratch.data.ptr - arrays[1].data.ptr == scratch_at
            else:
                assert len(allocated) == 3 and scratch is allocated[2]

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

    def test_no_copy_in_a_capture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error says what needs no copy."""
        framework, _ = cupy_framework(monkeypatch, capturing=True)
        layout = "a 16-byte aligned array whose last dimension is contiguous and whose other strides are"
        for copy in (framework.contiguous_copy, framework.aligned_copy):
            with pytest.raises(ValueError, match=rf"^q: .* {layout} positive multiples of 8 elements \("):
                copy(cupy_array((2, 16), np.float16, offset=2), "q")
        text = "^q: expected, inside a CUDA-graph capture .* an array of int32 whose last dimension is contig"
        with pytest.raises(ValueError, match=text):
            framework.aligned_copy(cupy_array((2, 16), np.int64), "q", "int32")

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

    def test_tensor(self, torch: Any, on_cuda: Any) -> None:
        part = on_cuda(torch.zeros(4, 10, 6, dtype=torch.bfloat16)[1:, ::2, 2:])
        view = inspect(part, "x")
        assert view[:5] == (part.data_ptr(), (3, 5, 4), (60, 12, 1), "bfloat16", 1)
        assert view.array is part and view.framework.name == "torch"
        with pytest.raises(ValueError, match=r"^q: expected a tensor in CUDA memory, got .* on device cpu"):
            inspect(torch.zeros(2, 3), "q")

    def test_tensors_without_memory(self, torch: Any, on_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A fake tensor and a wrapper subclass have a shape and strides, and a sparse tensor has neither."""
        sparse = on_cuda(torch.zeros(2, 2).to_sparse())
        with pytest.raises(TypeError, match=r"^q: expected a dense torch tensor with memory, got OnCuda"):
            inspect(sparse, "q")
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.empty(2, 3, device="cuda")
        with pytest.raises(TypeError, match=r"^q: expected .*FakeTensor"):
            inspect(fake, "q")
        tensor, empty = on_cuda(torch.zeros(2, 3)), on_cuda(torch.zeros(0, 3))
        monkeypatch.setattr(type(tensor), "data_ptr", lambda self: 0)
        with pytest.raises(TypeError, match=r"^q: expected an array with memory .*OnCuda of shape \[2, 3\]"):
            inspect(tensor, "q")
        assert inspect(empty, "q").shape == (0, 3)

    def test_a_kind_is_known_again(self, torch: Any) -> None:
        """A reader refuses the other tensors, or gives other fields of them than addresses."""
        framework = TorchFramework(torch)

        def make() -> Any:
            return torch.zeros(2, 3, dtype=torch.complex64)

        def view_of(x: Any) -> frameworks.Fields:
            return x.data_ptr(), x.shape, x.stride(), "float32", 0, framework, x

        def known(of: tuple[Any, Any], others: tuple[Any, Any]) -> Sequence[int] | None:
            views = [None, *map(view_of, of), None]
            kind = Kind(views, "call")
            check = kind.check(views)
            return None if check is None else kind.addresses((None, *others, None), check)

        x, y, z = make().imag, make().imag, torch.zeros(3)
        for others in ((x, z), (y, z.clone())):
            assert known((x, z), others) == (0, *[one.data_ptr() for one in others], 0)
        check = framework.kind_check([x, z])
        assert check is not None
        of_other_kinds = {
            "shape": make().imag[:1],
            "strides": torch.zeros(8)[1:7].view(2, 3),
            "dtype": make().imag.view(torch.int32),
            "device": torch.zeros(2, 3, dtype=torch.complex64, device="meta").imag,
            "sign": make().conj().imag,
            "gradient": make().imag.requires_grad_(),
        }
        for name, other in of_other_kinds.items():
            assert not check((other, z)), name
            assert known((other, z), (x, z)) is None, name
        nested = torch.nested.nested_tensor([torch.zeros(3)] * 2)
        for unreadable in (nested, torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3).to_sparse_csr()):
            assert known((x, z), (unreadable, z)) is None
        # These are known by their addresses alone.
        aligned, freed = make().real, make().real
        freed.untyped_storage().resize_(0)
        for of, other in ((x, aligned), (aligned, x), (aligned, freed)):
            assert framework.kind_check([of, z])((other, z))
            is_refused = known((of, z), (other, z)) is None
            assert is_refused  # pytest would show the freed tensor
        with torch.inference_mode():
            assert not check((x, z))
            assert known((x, z), (y, z)) is not None
        assert framework.kind_check([x, x]) is None
        views = [view_of(x), (*view_of(z)[:5], None, z)]
        assert Kind(views, "call").check(views) is None  # arrays of two frameworks
        framework._guards = None
        assert framework.kind_check([x, z]) is None

    @pytest.mark.parametrize("has_fast", (True, False))
    @pytest.mark.parametrize("device", (0, 1))
    def test_allocations(
        self, torch: Any, monkeypatch: pytest.MonkeyPatch, device: int, has_fast: bool
    ) -> None:
        """The fast function of torch is for the current device alone, which is 0. It gives CPU memory."""
        framework = TorchFramework(torch)
        places: list[tuple[str, int]] = []

        def place(*given: Any) -> str:
            places.append(given)
            return "meta"

        def fast(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
            return torch.empty_strided(shape, strides, dtype=dtype)

        others = SimpleNamespace(device=place, empty=torch.empty, empty_strided=torch.empty_strided)
        monkeypatch.setattr(framework, "_torch", others)
        monkeypatch.setattr(framework, "_current_device", lambda: 0)
        monkeypatch.setattr(framework, "_empty_strided", fast if has_fast else None)
        wanted = [((2, 3), "float32"), ((4, 1, 5), "bfloat16"), ((0, 3), "int32")]
        allocate = framework.allocator(wanted, 1001, device)
        made = [framework.empty(*array, device) for array in wanted]
        made += [*allocate(), *allocate()]  # the function is kept and called again
        is_fast = has_fast and device == 0
        with_scratch = [*wanted, ((1001,), "uint8")]
        for array, (shape, dtype) in zip(made, [*wanted, *with_scratch, *with_scratch], strict=True):
            assert (array.shape, array.dtype) == (shape, getattr(torch, dtype))
            assert array.stride() == torch.empty(shape).stride()
            assert array.device.type == ("cpu" if is_fast else "meta")
        assert set(places) == (set() if is_fast else {("cuda", device)})
        assert framework.allocator(wanted, 0, device)()[3:] == [None]

    @pytest.mark.parametrize("columns", (1, 8, 17))
    def test_copies(self, torch: Any, columns: int) -> None:
        framework = TorchFramework(torch)
        source = torch.arange(6.0 * columns, requires_grad=True).reshape(2, 3, columns)
        for array in (source, source.transpose(0, 1), source[:1].expand(5, 3, columns)):
            aligned = framework.aligned_copy(array, "q")
            contiguous = framework.contiguous_copy(array, "q")
            for copy in (aligned, contiguous):
                assert torch.equal(copy, array) and not copy.requires_grad and copy.dtype == array.dtype
                assert copy.data_ptr() != array.data_ptr()
            assert aligned.stride() == frameworks.aligned_strides(tuple(array.shape))
            assert contiguous.is_contiguous()

    def test_capture_query_asks_about_its_device(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        framework = TorchFramework(torch)
        current: list[int] = []

        @contextmanager
        def on(ordinal: int) -> Iterator[None]:
            current.append(ordinal)
            yield
            current.pop()

        cuda = SimpleNamespace(device=on, is_current_stream_capturing=lambda: current == [1])
        monkeypatch.setattr(framework, "_torch", SimpleNamespace(cuda=cuda))
        assert framework.capture_query(1)() is True
        assert framework.capture_query(0)() is False
        assert framework.capture_query(1) is framework.capture_query(1)
