"""Flex attention of torch CPU tensors: the public function as it is, up to launches, and a stand-in for
`rawmla.flex_attention_backward`. Both compute by the reference, from what they are given: a test says what a
function computes, what the function reads comes with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from mha_on_cpu import at, claim_cuda

import rawmla
from rawmla import reference
from rawmla.attention import flex
from rawmla.attention.functions import as_mod
from rawmla.attention.mods import Mod
from rawmla.kernels import flex_forward
from rawmla.kernels.flex_forward import FlexAddresses
from rawmla.reference._flex import NumpyMod, flex_attention_backward

torch = pytest.importorskip("torch")
from rawmla.attention import autograd  # noqa: E402
from rawmla.attention.names import names_of  # noqa: E402


@dataclass
class Launches:
    """What is computed, and what was.

    Attributes:
        score: the score function as one of NumPy arrays, from what it reads by name; None: there is none.
        mask: the mask function, from a list of what it reads.
        block_mask: that of the forward call, with lists of NumPy arrays.
        forward, backward: of every launch the score function as it was given, of the latter with keywords.
    """

    score: Callable[..., NumpyMod] | None = None
    mask: Callable[..., Callable[..., Any]] | None = None
    block_mask: Any = None
    forward: list[Any] = field(default_factory=list)
    backward: list[dict[str, Any]] = field(default_factory=list)
    given: dict[str, Mod | None] = field(default_factory=dict)

    def numpy_score(self, mod: Mod | None) -> NumpyMod | None:
        """The score function that reads the arrays of a `Mod`."""
        if mod is None or mod is flex.IDENTITY:
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


def exact(x: Any) -> Any:
    """A tensor as a NumPy array of float64, or of integers."""
    x = x.detach()
    return (x.double() if x.is_floating_point() else x).numpy()


def install(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Let CPU tensors pass for CUDA tensors."""
    claim_cuda(monkeypatch)
    launches = Launches()
    placed = flex.placed

    def named(function: Any, kind: Any, device: int, backward: bool = False) -> Mod | None:
        """With the names of what a function of Python reads, as those with gradients have them anyway."""
        mod = as_mod(function, kind, device, backward)
        if mod is None or backward or isinstance(function, (str, rawmla.CudaMod, Mod)):
            return mod
        names = names_of(function, [capture.array for capture in mod.captures])
        captures = [x._replace(name=name) for x, name in zip(mod.captures, names, strict=True)]
        return mod._replace(captures=tuple(captures))

    def recorded(mod: Mod | None, kind: str, *place: Any) -> Any:
        launches.given[kind] = mod
        return placed(mod, kind, *place)

    class Prepared:
        scratch_bytes = 16

        def __init__(self, call: Any, capturing: Any) -> None:
            self.call = call

        def launch(self, stream: int, addresses: Any, *more: Any) -> None:
            with torch.no_grad():
                _forward(launches, self.call, FlexAddresses(*addresses))

    def backward(*arguments: Any, **keywords: Any) -> Any:
        return _backward(launches, *arguments, **keywords)

    for module in (flex, autograd):
        monkeypatch.setattr(module, "as_mod", named)
    monkeypatch.setattr(flex, "placed", recorded)
    monkeypatch.setattr(flex_forward, "PreparedFlexForward", Prepared)
    monkeypatch.setattr(flex, "flex_attention_backward", backward, raising=False)
    return launches


def in_torch(block_mask: Any, mask_mod: Any) -> rawmla.BlockMask:
    """A mask with tensors for lists, and another function."""
    lengths, *lists, sizes, _ = block_mask.as_tuple(flatten=False)
    return rawmla.BlockMask(
        lengths, *[None if x is None else torch.from_numpy(x) for x in lists], sizes, mask_mod
    )


def _forward(launches: Launches, call: Any, addresses: FlexAddresses) -> None:
    def rows(name: str, batches: int, heads: int, tokens: int, columns: int) -> Any:
        request, token, head = getattr(call, f"{name}_strides")
        strides = (request, head, token, 1)
        return at(getattr(addresses, name), call.dtype, (batches, heads, tokens, columns), strides)

    q = rows("q", call.b, call.h_q, call.seqlen_q, call.d_qk)
    k = rows("k", call.k_batches, call.h_kv, call.seqlen_k, call.d_qk)
    v = rows("v", call.k_batches, call.h_kv, call.seqlen_k, call.d_v)
    out = rows("out", call.b, call.h_q, call.seqlen_q, call.d_v)
    score = launches.given["score_mod"]
    launches.forward.append(score)
    block_mask = None
    if call.lists is not None:
        block_mask = rawmla.BlockMask(*launches.block_mask.as_tuple(flatten=False))
        mask = launches.given["mask_mod"]
        block_mask.mask_mod = rawmla.noop_mask if mask is None else launches.numpy_mask(mask)
    _, (lse, largest) = reference.flex_attention(
        q, k, v, launches.numpy_score(score), block_mask, call.scale, call.h_q != call.h_kv, out=out,
        return_aux=rawmla.AuxRequest(True, True),
    )  # fmt: skip
    for address, values in ((addresses.lse, lse), (addresses.max_scores, largest)):
        if address:
            at(address, "float32", tuple(values.shape), values.stride()).copy_(values)


def _backward(
    launches: Launches,
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    grad_lse: Any = None,
    deterministic: bool | None = None,
) -> tuple[Any, Any, Any, Mapping[str, Any]]:
    """`rawmla.flex_attention_backward`."""
    assert not torch.is_grad_enabled()
    mod = as_mod(score_mod, "score_mod", 0, backward=True)
    launches.backward.append({"grad_lse": grad_lse, "deterministic": deterministic, "score": mod})
    if block_mask is not None:
        assert block_mask.q_num_blocks is not None and block_mask.full_q_num_blocks is not None
        lists = [
            np.asarray(getattr(block_mask, name))
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        ]
        mask_mod = block_mask.mask_mod
        if mask_mod is not rawmla.noop_mask:
            mask = as_mod(mask_mod, "mask_mod", 0, backward=True)
            assert mask is not None
            mask_mod = launches.numpy_mask(mask)
        sizes = {"BLOCK_SIZE": block_mask.BLOCK_SIZE, "mask_mod": mask_mod}
        block_mask = rawmla.BlockMask(block_mask.seq_lengths, *lists, **sizes)
    dq, dk, dv, captured = flex_attention_backward(
        grad_out, query, key, value, out, lse, launches.numpy_score(mod), block_mask, scale, enable_gqa,
        grad_lse=grad_lse, deterministic=deterministic,
    )  # fmt: skip
    if mod is None or mod.backward is None:
        return dq, dk, dv, {}
    names = [mod.captures[place].name for place in mod.backward.gradients]
    return dq, dk, dv, {name: captured[name] for name in names}
