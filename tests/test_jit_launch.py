"""Launches, tensor maps and device look-ups against a stand-in for the driver library; needs no GPU."""

from __future__ import annotations

import ctypes
import re
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jit_project import at_once, tiny, with_text

from rawmla.errors import KernelNotReadyError, LaunchError, NoGPUError, UnsupportedGPUError
from rawmla.jit import (
    Kernel,
    KernelSpec,
    device_info,
    driver,
    get_kernel,
    launch,
    loading,
    tensor_map,
    tensormap,
)
from rawmla.jit.builder import CompiledKernel
from rawmla.jit.driver import Driver
from rawmla.jit.table import BoundedTable

VOID = ctypes.c_void_p
CONTEXTS = CONTEXT_A, CONTEXT_B = 0xAAAA00000001, 0xBBBB00000002  # of devices 0 and 1
FUNCTION = 0xCCCC00000003
PARAM_BYTES = 192
MAP_BYTES = bytes(range(128))


def put(out: Any, value: Any) -> int:
    """Give a result through a pointer; CUDA_SUCCESS."""
    out[0] = value
    return 0


class FakeLibrary:
    """Driver functions as C callbacks, so that argument conversion and memory layout are the real ones."""

    def __init__(self) -> None:
        self.thread = threading.local()  # the current context belongs to a thread
        self.launches: list[dict[str, Any]] = []
        self.maps: list[tuple[Any, ...]] = []
        self.cleared: list[tuple[Any, ...]] = []
        self.result = 0
        self.results: list[int] = []  # of the next launches, in place of `result`
        self.capability = (9, 0)
        self.asked_context = 0
        self.capturing: dict[int, int] = {}  # stream -> its CUstreamCaptureStatus, if not 0
        self.asked_streams: list[int] = []
        self.unloaded: list[int | None] = []  # the contexts in which code was unloaded
        self.maps_need_a_context = False
        pointer, enum, number = ctypes.POINTER, ctypes.c_int, ctypes.c_uint
        texts = pointer(ctypes.c_char_p)
        arrays = [pointer(one) for one in (ctypes.c_uint64, ctypes.c_uint64, number, number)]
        for name, function, *types in (
            ("cuCtxGetCurrent", self._get, pointer(VOID)),
            ("cuCtxPushCurrent_v2", lambda context: self._stack().append(context) or 0, VOID),
            ("cuCtxPopCurrent_v2", lambda out: put(out, self._stack().pop()), pointer(VOID)),
            ("cuDevicePrimaryCtxRetain", lambda out, n: put(out, CONTEXTS[n - 40]), pointer(VOID), enum),
            ("cuMemsetD32Async", self._clear, ctypes.c_uint64, number, ctypes.c_size_t, VOID),
            ("cuLaunchKernelEx", self._launch, VOID, VOID, VOID, VOID),
            ("cuStreamIsCapturing", self._is_capturing, VOID, pointer(enum)),
            ("cuGetErrorName", lambda code, out: put(out, b"CUDA_ERROR_TEST"), enum, texts),
            ("cuGetErrorString", lambda code, out: put(out, f"explanation of {code}".encode()), enum, texts),
            ("cuDeviceGetCount", lambda out: put(out, 2), pointer(enum)),
            ("cuDeviceGet", lambda out, device: put(out, device + 40), pointer(enum), enum),
            ("cuDeviceGetName", self._device_name, VOID, enum, enum),
            ("cuDeviceGetAttribute", self._attribute, pointer(enum), enum, enum),
            ("cuTensorMapEncodeTiled", self._map, VOID, enum, number, VOID, *arrays, *[enum] * 4),
        ):
            setattr(self, name, ctypes.CFUNCTYPE(enum, *types)(function))

    def _stack(self) -> list[int | None]:
        if not hasattr(self.thread, "stack"):
            self.thread.stack = [None]
        return self.thread.stack

    def set_current(self, context: int | None) -> None:
        self.thread.stack = [context]

    def _get(self, out: Any) -> int:
        self.asked_context += 1
        return put(out, self._stack()[-1])

    def _clear(self, address: int, word: int, words: int, stream: int) -> int:
        self.cleared.append((address, word, words, stream, self._stack()[-1]))
        return self.result

    def _launch(self, config: int, function: int, params: int, extra: int | None) -> int:
        raw = ctypes.string_at(config, 56)
        fields = struct.unpack("<7I4xQQI4x", raw)
        first_param = VOID.from_address(params).value or 0
        attributes = ctypes.string_at(fields[8], 72 * fields[9]) if fields[9] else b""
        launch = {"grid": fields[:3], "block": fields[3:6], "smem": fields[6], "stream": fields[7]}
        launch["attributes"] = [struct.unpack_from("<I4x3I", attributes, 72 * i) for i in range(fields[9])]
        launch |= {"function": function, "extra": extra, "context": self._stack()[-1]}
        launch |= {"params": ctypes.string_at(first_param, PARAM_BYTES), "aligned": first_param % 128 == 0}
        self.launches.append(launch)
        return self.results.pop(0) if self.results else self.result

    def _is_capturing(self, stream: int, out: Any) -> int:
        if self._stack()[-1] is None:
            return 201
        self.asked_streams.append(stream)
        return put(out, self.capturing.get(stream, 0))

    def _device_name(self, out: int, size: int, handle: int) -> int:
        ctypes.memmove(out, f"GPU {handle}\0".encode(), 7)
        return 0

    def _attribute(self, out: Any, attribute: int, handle: int) -> int:
        return put(out, {16: 132, 75: self.capability[0], 76: self.capability[1]}[attribute])

    def _map(self, out: int, dtype: int, rank: int, ptr: int, *rest: Any) -> int:
        dims, strides, box, element_strides, *codes = rest
        arrays = (dims[:rank], strides[: rank - 1], box[:rank], element_strides[:rank])
        self.maps.append((out % 64, ptr, (dtype, *codes), *arrays))
        ctypes.memmove(out, MAP_BYTES, 128)
        return 201 if self.maps_need_a_context and self._stack()[-1] is None else self.result


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake = FakeLibrary()
    stand_in = Driver(fake)
    for module in (driver, launch, loading, tensormap):
        monkeypatch.setattr(module, "get_driver", lambda: stand_in)
    monkeypatch.setattr(loading, "_kernels", {})
    monkeypatch.setattr(loading, "_user_kernels", BoundedTable(2))
    monkeypatch.setattr(loading, "_captured", [])
    monkeypatch.setattr(loading, "_warned", BoundedTable(2))
    device_info.cache_clear()
    tensor_map.cache_clear()
    yield fake
    device_info.cache_clear()
    tensor_map.cache_clear()


def make_kernel(
    library: FakeLibrary, spec: KernelSpec | None = None, device: int = 0, **changes: Any
) -> Kernel:
    spec = spec or KernelSpec("tiny", (("FACTOR", 1),), 384, 232_448)
    stand_in = Driver(library)
    stand_in._contexts[0] = CONTEXT_A
    keep_loaded = loading._keep_loaded if spec.user_text else None
    rest = {"param_bytes": PARAM_BYTES, "module": None, **changes}
    return Kernel(spec, device, {}, stand_in, CONTEXT_A, FUNCTION, *rest.values(), keep_loaded)


def compiled(spec: KernelSpec, log: str = "") -> CompiledKernel:
    return CompiledKernel(spec, b"\x7fELF", {}, "", log, None)


PARAMS = bytes(range(PARAM_BYTES))
CHANGING = struct.Struct("<QI")


def test_a_launch(library: FakeLibrary) -> None:
    library.set_current(CONTEXT_A)
    kernel = make_kernel(library)
    attributes: dict[int, list[Any]] = {
        1: [(6, 1, 0, 0)],
        2: [(4, 2, 1, 1)],
        3: [(4, 4, 2, 1), (6, 1, 0, 0)],
        0x123456789AB: [],
    }
    for _ in range(2):
        kernel.launch((132, 2, 3), PARAMS, 1, pdl=True)
        kernel.launch((132, 2, 3), PARAMS, 2, cluster=(2, 1, 1))
        kernel.launch((132, 2, 3), PARAMS, 3, cluster=(4, 2, 1), pdl=True)
        kernel.launch((132, 2, 3), PARAMS, 0x123456789AB)
    same = {"grid": (132, 2, 3), "block": (384, 1, 1), "smem": 232_448, "function": FUNCTION}
    same |= {"params": PARAMS, "aligned": True, "extra": None, "context": CONTEXT_A}
    expected = [{**same, "stream": stream, "attributes": some} for stream, some in attributes.items()]
    assert library.launches == expected * 2


@pytest.mark.parametrize("prepared", (False, True))
@pytest.mark.parametrize("current", [None, CONTEXT_B])
def test_a_failed_launch(library: FakeLibrary, current: int | None, prepared: bool) -> None:
    """It says everything, in the context of its device. The caller's is restored, and the kernel usable."""
    library.set_current(current)
    kernel = make_kernel(library)

    def launch() -> None:
        if prepared:
            kernel.prepare((7, 8, 9), PARAMS, CHANGING).launch(0x55, 1, 2)
        else:
            kernel.launch((7, 8, 9), PARAMS, 0x55, cluster=(2, 1, 1), pdl=True)

    library.result = 701
    with pytest.raises(LaunchError) as caught:
        launch()
    parts = ("tiny[FACTOR=1]", "(7, 8, 9)", "384", "232448", "0x55", "CUDA_ERROR_TEST", "explanation of 701")
    assert all(part in str(caught.value) for part in parts)
    library.result = 0
    launch()
    assert [one["context"] for one in library.launches] == [CONTEXT_A] * 2 and library._stack() == [current]


def test_a_launch_that_is_none_is_refused(library: FakeLibrary) -> None:
    """Parameters of another size, and what is no grid. Without the driver's word the first launch sets the
    size.
    """
    kernel = make_kernel(library)
    text = f"params: expected the {PARAM_BYTES} bytes.*got {{}} bytes"
    wrong: Any = [((1, 1, 1), bytes(length), text.format(length)) for length in (0, 191, 200)]
    wrong += [(grid, PARAMS, "grid of three") for grid in ((1, -1, 1), (1, 1), (1, 1, 1 << 32), ("a", 1, 1))]
    for grid, params, text in wrong:
        with pytest.raises(ValueError, match=text):
            kernel.launch(grid, params, 0)
        with pytest.raises(ValueError, match=text):
            kernel.prepare(grid, params, CHANGING).launch(0, 1, 2)
    assert library.launches == []
    kernel = make_kernel(library, param_bytes=None)
    kernel.launch((1, 1, 1), PARAMS, 0)
    with pytest.raises(ValueError, match="params"):
        kernel.launch((1, 1, 1), PARAMS[:-1], 0)


def test_prepared_launch(library: FakeLibrary) -> None:
    """Only the stream and the first members differ. After a launch that says that its context is current, the
    next one need not ask.
    """
    kernel = make_kernel(library)
    options: dict[str, Any] = {"cluster": (2, 1, 1), "pdl": True}
    prepared = kernel.prepare((4, 5, 6), PARAMS, CHANGING, **options)
    for context, stream, members in ((CONTEXT_A, 7, (1, 2)), (CONTEXT_B, 0x99, (1 << 63, 3))):
        library.set_current(context)
        assert prepared.launch(stream, *members) == (context == CONTEXT_A)
        kernel.launch((4, 5, 6), CHANGING.pack(*members) + PARAMS[CHANGING.size :], stream, **options)
        assert library.launches[-2] == library.launches[-1]
    asked = library.asked_context
    assert prepared.launch(0, 1, 2, context_is_current=True) is True
    assert library.asked_context == asked and len(library.launches) == 5


@pytest.mark.parametrize("current", [None, CONTEXT_A])
def test_a_kernel_after_another(library: FakeLibrary, current: int | None) -> None:
    """It has the same parameters and stream. It is not enqueued after a failure, and says its own."""
    library.set_current(current)
    kernel, after = make_kernel(library), make_kernel(library, KernelSpec("after", (), 64, 16))
    prepared = kernel.prepare((4, 5, 6), PARAMS, CHANGING, pdl=True, then=(after, (7, 8, 9)))
    for stream in (7, 7, 0x99):
        prepared.launch(stream, stream, 3)
        params = CHANGING.pack(stream, 3) + PARAMS[CHANGING.size :]
        kernel.launch((4, 5, 6), params, stream, pdl=True)
        after.launch((7, 8, 9), params, stream, pdl=True)
        first, second, *others = library.launches
        assert [first, second] == others and second["grid"] == (7, 8, 9)
        library.launches.clear()
    prepared.launch(launch.NO_LAUNCH, 1, 2)
    assert not library.launches
    library.result = 701
    with pytest.raises(LaunchError, match="tiny"):
        prepared.launch(7, 1, 2)
    assert len(library.launches) == 1
    library.results = [0, 701]
    with pytest.raises(LaunchError, match=r"after.*(?s:.)*\(7, 8, 9\)"):
        prepared.launch(7, 1, 2)
    assert library._stack() == [current]


def test_the_stream_that_takes_no_launches(library: FakeLibrary) -> None:
    kernel = make_kernel(library)
    prepared = kernel.prepare((1, 1, 1), PARAMS, CHANGING)
    kernel.launch((1, 1, 1), PARAMS, launch.NO_LAUNCH)
    assert prepared.launch(launch.NO_LAUNCH, 1, 2) is False and not library.launches
    for stream in (0x51, launch.NO_LAUNCH, 0x51):
        prepared.launch(stream, 1, 2)
    assert len(library.launches) == 2


@pytest.mark.parametrize("current", [None, CONTEXT_A, CONTEXT_B])
def test_clearing(library: FakeLibrary, current: int | None) -> None:
    library.set_current(current)
    address = 0x7FFF00000010
    launch.clear(address, 48, 0x51, 0)
    launch.clear(address, 16, 0x52, 1)
    launch.clear(address, 16, launch.NO_LAUNCH, 0)
    assert library.cleared == [(address, 0, 12, 0x51, CONTEXT_A), (address, 0, 4, 0x52, CONTEXT_B)]
    library.result = 700
    with pytest.raises(LaunchError, match="cuMemsetD32Async: CUDA_ERROR_TEST"):
        launch.clear(0x1000, 16, 0x51, 0)
    assert library._stack() == [current]


def test_threads_do_not_mix_their_launches(library: FakeLibrary) -> None:
    kernel = make_kernel(library)
    prepared = kernel.prepare((1, 1, 1), PARAMS, CHANGING)

    def run(number: int) -> None:
        library.set_current(CONTEXT_A)
        for turn in range(200):
            prepared.launch(number, turn, number)
            kernel.launch((number + 1, turn + 1, 1), bytes([number]) * PARAM_BYTES, number + 8, pdl=True)

    at_once(8, run)
    plain = [one for one in library.launches if one["stream"] >= 8]
    others = [one for one in library.launches if one["stream"] < 8]
    assert len(plain) == len(others) == 1600
    seen = {(one["stream"], *CHANGING.unpack_from(one["params"])) for one in others}
    assert seen == {(number, turn, number) for number in range(8) for turn in range(200)}
    for one in plain:
        number = one["stream"] - 8
        assert one["grid"][0] == number + 1 and one["params"] == bytes([number]) * PARAM_BYTES


class Code:
    """Stands for a loaded module; notes the context in which it is unloaded."""

    def __init__(self, library: FakeLibrary) -> None:
        self.library = library

    def __del__(self) -> None:
        self.library.unloaded.append(self.library._stack()[-1])


@pytest.fixture
def loads(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the variants that were loaded, or "" for one without text; loading one needs no CuPy here."""
    made: list[str] = []
    launch._unused.clear()

    def load(built: CompiledKernel, device: int) -> Kernel:
        made.append("".join(text for _, text in built.spec.headers))
        return make_kernel(library, built.spec, device, module=Code(library))

    monkeypatch.setattr(loading, "build", compiled)
    monkeypatch.setattr(loading, "_load", load)
    return made


def test_loaded_kernels_are_found_also_in_a_capture(loads: list[str]) -> None:
    text = r"tiny\[FACTOR=1\].* device {}.*`rawmla\.warmup`.*or the function itself once"
    with pytest.raises(KernelNotReadyError, match=text.format(1)):
        get_kernel(tiny(), 1, capturing=lambda: True)
    kernel = get_kernel(tiny(), 1)
    assert get_kernel(tiny(), 1) is get_kernel(tiny(), 1, capturing=lambda: True) is kernel
    assert loads == [""] and (kernel.spec, kernel.device) == (tiny(), 1)
    with pytest.raises(KernelNotReadyError, match=text.format(0)):
        get_kernel(tiny(), 0, capturing=lambda: True)


def test_variants_with_text_are_bounded(loads: list[str]) -> None:
    """Two of them stay: the ones that were looked up last. Our own all stay."""
    for factor in range(10):
        get_kernel(tiny(factor), 0)
    for text in ("a", "b", "a", "c", "a", "b"):
        get_kernel(with_text(text), 0)
    for factor in range(10):
        get_kernel(tiny(factor), 0)
    assert loads == [""] * 10 + ["a", "b", "c", "b"] and loading.USER_KERNELS >= 256
    with pytest.raises(KernelNotReadyError):
        get_kernel(with_text("c"), 0, capturing=lambda: True)


@pytest.mark.parametrize("current", [None, CONTEXT_B])
def test_a_prepared_launch_keeps_its_kernel_loaded(
    library: FakeLibrary, loads: list[str], current: int | None
) -> None:
    """Code is unloaded in its own context, whichever is current, when the next kernel is loaded. At another
    time a capture could be going on, which an unload would end.
    """
    library.set_current(current)
    prepared = get_kernel(with_text("a"), 0).prepare((1, 1, 1), PARAMS, CHANGING)
    for text in "bcde":
        get_kernel(with_text(text), 0)
    assert library.unloaded == [CONTEXT_A]  # b
    prepared.launch(0, 1, 2)
    assert len(library.launches) == 1
    del prepared
    get_kernel(with_text("e"), 0)
    assert library.unloaded == [CONTEXT_A]
    get_kernel(with_text("f"), 0)
    assert library.unloaded == [CONTEXT_A] * 3 and library._stack() == [current]  # c, a


STREAM = 0x7F5100000001  # a handle of 64 bits
ACTIVE, INVALIDATED = 1, 2


@pytest.mark.parametrize("current", [None, CONTEXT_A])
@pytest.mark.parametrize("status", [ACTIVE, INVALIDATED])
@pytest.mark.parametrize("prepared", [False, True])
def test_what_a_capture_launched_stays_loaded(
    library: FakeLibrary, loads: list[str], prepared: bool, status: int, current: int | None
) -> None:
    """Replays need the code however many others come after it, and nobody else holds it. A thread without a
    context can launch, too.
    """
    library.set_current(current)
    spec = with_text("captured")
    library.capturing[STREAM] = status
    if prepared:
        get_kernel(spec, 0).prepare((1, 1, 1), PARAMS, CHANGING).launch(STREAM, 1, 2)
    else:
        get_kernel(spec, 0).launch((1, 1, 1), PARAMS, STREAM)
    for text in "abcde":
        get_kernel(with_text(text), 0).launch((1, 1, 1), PARAMS, STREAM + 1)
    assert len(library.unloaded) == 2  # and c when the next one is loaded
    get_kernel(spec, 0, capturing=lambda: True).launch((1, 1, 1), PARAMS, STREAM)
    assert loads == ["captured", *"abcde"]
    assert loading.loaded_labels() == []  # of our own kernels


def test_two_copies_that_captures_launched_stay(library: FakeLibrary, loads: list[str]) -> None:
    """One of them was dropped from the table before its launch, and loaded again for somebody else."""
    library.capturing[STREAM] = ACTIVE
    old = get_kernel(with_text("a"), 0)
    for text in "bca":
        new = get_kernel(with_text(text), 0)
    assert new is not old
    for kernel in (new, old):
        kernel.launch((1, 1, 1), PARAMS, STREAM)
    del kernel, new, old
    for text in "bcd":
        get_kernel(with_text(text), 0)
    assert loads == [*"abcabcd"] and len(library.unloaded) == 2


def test_who_is_asked_whether_a_stream_is_captured(library: FakeLibrary, loads: list[str]) -> None:
    """Only variants that may be unloaded, on streams that can be captured, until they are known to stay."""

    def run(spec: KernelSpec, stream: int) -> list[int]:
        library.asked_streams.clear()
        kernel = get_kernel(spec, 0)
        kernel.launch((1, 1, 1), PARAMS, stream)
        kernel.prepare((1, 1, 1), PARAMS, CHANGING).launch(stream, 1, 2)
        return [*library.asked_streams]

    library.capturing[STREAM] = ACTIVE
    assert run(tiny(), STREAM) == run(with_text("a"), 0) == run(with_text("a"), launch.NO_LAUNCH) == []
    assert run(with_text("a"), STREAM + 1) == [STREAM + 1] * 2
    assert run(with_text("a"), STREAM) == [STREAM]
    assert run(with_text("a"), STREAM + 1) == []


SLOW_LOG = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size
"""


def test_a_slow_variant_with_text_warns_once(
    library: FakeLibrary, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "build", lambda spec: compiled(spec, SLOW_LOG))
    slow = with_text("slow")
    with pytest.warns(RuntimeWarning) as caught:
        for spec, device in ((slow, 0), (slow, 1), (with_text("other"), 0), (slow, 0)):
            get_kernel(spec, device)
    texts = [str(one.message) for one in caught]
    assert all(spec.label in text for spec, text in zip((slow, with_text("other")), texts, strict=True))
    for part in ("C7510", "8 bytes stored, 12 bytes loaded", "16 bytes of stack frame"):
        assert part in texts[0]
    monkeypatch.setattr(loading, "build", compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_kernel(with_text("good"), 0)


def test_the_checked_bytes_are_loaded(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file may be another one by then."""
    seen: list[bytes] = []
    module = SimpleNamespace(load=seen.append, get_function=lambda name: SimpleNamespace(ptr=FUNCTION))
    errors = SimpleNamespace(CUDADriverError=Exception)
    cuda = SimpleNamespace(Device=lambda device: nullcontext(), driver=errors)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.function", SimpleNamespace(Module=lambda: module))
    library.cuFuncSetAttribute = lambda *arguments: 0  # type: ignore[attr-defined]
    monkeypatch.setattr(Driver, "primary_context", lambda self, device: CONTEXT_A)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(b"planted")
    one = CompiledKernel(tiny(), b"checked", {}, "", "", path)
    kernel = loading._load(one, 0)
    assert seen == [b"checked"] and kernel.spec == tiny()


def test_bounded_table() -> None:
    """It never has more than its bound, and threads do not see each other's values."""
    table: BoundedTable[int, int] = BoundedTable(8)

    def run(seed: int) -> None:
        for turn in range(3000):
            key, other = (seed * 7 + turn) % 20, (seed * 21 + turn * 3) % 20
            table[key] = key * 2
            found.add((table.get(other) or other * 2) - other * 2)

    found: set[int] = set()
    at_once(6, run)
    assert found == {0} and len(table) == 8


def test_other_gpus_are_refused_before_anything_is_built(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "build", lambda spec: pytest.fail("built"))
    for library.capability in ((8, 9), (10, 0)):
        with pytest.raises(UnsupportedGPUError, match=r"GPU 41.*{}\.{}.*9\.0".format(*library.capability)):
            get_kernel(tiny(), 1)
        device_info.cache_clear()
    library.capability = (9, 0)
    info = device_info(1)
    assert (info.name, info.sm_count, info.compute_capability) == ("GPU 41", 132, (9, 0))
    assert device_info(1) is info
    with pytest.raises(ValueError, match="device: expected an ordinal below 2.*got 2"):
        device_info(2)


@pytest.mark.parametrize("has_driver", (False, True))
def test_no_driver_or_no_device(monkeypatch: pytest.MonkeyPatch, has_driver: bool) -> None:
    fake = FakeLibrary()
    fake.cuInit = lambda flags: 100  # type: ignore[attr-defined]

    def load(name: str) -> FakeLibrary:
        if not has_driver:
            raise OSError(f"{name}: cannot open shared object file")
        return fake

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    text = "explanation of 100" if has_driver else r"libcuda\.so\.1.*Hopper GPU"
    with pytest.raises(NoGPUError, match=text):
        driver.get_driver.__wrapped__()


MAP = (0x7F0000000010, "bfloat16", (64, 100, 9), (1152, 128), (64, 64, 1), "128b", "256b")


def test_tensor_map_is_encoded_once_for_its_arguments(library: FakeLibrary) -> None:
    assert tensor_map(*MAP) == MAP_BYTES
    others = (MAP[0] + 16, "float16", (64, 101, 9), (1152, 256), (64, 32, 1), "none", "128b")
    variants = [(*MAP[:i], other, *MAP[i + 1 :]) for i, other in enumerate(others)]
    for arguments in (*variants, MAP):
        tensor_map(*arguments)
    assert len(library.maps) == 1 + len(MAP) and tensor_map.cache_info().maxsize == 4096
    codes, arrays = (9, 0, 3, 3, 0), ([64, 100, 9], [1152, 128], [64, 64, 1], [1, 1, 1])
    assert library.maps[0] == (0, MAP[0], codes, *arrays)


def test_tensor_map_in_a_thread_without_a_context(library: FakeLibrary) -> None:
    """It is encoded in the context of a device with kernels; without one the driver's refusal is raised."""
    library.maps_need_a_context = True
    library.set_current(None)
    with pytest.raises(LaunchError, match="explanation of 201"):
        tensor_map(*MAP)
    driver.get_driver()._contexts[1] = CONTEXT_B
    assert tensor_map(*MAP) == MAP_BYTES
    assert library._stack() == [None]


def test_refused_tensor_map_prints_every_field(library: FakeLibrary) -> None:
    library.result = 1
    with pytest.raises(LaunchError) as caught:
        tensor_map(*MAP)
    fields = "ptr=0x7f0000000010 dtype='bfloat16' dims=(64, 100, 9) strides_bytes=(1152, 128) box=(64, 64, 1)"
    for part in (*re.split(r" (?=[a-z])", fields), "swizzle='128b'", "l2_promotion='256b'", "EncodeTiled"):
        assert part in str(caught.value)
    library.result = 0
    assert tensor_map(*MAP) == MAP_BYTES  # the failure was not remembered


def test_tensor_map_arguments_are_checked(library: FakeLibrary) -> None:
    wrong = (("int4",), ((64, 100), ()), ((1152,),), ((64, 64),), ("64b",), ("64b",))
    for position, values in enumerate(wrong, 1):
        for value in values:
            with pytest.raises(ValueError, match="tensor_map"):
                tensor_map(*MAP[:position], value, *MAP[position + 1 :])
    assert library.maps == []
