"""Score and mask functions of Python in calls of flex attention."""

from __future__ import annotations

import math
import struct
import sys
from typing import Any

import pytest

import rawmla
from calls.fakes import World
from calls.test_dense import prepared
from calls.test_flex import HQ, L, S, call, headers, mask_of, only, optional, plain
from rawmla.call import arrays, frameworks
from rawmla.flex import functions

torch: Any = pytest.importorskip("torch")


@pytest.fixture
def on_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host pass for some of the device of query."""

    def read(x: Any, name: str) -> frameworks.Fields:
        return x.data_ptr(), x.shape, x.stride(), str(x.dtype)[6:], 0, world.framework, x

    monkeypatch.setitem(arrays.READERS, torch.Tensor, read)


def test_numbers(world: World) -> None:
    """Another number is another parameter; one on the host is read, and a change in place is seen."""
    slope, width = torch.tensor(3.5), torch.tensor(3)
    for number in (0.5, 2.5, slope, slope.fill_(4.5)):
        call(plain(), score_mod=lambda score, b, h, q, k, s=number: score * s)
    assert [struct.unpack("<f4x", launch.score_mod)[0] for launch in world.flex] == [0.5, 2.5, 4.5, 4.5]
    assert len(headers(world)) == 1
    mask = mask_of(mask_mod=lambda b, h, q, k: q - k < width)
    for number in (3, 4):
        width.fill_(number)
        call(plain(), block_mask=mask)
    assert [struct.unpack("<q", launch.mask_mod)[0] for launch in world.flex[-2:]] == [3, 4]
    call(plain(), score_mod=lambda score, b, h, q, k: torch.where(q >= k, score, -1e300))
    assert struct.unpack("<f4x", world.flex[-1].score_mod) == (-math.inf,)


def test_captured_tensors(world: World, on_device: None) -> None:
    bias, ids = torch.randn(HQ, 2 * L)[:, ::2], torch.zeros(L + S, dtype=torch.int64)
    mask = mask_of(mask_mod=lambda b, h, q, k: ids[q] == ids[k])
    call(plain(), score_mod=lambda s, b, h, q, k: s + bias[h, q], block_mask=mask)
    launch = only(world)
    assert launch.score_mod == struct.pack("<Q2q2i", bias.data_ptr(), 2 * L, 2, HQ, L)
    assert launch.mask_mod == struct.pack("<Qqi4x", ids.data_ptr(), 1, L + S)


def test_other_captured_tensors(world: World, on_device: None) -> None:
    """Other strides are other parameters. Rows that are no longer contiguous need another kernel."""
    table = torch.randn(2 * HQ, 2 * L)
    lying = (table[:HQ, :L], table[HQ:, :L], table[::2, :L], table[:HQ, ::2], table[:HQ, :L])
    for bias in lying:
        call(plain(), score_mod=lambda s, b, h, q, k: s + bias[h, q])  # noqa: B023
    packed = [struct.unpack("<Q2q2i", launch.score_mod) for launch in world.flex]
    assert packed == [(x.data_ptr(), *x.stride(), HQ, L) for x in lying]
    layouts = ["kSmallRows" in launch.call.mods.header[1] for launch in world.flex]
    assert layouts == [True, True, True, False, True]
    assert prepared(world.flex) == [0, 0, 0, 3, 0]


def test_captured_tensors_on_the_host(world: World) -> None:
    bias = torch.zeros(HQ)
    for name, more in (
        ("score_mod", {"score_mod": lambda s, b, h, q, k: s + bias[h]}),
        ("mask_mod", {"block_mask": mask_of(mask_mod=lambda b, h, q, k: bias[h] > 0)}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: an array that it reads: expected a tensor in CUDA"):
            call(plain(), **more)
    assert world.untouched


def test_captured_tensors_that_require_grad(world: World) -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True

    for made in (torch.zeros(HQ, requires_grad=True), torch.zeros((), requires_grad=True)):
        mod = rawmla.CudaMod("score + bias(h)", {"bias": made.as_subclass(OnCuda)})
        text = "^query: expected a torch tensor, as one of the arrays requires grad, got FakeArray"
        with pytest.raises(TypeError, match=text):
            call(plain(), score_mod=mod)
    assert world.untouched


@pytest.mark.parametrize(
    ("name", "mod", "kind", "text"),
    (
        ("score_mod", lambda s, b, h, q: s, TypeError, "expected a function of (score, b, h, q_idx, kv_idx)"),
        ("mask_mod", lambda s, b, h, q, k: s, TypeError, "expected a function of (b, h, q_idx, kv_idx)"),
        ("mask_mod", lambda b, h, q, k: (q + k).bernoulli() > 0, NotImplementedError, "aten::bernoulli"),
    ),
)
def test_functions_that_cannot_be_traced(
    world: World, name: str, mod: Any, kind: type[Exception], text: str
) -> None:
    arguments = {"score_mod": mod} if name == "score_mod" else {"block_mask": mask_of(mask_mod=mod)}
    with pytest.raises(kind) as caught:
        call(plain(), **arguments)
    message = str(caught.value)
    assert type(caught.value) is kind and message.startswith(f"{name} ") and "<lambda>: " in message
    assert text in message and world.untouched


def test_python_functions_need_torch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(functions, "_memo_for", functions._memo_for.__wrapped__)  # not the one found before
    for arguments in (
        {"score_mod": lambda s, b, h, q, k: s},
        {"block_mask": mask_of(mask_mod=lambda b, h, q, k: q >= k)},
    ):
        with pytest.raises(rawmla.MissingDependencyError, match=r"^(score|mask)_mod: .* rawmla\.CudaMod"):
            call(plain(), **arguments)
    assert world.untouched
    call(optional())
