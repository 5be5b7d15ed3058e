"""Score functions and masks by name: each written once for torch and NumPy, with its CUDA text beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawmla.flex.mods import CudaMod

PAGE = 16
"""Keys of a page of the function "paged"."""


@dataclass(frozen=True)
class Function:
    """A score function or a mask, in three forms that compute the same.

    Attributes:
        python: for tensors without dimensions, as users write it: `(score, b, h, q_idx, kv_idx)`, a mask
            without the score. It closes over the tensors of `captures`.
        code: CUDA text, which reads `captures` by their names.
        arrays: `(xp, captures, score, b, h, q_idx, kv_idx)` for arrays of any shapes, xp being numpy or torch
            and captures arrays of it, float64 where they are floating point.
        captures: tensors and numbers by name.
        grad, capture_grads: derivatives of a score function, as in `rawmla.CudaMod`.
        positive: scores have to be positive, and not too small.
        approximate: kernels compute it with approximate instructions.
    """

    python: Callable[..., Any]
    code: str
    arrays: Callable[..., Any]
    captures: Mapping[str, Any] = field(default_factory=dict)
    grad: str | None = None
    capture_grads: Mapping[str, Any] = field(default_factory=dict)
    positive: bool = False
    approximate: bool = False

    def cuda(self) -> CudaMod:
        """The function as CUDA text with its captures."""
        return CudaMod(self.code, self.captures, grad=self.grad, capture_grads=self.capture_grads)

    def numpy(self) -> Callable[..., Any]:
        """The function for NumPy arrays, as `rawmla.reference` takes it."""
        read = {name: _exact(x).cpu().numpy() if _is_array(x) else x for name, x in self.captures.items()}
        return partial(self.arrays, np, SimpleNamespace(**read))

    def torch(self, instead: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """The function for tensors of any shapes; `instead` replaces captures."""
        import torch

        read = {name: _exact(x) if _is_array(x) else x for name, x in self.captures.items()}
        return partial(self.arrays, torch, SimpleNamespace(**{**read, **(instead or {})}))

    def form(self, name: str) -> Any:
        """What `rawmla.flex_attention` takes: "python" or "cuda"."""
        return self.python if name == "python" else self.cuda()


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape")


def _exact(tensor: Any) -> Any:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors that functions read: requests, query heads, query tokens, keys; and the device."""

    b: int
    h: int
    s_q: int
    s_k: int
    seed: int = 0
    device: str = "cuda"

    @property
    def extent(self) -> int:
        """Query tokens or keys, whichever are more."""
        return max(self.s_q, self.s_k)

    def _draw(self) -> Any:
        import torch

        return torch.Generator(self.device).manual_seed(self.seed + 1)

    def randn(self, *shape: int, dtype: str = "float32") -> Any:
        """Normal random numbers."""
        import torch

        numbers = torch.randn(shape, generator=self._draw(), device=self.device)
        return numbers.to(getattr(torch, dtype))

    def integers(self, low: int, high: int, *shape: int, dtype: str = "int32") -> Any:
        """Random integers from low to high - 1."""
        import torch

        numbers = torch.randint(low, high, shape, generator=self._draw(), device=self.device)
        return numbers.to(getattr(torch, dtype))

    def documents(self) -> Any:
        """int32 `[b, tokens]`: which of five documents a token of each request belongs to, ascending."""
        return self.integers(0, 5, self.b, self.extent).sort().values

    def lengths(self) -> Any:
        """int32 `[b]`: lengths of the requests, at least one of which is 0."""
        length = self.integers(0, self.extent + 1, self.b)
        length[-1] = 0
        return length

    def offsets(self) -> Any:
        """int64 `[4]`: where three documents begin and end."""
        import torch

        return torch.tensor([0, self.extent // 3, self.extent // 2, self.extent], device=self.device)

    def document(self) -> Any:
        """int64 `[tokens]`: the document of `offsets` that a token belongs to."""
        import torch

        tokens = torch.arange(self.extent, device=self.device)
        return torch.bucketize(tokens, self.offsets()[1:], right=True)

    def pages(self) -> Any:
        """int64 `[b, pages]`: the pages of each request in random order."""
        import torch

        count = -(-self.s_k // PAGE)
        return torch.stack([self.randn(count + i)[:count].argsort() for i in range(self.b)])


Builder = Callable[[Sizes], Function]


def _function(
    make: Callable[..., Callable[..., Any]],
    code: str,
    grad: str | None = "grad",
    captures: Callable[[Sizes], Mapping[str, Any]] = lambda n: {},
    capture_grads: Mapping[str, Any] | None = None,
    in_torch: Callable[..., Callable[..., Any]] | None = None,
    **flags: bool,
) -> Builder:
    """A function of `make(xp, **captures)`; `in_torch(**captures)`, if given, is what users write instead."""

    def build(sizes: Sizes) -> Function:
        import torch

        read = captures(sizes)
        python = make(torch, **read) if in_torch is None else in_torch(**read)
        return Function(python, code, partial(_of_arrays, make), read, grad, capture_grads or {}, **flags)

    return build


def _of_arrays(make: Callable[..., Callable[..., Any]], xp: Any, captures: Any, *at: Any) -> Any:
    return make(xp, **vars(captures))(*at)


_mask = partial(_function, grad=None)


def _bias(order: str, dtype: str = "float32", chained: bool = False) -> Builder:
    """A bias that is indexed in this order by b, h, q and k."""
    names = dict(zip("bhqk", ("b", "h", "q_idx", "kv_idx"), strict=True))
    place = ", ".join(names[letter] for letter in order)

    def captures(sizes: Sizes) -> dict[str, Any]:
        extents = dict(zip("bhqk", (sizes.b, sizes.h, sizes.s_q, sizes.s_k), strict=True))
        return {"bias": sizes.randn(*[extents[letter] for letter in order], dtype=dtype)}

    def make(xp: Any, bias: Any) -> Callable[..., Any]:
        def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            at = {"b": b, "h": h, "q": q, "k": k}
            return s + bias[tuple(at[letter] for letter in order)]

        return function

    def in_chain(bias: Any) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + bias[b][h][q][k]

    grads = {"bias": (place, "grad")}
    in_torch = in_chain if chained else None
    return _function(make, f"score + bias({place})", "grad", captures, grads, in_torch)


def _torch() -> Any:
    import torch

    return torch


SCORES: dict[str, Builder] = {
    "identity": _function(lambda xp: lambda s, b, h, q, k: s, "score"),
    "twice": _function(lambda xp: lambda s, b, h, q, k: 2 * s, "2 * score", "2 * grad"),
    "square": _function(lambda xp: lambda s, b, h, q, k: s**2, "score * score", "2 * score * grad"),
    "reciprocal": _function(
        lambda xp: lambda s, b, h, q, k: 1 / s, "1.0f / score", "-grad / (score * score)", positive=True
    ),
    "log": _function(
        lambda xp: lambda s, b, h, q, k: xp.where(s > 0, xp.log(s), -inf),
        "score > 0.0f ? logf(score) : -kInfinity",
        "score > 0.0f ? grad / score : 0.0f",
    ),
    "softcap": _function(
        lambda xp, cap: lambda s, b, h, q, k: cap * xp.tanh(s / cap),
        "cap * tanhf(score / cap)",
        "const float t = tanhf(score / cap);\nreturn grad * (1.0f - t * t);",
        lambda n: {"cap": 2.0},
        approximate=True,
    ),
    "silu": _function(
        lambda xp: lambda s, b, h, q, k: s / (1 + xp.exp(-s)),
        "score / (1.0f + expf(-score))",
        "const float t = 1.0f / (1.0f + expf(-score));\nreturn grad * t * (1.0f + score * (1.0f - t));",
        in_torch=lambda: lambda s, b, h, q, k: _torch().nn.functional.silu(s),
    ),
    "trigonometric": _function(
        lambda xp: lambda s, b, h, q, k: 2 * xp.sin(s) + xp.cos(s),
        "2 * torch_sin(score) + torch_cos(score)",
        "grad * (2 * torch_cos(score) - torch_sin(score))",
    ),
    "causal": _function(
        lambda xp: lambda s, b, h, q, k: xp.where(q >= k, s, -inf),
        "q_idx >= kv_idx ? score : -kInfinity",
        "q_idx >= kv_idx ? grad : 0.0f",
    ),
    "inverse causal": _function(
        lambda xp: lambda s, b, h, q, k: xp.where(q <= k, s, -inf),
        "q_idx <= kv_idx ? score : -kInfinity",
        "q_idx <= kv_idx ? grad : 0.0f",
    ),
    # Models mask with a large negative number; here some rows are filled whole.
    "filled": _function(
        lambda xp, fill: lambda s, b, h, q, k: xp.where((q >= k) & (q % 50 != 7), s, fill[k]),
        "q_idx >= kv_idx && q_idx % 50 != 7 ? score : fill(kv_idx)",
        "q_idx >= kv_idx && q_idx % 50 != 7 ? grad : 0.0f",
        lambda n: {"fill": n.randn(n.s_k) * 0 - 1e9},
        {"fill": ("kv_idx", "q_idx >= kv_idx && q_idx % 50 != 7 ? 0.0f : grad")},
    ),
    "relative": _function(lambda xp: lambda s, b, h, q, k: s + (q - k), "score + (q_idx - kv_idx)"),
    "relative table": _function(
        lambda xp, table, shift: lambda s, b, h, q, k: s + table[q - k + shift],
        "score + table(q_idx - kv_idx + shift)",
        captures=lambda n: {"table": n.randn(n.s_q + n.s_k), "shift": n.s_k},
        capture_grads={"table": ("q_idx - kv_idx + shift", "grad")},
    ),
    "clamped table": _function(
        lambda xp, table: lambda s, b, h, q, k: s + table[xp.clip(q - k, -16, 16) + 16],
        "score + table(max_int(min_int(q_idx - kv_idx, 16), -16) + 16)",
        captures=lambda n: {"table": n.randn(33)},
        capture_grads={"table": ("max_int(min_int(q_idx - kv_idx, 16), -16) + 16", "grad")},
    ),
    "absolute": _function(
        lambda xp: lambda s, b, h, q, k: s - 0.05 * abs(q - k), "score - 0.05f * fabsf(q_idx - kv_idx)"
    ),
    "alibi": _function(
        lambda xp, heads: lambda s, b, h, q, k: s + xp.exp2(-((h + 1) * 8.0 / heads)) * (k - q),
        "score + exp2f(-(h + 1) * 8.0f / heads) * (kv_idx - q_idx)",
        captures=lambda n: {"heads": n.h},
    ),
    "alibi table": _function(
        lambda xp, slopes: lambda s, b, h, q, k: s - slopes[h] * abs(q - k),
        "score - slopes(h) * fabsf(q_idx - kv_idx)",
        captures=lambda n: {"slopes": n.randn(n.h, dtype="bfloat16").abs() / 4},
        capture_grads={"slopes": ("h", "-grad * fabsf(q_idx - kv_idx)")},
        in_torch=lambda slopes: lambda s, b, h, q, k: s - slopes[h].float() * (q - k).abs(),
    ),
    # The same for all keys of a row: only lse shows it.
    "head offset": _function(
        lambda xp, offset: lambda s, b, h, q, k: s + offset[h],
        "score + offset(h)",
        captures=lambda n: {"offset": n.randn(n.h)},
        capture_grads={"offset": ("h", "grad")},
    ),
    "head scale": _function(
        lambda xp, factor: lambda s, b, h, q, k: s * factor[h],
        "score * factor(h)",
        "grad * factor(h)",
        lambda n: {"factor": n.randn(n.h, dtype="float16")},
        {"factor": ("h", "grad * score")},
    ),
    "query scale": _function(
        lambda xp, factor: lambda s, b, h, q, k: s * factor[h, q],
        "score * factor(h, q_idx)",
        "grad * factor(h, q_idx)",
        lambda n: {"factor": n.randn(n.h, n.s_q)},
        {"factor": ("h, q_idx", "grad * score")},
    ),
    "head gate": _function(
        lambda xp, gate: lambda s, b, h, q, k: s / (1 + xp.exp(-gate[h])),
        "score / (1.0f + expf(-gate(h)))",
        "grad / (1.0f + expf(-gate(h)))",
        lambda n: {"gate": n.randn(n.h)},
        {
            "gate": (
                "h",
                "grad * score * expf(-gate(h)) / ((1.0f + expf(-gate(h))) * (1.0f + expf(-gate(h))))",
            )
        },
        lambda gate: lambda s, b, h, q, k: s * _torch().sigmoid(gate[h]),
    ),
    "bias q k": _bias("qk"),
    "bias k q": _bias("kq"),
    "bias b k": _bias("bk", "float16"),
    "bias h q k": _bias("hqk", "bfloat16"),
    "bias q h k": _bias("qhk"),
    "bias b h q k": _bias("bhqk"),
    "bias k q h b": _bias("kqhb"),
    "chained bias": _bias("bhqk", chained=True),
    "symmetric bias": _function(
        lambda xp, bias: lambda s, b, h, q, k: s + bias[q, k] + bias[k, q],
        "score + bias(q_idx, kv_idx) + bias(kv_idx, q_idx)",
        captures=lambda n: {"bias": n.randn(n.extent, n.extent)},
        capture_grads={"bias": (("q_idx, kv_idx", "grad"), ("kv_idx, q_idx", "grad"))},
    ),
    "scalar": _function(
        lambda xp, factor: lambda s, b, h, q, k: s * factor,
        "score * factor()",
        "grad * factor()",
        lambda n: {"factor": n.randn().abs() + 0.5},
        {"factor": ("", "grad * score")},
    ),
    "one element": _function(
        lambda xp, factor: lambda s, b, h, q, k: s * factor[0],
        "score * factor(0)",
        "grad * factor(0)",
        lambda n: {"factor": n.randn(1).abs() + 0.5},
        {"factor": ("0", "grad * score")},
    ),
    "distance": _function(
        lambda xp, places: lambda s, b, h, q, k: s - ((places[q] - places[k]) ** 2).sum(-1),
        """float far = 0.0f;
for (int i = 0; i < 3; ++i) {
    const float step = places(q_idx, i) - places(kv_idx, i);
    far += step * step;
}
return score - far;""",
        captures=lambda n: {"places": n.randn(n.extent, 3)},
        capture_grads={
            "places": [
                (f"{own}_idx, {i}", f"-2 * grad * (places({own}_idx, {i}) - places({other}_idx, {i}))")
                for own, other in (("q", "kv"), ("kv", "q"))
                for i in range(3)
            ]
        },
        in_torch=lambda places: lambda s, b, h, q, k: s - (places[q] - places[k]).square().sum(-1),
    ),
    "xor": _function(
        lambda xp: lambda s, b, h, q, k: xp.where((q ^ k) % 2 == 0, s, s * 0.5),
        "(q_idx ^ kv_idx) % 2 == 0 ? score : score * 0.5f",
        "(q_idx ^ kv_idx) % 2 == 0 ? grad : grad * 0.5f",
    ),
    "documents": _function(
        lambda xp, documents: lambda s, b, h, q, k: xp.where(documents[b, q] == documents[b, k], s, -inf),
        "documents(b, q_idx) == documents(b, kv_idx) ? score : -kInfinity",
        "documents(b, q_idx) == documents(b, kv_idx) ? grad : 0.0f",
        lambda n: {"documents": n.documents()},
    ),
    # Positions count from the beginning of a document.
    "nested": _function(
        lambda xp, document, offsets: (
            lambda s, b, h, q, k: xp.where(
                document[q] == document[k],
                s + 0.01 * ((q - offsets[document[q]]) - (k - offsets[document[k]])),
                -inf,
            )
        ),
        """const i64 own = document(q_idx), other = document(kv_idx);
const i64 apart = (q_idx - offsets(own)) - (kv_idx - offsets(other));
return own == other ? score + 0.01f * apart : -kInfinity;""",
        "document(q_idx) == document(kv_idx) ? grad : 0.0f",
        lambda n: {"document": n.document(), "offsets": n.offsets()},
    ),
    # The bias is stored in pages, which a table of each request orders.
    "paged": _function(
        lambda xp, pages, bias, page: lambda s, b, h, q, k: s + bias[pages[b, k // page] * page + k % page],
        "score + bias(pages(b, kv_idx / page) * page + kv_idx % page)",
        captures=lambda n: {"pages": n.pages(), "bias": n.randn(-(-n.s_k // PAGE) * PAGE), "page": PAGE},
        capture_grads={"bias": ("pages(b, kv_idx / page) * page + kv_idx % page", "grad")},
    ),
    # A table is indexed by a value of a narrow type that was loaded.
    "gathered": _function(
        lambda xp, table, narrow: lambda s, b, h, q, k: s + table[b, narrow[k] + 0 * k],
        "score + table(b, narrow(kv_idx))",
        captures=lambda n: {
            "table": n.randn(n.b, 64, dtype="bfloat16"),
            "narrow": n.integers(-64, 64, n.s_k, dtype="int8"),
        },
        capture_grads={"table": ("b, narrow(kv_idx)", "grad")},
        in_torch=lambda table, narrow: lambda s, b, h, q, k: s + table[b][narrow[k].int()],
    ),
}
"""Score functions by name."""

BIASES: dict[str, Builder] = {
    f"bias {' '.join(order)}": _bias("".join(order))
    for count in (2, 3, 4)
    for order in permutations("bhqk", count)
}
"""Biases of two to four dimensions in every order, by the names that some have in SCORES too."""

MASKS: dict[str, Builder] = {
    "causal": _mask(lambda xp: lambda b, h, q, k: q >= k, "q_idx >= kv_idx"),
    "window": _mask(
        lambda xp, width: lambda b, h, q, k: (q >= k) & (q - k <= width),
        "q_idx >= kv_idx && q_idx - kv_idx <= width",
        captures=lambda n: {"width": max(1, n.s_k // 5)},
    ),
    "documents": _mask(
        lambda xp, documents: lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k),
        "documents(b, q_idx) == documents(b, kv_idx) && q_idx >= kv_idx",
        captures=lambda n: {"documents": n.documents()},
    ),
    "prefix": _mask(
        lambda xp, prefix: lambda b, h, q, k: (k < prefix[b]) | (q >= k),
        "kv_idx < prefix(b) || q_idx >= kv_idx",
        captures=lambda n: {"prefix": n.integers(0, n.s_k + 1, n.b, dtype="int64")},
    ),
    "dilated": _mask(
        lambda xp: lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
        "q_idx >= kv_idx && (q_idx - kv_idx) % 3 == 0",
    ),
    "diagonal": _mask(lambda xp: lambda b, h, q, k: q // 48 == k // 48, "q_idx / 48 == kv_idx / 48"),
    "checkered": _mask(
        lambda xp: lambda b, h, q, k: (q // 128 + k // 128) % 3 == 0, "(q_idx / 128 + kv_idx / 128) % 3 == 0"
    ),
    "odd keys": _mask(lambda xp: lambda b, h, q, k: (q >= 0) & (k % 2 == 1), "kv_idx % 2 == 1"),
    "padding": _mask(
        lambda xp, length: lambda b, h, q, k: (q < length[b]) & (k < length[b]),
        "q_idx < length(b) && kv_idx < length(b)",
        captures=lambda n: {"length": n.lengths()},
    ),
    "empty": _mask(lambda xp: lambda b, h, q, k: (q < 0) & (k < 0), "false"),
    "lower half": _mask(
        lambda xp, half: lambda b, h, q, k: (q >= half) & (k >= 0),
        "q_idx >= half",
        captures=lambda n: {"half": n.s_q // 2},
        in_torch=lambda half: lambda b, h, q, k: q >= half,
    ),
    "per batch": _mask(
        lambda xp: lambda b, h, q, k: abs(q - k) < 20 + 90 * b, "fabsf(q_idx - kv_idx) < 20 + 90 * b"
    ),
    "per head": _mask(lambda xp: lambda b, h, q, k: abs(q - k) <= 40 * h, "fabsf(q_idx - kv_idx) <= 40 * h"),
    "random": _mask(
        lambda xp, chosen: lambda b, h, q, k: chosen[q, k],
        "chosen(q_idx, kv_idx)",
        captures=lambda n: {"chosen": n.randn(n.s_q, n.s_k) > 0},
    ),
}
"""Masks by name."""
