"""Functions that read what an earlier call of the same code read: bound without a look at their trace, for as
long as nothing that they read has changed.
"""

from __future__ import annotations

import builtins
import functools
import gc
import math
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from emulator.device import HostTensors  # noqa: E402
from flex_on_cpu import Proxy  # noqa: E402

import rawmla  # noqa: E402
from rawmla.call import arrays  # noqa: E402
from rawmla.call.arrays import NeedsGradient  # noqa: E402
from rawmla.call.memo import clear_all  # noqa: E402
from rawmla.flex import functions, memo, recall  # noqa: E402
from rawmla.flex.functions import Bound, as_bound  # noqa: E402


class World:
    """`as_bound` on CPU tensors that say they are on device 0.

    Attributes
    ----------
    looked : list
        The functions that were compared with kept traces, and traced where there was none.
    """

    def __init__(self) -> None:
        self.framework = HostTensors(torch)
        self.looked: list[Any] = []

    def bind(self, function: Any, kind: Any = "score_mod", device: int = 0) -> Bound:
        made = as_bound(function, kind, device, self.framework)
        assert made is not None
        return made

    def is_recalled(self, function: Any) -> bool:
        """Whether the next call of a function is, which then gives what a new look gives."""
        count = len(self.looked)
        made = self.bind(function)
        recalled = len(self.looked) == count
        clear_all()
        assert made == self.bind(function)
        return recalled


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for kind in (torch.Tensor, torch.nn.Parameter):
        monkeypatch.setitem(arrays.READERS, kind, made.framework.read)
    original = memo.read
    monkeypatch.setattr(memo, "read", lambda *given: made.looked.append(given[0]) or original(*given))
    clear_all()
    return made


def biased(table: Any, factor: Any = 1.0) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + table[q] * factor


FACTOR = 2.0


def with_global(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * FACTOR


def with_builtin(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return abs(s)


def test_the_same_objects(world: World) -> None:
    table = torch.randn(50)
    first = world.bind(biased(table))
    assert first.addresses == [table.data_ptr()]
    assert world.bind(biased(table)) is first  # another function with the same code
    assert len(world.looked) == 1
    assert world.is_recalled(biased(table))


@pytest.mark.parametrize("function", (with_global, with_builtin, lambda s, b, h, q, k: torch.tanh(s)))
def test_globals(world: World, function: Callable[..., Any]) -> None:
    world.bind(function)
    assert world.is_recalled(function)


def test_functions_of_functions(world: World) -> None:
    """They are looked at again: what they read may change."""
    limits = torch.arange(2)

    def under(bound: Any) -> Callable[..., Any]:
        return lambda b, h, q, k: k < limits[bound]

    far = under(0)
    mask = rawmla.and_masks(far, under(1))
    for function in (
        mask,
        lambda b, h, q, k: far(b, h, q, k),
        lambda s, b, h, q, k: with_global(s, b, h, q, k),
    ):
        assert recall.objects_of(function) is None


def test_a_function_that_calls_itself(world: World) -> None:
    def power(s: Any, b: Any = None, h: Any = None, q: Any = None, k: Any = None, n: int = 3) -> Any:
        return s if n == 0 else power(s, n=n - 1) * s

    world.bind(power)
    assert not recall._known


def test_kinds_and_devices_apart(world: World) -> None:
    def one(*given: Any) -> Any:
        return given[-1] > 3

    score, mask = world.bind(one, "score_mod"), world.bind(one, "mask_mod")
    assert score is not mask and world.bind(one, "mask_mod") is mask
    assert len(world.looked) == 2
    objects = recall.objects_of(one)
    assert objects is not None
    assert recall.recall_bound(objects, "mask_mod", 0, world.framework) is mask
    assert recall.recall_bound(objects, "mask_mod", 1, world.framework) is None


@pytest.mark.parametrize(
    "other",
    (
        lambda table: biased(torch.randn(50)),
        lambda table: biased(table, 3.0),
        lambda table: biased(table, 1),
        lambda table: biased(table, -1.0),
        lambda table: biased(table[:]),
    ),
)
def test_other_objects(world: World, other: Callable[..., Any]) -> None:
    table = torch.randn(50)
    world.bind(biased(table))
    assert not world.is_recalled(other(table))


@pytest.mark.parametrize(
    "change",
    (
        lambda x: x.set_(torch.randn(50)),
        lambda x: x.set_(torch.randn(100)[::2]),
        lambda x: x.resize_(40),
        lambda x: setattr(x, "data", torch.randn(50).half()),
        lambda x: setattr(x, "data", x.data.view(torch.int32)),
        lambda x: setattr(x, "scale", 2.0),
    ),
)
def test_arrays_that_change_in_place(world: World, change: Callable[..., Any]) -> None:
    table = torch.randn(50)
    world.bind(biased(table))
    change(table)
    assert not world.is_recalled(biased(table))


def test_an_array_that_gets_the_negative_bit(world: World) -> None:
    """It may also be another one, with the id of one that is gone, of the same memory."""
    table = torch.randn(50)
    world.bind(biased(table))
    table.data = torch._neg_view(table.data)
    with pytest.raises(ValueError, match=r"^score_mod: an array that it reads: .* negative bit"):
        world.bind(biased(table))


def test_values_that_change_in_place(world: World) -> None:
    """They are read by the kernel."""
    table = torch.randn(50)
    world.bind(biased(table))
    table += 1
    assert world.is_recalled(biased(table))


def test_arrays_that_need_a_gradient(world: World) -> None:
    table = torch.randn(50)
    world.bind(biased(table))
    table.requires_grad_()
    with pytest.raises(NeedsGradient, match="score_mod: an array that it reads"):
        world.bind(biased(table))
    with torch.no_grad():
        assert world.bind(biased(table)).addresses == [table.data_ptr()]


def test_whether_an_array_needs_a_gradient_without_grad(world: World) -> None:
    table = torch.randn(50)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q] * (2 if table.requires_grad else 1)

    world.bind(score)
    table.requires_grad_()
    with torch.no_grad():
        assert not world.is_recalled(score)
        assert world.is_recalled(score)
        world.bind(score)
    with pytest.raises(NeedsGradient, match="score_mod: an array that it reads"):
        world.bind(score)


def test_an_array_with_attributes(world: World) -> None:
    table = torch.randn(50)
    table.scale = 2.0

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q] * getattr(table, "scale", 1.0)

    world.bind(score)
    assert not recall._known
    table.scale = 3.0
    assert not world.is_recalled(score)
    del table.scale
    assert not world.is_recalled(score)


def test_an_array_that_is_no_longer_read(world: World) -> None:
    """It is not looked at."""
    table, reads = torch.randn(50), True

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q] if reads else s * 2

    world.bind(score)
    reads = False
    table.requires_grad_()
    assert world.bind(score).addresses == []
    table.untyped_storage().resize_(0)
    assert world.bind(score).addresses == []


def test_variables_that_change(world: World) -> None:
    factor = 2.0

    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * factor

    world.bind(scaled)
    factor = 3.0
    assert not world.is_recalled(scaled)
    assert world.bind(scaled).numbers == [3.0]


def test_a_global_that_changes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.bind(with_global)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert not world.is_recalled(with_global)


def test_a_builtin_that_is_hidden(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.bind(with_builtin)
    monkeypatch.setitem(globals(), "abs", torch.tanh)
    assert not world.is_recalled(with_builtin)


@pytest.mark.parametrize(
    ("holder", "name", "function"),
    (
        (math, "pi", lambda s, b, h, q, k: s * math.pi),
        (builtins, "a_factor", lambda s, b, h, q, k: s * a_factor),  # type: ignore[name-defined]  # noqa: F821
    ),
)
def test_a_value_of_a_module_that_changes(
    world: World, holder: Any, name: str, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, name, 3.0, raising=False)
    world.bind(function)
    assert world.is_recalled(function)
    monkeypatch.setattr(holder, name, 5.0)
    assert not world.is_recalled(function)
    assert world.bind(function).numbers == [5.0]


def test_defaults(world: World) -> None:
    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any, factor: Any = 2.0) -> Any:
        return s * factor

    world.bind(scaled)
    (default,) = scaled.__defaults__ or ()
    scaled.__defaults__ = tuple([default])  # another tuple
    assert world.is_recalled(scaled)
    scaled.__defaults__ = (3.0,)
    assert not world.is_recalled(scaled)
    scaled.__defaults__ = (3.0, 3.0)
    assert not world.is_recalled(scaled)


class Scale:
    """An object of a user's."""

    value = 2.0


PROXY: Any = Proxy()
TABLE = torch.randn(50)
NUMBER = torch.tensor(2.0)
LIST = [2.0]
DICT = {"a": 2.0}
TUPLE = ([2.0],)
KEYWORD: Any = types.SimpleNamespace(value=2.0)


def _keyword(s: Any, b: Any, h: Any, q: Any, k: Any, *, factor: float = 2.0) -> Any:
    return s * factor


def _with_attribute(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * _with_attribute.factor  # type: ignore[attr-defined]


def _zero() -> int:
    return 0


_with_attribute.factor = 2.0  # type: ignore[attr-defined]
_zero.factor = 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "function",
    (
        _keyword,
        _with_attribute,
        lambda s, b, h, q, k: s * _zero.factor,  # type: ignore[attr-defined]
        lambda s, b, h, q, k: s + TABLE[q] * TABLE.stride(0),
        lambda s, b, h, q, k: s * KEYWORD.value,
        lambda s, b, h, q, k: s * Scale.value,
        lambda s, b, h, q, k: PROXY.__rmul__(s),
        functools.partial(lambda f, s, b, h, q, k: s * f, 2.0),
        lambda s, b, h, q, k: s * len(globals()),
        lambda s, b, h, q, k: s * (time.time() > 0),
        lambda s, b, h, q, k: s + TABLE[q] * TABLE.dim_order()[0],
        lambda s, b, h, q, k: s * LIST[0],
        lambda s, b, h, q, k: s * DICT["a"],
        lambda s, b, h, q, k: s * TUPLE[0][0],
        lambda s, b, h, q, k: s * NUMBER,
        lambda s, b, h, q, k: s * len(TABLE),
        lambda s, b, h, q, k: s + TABLE[q] * NUMBER,
    ),
)
def test_what_may_change_unseen_is_looked_at_again(world: World, function: Any) -> None:
    world.bind(function)
    assert not recall._known
    assert not world.is_recalled(function)


def test_an_array_that_the_trace_makes(world: World) -> None:
    """It belongs to the trace."""
    world.bind(lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0, 3.0])[q])
    assert not recall._known


def test_nothing_is_kept_of_a_refused_function(world: World) -> None:
    """Whoever mends what it reads gets a new trace."""
    limit = torch.tensor(3)
    function = lambda s, b, h, q, k: s * int(limit)  # noqa: E731
    kept = len(memo._kept)
    for _ in range(2):
        with pytest.raises(ValueError, match="takes the value of limit into Python"):
            world.bind(function)
    assert len(memo._kept) == kept and not recall._known
    limit = 3
    assert list(world.bind(function).numbers) == [3]


def test_a_call_with_arrays_of_cupy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of both frameworks are compared in every call."""
    monkeypatch.setattr(world.framework, "name", "cupy")
    world.bind(biased(torch.randn(50)))
    assert not recall._known


def test_another_framework(world: World) -> None:
    bound = world.bind(with_global)
    assert as_bound(with_global, "score_mod", 0, HostTensors(torch)) is not bound
    assert len(world.looked) == 2


def test_keeps_no_array(world: World) -> None:
    table = torch.randn(50)
    function = biased(table)
    world.bind(function)
    seen = weakref.ref(table)
    del table, function
    world.looked.clear()
    gc.collect()
    assert recall._known and seen() is None


@pytest.mark.parametrize(
    "other",
    (
        *(3.0, [2.0], torch.randn(50), torch.nn.Parameter(torch.randn(50))),
        torch.eye(50).to_sparse(),
    ),
)
def test_an_object_in_the_place_of_an_array_that_is_gone(
    world: World, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have its id."""
    table = torch.randn(50)
    world.bind(biased(table))
    monkeypatch.setattr(recall, "id", lambda x: id(table if x is other else x), raising=False)
    objects = [other if x is table else x for x in recall.objects_of(biased(table)) or []]
    assert recall.recall_bound(objects, "score_mod", 0, world.framework) is None


def test_functions_of_one_code_beside_each_other(world: World) -> None:
    """Layers with tables of their own, say."""
    tables = [torch.randn(50) for _ in range(3)]
    first = [world.bind(biased(table)) for table in tables]
    assert [world.bind(biased(table)) for table in tables] == first
    assert len(world.looked) == 3
    assert [x.addresses for x in first] == [[table.data_ptr()] for table in tables]


def test_floats_count_by_value(world: World) -> None:
    table = torch.randn(50)
    first = world.bind(biased(table, float("0.25")))
    assert world.bind(biased(table, float("0.25"))) is first
    numbers = (0.0, -0.0, float("nan"), float("inf"), 1.0, 1)
    for x in numbers:
        assert not world.is_recalled(biased(table, x))
    for x in numbers:
        world.bind(biased(table, x))
        assert world.is_recalled(biased(table, x))


def test_what_a_function_changes_itself(world: World) -> None:
    step = 0

    def stepping(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal step
        step += 1
        return s * step

    assert [world.bind(stepping).numbers for _ in range(3)] == [[1.0], [2.0], [3.0]]


def test_what_changes_while_it_is_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, say."""
    table, factor = torch.randn(50), 2.0

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[q] * factor

    plain = functions.bound

    def change_factor() -> None:
        nonlocal factor
        factor = 3.0

    for change in (
        change_factor,
        lambda: table.set_(torch.randn(50)),
        lambda: table.resize_(40),
        lambda: setattr(table, "data", table.data.view(torch.int32)),
        lambda: setattr(table, "scale", 2.0),
    ):
        with monkeypatch.context() as patch:

            def late(*given: Any) -> Any:
                made = plain(*given)
                change()  # noqa: B023
                return made

            patch.setattr(functions, "bound", late)
            world.bind(score)
        assert not recall._known
        assert not world.is_recalled(score)
        clear_all()


def test_can_be_forgotten(world: World) -> None:
    world.bind(with_global)
    clear_all()
    world.bind(with_global)
    assert len(world.looked) == 2


def test_gradients_go_another_way(world: World) -> None:
    """What is bound for a backward has places for gradients, and is not recalled by a forward."""
    table = torch.randn(50)
    reading = functions.as_reading(biased(table), "score_mod", 0, backward=True)
    backward = functions.bound(reading, "score_mod", 0, world.framework)
    assert backward is not None and not recall._known
    plain = world.bind(biased(table))
    assert len(world.looked) == 2
    assert world.bind(biased(table)) is plain and len(plain.packed) < len(backward.packed)
