"""The graph of autograd of flex attention.

Imports torch, so it is imported by a call that reads a tensor which requires grad.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..call.autograd import Call, attend, check_no_out, check_torch, gradient_of_out
from ..kernels.mha_backward_variants import Needs
from .arrays import read_dense
from .backward import Arrays, Options, gradients
from .block_lists import LISTS, Q_LISTS
from .block_mask import lacks_columns, read_mask
from .forward import Arguments, AuxOutput, AuxRequest, attend_alone, wanted
from .functions import as_reading
from .lists import MASK_PARTS, read_lists
from .mods import Reading


class _Functions(NamedTuple):
    """The functions and the mask of a call, as the forward read them: a name that a function reads may stand
    for another tensor by the time of the backward pass.
    """

    score: Reading | None  # with gradients
    mask: SimpleNamespace | None  # the attributes of a BlockMask; its function is a Reading
    inputs: tuple[int, ...]
    """The captures of `score` that are inputs of the graph."""

    def arrays(self) -> list[Any]:
        """The arrays that the backward reads, first the captures of `score`."""
        found = [] if self.score is None else [*self.score.arrays]
        if self.mask is not None:
            found += [] if self.mask.mask_mod is None else self.mask.mask_mod.arrays
            found += [getattr(self.mask, name) for name in (*LISTS, *Q_LISTS)]
        return found

    def with_arrays(self, arrays: Iterator[Any]) -> _Functions:
        """The same with other arrays, in the order of `arrays`."""

        def taken(function: Reading | None) -> Reading | None:
            return function and function._replace(arrays=[next(arrays) for _ in function.arrays])

        score, mask = taken(self.score), self.mask
        if mask is not None:
            function = taken(mask.mask_mod)
            lists = {name: next(arrays) for name in (*LISTS, *Q_LISTS)}
            mask = SimpleNamespace(**{**vars(mask), **lists, "mask_mod": function})
        return _Functions(score, mask, self.inputs)


def attention(arguments: Arguments) -> Any:
    """`flex_attention` where a tensor that is read requires grad."""
    return_lse, return_aux = arguments.return_lse, arguments.return_aux
    check_no_out(arguments.out)
    _, wants_max = wanted(return_lse, return_aux)
    with torch.no_grad():
        views = [read_dense(x, name) for name, x in zip(Arguments._fields, arguments[:3], strict=False)]
        for name, x, view in zip(Arguments._fields, arguments[:3], views, strict=False):
            check_torch(name, x)
            if name != "query" and "float8" in view[3]:
                raise ValueError(
                    f"{name}: expected the dtype of query where a gradient is needed, got {view[3]}; "
                    "convert it, or call under torch.no_grad()"
                )
        device = views[0][4]
        plain = _frozen(as_reading(arguments.score_mod, "score_mod", device))
        functions = _functions(arguments.score_mod, arguments.block_mask, device)
    mask = functions.mask
    if mask is not None:
        lists = {name: getattr(arguments.block_mask, name) for name in LISTS}
        mask = SimpleNamespace(**{name: getattr(mask, name) for name in MASK_PARTS}, **lists)
    alone = arguments._replace(
        score_mod=plain, block_mask=mask, return_lse=False, return_aux=AuxRequest(True, wants_max)
    )
    read_again = functions.arrays()
    captured = [read_again[i] for i in functions.inputs]
    others = [x for i, x in enumerate(read_again) if i not in functions.inputs]
    inputs = (*arguments[:3], *captured)
    if any(x.requires_grad for x in inputs):
        kept = [None if isinstance(x, torch.Tensor) else x for x in others]
        without = functions.with_arrays(iter([None] * len(read_again)))
        options = Options(arguments.scale, arguments.enable_gqa, arguments.deterministic)
        call = Call(
            "flex attention",
            lambda: _flat(*attend_alone(alone)),
            partial(_gradients, without, kept, options),
            inputs,
            tuple([x if isinstance(x, torch.Tensor) else None for x in others]),
        )
        results = attend(call)
    else:  # what requires grad does not reach the results
        with torch.no_grad():
            results = _flat(*attend_alone(alone))
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
    if read_lists(block_mask, saved) is not None:
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
    options: Options,
    needs: tuple[bool, ...],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    saved: tuple[torch.Tensor | None, ...],
) -> tuple[torch.Tensor | None, ...]:
    """`Call.backward`: ``without`` has the functions without arrays, which are saved, or ``kept``."""
    query, key, value, *captured = inputs
    known = dict(zip(without.inputs, captured, strict=True))
    others = iter([x if tensor is None else tensor for x, tensor in zip(kept, saved, strict=True)])
    places = range(len(without.arrays()))
    score, mask, _ = without.with_arrays(iter([known[i] if i in known else next(others) for i in places]))
    of_query, of_key, of_value, *of_captures = needs
    dq, dk, dv, by_name = gradients(
        Needs(of_query, of_key, of_value, any(of_captures)),
        Arrays(query, key, value, out, gradient_of_out(dout, out), lse, dlse),
        score,
        mask,
        options,
    )
    captures = () if score is None else score.frame.mod.captures
    return (dq, dk, dv, *[by_name[captures[i].name] for i in without.inputs])
