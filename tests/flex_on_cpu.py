"""Flex attention of torch CPU tensors: the public functions as they are, up to launches, which the reference
computes in the memory that kernels would have been given. A test says what a score or mask function computes;
what it reads comes with the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_mods import mod_of
from mha_on_cpu import at, claim_cuda

import rawmla
from rawmla import reference
from rawmla.flex import backward as flex_backward_call
from rawmla.flex import forward as flex_forward_call
from rawmla.flex.functions import as_reading
from rawmla.flex.mods import Mod, Reading, reading_of
from rawmla.kernels import mha_backward, mha_forward
from rawmla.kernels.mha_backward import BackwardAddresses
from rawmla.kernels.mha_forward import MhaForwardAddresses, ModAddresses
from rawmla.reference._flex import NumpyMod, flex_attention_backward

torch = pytest.importorskip("torch")
from rawmla.flex import autograd  # noqa: E402
from rawmla.flex.names import names_of  # noqa: E402


@dataclass
class Launches:
    """What is computed, and what was.

    Attributes:
        score: the score function as one of NumPy arrays, from what it reads by name; None: there is none.
        mask: the mask function, from a list of what it reads.
        forward, backward: of every launch the score function, of the latter the call and addresses too.
        given: the functions of the latest call.
    """

    score: Callable[..., NumpyMod] | None = None
    mask: Callable[..., Callable[..., Any]] | None = None
    forward: list[Any] = field(default_factory=list)
    backward: list[Any] = field(default_factory=list)
    given: dict[str, Mod | None] = field(default_factory=dict)

    def numpy_score(self, mod: Mod | None) -> NumpyMod | None:
        """The score function that reads the arrays of a `Mod`."""
        if mod is None or mod == mod_of(flex_forward_call.IDENTITY):
            return None
        assert self.score is not None
        arrays = {capture.name: capture.array for capture in mod.captures}
        made = self.score(**{name: exact(x) for name, x in arrays.items()})
        gradients = {name: (arrays[name], add) for name, (_, add) in made.capture_grads.items()}
        return NumpyMod(made.function, made.grad, gradients)

    def numpy_mask(self, mod: Mod) -> Callable[..., Any]:
        """The mask function that reads the arrays of a `Mod`."""
        assert self.mask is not None
        return self.mask(*[exact(capture.array) for capture in mod.captures])


class Proxy:
    """An object that score functions read: it passes for the number that it holds, and may hold another."""

    value = 2.0
    __class__ = float  # type: ignore[assignment]

    def __rmul__(self, other: Any) -> Any:
        return other * self.value


def exact(x: Any) -> Any:
    """A tensor as a NumPy array of float64, or of integers."""
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).numpy()


def install(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Let CPU tensors pass for CUDA tensors."""
    claim_cuda(monkeypatch)
    launches = Launches()
    bound = flex_backward_call.bound

    def named(function: Any, kind: Any, device: int, backward: bool = False) -> Reading | None:
        """With the names of what a function of Python reads, as those with gradients have them anyway."""
        reading = as_reading(function, kind, device, backward)
        if reading is None or backward or isinstance(function, (str, rawmla.CudaMod, Reading)):
            return reading
        mod = mod_of(reading)
        names = names_of(function, reading.arrays)
        captures = [x._replace(name=name) for x, name in zip(mod.captures, names, strict=True)]
        return reading_of(mod._replace(captures=tuple(captures)))

    def recorded(reading: Reading | None, kind: Any, *place: Any) -> Any:
        launches.given[kind] = reading and mod_of(reading)
        return bound(reading, kind, *place)

    class Prepared:
        scratch_bytes = 16

        def __init__(self, call: Any, capturing: Any) -> None:
            self.call = call

    class PreparedForward(Prepared):
        def launch(self, stream: int, addresses: Any, scratch: int, *of_mods: Any) -> None:
            *more, _, _ = of_mods
            with torch.no_grad():
                _forward(launches, self.call, MhaForwardAddresses(*addresses), ModAddresses(*more))

    class PreparedBackward(Prepared):
        def launch(self, stream: int, addresses: BackwardAddresses, scratch: int, *of_mods: Any) -> None:
            *lists, _, _, captured = of_mods
            with torch.no_grad():
                _backward(launches, self.call, addresses, lists, captured)

    for module in (flex_backward_call, autograd):
        monkeypatch.setattr(module, "as_reading", named)
    monkeypatch.setattr(
        flex_forward_call, "as_bound", lambda function, kind, device, framework: named(function, kind, device)
    )
    for module in (flex_forward_call, flex_backward_call):
        monkeypatch.setattr(module, "bound", recorded)
    monkeypatch.setattr(mha_forward, "PreparedMhaForward", PreparedForward)
    monkeypatch.setattr(mha_backward, "PreparedMhaBackward", PreparedBackward)
    return launches


def in_torch(block_mask: Any, mask_mod: Any) -> rawmla.BlockMask:
    """A mask with tensors for lists, and another function."""
    lengths, *lists, sizes, _ = block_mask.as_tuple(flatten=False)
    tensors = [None if x is None else torch.from_numpy(x) for x in lists]
    return rawmla.BlockMask(lengths, *tensors, BLOCK_SIZE=sizes, mask_mod=mask_mod)


def _array(call: Any, addresses: Any, name: str) -> Any:
    """An array of a call, `[batch, heads, tokens, columns]`."""
    request, token, head = getattr(call, f"{name}_strides")
    of_keys, of_values = name in ("k", "dk", "v", "dv"), name in ("v", "dv", "out", "dout")
    batches, heads, tokens = (
        (call.k_batches, call.h_kv, call.max_seqlen_k) if of_keys else (call.b, call.h_q, call.max_seqlen_q)
    )
    shape = (batches, heads, tokens, call.d_v if of_values else call.d_qk)
    return at(getattr(addresses, name), call.dtype, shape, (request, head, token, 1))


def _rows(call: Any, addresses: Any, name: str, strides: tuple[int, int, int] | None = None) -> Any:
    """lse or its gradient; contiguous without strides for (request, token, head)."""
    request, token, head = strides or (call.h_q * call.max_seqlen_q, 1, call.max_seqlen_q)
    shape = (call.b, call.h_q, call.max_seqlen_q)
    return at(getattr(addresses, name), "float32", shape, (request, head, token))


def _block_mask(launches: Launches, call: Any, addresses: Any, prefix: str) -> Any:
    """The mask of a call, as the reference takes it, from lists by rows ("kv") or by columns ("q")."""
    lists = call.mods.lists
    if lists is None:
        return None
    sizes = lists.block_q, lists.block_k
    length = call.max_seqlen_q if prefix == "kv" else call.max_seqlen_k
    lines = -(-length // sizes[prefix == "q"])
    parts = []
    for kind, name in enumerate((prefix, f"full_{prefix}")):
        shape = (lists.batches, lists.heads, lines)
        counts = at(getattr(addresses, f"{name}_num_blocks"), "int32", shape, lists.counts_strides[kind])
        if counts is None:
            parts += [None, None]
            continue
        indices = at(
            getattr(addresses, f"{name}_indices"), "int32", (*shape, lists.columns[kind]),
            (*lists.lists_strides[kind], 1),
        )  # fmt: skip
        parts += [counts.numpy(), indices.numpy()]
        if prefix == "q":
            rows = -(-call.max_seqlen_q // sizes[0])
            parts[-2:] = _transposed(parts[-2], parts[-1], rows)
    mask = launches.given["mask_mod"]
    mask_mod = rawmla.noop_mask if mask is None else launches.numpy_mask(mask)
    return rawmla.BlockMask(
        (call.max_seqlen_q, call.max_seqlen_k), *parts, BLOCK_SIZE=sizes, mask_mod=mask_mod
    )


def _transposed(counts: Any, indices: Any, rows: int) -> tuple[Any, Any]:
    """Lists by rows, from lists by columns."""
    listed = np.zeros((*counts.shape[:2], rows, counts.shape[2]), bool)
    for place in np.ndindex(*counts.shape):
        listed[(*place[:2], indices[place][: counts[place]], place[2])] = True
    return listed.sum(-1), np.argsort(~listed, axis=-1, kind="stable")


def _forward(launches: Launches, call: Any, arrays: MhaForwardAddresses, more: ModAddresses) -> None:
    addresses = SimpleNamespace(**arrays._asdict(), **more._asdict())
    score = launches.given["score_mod"]
    launches.forward.append(score)
    _, (lse, largest) = reference.flex_attention(
        *[_array(call, addresses, name) for name in ("q", "k", "v")],
        launches.numpy_score(score),
        _block_mask(launches, call, addresses, "kv"),
        call.softmax_scale,
        call.h_q != call.h_kv,
        out=_array(call, addresses, "out"),
        return_aux=rawmla.AuxRequest(True, True),
    )
    for name, values in (("lse", lse), ("max_scores", largest)):
        if getattr(addresses, name):
            _rows(call, addresses, name).copy_(values)


def _backward(
    launches: Launches,
    call: Any,
    arrays: BackwardAddresses,
    lists: Sequence[int],
    captured: Sequence[int],
) -> None:
    names = [name.replace("kv", "q") for name in ModAddresses._fields[1:5]]
    addresses = SimpleNamespace(**arrays._asdict(), **dict(zip(names, lists, strict=True)))
    score = launches.given["score_mod"]
    launches.backward.append((score, call, addresses))
    grad_lse = _rows(call, addresses, "dlse", call.dlse_strides)
    *made, gradients = flex_attention_backward(
        *[_array(call, addresses, name) for name in ("dout", "q", "k", "v", "out")],
        _rows(call, addresses, "lse", call.lse_strides),
        launches.numpy_score(score),
        _block_mask(launches, call, addresses, "q"),
        call.softmax_scale,
        call.h_q != call.h_kv,
        grad_lse=grad_lse,
    )
    for name, values, is_needed in zip(("dq", "dk", "dv"), made, call.needs, strict=False):
        assert (getattr(addresses, name) != 0) == is_needed
        if is_needed:
            _array(call, addresses, name).copy_(values)
    assert (len(captured) > 0) == call.needs.others
    places = () if not captured or score is None or score.backward is None else score.backward.gradients
    for place, address, wanted in zip(places, captured, call.mods.captured, strict=True):
        values = gradients[score.captures[place].name]
        assert (values.numel(), str(values.dtype)[6:]) == wanted
        at(address, wanted.dtype, (wanted.elements,), (1,)).copy_(values.flatten())
