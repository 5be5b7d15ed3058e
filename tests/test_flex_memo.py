"""Traces that are kept: reused where nothing of another kind is read, with the tensors of the very call."""

from __future__ import annotations

import builtins
import collections
import functools
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from emulator.device import HostTensors  # noqa: E402
from torch.nn.attention.flex_attention import and_masks  # noqa: E402
from torch.nn.functional import silu  # noqa: E402

import rawmla  # noqa: E402
from rawmla.call import arrays  # noqa: E402
from rawmla.flex import memo  # noqa: E402
from rawmla.flex.functions import as_bound, bound  # noqa: E402
from rawmla.flex.mods import Bound, Reading  # noqa: E402
from rawmla.flex.trace import trace  # noqa: E402

SCALE = 2.0
Score = Callable[..., Any]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are traced."""
    made: list[Any] = []
    original = memo.trace
    monkeypatch.setattr(memo, "_kept", type(memo._kept)())
    monkeypatch.setattr(memo, "trace", lambda *given: made.append(given[0]) or original(*given))
    return made


def traced(function: Any, kind: Any = "score_mod", device: str = "cpu", backward: bool = False) -> Reading:
    return memo.read(function, kind, device, backward)


def number_of(function: Any, kind: str = "score_mod", device: str = "cpu") -> Any:
    """The only number of a function."""
    (number,) = traced(function, kind, device).sources
    return number


def biased(table: Any, factor: Any = 1.0) -> Score:
    return lambda s, b, h, q, k: s + table[q] * factor


# ---- what makes a new trace


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
def test_other_kinds(traces: list[Any], other: Score) -> None:
    traced(biased(torch.randn(50)))
    traced(other)
    assert len(traces) == 2


def test_signs_of_zeros(traces: list[Any]) -> None:
    for zero in (0.0, -0.0, 0.0):
        assert math.copysign(1, number_of(lambda s, b, h, q, k: s * zero)) == math.copysign(1, zero)  # noqa: B023
    assert len(traces) == 2


def _times(read: Callable[[Any], Any]) -> Callable[[Any], Score]:
    return lambda table: lambda s, b, h, q, k: s * read(table)


@pytest.mark.parametrize(
    "reading",
    (
        _times(lambda t: t.stride(0)),
        _times(lambda t: t.storage_offset()),
        _times(lambda t: int(t.is_contiguous())),
        _times(lambda t: [x.stride()[0] for x in (t,)][0]),
        _times(lambda t: t.shape[0]),
        lambda table: lambda s, b, h, q, k: s + table[torch.clamp(q - k, 0, len(table) - 1)],
        lambda table: lambda s, b, h, q, k: s + table[-30:][k],
        lambda table: lambda s, b, h, q, k: s + table[20:][k],
        lambda table: lambda s, b, h, q, k: s + table.unbind(0)[-1],
    ),
)
def test_reads_beside_values(reading: Callable[[Any], Score]) -> None:
    """Each call has what its own tensor says."""
    base = torch.randn(4000)
    for table in (base[:50], base[7:67], base[::80], base[:50]):
        kept, fresh = traced(reading(table)), trace(reading(table), "score_mod", "cpu")
        assert kept.frame.mod.text == fresh.text
        assert list(kept.sources) == [number.source for number in fresh.numbers]


def test_gradients(traces: list[Any]) -> None:
    """Traces with and without them are two; kept ones have the gradients of a fresh one, of other tensors."""
    tables = [torch.randn(50, requires_grad=True) for _ in range(2)]
    kept = [traced(biased(table, 2.0), backward=True) for table in tables]
    assert len(traces) == 1
    assert traced(biased(tables[0], 2.0)).frame.mod.backward is None and len(traces) == 2
    fresh = trace(biased(tables[0], 2.0), "score_mod", "cpu", True).backward
    assert fresh is not None and fresh.gradients == (0,)
    for one, table in zip(kept, tables, strict=True):
        assert one.arrays[0] is table and one.frame.mod.backward == fresh
    other = traced(biased(tables[0].detach(), 2.0), backward=True).frame.mod.backward
    assert len(traces) == 3 and other is not None and other.gradients == ()


def test_numbers_as_indices_of_tensors_on_a_device(traces: list[Any]) -> None:
    """They are no tensors on it: those would be copied there, and be others at each trace."""
    limits, table = torch.zeros(3, device="meta"), torch.zeros(4, 5, device="meta")
    for index in (0, 1, 1):
        found = traced(lambda b, h, q, k: table[q, 3] < limits[index], "mask_mod", "meta")  # noqa: B023
        assert found.arrays[0] is table and found.arrays[1] is limits
        assert [int(number) for number in found.sources] == [3, index]
    assert len(traces) == 2


def test_functions_of_functions(traces: list[Any]) -> None:
    def both(*mods: Score) -> Score:
        return lambda s, b, h, q, k: mods[1](mods[0](s, b, h, q, k), b, h, q, k)

    for table in (torch.randn(50), torch.randn(50)):  # one tensor in two places, which are one capture
        found = traced(both(biased(table), biased(table, 3.0)))
        assert [array is table for array in found.arrays] == [True]
    assert len(traces) == 1
    assert len(traced(both(biased(torch.randn(50)), biased(torch.randn(50), 3.0))).arrays) == 2


def test_devices_apart(traces: list[Any]) -> None:
    """A function may ask for the device of its arguments."""
    for device, scale in (("cpu", 2.0), ("meta", 3.0), ("cpu", 2.0)):
        mod = lambda s, b, h, q, k: s * (3.0 if q.is_meta else 2.0)  # noqa: E731
        assert number_of(mod, device=device) == scale
    assert len(traces) == 2


# ---- what each call sees


class Settings:
    """A class that functions read, and whose object is one."""

    scale = 2.0

    def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * self.scale


class OwnDict(dict):  # type: ignore[type-arg]
    scale = 1.0


class OwnTensor(torch.Tensor):
    scale = 1.0


def _with_attribute(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * _with_attribute.scale  # type: ignore[attr-defined]


def _scale_of(x: Any) -> Score:
    return lambda s, b, h, q, k: s * x.scale


HERE = sys.modules[__name__]
MODULE = types.ModuleType("settings")
TABLE = torch.randn(50)
TABLE.grad = torch.randn(50)
OBJECT = Settings()
ATTRIBUTES: tuple[tuple[Any, str, Score], ...] = (
    *[(x, "scale", _scale_of(x)) for x in (OwnDict(), torch.zeros(3), functools.partial(abs))],
    (OwnTensor, "scale", _scale_of(torch.zeros(3).as_subclass(OwnTensor))),
    (_with_attribute, "scale", _with_attribute),
    (OBJECT, "scale", OBJECT),
    (Settings, "scale", lambda s, b, h, q, k: s * Settings.scale),
    (MODULE, "scale", lambda s, b, h, q, k: s * MODULE.scale),
    (HERE, "SCALE", lambda s, b, h, q, k: s * SCALE),
    (math, "pi", lambda s, b, h, q, k: s * math.pi),
    (torch.Tensor, "a_scale", lambda s, b, h, q, k: s * TABLE.a_scale),  # type: ignore[attr-defined]
    (builtins, "a_scale", lambda s, b, h, q, k: s * a_scale),  # type: ignore[name-defined]  # noqa: F821
)


@pytest.mark.parametrize(("holder", "name", "function"), ATTRIBUTES, ids=lambda x: type(x).__name__)
def test_attributes_that_change(
    holder: Any, name: str, function: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    for scale in (2.0, 3.0):
        monkeypatch.setattr(holder, name, scale, raising=False)
        assert number_of(function) == scale


def test_contents_that_change() -> None:
    """A variable, a default, a list by a method of it, keys that are equal, the default of a dict."""
    scales: list[Any] = [2.0]
    get, factor = scales.__getitem__, 2.0
    functions = (lambda s, b, h, q, k: s * get(0), lambda s, b, h, q, k: s * factor)
    for scale in (2.0, 3.0):
        factor = scales[0] = scale
        with_default = lambda s, b, h, q, k, scale=scale: s * scale  # noqa: E731
        others: Any = collections.defaultdict(lambda: scale)  # noqa: B023
        for function in (*functions, with_default, lambda s, b, h, q, k: s * others[0]):  # noqa: B023
            assert number_of(function) == scale
    for key in (2, 2.0):
        keyed = {key: 0}
        assert type(number_of(lambda s, b, h, q, k: s * [*keyed][0])) is type(key)  # noqa: B023


def test_a_builtin_that_a_global_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    function = lambda s, b, h, q, k: abs(s)  # noqa: E731
    before = traced(function).frame
    monkeypatch.setitem(globals(), "abs", torch.tanh)
    assert traced(function).frame.mod.text != before.mod.text


# ---- what is kept


class Plain(NamedTuple):
    table: Any
    factor: float


def plain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Calls what is kept: builtins, code of its own, and operators of torch by names of every sort."""
    if SCALE < 0:
        raise ValueError("SCALE")
    limits = [min(len(TABLE), TABLE.size(0)), *(int(x) for x in range(TABLE.shape[0], 60))]
    s = torch.where(q < limits[0], s, torch.finfo(torch.float32).min)
    return functools.reduce(
        operator.add, (s.float(), abs(TABLE[q].to(torch.float32)), isinstance(s, torch.Tensor))
    )


def _calls_itself(s: Any, b: Any, h: Any, q: Any, k: Any, times: int = 2) -> Any:
    return _calls_itself(s * 2.0, b, h, q, k, times - 1) if times else s


def _seen_by_torch_compile() -> Score:
    table = torch.nn.Parameter(torch.randn(50))
    torch._dynamo.mark_static_address(table)
    assert vars(table)
    return biased(table)


def _weighted(both: Plain) -> Score:
    return lambda s, b, h, q, k: s + both.table[q] * both.factor


@pytest.mark.parametrize(
    "make",
    (
        lambda: plain,
        lambda: _calls_itself,
        lambda: _weighted(Plain(torch.randn(50), 2.0)),
        _seen_by_torch_compile,
        lambda: eval("lambda s, b, h, q, k: s * 2.0"),
        lambda: lambda s, b, h, q, k: silu(s) + F.softsign(s) + torch.nn.functional.gelu(s),
        lambda: lambda s, b, h, q, k: torch.special.expit(s) + torch.ops.aten.elu(s),
        lambda: lambda s, b, h, q, k: s * math.sqrt(2) * np.sqrt(2.0) * np.float32(2) * torch.pi + np.pi,
        lambda: lambda s, b, h, q, k: s.masked_fill(q < k, -math.inf).clamp(max=2.0).exp().mul(2),
    ),
)
def test_scores_that_are_kept(traces: list[Any], make: Callable[[], Score]) -> None:
    """They are kept of another object, too, that reads what is equal."""
    assert traced(make()).frame is traced(make()).frame
    assert len(traces) == 1


@pytest.mark.parametrize("join", (and_masks, rawmla.and_masks, rawmla.or_masks))
def test_masks_that_are_kept(traces: list[Any], join: Any) -> None:
    mask = join(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k < len(TABLE))
    for _ in range(2):
        traced(mask, "mask_mod")
    assert len(traces) == 1


# ---- what is traced at every call


class Proxy:
    """An object that passes for the number that it holds, and may hold another."""

    value = 2.0
    __class__ = float  # type: ignore[assignment]

    def __rmul__(self, other: Any) -> Any:
        return other * self.value


PROXY: Any = Proxy()


@functools.lru_cache
def cached_scale() -> float:
    return SCALE


def pi_of(module: Any) -> Any:
    return module.pi


def makes_a_class(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    class Here:
        scale = SCALE

    return s * Here.scale


def matches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    match TABLE:
        case torch.Tensor(_version=version):
            return s * version


with_own_builtins = types.FunctionType(
    (lambda s, b, h, q, k: abs(s)).__code__, {"__builtins__": {"abs": torch.tanh}}
)


NOT_COMPARED = (
    *(makes_a_class, matches, with_own_builtins),
    lambda s, b, h, q, k, module=math: s * module.pi,
    lambda s, b, h, q, k: s * sys.modules[__name__].SCALE,
    lambda s, b, h, q, k: s * globals()["SCALE"],
    lambda s, b, h, q, k: s * pi_of.__globals__["SCALE"],
    lambda s, b, h, q, k: s * len([x for x in (s,)] and (x for x in (s,)).gi_frame.f_globals),
    lambda s, b, h, q, k: s * float(np.random.rand()),
    lambda s, b, h, q, k: s * torch.initial_seed(),
    lambda s, b, h, q, k: s * cached_scale(),
    lambda s, b, h, q, k: PROXY.__rmul__(s),
    lambda s, b, h, q, k: s * pi_of(math),
    lambda s, b, h, q, k: s + TABLE[q] * getattr(TABLE, "str" + "ide")(0),
    lambda s, b, h, q, k: s + TABLE[q] * operator.attrgetter("_version")(TABLE),
    lambda s, b, h, q, k: s + TABLE[q] * TABLE._version,
    lambda s, b, h, q, k: s + TABLE[q] * TABLE.grad.shape[0],
    lambda s, b, h, q, k: s + TABLE[q] * torch.ops.aten.stride(TABLE)[0],
)


@pytest.mark.parametrize("function", NOT_COMPARED)
def test_functions_that_are_not_kept(traces: list[Any], function: Any) -> None:
    for _ in range(2):
        traced(function)
    assert len(traces) == 2 and not memo._kept


def test_long_containers(traces: list[Any]) -> None:
    """A function that reads MAX_COMPARED objects or more is traced at every call."""
    for length, count in ((memo.MAX_COMPARED - 1, 2), (memo.MAX_COMPARED, 3)):  # the function counts too
        traces.clear()
        widths = [2] * length
        for widths[-1] in (2, 2, 3):
            assert number_of(lambda b, h, q, k: q - k < widths[-1], "mask_mod") == widths[-1]  # noqa: B023
        assert len(traces) == count
    itself: Any = {"width": 2}
    itself["itself"] = itself
    traces.clear()
    function = lambda b, h, q, k: q - k < itself["width"]  # noqa: E731
    assert [number_of(function, "mask_mod") for _ in range(2)] == [2, 2] and len(traces) == 2


def test_nothing_is_kept_of_a_refused_function(traces: list[Any]) -> None:
    limit = torch.tensor(3)
    for count in (1, 2):
        with pytest.raises(ValueError, match="takes the value of limit into Python"):
            traced(lambda s, b, h, q, k: s * int(limit))
        assert len(traces) == count and not memo._kept


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


def test_tensors_that_are_refused_later(bind: Any) -> None:
    """Those that require grad: without no_grad, if they are read."""
    table, reads = torch.randn(50), True

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q] * (2 if table.requires_grad else 1) if reads else s * 2

    before = bind(score).numbers
    table.requires_grad_()
    with torch.no_grad():
        assert bind(score).numbers != before and bind(score).addresses == [table.data_ptr()]
    with pytest.raises(ValueError, match="score_mod: an array that it reads"):
        bind(score)
    reads = False
    assert bind(score).addresses == []
    table.untyped_storage().resize_(0)
    assert bind(score).addresses == []


def test_calls_that_are_bound_at_once() -> None:
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
