"""Traces that are kept: reused where nothing of another kind is read, with the tensors of the very call."""

from __future__ import annotations

import builtins
import collections
import contextvars
import datetime
import functools
import gc
import importlib
import math
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from time import time as now
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from emulator.device import HostTensors  # noqa: E402
from flex_on_cpu import Proxy  # noqa: E402
from host_mods import mod_of  # noqa: E402
from torch.nn.attention.flex_attention import and_masks  # noqa: E402
from torch.nn.functional import silu  # noqa: E402

import rawmla  # noqa: E402
from rawmla.call import arrays  # noqa: E402
from rawmla.flex import memo  # noqa: E402
from rawmla.flex.functions import as_bound, bound  # noqa: E402
from rawmla.flex.mods import Bound, Reading  # noqa: E402
from rawmla.flex.trace import trace  # noqa: E402

SCALE = 2.0


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are traced."""
    made: list[Any] = []
    original = memo.trace
    monkeypatch.setattr(memo, "_kept", type(memo._kept)())
    monkeypatch.setattr(memo, "trace", lambda *given: made.append(given[0]) or original(*given))
    return made


def traced(*given: Any) -> Any:
    return mod_of(memo.read(*given))


def biased(table: Any, factor: Any = 1.0) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + table[q] * factor


def test_other_tensors_of_the_kind(traces: list[Any]) -> None:
    first, second = torch.randn(50), torch.randn(50)
    mods = [traced(biased(table), "score_mod", "cpu") for table in (first, second, first)]
    assert len(traces) == 1
    for mod, table in zip(mods, (first, second, first), strict=True):
        assert mod.captures[0].array is table
    assert mods[0].text == mods[1].text


@pytest.mark.parametrize(
    "reading",
    (
        lambda t: t.stride(0),
        lambda t: t.storage_offset(),
        lambda t: int(t.is_contiguous()),
        lambda t: [x.stride()[0] for x in (t,)][0],
    ),
)
def test_how_a_tensor_lies_in_memory(traces: list[Any], reading: Callable[..., Any]) -> None:
    base = torch.arange(4000)
    for table in (base[:50], base[7:57], base[::80], base[:50]):
        mod = traced(lambda s, b, h, q, k: s + reading(table), "score_mod", "cpu")  # noqa: B023
        assert [number.source for number in mod.numbers] == [reading(table)]
    assert len(traces) == 4


def test_numbers_as_indices_of_tensors_on_a_device(traces: list[Any]) -> None:
    """They are no tensors on it: those would be copied there, and be others at each trace."""
    limits, table = torch.zeros(3, device="meta"), torch.zeros(4, 5, device="meta")
    for index in (0, 1, 1):
        mod = traced(lambda b, h, q, k: table[q, 3] < limits[index], "mask_mod", "meta")  # noqa: B023
        assert [capture.array for capture in mod.captures] == [table, limits]
        assert [int(number.source) for number in mod.numbers] == [3, index]
    assert len(traces) == 2


@pytest.mark.parametrize(
    "other",
    (
        biased(torch.randn(50).half()),
        biased(torch.randn(50), 2.0),
        biased(torch.randn(50), 1),
        biased(torch.randn(50, requires_grad=True)),
        biased(torch.randn(10)),
        functools.partial(biased(torch.randn(50))),
        lambda s, b, h, q, k: s,
    ),
)
def test_other_kinds(traces: list[Any], other: Callable[..., Any]) -> None:
    traced(biased(torch.randn(50)), "score_mod", "cpu")
    traced(other, "score_mod", "cpu")
    assert len(traces) == 2


def test_another_size_is_the_same_text(traces: list[Any]) -> None:
    """It is traced again, for the kernel that there is."""
    mods = [traced(biased(torch.randn(n, 70)[0]), "score_mod", "cpu") for n in (1, 2)]
    mods += [traced(biased(torch.randn(80)), "score_mod", "cpu")]
    assert len(traces) == 2 and len({mod.text for mod in mods}) == 1


@pytest.mark.parametrize(
    "reading",
    (
        lambda table: lambda s, b, h, q, k: s + table[torch.clamp(q - k, 0, table.shape[0] - 1)],
        lambda table: lambda s, b, h, q, k: torch.where(q < len(table), s, 2 * s),
        lambda table: lambda s, b, h, q, k: s + table[-30:][k],
        lambda table: lambda s, b, h, q, k: s + table[20:][k],
        lambda table: lambda s, b, h, q, k: s + table.unbind(0)[-1],
    ),
    ids=("shape", "len", "last", "first", "unbind"),
)
def test_sizes_that_are_read(traces: list[Any], reading: Callable[..., Any]) -> None:
    """Each call takes the sizes of its own table."""
    for table in (torch.randn(50), torch.randn(70)):
        kept = traced(reading(table), "score_mod", "cpu")
        fresh = trace(reading(table), "score_mod", "cpu")
        assert kept.text == fresh.text
        assert [number.source for number in kept.numbers] == [number.source for number in fresh.numbers]


class Settings:
    """What functions below read."""

    scale = 2.0


MODULE = types.ModuleType("settings")


def _with_attribute(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * _with_attribute.scale  # type: ignore[attr-defined]


def _of_a_class(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * Settings.scale


def _of_a_module(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * MODULE.scale


@pytest.mark.parametrize(
    ("holder", "mod"), ((_with_attribute, _with_attribute), (Settings, _of_a_class), (MODULE, _of_a_module))
)
def test_attributes_that_change(
    holder: Any, mod: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for scale in (2.0, 3.0):
        monkeypatch.setattr(holder, "scale", scale, raising=False)
        (number,) = traced(mod, "score_mod", "cpu").numbers
        assert number.source == scale


class OwnDict(dict):  # type: ignore[type-arg]
    scale = 1.0


class OwnList(list):  # type: ignore[type-arg]
    pass


class OwnFloat(float):
    pass


class OwnStr(str):
    pass


class OwnTensor(torch.Tensor):
    scale = 1.0


class OwnPartial(functools.partial):  # type: ignore[type-arg]
    pass


class WithMethod(NamedTuple):
    width: int

    @property
    def scale(self) -> float:
        return SCALE


@pytest.mark.parametrize(
    ("changing", "read"),
    (
        *[(x, x) for x in (OwnDict(), OwnList(), OwnFloat(), OwnStr(), OwnPartial(abs))],
        (OwnDict, OwnDict()),
        (OwnTensor, torch.zeros(3).as_subclass(OwnTensor)),
        *[(x, x) for x in (torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), functools.partial(abs))],
    ),
    ids=lambda x: type(x).__name__,
)
def test_attributes_beside_contents(changing: Any, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for scale in (2.0, 3.0):
        monkeypatch.setattr(changing, "scale", scale, raising=False)
        (number,) = traced(lambda s, b, h, q, k: s * read.scale, "score_mod", "cpu").numbers
        assert number.source == scale


def test_members_of_a_named_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = WithMethod(3)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        (number,) = traced(lambda s, b, h, q, k: s * sizes.scale, "score_mod", "cpu").numbers
        assert number.source == scale


def test_what_a_dict_gives_beside_its_values() -> None:
    """The default of one, and keys that are equal."""
    for scale in (2.0, 3.0):
        scales: Any = collections.defaultdict(lambda: scale)  # noqa: B023
        (number,) = traced(lambda s, b, h, q, k: s * scales[0], "score_mod", "cpu").numbers  # noqa: B023
        assert number.source == scale
    for key in (2, 2.0):
        keyed = {key: 0}
        (number,) = traced(lambda s, b, h, q, k: s * [*keyed][0], "score_mod", "cpu").numbers  # noqa: B023
        assert type(number.source) is type(key)


class Plain(NamedTuple):
    table: Any
    factor: float


Made = collections.namedtuple("Made", ("table", "factor"))


@pytest.mark.parametrize("kind", (Plain, Made))
def test_named_tuples_without_members_are_known(traces: list[Any], kind: Any) -> None:
    for factor in (2.0, 2.0, 3.0):
        both = kind(torch.randn(50), factor)
        mod = traced(lambda s, b, h, q, k: s + both.table[q] * both.factor, "score_mod", "cpu")  # noqa: B023
        assert mod.captures[0].array is both.table and mod.numbers[0].source == factor
    assert len(traces) == 2


def test_numpy_is_known(traces: list[Any]) -> None:
    for scale in (np.float64(2.0), np.float64(2.0), np.float64(3.0)):
        mod = traced(lambda s, b, h, q, k: s * scale + np.pi, "score_mod", "cpu")  # noqa: B023
        assert mod.numbers[0].source == scale
    assert len(traces) == 2


def test_what_torch_compile_has_seen_is_known(traces: list[Any]) -> None:
    """It leaves attributes on parameters."""
    tables = [torch.nn.Parameter(torch.randn(50)) for _ in range(2)]
    for table in tables:
        torch._dynamo.mark_static_address(table)
        assert vars(table)
        assert traced(biased(table), "score_mod", "cpu").captures[0].array is table
    assert len(traces) == 1


def test_a_variable_that_has_no_value_yet() -> None:
    def make() -> Callable[..., Any]:
        def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * 2.0 if h is not None else later

        return mod
        later = 1.0

    (number,) = traced(make(), "score_mod", "cpu").numbers
    assert number.source == 2.0


def test_methods_of_objects_that_change() -> None:
    scales = [2.0]
    get = scales.__getitem__
    for scale in (2.0, 3.0):
        scales[0] = scale
        (number,) = traced(lambda s, b, h, q, k: s * get(0), "score_mod", "cpu").numbers
        assert number.source == scale


def test_modules_of_torch_are_known(traces: list[Any]) -> None:
    import math

    for _ in range(2):
        traced(
            lambda s, b, h, q, k: torch.nn.functional.silu(s) * math.pi + q.to(torch.float32),
            "score_mod",
            "cpu",
        )
    assert len(traces) == 1


def test_gradients(traces: list[Any]) -> None:
    """Traces with and without them are two; kept ones have the gradients of a fresh one, of other tensors."""
    tables = [torch.randn(50, requires_grad=True) for _ in range(2)]
    mods = [traced(biased(table, 2.0), "score_mod", "cpu", True) for table in tables]
    assert len(traces) == 1
    assert traced(biased(tables[0], 2.0), "score_mod", "cpu").backward is None and len(traces) == 2
    fresh = trace(biased(tables[0], 2.0), "score_mod", "cpu", True)
    for mod, table in zip(mods, tables, strict=True):
        assert mod.captures[0].array is table
        assert mod.backward == fresh.backward and mod.backward.gradients == (0,)
    other = traced(biased(tables[0].detach(), 2.0), "score_mod", "cpu", True)
    assert len(traces) == 3 and other.backward is not None and other.backward.gradients == ()


def test_globals(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * SCALE

    for scale, count in ((2.0, 1), (2.0, 1), (3.0, 2)):
        monkeypatch.setitem(globals(), "SCALE", scale)
        (number,) = traced(scaled, "score_mod", "cpu").numbers
        assert number.source == scale and len(traces) == count


def test_numbers_on_the_cpu_are_those_of_the_call(traces: list[Any]) -> None:
    first, second = torch.tensor(2.0), torch.tensor(3.0)
    for factor in (first, second):
        mod = traced(biased(torch.randn(50), factor), "score_mod", "cpu")
        assert mod.numbers[0].source is factor
    assert len(traces) == 1


def test_functions_of_functions(traces: list[Any]) -> None:
    def both(*mods: Callable[..., Any]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: mods[1](mods[0](s, b, h, q, k), b, h, q, k)

    for table in (torch.randn(50), torch.randn(50)):
        mod = traced(both(biased(table), biased(table, 3.0)), "score_mod", "cpu")
        assert [capture.array is table for capture in mod.captures] == [True]
    assert len(traces) == 1
    tables = torch.randn(50), torch.randn(60)
    mod = traced(both(biased(tables[0]), biased(tables[1], 3.0)), "score_mod", "cpu")
    assert len(mod.captures) == 2 and len(traces) == 2


def test_unknown_objects_are_traced_again(traces: list[Any]) -> None:
    class Mod:
        width = 3

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q - k < self.width

    mod = Mod()
    for width in (3, 4):
        mod.width = width
        assert traced(mod, "mask_mod", "cpu").numbers[0].source == width
    assert len(traces) == 2


PROXY: Any = Proxy()
WEAK: Any = weakref.proxy(PROXY)
LOCAL = threading.local()
LOCAL.scale = 2.0
CONTEXT = contextvars.ContextVar("CONTEXT", default=2.0)
NUMBERS = iter(range(100))
MODULES = {"math": math}
VERSION = "{0._version}"
TABLE = torch.randn(50)
TABLE.grad = torch.randn(50)


@functools.lru_cache
def cached_scale() -> float:
    return SCALE


def pi_of(module: Any) -> Any:
    return module.pi


def imports(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    import calls

    return s * len(calls.__name__)


def imports_from(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    from test_flex_memo import SCALE

    return s * SCALE


def makes_a_class(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    class Here:
        scale = SCALE

    return s * Here.scale


def sets_a_global(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    global SEEN
    SEEN = True
    return s * 2.0


def sets_an_attribute(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    TABLE.seen = True  # type: ignore[attr-defined]
    return s + TABLE[q]


def matches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    match TABLE:
        case torch.Tensor(_version=version):
            return s * version


with_own_builtins = types.FunctionType(
    (lambda s, b, h, q, k: s * a_scale).__code__,  # type: ignore[name-defined]  # noqa: F821
    {"__builtins__": {"a_scale": 2.0}},
)


def of_a_default(s: Any, b: Any, h: Any, q: Any, k: Any, module: Any = math) -> Any:
    return s * module.pi


@pytest.mark.parametrize(
    "function",
    (
        *(
            imports,
            imports_from,
            makes_a_class,
            sets_a_global,
            sets_an_attribute,
            matches,
            of_a_default,
            with_own_builtins,
        ),
        lambda s, b, h, q, k: s * importlib.import_module("test_flex_memo").SCALE,
        lambda s, b, h, q, k: s * sys.modules[__name__].SCALE,
        lambda s, b, h, q, k: s * len(os.environ),
        lambda s, b, h, q, k: s * globals()["SCALE"],
        lambda s, b, h, q, k: s * eval("SCALE"),
        lambda s, b, h, q, k: s * pi_of.__globals__["SCALE"],
        lambda s, b, h, q, k: s * len([x for x in (s,)] and (x for x in (s,)).gi_frame.f_globals),
        lambda s, b, h, q, k: s * random.random(),
        lambda s, b, h, q, k: s * time.time(),
        lambda s, b, h, q, k: s * now(),
        lambda s, b, h, q, k: s * datetime.datetime.now().microsecond,
        lambda s, b, h, q, k: s * float(np.random.rand()),
        lambda s, b, h, q, k: s * torch.initial_seed(),
        lambda s, b, h, q, k: s * torch.get_num_threads(),
        lambda s, b, h, q, k: s * torch.backends.cuda.matmul.allow_tf32,
        lambda s, b, h, q, k: s * torch.random.initial_seed(),
        lambda s, b, h, q, k: s * next(NUMBERS),
        lambda s, b, h, q, k: s * cached_scale(),
        lambda s, b, h, q, k: s * LOCAL.scale,
        lambda s, b, h, q, k: s * CONTEXT.get(),
        lambda s, b, h, q, k: PROXY.__rmul__(s),
        lambda s, b, h, q, k: s * PROXY.value,
        lambda s, b, h, q, k: s * WEAK.value,
        lambda s, b, h, q, k: s * pi_of(math),
        lambda s, b, h, q, k: s * (math or h).pi,
        lambda s, b, h, q, k: s * MODULES["math"].pi,
        lambda s, b, h, q, k: s + TABLE[q] * getattr(TABLE, "str" + "ide")(0),
        lambda s, b, h, q, k: s + TABLE[q] * len(VERSION.format(TABLE)),
        lambda s, b, h, q, k: s + TABLE[q] * operator.attrgetter("_version")(TABLE),
        lambda s, b, h, q, k: s + TABLE[q] * TABLE._version,
        lambda s, b, h, q, k: s + TABLE[q] * TABLE.dim_order()[0],
        lambda s, b, h, q, k: s + TABLE[q] * TABLE.grad.shape[0],
        lambda s, b, h, q, k: s + TABLE[q] * torch.ops.aten.stride(TABLE)[0],
    ),
)
def test_what_is_not_compared_is_traced_again(traces: list[Any], function: Any) -> None:
    for _ in range(2):
        traced(function, "score_mod", "cpu")
    assert len(traces) == 2 and not memo._kept


def plain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Calls what is kept: builtins, code of its own, and operators of torch by names of every sort."""
    if SCALE < 0:
        raise ValueError("SCALE")
    limits = [min(len(TABLE), TABLE.size(0)), *(int(x) for x in range(TABLE.shape[0], 60))]
    s = torch.where(q < limits[0], s, torch.finfo(torch.float32).min)
    return functools.reduce(
        operator.add, (s.float(), abs(TABLE[q].to(torch.float32)), isinstance(s, torch.Tensor))
    )


@pytest.mark.parametrize(
    ("function", "kind"),
    (
        (plain, "score_mod"),
        (lambda s, b, h, q, k: silu(s) + F.softsign(s) + torch.nn.functional.gelu(s), "score_mod"),
        (lambda s, b, h, q, k: torch.special.expit(s) + torch.ops.aten.elu(s), "score_mod"),
        (lambda s, b, h, q, k: s * math.sqrt(2) * np.sqrt(2.0) * np.float32(2) * torch.pi, "score_mod"),
        (lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf).clamp(max=2.0).exp().mul(2), "score_mod"),
        (and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < len(TABLE)), "mask_mod"),
        (rawmla.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < len(TABLE)), "mask_mod"),
        (rawmla.or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: TABLE[q] > 0), "mask_mod"),
    ),
)
def test_what_is_compared_or_trusted_is_kept(traces: list[Any], function: Any, kind: Any) -> None:
    for _ in range(2):
        traced(function, kind, "cpu")
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("holder", "name", "function"),
    (
        (math, "pi", lambda s, b, h, q, k: s * math.pi),
        (torch, "pi", lambda s, b, h, q, k: s * torch.pi),
        (torch.Tensor, "a_scale", lambda s, b, h, q, k: s * TABLE.a_scale),  # type: ignore[attr-defined]
        (builtins, "a_scale", lambda s, b, h, q, k: s * a_scale),  # type: ignore[name-defined]  # noqa: F821
    ),
)
def test_values_of_modules_and_classes(
    holder: Any, name: str, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes the value that it finds."""
    for scale in (2.0, 3.0):
        monkeypatch.setattr(holder, name, scale, raising=False)
        (number,) = traced(function, "score_mod", "cpu").numbers
        assert number.source == scale


def test_devices_apart(traces: list[Any]) -> None:
    """A function may ask for the device of its arguments, so it is traced for each device."""
    for device, scale in (("cpu", 2.0), ("meta", 3.0), ("cpu", 2.0)):
        (number,) = traced(lambda s, b, h, q, k: s * (3.0 if q.is_meta else 2.0), "score_mod", device).numbers
        assert number.source == scale
    assert len(traces) == 2


def test_long_lists(traces: list[Any]) -> None:
    """A function that reads a list of MAX_COMPARED entries or more is traced at every call."""
    for length, count in ((memo.MAX_COMPARED - 1, 2), (memo.MAX_COMPARED, 3)):  # the function counts too
        traces.clear()
        widths = [2] * length
        for widths[-1] in (2, 2, 3):
            (number,) = traced(lambda b, h, q, k: q - k < widths[-1], "mask_mod", "cpu").numbers  # noqa: B023
            assert number.source == widths[-1]
        assert len(traces) == count


def test_containers_that_are_long_by_others(traces: list[Any]) -> None:
    """One that holds another twice, forty times over, and one that holds itself."""
    doubled: Any = [2]
    for _ in range(40):
        doubled = [doubled, doubled]
    itself: Any = {"width": 2}
    itself["itself"] = itself
    for function in (
        lambda b, h, q, k: q - k < len(doubled),
        lambda b, h, q, k: q - k < itself["width"],
    ):
        traces.clear()
        for _ in range(2):
            (number,) = traced(function, "mask_mod", "cpu").numbers
            assert number.source == 2
        assert len(traces) == 2


def test_bounded(traces: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rawmla.call.memo.MAX_ENTRIES", 2)
    table = torch.randn(50)
    for factor in (1.0, 2.0, 3.0, 3.0, 1.0):
        traced(biased(table, factor), "score_mod", "cpu")
    assert len(traces) == 4


def test_code_that_is_compiled_again(traces: list[Any]) -> None:
    """It is equal, and so is what it reads."""
    for _ in range(2):
        traced(eval("lambda s, b, h, q, k: s * 2.0"), "score_mod", "cpu")
    assert len(traces) == 1


def test_a_function_that_calls_itself(traces: list[Any]) -> None:
    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any, times: int = 2) -> Any:
        return scaled(s * 2.0, b, h, q, k, times - 1) if times else s

    texts = {traced(scaled, "score_mod", "cpu").text for _ in range(2)}
    assert len(traces) == 1 and len(texts) == 1


def test_one_text_is_one_frame(traces: list[Any]) -> None:
    """Also where another size is traced again: forms of a text are found again."""
    frames = {id(memo.read(biased(torch.randn(n)), "score_mod", "cpu").frame) for n in (50, 60, 50)}
    assert len(traces) == 2 and len(frames) == 1


# ---- calls of one function whose state changes between them


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Bound]:
    """What a call binds of a score function; CPU tensors pass for tensors of device 0."""
    framework = HostTensors(torch)
    for kind in (torch.Tensor, torch.nn.Parameter):
        monkeypatch.setitem(arrays.READERS, kind, framework.read)

    def bound_now(function: Any) -> Bound:
        made = bound(as_bound(function, "score_mod", 0, framework), "score_mod", 0, framework)
        assert made is not None
        return made

    return bound_now


@pytest.mark.parametrize(
    "change",
    (
        lambda x: x.set_(torch.randn(50)),
        lambda x: x.set_(torch.randn(100)[::2]),
        lambda x: x.resize_(40),
        lambda x: setattr(x, "data", torch.randn(50).half()),
        lambda x: setattr(x, "data", x.data.view(torch.int32)),
        lambda x: setattr(x, "scale", 2.0),
        lambda x: x.add_(1),
    ),
)
def test_tensors_that_change_in_place(bind: Any, change: Callable[..., Any]) -> None:
    """The next call binds what it would bind of a tensor that was so from the first."""
    table = torch.randn(50)
    function = biased(table)
    bind(function)
    change(table)
    made = bind(function)
    assert made.addresses == [table.data_ptr()]
    assert [x.dtype for x in made.form.frame.mod.captures] == [str(table.dtype).removeprefix("torch.")]
    assert made == bind(biased(table.detach()))


def test_a_tensor_that_gets_the_negative_bit(bind: Any) -> None:
    table = torch.randn(50)
    bind(biased(table))
    table.data = torch._neg_view(table.data)
    with pytest.raises(ValueError, match=r"^score_mod: an array that it reads: .* negative bit"):
        bind(biased(table))


def test_a_tensor_that_requires_grad_later(bind: Any) -> None:
    table = torch.randn(50)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q] * (2 if table.requires_grad else 1)

    before = bind(score).numbers
    table.requires_grad_()
    with torch.no_grad():
        assert bind(score).numbers != before and bind(score).addresses == [table.data_ptr()]
    with pytest.raises(ValueError, match="score_mod: an array that it reads"):
        bind(score)


def test_a_tensor_that_is_no_longer_read(bind: Any) -> None:
    """The call does not look at it."""
    table, reads = torch.randn(50), True

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q] if reads else s * 2

    bind(score)
    reads = False
    table.requires_grad_()
    assert bind(score).addresses == []
    table.untyped_storage().resize_(0)
    assert bind(score).addresses == []


def test_numbers_that_change(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 2.0

    def with_variable(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * factor

    def with_global(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * SCALE

    def with_default(s: Any, b: Any, h: Any, q: Any, k: Any, factor: Any = 2.0) -> Any:
        return s * factor

    def with_module(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * math.pi

    monkeypatch.setattr(math, "pi", 2.0)
    functions = (with_variable, with_global, with_default, with_module)
    assert [bind(function).numbers for function in functions] == [[2.0]] * 4
    factor = 3.0
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with_default.__defaults__ = (3.0,)
    monkeypatch.setattr(math, "pi", 3.0)
    assert [bind(function).numbers for function in functions] == [[3.0]] * 4


def test_a_builtin_that_a_global_hides(bind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return abs(s)

    before = bind(function).form.frame.mod.text
    monkeypatch.setitem(globals(), "abs", torch.tanh)
    assert bind(function).form.frame.mod.text != before


def test_what_a_function_changes_itself(bind: Any) -> None:
    step = 0

    def stepping(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal step
        step += 1
        return s * step

    assert [bind(stepping).numbers for _ in range(3)] == [[1.0], [2.0], [3.0]]


def test_nothing_is_kept_of_a_refused_function(bind: Any) -> None:
    limit: Any = torch.tensor(3)
    function = lambda s, b, h, q, k: s * int(limit)  # noqa: E731
    kept = len(memo._kept)
    for _ in range(2):
        with pytest.raises(ValueError, match="takes the value of limit into Python"):
            bind(function)
    assert len(memo._kept) == kept
    limit = 3
    assert list(bind(function).numbers) == [3]


def test_what_is_bound_at_once() -> None:
    """A call finds what an earlier one of its framework bound, unless a number or a gradient is read."""
    framework, other = HostTensors(torch), HostTensors(torch)
    table, limit = torch.randn(50), torch.tensor(3)

    def call(function: Any, framework: Any) -> Any:
        found = as_bound(function, "score_mod", 0, framework)
        bound(found, "score_mod", 0, framework)
        return type(found)

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(arrays.READERS, torch.Tensor, framework.read)
        assert [call(biased(table), framework) for _ in range(3)] == [Reading, Bound, Bound]
        assert [call(biased(torch.randn(50)), framework) for _ in range(2)] == [Bound] * 2
        assert call(biased(torch.randn(100)[::2]), framework) is Reading
        assert [call(biased(table), other) for _ in range(3)] == [Reading] * 3
        assert [call(biased(table, limit), framework) for _ in range(3)] == [Reading] * 3
        assert call(functools.partial(biased(table)), framework) is Reading
        table.requires_grad_()
        with torch.no_grad():
            assert [call(biased(table), framework) for _ in range(3)] == [Reading, Bound, Bound]
        assert type(as_bound(biased(table), "score_mod", 0, framework)) is Reading


def test_functions_of_one_code_beside_each_other(bind: Any, traces: list[Any]) -> None:
    """Layers with tables of their own, say."""
    tables = [torch.randn(50) for _ in range(3)]
    for _ in range(2):
        assert [bind(biased(x)).addresses for x in tables] == [[x.data_ptr()] for x in tables]
    assert len(traces) == 1


def test_keeps_no_tensor(bind: Any) -> None:
    table = torch.randn(50)
    bind(biased(table))
    seen = weakref.ref(table)
    del table
    gc.collect()
    assert seen() is None
