"""The graph of autograd of flex attention.

Imports torch, so it is imported by a call that reads a tensor which requires grad.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..call.autograd import Call, attend, check_no_out, check_torch, gradient_of_out
from ..kernels.mha_backward_variants import Needs
from .arrays import LISTS, MASK_PARTS, Q_LISTS, lists_of
from .backward import gradients
from .block_mask import lacks_columns, read_mask
from .forward import AuxOutput, AuxRequest, attend_alone, read_dense, wanted
from .functions import as_reading
from .mods import Reading

__all__ = ["attention"]


class _Options(NamedTuple):
    """Arguments of `flex_attention_backward` that are no arrays."""

    scale: float | None
    enable_gqa: bool
    deterministic: bool | None


class _Functions(NamedTuple):
    """What the forward call made of its functions and its mask, as they were then: a name that a function
    reads may stand for another tensor by the time of the backward pass.
    """

    score: Reading | None  # with gradients
    mask: Any  # the attributes of a BlockMask; its function is a Reading
    inputs: tuple[int, ...]
    """The captures of `score` that are inputs of the graph."""

    def arrays(self) -> list[Any]:
        """What is read of device memory, but for the inputs of the graph."""
        score = () if self.score is None else self.score.arrays
        read_by_score = [x for i, x in enumerate(score) if i not in self.inputs]
        if self.mask is None:
            return read_by_score
        function = self.mask.mask_mod
        read_by_mask = function.arrays if isinstance(function, Reading) else ()
        return [*read_by_score, *read_by_mask, *[getattr(self.mask, name) for name in (*LISTS, *Q_LISTS)]]

    def with_arrays(self, inputs: Sequence[Any], others: Iterator[Any]) -> _Functions:
        """The same with other arrays: the inputs, and the rest in the order of `arrays`."""
        score, mask = self.score, self.mask
        if score is not None:
            known = dict(zip(self.inputs, inputs, strict=True))
            arrays = [known[i] if i in known else next(others) for i in range(len(score.arrays))]
            score = score._replace(arrays=arrays)
        if mask is not None:
            function = mask.mask_mod
            if isinstance(function, Reading):
                function = function._replace(arrays=[next(others) for _ in function.arrays])
            lists = {name: next(others) for name in (*LISTS, *Q_LISTS)}
            mask = SimpleNamespace(**{**vars(mask), **lists, "mask_mod": function})
        return _Functions(score, mask, self.inputs)


def attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any,
    deterministic: bool | None,
    out: Any,
) -> Any:
    """`flex_attention` where a tensor that is read requires grad."""
    check_no_out(out)
    _, wants_max = wanted(return_lse, return_aux)
    arrays = {"query": query, "key": key, "value": value}
    with torch.no_grad():
        views = {name: read_dense(x, name) for name, x in arrays.items()}
        for name, x in arrays.items():
            check_torch(name, x)
            if name != "query" and "float8" in views[name][3]:
                raise ValueError(
                    f"{name}: expected the dtype of query where a gradient is needed, got {views[name][3]}; "
                    "convert it, or call under torch.no_grad()"
                )
        device = views["query"][4]
        plain = _frozen(as_reading(score_mod, "score_mod", device))
        functions = _functions(score_mod, block_mask, device)
    captured, names = [], []
    if functions.score is not None:
        captured = [functions.score.arrays[i] for i in functions.inputs]
        names = [functions.score.frame.mod.captures[i].name for i in functions.inputs]
    mask = functions.mask
    if mask is not None:
        lists = {name: getattr(block_mask, name) for name in LISTS}
        mask = SimpleNamespace(**{name: getattr(mask, name) for name in MASK_PARTS}, **lists)
    forward = partial(
        attend_alone, query, key, value, plain, mask, scale, enable_gqa, False, kernel_options,
        AuxRequest(True, wants_max), deterministic, None,
    )  # fmt: skip
    inputs = (query, key, value, *captured)
    if any(x.requires_grad for x in inputs):
        read_again = functions.arrays()
        kept = [None if isinstance(x, torch.Tensor) else x for x in read_again]
        without = functions.with_arrays([None] * len(captured), iter(kept))
        options = _Options(scale, enable_gqa, deterministic)
        call = Call(
            "flex attention",
            lambda: _flat(*forward()),
            partial(_gradients, without, kept, options, names),
            inputs,
            tuple([x if isinstance(x, torch.Tensor) else None for x in read_again]),
        )
        results = attend(call)
    else:  # what requires grad does not reach the results
        with torch.no_grad():
            results = _flat(*forward())
    result, lse, *largest = results
    if return_aux is not None:
        return result, AuxOutput(lse if return_aux.lse else None, *largest)
    return (result, lse) if return_lse else result


def _flat(out: Any, more: AuxOutput) -> tuple[Any, ...]:
    return (out, *[x for x in more if x is not None])


def _functions(score_mod: Any, block_mask: Any, device: int) -> _Functions:
    """The functions of a call as its backward needs them."""
    score = _frozen(as_reading(score_mod, "score_mod", device, backward=True))
    inputs: tuple[int, ...] = ()
    if score is not None and score.frame.mod.backward is not None:
        places = score.frame.mod.backward.gradients
        inputs = tuple([i for i in places if isinstance(score.arrays[i], torch.Tensor)])
    mask = None
    saved, others = (LISTS, Q_LISTS) if lacks_columns(block_mask) else (Q_LISTS, LISTS)
    if lists_of(block_mask, saved) is not None:
        parts = {name: getattr(block_mask, name, None) for name in (*saved, *MASK_PARTS)}
        mask = SimpleNamespace(**parts, **dict.fromkeys(others))
        mask.mask_mod = _frozen(read_mask(block_mask, device, backward=True))
    return _Functions(score, mask, inputs)


def _frozen(reading: Reading | None) -> Reading | None:
    """A function whose numbers stay as they are."""
    if reading is None:
        return None
    numbers = [x.item() if isinstance(x, torch.Tensor) else x for x in reading.sources]
    return reading._replace(sources=numbers)


def _gradients(
    without: _Functions,
    kept: list[Any],
    options: _Options,
    names: list[str],
    needs: tuple[bool, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    saved: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor | None, ...]:
    """`Call.backward`; ``names`` has a name for each captured tensor among ``inputs``."""
    query, key, value, *captured = inputs
    others = (x if tensor is None else tensor for x, tensor in zip(kept, saved, strict=True))
    functions = without.with_arrays(captured, others)
    of_query, of_key, of_value, *of_captures = needs
    dq, dk, dv, by_name = gradients(
        Needs(of_query, of_key, of_value, any(of_captures)), gradient_of_out(dout, out), query, key, value,
        out, lse, functions.score, functions.mask, options.scale, options.enable_gqa, dlse,
        options.deterministic,
    )  # fmt: skip
    return (dq, dk, dv, *[by_name[name] for name in names])
