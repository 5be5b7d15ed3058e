"""`flash_attn.bert_padding` and `flash_attn.layers.rotary` against plain torch, values and gradients."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rawmla.compat.flash_attn import bert_padding as padding  # noqa: E402
from rawmla.compat.flash_attn import rotary  # noqa: E402

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]])


def test_padding() -> None:
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    rows, indices, starts, longest, used = padding.unpad_input(x, MASK.bool())
    assert torch.equal(rows, x[MASK.bool()]) and torch.equal(indices, MASK.flatten().nonzero().flatten())
    assert starts.tolist() == [0, 3, 5, 7] and starts.dtype is used.dtype is torch.int32
    assert (longest, type(longest), used.tolist()) == (3, int, [3, 2, 2])
    weights = torch.randn_like(rows)
    back = padding.pad_input(rows * weights, indices, 3, 4)
    assert torch.equal(back[MASK.bool()], rows * weights) and not back[~MASK.bool()].any()
    assert torch.equal(padding.pad_input(rows * weights, indices.int(), 3, 4), back)
    back.sum().backward()
    expected = torch.zeros(3, 4, 2, 5)
    expected[MASK.bool()] = weights
    assert torch.equal(x.grad, expected)


def test_padding_with_unused_places_and_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4, 5)
    unused = torch.zeros_like(MASK)
    unused[1, 3] = 1
    rows, indices, starts, longest, used = padding.unpad_input(x, MASK, unused)
    assert rows.shape == (8, 5) and starts.tolist() == [0, 3, 6, 8] and used.tolist() == [3, 2, 2]
    lengths = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0], [1, 1, 1, 0]])
    rows, indices, starts, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :3], x[1], x[2, :3]))) and longest == 4
    assert starts.tolist() == [0, 2, 3, 7, 8, 9, 10] and starts.dtype is torch.int32
    y = torch.randn(6, 2, requires_grad=True)
    some, whole = padding.index_first_axis_residual(y, torch.tensor([4, 1]))
    (some.sum() + whole.sum()).backward()
    assert y.grad[:, 0].tolist() == [1, 2, 1, 1, 2, 1]
    with pytest.raises(AttributeError, match="bogus"):
        _ = padding.bogus
    monkeypatch.setitem(sys.modules, "einops", SimpleNamespace(rearrange=len))
    assert padding.rearrange is len


def tables(positions: int, columns: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    angles = torch.arange(positions).unsqueeze(1) * 100.0 ** (-torch.arange(columns) / columns)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Pairs of columns as complex numbers, in float64. cos and sin are of x's tokens."""
    half = cos.shape[-1]
    head = x[..., : 2 * half].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
    turns = torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    return torch.cat(((pairs if interleaved else pairs.mT).flatten(-2).to(x.dtype), x[..., 2 * half :]), -1)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("offsets", (0, 3, torch.tensor([5, 0], dtype=torch.int32)), ids=str)
@pytest.mark.parametrize("inplace", (False, True))
def test_rotary(interleaved: bool, offsets: Any, inplace: bool) -> None:
    cos, sin = tables(16, 4)
    x = torch.randn(2, 6, 3, 12, requires_grad=True)
    positions = torch.arange(6) + (offsets.unsqueeze(1) if torch.is_tensor(offsets) else offsets)
    before, y = x.detach().clone(), x.detach().clone().requires_grad_()
    expected = rotated(y, cos[positions], sin[positions], interleaved)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets)
    torch.testing.assert_close(out, expected)
    assert torch.equal(x.detach(), out.detach() if inplace else before)
    (out * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    if not torch.is_tensor(offsets):
        given = cos[positions], sin[positions]
        torch.testing.assert_close(rotary.apply_rotary_emb_torch(before, *given, interleaved), expected)


def test_rotary_of_requests_of_different_lengths() -> None:
    cos, sin = tables(16, 6, torch.bfloat16)
    starts, offsets = torch.tensor([0, 2, 2, 7], dtype=torch.int32), torch.tensor([4, 1, 9])
    x = torch.randn(7, 2, 12).bfloat16()
    positions = torch.tensor([4, 5, 9, 10, 11, 12, 13])
    out = rotary.apply_rotary(x, cos, sin, offsets, starts, 5)
    torch.testing.assert_close(out, rotated(x, cos[positions], sin[positions], False))
    back = rotary.apply_rotary(out, cos, sin, offsets, starts, 5, conjugate=True)
    torch.testing.assert_close(back, x, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("scale_base", (None, 64.0))
def test_module(scale_base: float | None) -> None:
    module = rotary.RotaryEmbedding(8, 100.0, scale_base=scale_base)
    qkv = torch.randn(2, 5, 3, 4, 12, requires_grad=True)
    q, k, v = qkv.detach().clone().unbind(2)
    out = module(qkv, seqlen_offset=2)
    plain, scale = tables(7, 4), torch.ones(())
    if scale_base is not None:
        base = (torch.arange(0, 8, 2) + 3.2) / 11.2
        scale = base ** ((torch.arange(7.0).unsqueeze(1) - 3) / scale_base)
    cos, sin, cos_k, sin_k = [(x * y)[2:] for y in (scale, 1 / scale) for x in plain]
    expected = torch.stack((rotated(q, cos, sin, False), rotated(k, cos_k, sin_k, False), v), 2)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert torch.equal(qkv.grad[:, :, 2], torch.ones_like(v)) and (qkv.grad[:, :, :2] != 1).any()
    out = module(torch.cat((q, k[:, :, :2], v[:, :, :2]), 2), seqlen_offset=2, num_heads_q=4)
    torch.testing.assert_close(out, torch.cat((expected[:, :, 0], expected[:, :, 1, :2], v[:, :, :2]), 2))
    q_out, kv_out = module(q.clone(), torch.stack((k, v), 2), torch.tensor([2, 2]), max_seqlen=7)
    torch.testing.assert_close(torch.cat((q_out.unsqueeze(2), kv_out), 2), expected)


def test_module_for_subclasses() -> None:
    """By the names that ModernBERT's subclass in transformers 4 uses."""
    module = rotary.RotaryEmbedding(8, 100.0)
    assert module._cos_cached is module._sin_cached is None
    module._update_cos_sin_cache(7, device="cpu", dtype=torch.float64)
    for table, expected in zip((module._cos_cached, module._sin_cached), tables(7, 4), strict=True):
        torch.testing.assert_close(table, expected.double())


def test_rotary_refusals() -> None:
    x, (cos, sin), one = torch.randn(1, 5, 1, 8), tables(4, 4), torch.tensor([1])
    for function, arguments, text in (
        (rotary.apply_rotary_emb, (x, cos, sin), "cos: expected at least 5 rows"),
        (rotary.apply_rotary_emb, (x[..., :6], cos, sin), "cos: expected shape"),
        (rotary.apply_rotary_emb, (x[0], cos, sin), "x: expected 4 dimensions"),
        (rotary.apply_rotary, (x, cos, sin, one[:0]), "seqlen_offsets: expected shape"),
        (rotary.apply_rotary_emb_qkv_, (x, cos, sin), "num_heads_q: expected an int"),
        (rotary.RotaryEmbedding(8), (x, None, one), "max_seqlen: expected an int"),
    ):
        with pytest.raises(ValueError, match=text):
            function(*arguments)
