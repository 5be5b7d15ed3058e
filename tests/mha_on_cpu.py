"""Dense attention of torch CPU tensors: the public functions as they are, up to launches, which the reference
computes in the memory that kernels would have been given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rawmla import reference
from rawmla.call import arrays, frameworks, memo
from rawmla.jit import NO_LAUNCH
from rawmla.kernels import mha_backward, mha_forward
from rawmla.kernels.mha_forward import NO_BOUND

torch = pytest.importorskip("torch")


class OnCuda(torch.Tensor):  # type: ignore[misc]
    """A tensor that claims to be on a CUDA device."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


def claim_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors pass for CUDA tensors of device 0; new ones are full of NaN."""
    framework = frameworks.TorchFramework(torch)

    def read(x: Any, name: str) -> frameworks.Fields:
        return (*framework.read(x.as_subclass(OnCuda), name)[:6], x)

    def empty_strided(shape: Any, strides: Any, dtype: Any) -> Any:
        made = torch.empty_strided(shape, strides, dtype=dtype)
        if dtype.is_floating_point:
            made.fill_(float("nan"))
        return made

    monkeypatch.setitem(arrays.READERS, torch.Tensor, read)
    monkeypatch.setitem(arrays.READERS, torch.nn.Parameter, read)
    monkeypatch.setattr(framework, "current_stream", lambda device: 0)
    monkeypatch.setattr(framework, "_empty_strided", empty_strided)
    monkeypatch.setattr(framework, "_current_device", lambda: 0)
    memo.clear_all()


def install(monkeypatch: pytest.MonkeyPatch, skipped: list[int] | None = None) -> list[Any]:
    """Let CPU tensors pass for CUDA tensors; returns a list that is told of every launch, and so are the
    streams on which nothing is launched in ``skipped``.
    """
    claim_cuda(monkeypatch)
    launched: list[Any] = []

    def prepared(run: Callable[..., None]) -> Callable[..., Any]:
        class Prepared:
            scratch_bytes = 16

            def __init__(self, call: Any, capturing: Any) -> None:
                self.call = call

            def launch(self, stream: int, addresses: Any, scratch: int) -> None:
                if stream == NO_LAUNCH:
                    if skipped is not None:
                        skipped.append(stream)
                    return
                launched.append(SimpleNamespace(**self.call._asdict(), addresses=addresses))
                with torch.no_grad():
                    run(self.call, addresses)

        return Prepared

    monkeypatch.setattr(mha_forward, "PreparedMhaForward", prepared(_forward))
    monkeypatch.setattr(mha_backward, "PreparedMhaBackward", prepared(_backward))
    return launched


def at(address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """The tensor at an address; None at 0."""
    if not address:
        return None
    kind = getattr(torch, dtype)
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    size = reach * kind.itemsize if 0 not in shape else 0
    if not size:
        return torch.empty(shape, dtype=kind)
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=kind).as_strided(shape, strides)


def _rows(call: Any, address: int, which: str, name: str, heads: int, columns: int) -> Any:
    """The array ``name`` of queries or keys."""
    total = call.total_q if which == "q" else call.total_k
    strides = getattr(call, f"{name}_strides")
    if call.varlen:
        return at(address, call.dtype, (total, heads, columns), (*strides[1:], 1))
    return at(address, call.dtype, (call.b, total, heads, columns), (*strides, 1))


def _logs(call: Any, address: int, strides: tuple[int, int, int]) -> Any:
    """lse or dlse, from strides for (request, token, head)."""
    request, token, head = strides
    if call.varlen:
        return at(address, "float32", (call.total_q, call.h_q), (token, head))
    return at(address, "float32", (call.b, call.h_q, call.total_q), (request, head, token))


def _options(call: Any, addresses: Any, sink_dtype: str | None) -> dict[str, Any]:
    def bound(width: int) -> int:
        return -1 if width >= NO_BOUND else width

    slopes = (call.b, call.h_q) if call.alibi_stride_b else (call.h_q,)
    steps = (call.alibi_stride_b, 1) if call.alibi_stride_b else (1,)
    sink = None if sink_dtype is None else at(addresses.attn_sink, sink_dtype, (call.h_q,), (1,))
    made = {
        "softmax_scale": call.softmax_scale,
        "window_size": (bound(call.window_left), bound(call.window_right)),
        "softcap": call.softcap,
        "attn_sink": sink,
        "alibi_slopes": at(addresses.alibi_slopes, "float32", slopes, steps),
    }
    if call.varlen:
        for name, count in (("cu_seqlens", call.b + 1), ("seqused", call.b)):
            for which in ("q", "k"):
                address = getattr(addresses, f"{name}_{which}")
                made[f"{name}_{which}"] = at(address, "int32", (count,), (1,))
        made |= {"max_seqlen_q": call.max_seqlen_q, "max_seqlen_k": call.max_seqlen_k}
    return made


def _forward(call: Any, addresses: Any) -> None:
    addresses = mha_forward.MhaForwardAddresses(*addresses)
    q = _rows(call, addresses.q, "q", "q", call.h_q, call.d_qk)
    k = _rows(call, addresses.k, "k", "k", call.h_kv, call.d_qk)
    v = _rows(call, addresses.v, "k", "v", call.h_kv, call.d_v)
    out = _rows(call, addresses.out, "q", "out", call.h_q, call.d_v)
    function = reference.flash_attn_varlen_func if call.varlen else reference.flash_attn_func
    options = _options(call, addresses, call.sink_dtype)
    _, lse = function(q, k, v, **options, out=out)
    request, head = call.lse_strides
    _logs(call, addresses.lse, (request, 1, head)).copy_(lse)


def _backward(call: Any, addresses: Any) -> None:
    arrays = {
        name: _rows(call, getattr(addresses, name), which, name, heads, columns)
        for name, which, heads, columns in (
            ("dout", "q", call.h_q, call.d_v),
            ("q", "q", call.h_q, call.d_qk),
            ("k", "k", call.h_kv, call.d_qk),
            ("v", "k", call.h_kv, call.d_v),
            ("out", "q", call.h_q, call.d_v),
            ("dq", "q", call.h_q, call.d_qk),
            ("dk", "k", call.h_kv, call.d_qk),
            ("dv", "k", call.h_kv, call.d_v),
        )
    }
    lse = _logs(call, addresses.lse, call.lse_strides)
    dlse = _logs(call, addresses.dlse, call.dlse_strides)
    function = reference.flash_attn_varlen_backward if call.varlen else reference.flash_attn_backward
    made = function(**arrays, lse=lse, dlse=dlse, **_options(call, addresses, call.sink_dtype))
    addressed = (addresses.dq, addresses.dk, addresses.dv, addresses.dsink)
    assert tuple(address != 0 for address in addressed) == call.needs
    if call.needs.others:
        at(addresses.dsink, call.sink_dtype, (call.h_q,), (1,)).copy_(made[3])
