"""Flex attention and block masks, written as they are defined."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call.checks import as_scale, show
from ..flex.block_mask import BlockMask
from ..flex.forward import AuxOutput, check_options, wanted
from ..flex.mods import CudaMod
from ._arrays import FLOAT_DTYPES, Array, Floats, check_target, read
from ._heads import weighted_sum

_HUGE_BLOCK = 2**30
FAR_LSE = 2**14 * float(np.log(2))
"""Beyond it, float32 rounds an lse by more than gradients in 16 bits bear."""
_Bools = NDArray[np.bool_]


class NumpyMod:
    """A score function of NumPy arrays with its gradients, as `rawmla.CudaMod` is one of CUDA text.

    Args:
        function: `(score, b, h, q_idx, kv_idx)`, what `flex_attention` takes.
        grad: `(grad, score, b, h, q_idx, kv_idx)`: the gradient of the scores `[L, S]`, from the
            gradient of the results of `function`.
        capture_grads: by name an array that `function` reads, and a function of the arguments of `grad` that
            gives `(indices, value)`: what each score adds, and where. Both have shapes that broadcast to
            `[..., L, S]`; dimensions in front are of an array that is read at several places.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        grad: Callable[..., Any],
        capture_grads: Mapping[str, tuple[Any, Callable[..., Any]]] | None = None,
    ) -> None:
        self.function = function
        self.grad = grad
        self.capture_grads = dict(capture_grads or {})

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(score, b, h, q_idx, kv_idx)


_NO_MOD = NumpyMod(lambda score, *at: score, lambda grad, *at: grad)


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    deterministic: bool | None = None,
    out: Any = None,
) -> Any:
    """Attention with a score function and a mask of the caller's as `rawmla.flex_attention`, in float64.

    query, key and value are float32 and float64 too, of any head dimension. `kernel_options` and
    `deterministic` do not change what is computed.

    Args:
        score_mod: a function of NumPy arrays: of scores `[L, S]`, two integers, query tokens `[L, 1]` and
            keys `[1, S]`. Where query is a tensor, also one of 0-d tensors, as on the GPU; `torch.vmap` calls
            it. No CUDA text.
        block_mask: of rawmla, or torch's. Its mask_mod is such a function, without the scores.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: shapes that do not fit; `return_lse` together with `return_aux`; a mask of other lengths;
            a function that takes neither tensors nor arrays.
    """
    call = _Call.of(query, key, value, block_mask, scale, enable_gqa, ("float8_e4m3fn", "float8_e5m2"))
    q, shape = call.q, (*call.q.shape[:3], call.v.shape[3])
    wants_lse, wants_max = wanted(return_lse, return_aux)
    check_options(kernel_options)
    check_target(out, "out", FLOAT_DTYPES, shape)
    score = None if score_mod is None else _Function("score_mod", score_mod, q.is_torch)
    attended = np.zeros(shape)
    lse, top = np.full(shape[:3], -np.inf), np.full(shape[:3], -np.inf)
    queries, keys, values = q.floats, call.k.floats, call.v.floats
    for place in np.ndindex(*shape[:2]):
        pair, at, visible = call.head(place)
        with np.errstate(all="ignore"):  # masked pairs may be anything
            scores = call.factor * (queries[place] @ keys[pair].T)
            if score is not None:
                scores = score(scores, *at).astype(np.float64)
        weights, lse[place], top[place] = _softmax(scores, visible)
        attended[place] = weighted_sum(weights, visible, values[pair])
    returned = q.result(attended, q.dtype, out)
    if return_lse:
        return returned, q.result(lse, "float32")
    if return_aux is None:
        return returned
    further = (wants_lse, lse), (wants_max, top)
    return returned, AuxOutput(*[q.result(x, "float32") if is_wanted else None for is_wanted, x in further])


def flex_attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    score_mod: NumpyMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    grad_lse: Any = None,
    deterministic: bool | None = None,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Gradients of `flex_attention` as `rawmla.flex_attention_backward`, in float64.

    With score_mod an lse beyond 2**14 * ln(2) in magnitude is computed again from the scores, since float32
    rounds it too much.

    Args:
        score_mod: with its gradients; None: scores stay as they are.
        deterministic: does not change what is computed.

    Returns:
        dq, dk, dv, and by name the gradients of arrays in `score_mod.capture_grads`, of their shapes.
    """
    call = _Call.of(query, key, value, block_mask, scale, enable_gqa)
    mod = _NO_MOD if score_mod is None else score_mod
    if not isinstance(mod, NumpyMod):
        raise TypeError(f"score_mod: expected a NumpyMod, which has gradients, got {show(score_mod)}")
    arrays = (call.q, call.k, call.v)
    shape = (*call.q.shape[:3], call.v.shape[3])
    dout, results = (
        read(x, name, FLOAT_DTYPES, shape).floats for name, x in (("grad_out", grad_out), ("out", out))
    )
    logs = read(lse, "lse", FLOAT_DTYPES, shape[:3]).floats
    delta = (dout * results).sum(-1)
    if grad_lse is not None:
        delta = delta - read(grad_lse, "grad_lse", FLOAT_DTYPES, shape[:3]).floats
    dq, dk, dv = grads = [np.zeros(x.shape) for x in arrays]
    sources = {name: read(array, name) for name, (array, _) in mod.capture_grads.items()}
    captured = {name: np.zeros(source.shape) for name, source in sources.items()}
    queries, keys, values = (x.floats for x in arrays)
    for place in np.ndindex(*shape[:2]):
        pair, at, visible = call.head(place)
        visible = visible & (logs[place] > -np.inf)[:, None]
        with np.errstate(all="ignore"):  # masked pairs may be anything
            products = call.factor * (queries[place] @ keys[pair].T)
            scores = mod(products, *at)
            lse_is_far = np.abs(logs[place])[:, None] > FAR_LSE
            p = np.where(lse_is_far, _softmax(scores, visible)[0], np.exp(scores - logs[place][:, None]))
            p = np.where(visible, p, 0)
            grad = np.where(visible, p * (dout[place] @ values[pair].T - delta[place][:, None]), 0)
            ds = np.where(visible, mod.grad(grad, products, *at), 0)
            for name, (_, gradient) in mod.capture_grads.items():
                indices, added = gradient(grad, products, *at)
                _add(captured[name], indices, added, visible)
        dq[place] = call.factor * weighted_sum(ds, visible, keys[pair])
        dk[pair] += call.factor * weighted_sum(ds.T, visible.T, queries[place])
        dv[pair] += weighted_sum(p.T, visible.T, dout[place])
    of_captured = {name: source.result(captured[name], source.dtype) for name, source in sources.items()}
    returned = [array.result(x, array.dtype) for x, array in zip(grads, arrays, strict=True)]
    return returned[0], returned[1], returned[2], of_captured


def _add(total: Floats, indices: tuple[Any, ...], added: Any, visible: _Bools) -> None:
    """Add the terms of visible scores to the elements at their indices."""
    shape = np.broadcast_shapes(*[np.shape(x) for x in (*indices, added)], visible.shape)
    terms = np.where(visible, np.broadcast_to(added, shape), 0)
    if indices:
        np.add.at(total, tuple(np.broadcast_to(x, shape) for x in indices), terms)
    else:
        total += terms.sum()


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The blocks of a mask function as `rawmla.create_block_mask`, in NumPy arrays.

    A block is full if the function holds for all its positions and all are inside (Q_LEN, KV_LEN), else
    partial if the function holds for some. Lists are ascending, followed by the other blocks.

    Args:
        mask_mod: a function of NumPy arrays: of two integers, query tokens `[Q_LEN, 1]` and keys
            `[1, KV_LEN]`. Where torch is imported, also one of 0-d tensors, as on the GPU; `torch.vmap` calls
            it. No CUDA text.
        device, _compile, compute_dq_write_order, dq_kv_order: do not change what is computed.
    """
    mask = _Function("mask_mod", mask_mod, "torch" in sys.modules)
    b, h = (1 if x is None else x for x in (B, H))
    lengths = Q_LEN, KV_LEN
    sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    rows, columns = (-(-length // size) for length, size in zip(lengths, sizes, strict=True))
    some, full = np.zeros((2, b, h, rows, columns), bool)
    for place in np.ndindex(b, h):
        # Positions past the lengths are not seen, so that no block with one of them is full.
        seen = np.zeros((rows * sizes[0], columns * sizes[1]), bool)
        seen[:Q_LEN, :KV_LEN] = mask(*_positions(place, lengths))
        blocks = seen.reshape(rows, sizes[0], columns, sizes[1])
        some[place], full[place] = blocks.any((1, 3)), blocks.all((1, 3))
    kinds = [some & ~full, full] if separate_full_blocks else [some]
    by_rows = [x for kind in kinds for x in _lists(kind)]
    by_columns = [x for kind in kinds for x in _lists(kind.swapaxes(2, 3))]
    nothing = [None, None] * (2 - len(kinds))
    parts: list[Any] = [lengths, *by_rows, *nothing, *by_columns, *nothing, sizes, mask_mod]
    return BlockMask(*parts)


def _lists(is_listed: _Bools) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The number of listed blocks, and their indices, ascending, followed by the indices of the others."""
    order = np.argsort(~is_listed, axis=-1, kind="stable")
    return is_listed.sum(-1).astype(np.int32), order.astype(np.int32)


class _Function:
    """A score or mask function of a caller, evaluated at all positions of one head of one request.

    With `may_be_torch` tensors are tried first: a function of torch may give wrong values for whole arrays,
    and one of NumPy raises for tensors.
    """

    def __init__(self, name: str, function: Any, may_be_torch: bool) -> None:
        if isinstance(function, (CudaMod, str)):
            raise TypeError(
                f"{name}: expected a Python function, as CUDA text runs on a GPU alone, got {show(function)}"
            )
        if not callable(function):
            raise TypeError(f"{name}: expected a function, got {show(function)}")
        self._name = name
        self._function = function
        self._ways: list[Callable[..., Any]] = [function]
        if may_be_torch and not isinstance(function, NumpyMod):
            self._ways.insert(0, self._by_torch)

    def __call__(self, *arguments: Any) -> NDArray[Any]:
        """Results `[L, S]`, from scores, if any, request, head, query tokens `[L, 1]` and keys `[1, S]`."""
        *_, i, j = arguments
        shape = (i.size, j.size)
        if 0 in shape:
            return np.zeros(shape)
        errors: list[Exception] = []
        for way in self._ways:
            try:
                with np.errstate(all="ignore"):
                    result = np.broadcast_to(way(*arguments), shape)
            except Exception as error:
                errors.append(error)
            else:
                self._ways = [way]
                return result
        if len(errors) == 1:
            raise errors[0]
        texts = [f"{type(error).__name__}: {error}" for error in errors]
        raise ValueError(
            f"{self._name}: expected a function of 0-d torch tensors or of NumPy arrays, got one that raises "
            f"with the first ({texts[0]}) and with the second ({texts[1]})"
        ) from errors[0]

    def _by_torch(self, *arguments: Any) -> Any:
        import torch

        from ..flex.recording import IndexByTensors

        *score, b, h, i, j = arguments
        places = [torch.tensor(np.ravel(x), dtype=torch.int32) for x in (b, h, i, j)]
        given = [*map(torch.from_numpy, score), places[0][0], places[1][0], *places[2:]]
        per_key = torch.vmap(
            lambda *one: torch.as_tensor(self._function(*one)), (*[0] * len(score), None, None, None, 0)
        )
        per_query = torch.vmap(per_key, (*[0] * len(score), None, None, 0, None))
        with torch.no_grad(), IndexByTensors():
            result = per_query(*given)
        return result.to(torch.bool if not score else torch.float64).numpy()


def _positions(place: tuple[int, ...], lengths: tuple[int, int]) -> tuple[Any, ...]:
    """Request, head, query tokens `[L, 1]` and keys `[1, S]`, as functions take them."""
    request, head = place
    return (np.int64(request), np.int64(head), np.arange(lengths[0])[:, None], np.arange(lengths[1])[None, :])


def _softmax(scores: Floats, visible: _Bools) -> tuple[Floats, Floats, Floats]:
    """Probabilities of visible scores, lse and largest scores."""
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(1, initial=-np.inf)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - np.where(top == -np.inf, 0, top)[:, None])
        total = weights.sum(1)
        lse = np.where(top == -np.inf, 0, top) + np.log(total)
        return weights / np.where(total == 0, 1, total)[:, None], lse, top


class _Call(NamedTuple):
    """Arguments that forward and backward share."""

    q: Array
    k: Array
    v: Array
    visible: Callable[[tuple[Any, ...]], _Bools]
    factor: float

    @classmethod
    def of(
        cls,
        query: Any,
        key: Any,
        value: Any,
        block_mask: Any,
        scale: float | None,
        enable_gqa: bool,
        narrow: tuple[str, ...] = (),
    ) -> _Call:
        """Read them; key and value are of the dtype of query or of `narrow`."""
        q = read(query, "query", FLOAT_DTYPES, ("B", "Hq", "L", "E"))
        k = read(key, "key", (q.dtype, *narrow), ("Bkv", "Hkv", "S", q.shape[3]))
        v = read(value, "value", (q.dtype, *narrow), (*k.shape[:3], "Ev"))
        if k.shape[0] not in (q.shape[0], 1):
            raise ValueError(
                f"key: expected a batch of {q.shape[0]}, the batch of query, or 1, got shape {list(k.shape)}"
            )
        h_q, h_kv = q.shape[1], k.shape[1]
        if h_q % h_kv or (h_q != h_kv and not enable_gqa):
            rule = "a multiple of" if enable_gqa else "without enable_gqa equal to"
            raise ValueError(f"query: expected Hq to be {rule} the Hkv of key, got Hq {h_q} and Hkv {h_kv}")
        factor = q.shape[3] ** -0.5 if scale is None else as_scale(scale)
        return cls(q, k, v, _visible(block_mask, (q.shape[2], k.shape[2]), q.is_torch), factor)

    def head(self, place: tuple[int, ...]) -> tuple[tuple[int, int], tuple[Any, ...], _Bools]:
        """Find the place of a head in key and value, its `_positions`, and which keys it attends."""
        request, head = place
        pair = request % self.k.shape[0], head // (self.q.shape[1] // self.k.shape[1])
        at = _positions(place, (self.q.shape[2], self.k.shape[2]))
        return pair, at, self.visible(at)


def _visible(
    block_mask: Any, seqlens: tuple[int, int], may_be_torch: bool
) -> Callable[[tuple[Any, ...]], _Bools]:
    """Make a function of `_positions` that gives the keys `[L, S]` which each query of a head attends."""
    if block_mask is None:
        return lambda at: np.ones(seqlens, bool)
    if not hasattr(block_mask, "kv_indices"):
        raise TypeError(f"block_mask: expected a BlockMask, got {show(block_mask)}")
    lengths, sizes = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
    if lengths == (1, 1) and min(sizes) >= _HUGE_BLOCK:  # torch's way to say that there is none
        return lambda at: np.ones(seqlens, bool)
    if lengths != seqlens:
        raise ValueError(
            f"block_mask: expected seq_lengths of {seqlens}, the lengths of query and key, got {lengths}"
        )
    partial = _covered(block_mask.kv_num_blocks, block_mask.kv_indices, sizes, seqlens)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _covered(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, sizes, seqlens)
    mask = _Function("mask_mod", block_mask.mask_mod, may_be_torch)

    def visible(at: tuple[Any, ...]) -> _Bools:
        request, head, *_ = at
        listed = request % len(full), head % full.shape[1]
        return full[listed] | partial[listed] & mask(*at).astype(bool)

    return visible


def _covered(counts: Any, indices: Any, sizes: tuple[int, ...], seqlens: tuple[int, int]) -> _Bools:
    """The positions in listed blocks, `[Z, H, L, S]`."""
    number = read(counts, "block_mask").values
    blocks = read(indices, "block_mask").values
    number, blocks = number.reshape((1, 1, *number.shape)[-3:]), blocks.reshape((1, 1, *blocks.shape)[-4:])
    rows, columns = (-(-length // size) for length, size in zip(seqlens, sizes, strict=True))
    listed = np.zeros((*number.shape[:2], rows, columns), bool)
    for place in np.ndindex(*number.shape[:2], rows):
        count = min(int(number[place]), columns, blocks.shape[-1])
        for block in blocks[place][: max(0, count)]:
            if 0 <= block < columns:
                listed[place][block] = True
    i, j = (np.arange(length) // size for length, size in zip(seqlens, sizes, strict=True))
    return listed[:, :, i][..., j]
