"""Functions that are traced ahead of calls: their parts, the values that they keep, and calls with them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from calls.constants import installed  # noqa: E402
from calls.fakes import trace_on_device_0  # noqa: E402
from emulator.device import HostTensors  # noqa: E402
from flex_page import TRACED  # noqa: E402

import rawmla  # noqa: E402
from rawmla import jit  # noqa: E402
from rawmla.call import arrays  # noqa: E402
from rawmla.flex import memo  # noqa: E402
from rawmla.flex.block_mask import read_mask  # noqa: E402
from rawmla.flex.functions import Bound, as_reading, bound  # noqa: E402
from rawmla.flex.trace import trace  # noqa: E402


@pytest.fixture(autouse=True)
def on_device_0(monkeypatch: pytest.MonkeyPatch) -> HostTensors:
    """CPU tensors that say they are on device 0."""
    framework = HostTensors(torch)
    for kind in (torch.Tensor, torch.nn.Parameter):
        monkeypatch.setitem(arrays.READERS, kind, framework.read)
    return framework


def traced(function: Any, kind: Any = "score_mod") -> rawmla.TracedMod:
    return rawmla.trace_mod(function, kind, 0)


def bind(function: Any, framework: HostTensors, kind: Any = "score_mod", backward: bool = False) -> Bound:
    made = bound(as_reading(function, kind, 0, backward), kind, 0, framework)
    assert made is not None
    return made


def biased(table: Any, factor: Any = 2.0) -> Callable[..., Any]:
    return lambda s, b, h, q, k: s + table[q] * factor


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def test_parts_of_a_score_function() -> None:
    table, gain = torch.randn(50, requires_grad=True), torch.tensor(3.0)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * gain + table[q] * 2.0

    mod = traced(score)
    plain, with_gradients = trace(score, "score_mod"), trace(score, "score_mod", "cpu", True)
    assert mod.kind == "score_mod" and mod.code == plain.text
    assert list(mod.captures) == ["table", "mod.n0", "mod.n1"]
    assert mod.captures["table"] is table
    assert mod.captures["mod.n0"] is gain and mod.captures["mod.n1"] == 2.0
    assert [x.source for x in plain.numbers] == [gain, 2.0]
    assert with_gradients.backward is not None and mod.grad is not None
    assert with_gradients.backward.text in mod.grad and with_gradients.backward.captured in mod.grad


@pytest.mark.parametrize("backward", (False, True))
def test_calls_bind_the_same_function(
    on_device_0: HostTensors, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not look at it again."""
    function = biased(torch.randn(50, requires_grad=True))
    given: list[tuple[Any, Any]] = [(function, "score_mod"), (causal, "mask_mod")]
    with torch.no_grad():
        plain = [bind(one, on_device_0, kind, backward) for one, kind in given]
        mods = [(traced(one, kind), kind) for one, kind in given]
        monkeypatch.setattr(memo, "read", lambda *given: pytest.fail("the function is read again"))
        assert [bind(mod, on_device_0, kind, backward) for mod, kind in mods] == plain


def test_values_that_are_kept(on_device_0: HostTensors) -> None:
    """Another number or tensor of a variable is not seen; what changes in place is."""
    table, factor, gain = torch.randn(50), 2.0, torch.tensor(3.0)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * gain[()] + table[q] * factor

    mod, old = traced(score), table
    before = bind(mod, on_device_0)
    table, factor = torch.randn(50), 5.0
    assert bind(mod, on_device_0) == before and before.addresses == [old.data_ptr()]
    assert sorted(before.numbers) == [2.0, 3.0]
    gain.fill_(4.0)
    assert sorted(bind(mod, on_device_0).numbers) == [2.0, 4.0]
    old.set_(torch.randn(60)[10:])
    assert bind(mod, on_device_0).addresses == [old.data_ptr()]
    assert bind(traced(score), on_device_0).addresses == [table.data_ptr()]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    (
        (lambda x: x.half(), TypeError, "expected dtype float32, as when .* got float16"),
        (lambda x: x[None], ValueError, r"expected 1 dimensions, as when .* got shape \[1, 50\]"),
        (lambda x: x[:0], ValueError, "expected dimensions of 1 to"),
        (torch._neg_view, ValueError, "negative bit"),
    ),
)
def test_tensors_that_no_longer_fit(
    on_device_0: HostTensors, change: Callable[..., Any], error: type[Exception], text: str
) -> None:
    table = torch.randn(50)
    mod = traced(biased(table))
    bind(mod, on_device_0)
    table.data = change(table.data)
    with pytest.raises(error, match=f"^score_mod: an array that it reads: .*{text}"):
        bind(mod, on_device_0)


def test_a_tensor_that_requires_grad_later(on_device_0: HostTensors) -> None:
    table = torch.randn(50)
    mod = traced(biased(table))
    table.requires_grad_()
    for _ in range(2):
        with pytest.raises(ValueError, match="^score_mod: expected table to require no grad, as when"):
            bind(mod, on_device_0, backward=True)
    with torch.no_grad():
        bind(mod, on_device_0)
    bind(traced(biased(table)), on_device_0, backward=True)


def test_a_function_without_gradients(on_device_0: HostTensors) -> None:
    """It can be traced; a call that needs them says why there are none."""
    number = torch.tensor(2.0, requires_grad=True)
    function = lambda s, b, h, q, k: s * number  # noqa: E731
    mod = traced(function)
    assert mod.grad is None
    with torch.no_grad():
        bind(mod, on_device_0)
    with pytest.raises(ValueError) as plain:
        trace(function, "score_mod", "cpu", True)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(str(plain.value))):
            bind(mod, on_device_0, backward=True)


@pytest.mark.parametrize(
    ("function", "kind", "error", "text"),
    (
        (causal, "score", ValueError, "^kind: expected 'score_mod' or 'mask_mod', got 'score'"),
        ("score", "score_mod", TypeError, "^function: expected a Python function, got str"),
        (rawmla.CudaMod("score"), "score_mod", TypeError, "^function: expected a Python function, got"),
    ),
)
def test_refused(function: Any, kind: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rawmla.trace_mod(function, kind, 0)


def test_a_traced_function_of_the_other_kind() -> None:
    mask = traced(causal, "mask_mod")
    with pytest.raises(TypeError, match="^score_mod: expected a function of this kind, .* of a mask_mod"):
        as_reading(mask, "score_mod", 0)
    with pytest.raises(TypeError, match="^function: expected a Python function, got"):
        traced(mask, "mask_mod")


def test_gradients_of_a_call() -> None:
    """They are those of the function itself: of the same text, which reads the same."""
    heads, tokens, size = 2, 140, 150
    table = torch.randn(heads, tokens + size, requires_grad=True)
    q, k, v = [torch.randn(1, heads, n, 16).half().requires_grad_() for n in (tokens, size, size)]
    score = lambda s, b, h, q, k: s + table[h, q - k + size]  # noqa: E731
    found = []
    with installed() as launches:
        for function in (score, traced(score)):
            out = rawmla.flex_attention(q, k, v, function)
            found.append((out.detach(), *torch.autograd.grad(out.float().sum(), (q, k, v, table))))
    for one, other in zip(*found, strict=True):
        assert bool(one.any()) and torch.equal(one, other)
    first, second = launches.backward
    assert first.call == second.call and first.score_mod[:32] == second.score_mod[:32]


def test_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/flex.md."""
    monkeypatch.setattr(jit, "current_device", lambda: 0)
    given: list[Any] = []
    monkeypatch.setattr(rawmla, "flex_attention", lambda *arguments: given.append(arguments[3]))
    names = {"rawmla": rawmla, **dict.fromkeys("qkv")}
    exec(compile(TRACED, "docs/flex.md", "exec"), names)
    (mod,) = given
    assert mod is names["traced"] and mod.grad is not None
    assert list(mod.captures.values()) == [0.5] and "mod.n0" in mod.code


# ---- the function of a BlockMask


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are compared with kept traces."""
    made: list[Any] = []
    original = memo.read
    monkeypatch.setattr(memo, "read", lambda *given: made.append(given[0]) or original(*given))
    return made


def mask_of(mask_mod: Any) -> rawmla.BlockMask:
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    return rawmla.BlockMask((256, 256), counts, counts[..., None], mask_mod=mask_mod)


def test_a_mask_reads_its_function_once(looked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trace_on_device_0(monkeypatch)
    mask = mask_of(causal)
    first = read_mask(mask, 0)
    assert first is not None and first == as_reading(causal, "mask_mod", 0)
    looked.clear()
    assert read_mask(mask, 0) is first and read_mask(mask, 0, backward=True) is first and looked == []
    assert read_mask(mask, 1) is not first and looked == [causal]
    mask.mask_mod = causal
    read_mask(mask, 1)
    assert looked == [causal, causal]


def test_masks_of_torch(looked: list[Any]) -> None:
    """They are looked at at each call."""
    theirs = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = theirs.create_block_mask(causal, 1, 1, 256, 256, device="cpu")
    for _ in range(2):
        read_mask(mask, 0)
    assert looked == [causal, causal]


def test_calls_with_one_mask(looked: list[Any]) -> None:
    """Forward and backward take what the first call read."""
    limits = torch.arange(256) % 200 + 1
    first = limits.data_ptr()
    mask = mask_of(lambda b, h, q, k: k < limits[q])
    q, k, v = [torch.randn(1, 2, 256, 16).half().requires_grad_() for _ in range(3)]
    with installed() as launches:
        for _ in range(2):
            out = rawmla.flex_attention(q, k, v, block_mask=mask)
            torch.autograd.grad(out.float().sum(), (q, k, v))
            limits = torch.ones(256, dtype=torch.int64)  # not seen
    assert len(looked) == 1
    masks = [launch.mask_mod for launch in (*launches.forward, *launches.backward)]
    assert len(masks) == 4 and set(masks) == {masks[0]} and masks[0][:8] == struct.pack("<Q", first)
