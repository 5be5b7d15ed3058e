"""Flex attention: cases, their inputs, functions in several forms, and the reference on the device in torch.

The reference computes what `rawmla.reference` computes (the tests hold one against the other), for several
heads at a time. In the inputs' own dtype it is the plain torch that bounds of errors are measured by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from math import inf, nan, prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawmla.flex.block_mask import BlockMask
from rawmla.flex.mods import CudaMod

from .compare import Tolerance, measure
from .mha import changed_fields, in_gaps, problems_of_out

CHUNK_SCORES = 1 << 25
"""Scores of one step of the reference (256 MiB in float64), unless a single head has more."""

PAGE = 16
"""Keys of a page of the function "paged"."""

_ANY = Tolerance(absolute=inf, relative=inf)


# ---- functions


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
        grad, capture_grads: of a score function, as in `rawmla.CudaMod`.
        positive: scores have to be positive, and not too small.
        approximate: the kernel's instructions for it are.
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
        """The function for tensors of any shapes; `instead`: what it reads instead of captures."""
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
    """Sizes of the tensors that functions read: requests, query heads, query tokens, keys, and the device."""

    b: int
    h: int
    s_q: int
    s_k: int
    seed: int = 0
    device: str = "cuda"

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
        return self.integers(0, 5, self.b, max(self.s_q, self.s_k)).sort().values


Builder = Callable[[Sizes], Function]


def _plain(
    python: Callable[..., Any],
    code: str,
    arrays: Callable[..., Any],
    grad: str | None = None,
    positive: bool = False,
) -> Builder:
    """A function without captures; `arrays` takes xp and no captures."""
    made = Function(python, code, lambda xp, t, *at: arrays(xp, *at), grad=grad, positive=positive)
    return lambda sizes: made


def _same(
    function: Callable[..., Any], code: str, grad: str | None = None, positive: bool = False
) -> Builder:
    """A function without captures, written with operators that tensors and NumPy arrays share."""
    return _plain(function, code, lambda xp, *at: function(*at), grad, positive)


def _torch() -> Any:
    import torch

    return torch


def _softcap(sizes: Sizes) -> Function:
    cap = 2.0
    return Function(
        lambda s, b, h, q, k: cap * _torch().tanh(s / cap),
        "cap * tanhf(score / cap)",
        lambda xp, t, s, b, h, q, k: t.cap * xp.tanh(s / t.cap),
        {"cap": cap},
        "const float t = tanhf(score / cap);\nreturn grad * (1.0f - t * t);",
        approximate=True,
    )


def _relative_table(sizes: Sizes) -> Function:
    table, shift = sizes.randn(sizes.s_q + sizes.s_k), sizes.s_k
    return Function(
        lambda s, b, h, q, k: s + table[q - k + shift],
        "score + table(q_idx - kv_idx + shift)",
        lambda xp, t, s, b, h, q, k: s + t.table[q - k + t.shift],
        {"table": table, "shift": shift},
        "grad",
        {"table": ("q_idx - kv_idx + shift", "grad")},
    )


def _clamped_table(sizes: Sizes) -> Function:
    table = sizes.randn(33)
    return Function(
        lambda s, b, h, q, k: s + table[_torch().clamp(q - k, -16, 16) + 16],
        "score + table(max_int(min_int(q_idx - kv_idx, 16), -16) + 16)",
        lambda xp, t, s, b, h, q, k: s + t.table[xp.clip(q - k, -16, 16) + 16],
        {"table": table},
        "grad",
        {"table": ("max_int(min_int(q_idx - kv_idx, 16), -16) + 16", "grad")},
    )


def _alibi(sizes: Sizes) -> Function:
    heads = sizes.h
    return Function(
        lambda s, b, h, q, k: s + _torch().exp2(-((h + 1) * 8.0 / heads)) * (k - q),
        "score + exp2f(-(h + 1) * 8.0f / heads) * (kv_idx - q_idx)",
        lambda xp, t, s, b, h, q, k: s + 2.0 ** (-((h + 1) * 8.0 / t.heads)) * (k - q),
        {"heads": heads},
        "grad",
    )


def _alibi_table(sizes: Sizes) -> Function:
    slopes = sizes.randn(sizes.h, dtype="bfloat16").abs() / 4
    return Function(
        lambda s, b, h, q, k: s - slopes[h].float() * (q - k).abs(),
        "score - slopes(h) * fabsf(q_idx - kv_idx)",
        lambda xp, t, s, b, h, q, k: s - t.slopes[h] * abs(q - k),
        {"slopes": slopes},
        "grad",
        {"slopes": ("h", "-grad * fabsf(q_idx - kv_idx)")},
    )


def _head_offset(sizes: Sizes) -> Function:
    offset = sizes.randn(sizes.h)  # alike for all keys of a row: lse shows it
    return Function(
        lambda s, b, h, q, k: s + offset[h],
        "score + offset(h)",
        lambda xp, t, s, b, h, q, k: s + t.offset[h],
        {"offset": offset},
        "grad",
        {"offset": ("h", "grad")},
    )


def _head_scale(sizes: Sizes) -> Function:
    factor = sizes.randn(sizes.h, dtype="float16")
    return Function(
        lambda s, b, h, q, k: s * factor[h],
        "score * factor(h)",
        lambda xp, t, s, b, h, q, k: s * t.factor[h],
        {"factor": factor},
        "grad * factor(h)",
        {"factor": ("h", "grad * score")},
    )


def _query_scale(sizes: Sizes) -> Function:
    factor = sizes.randn(sizes.h, sizes.s_q)
    return Function(
        lambda s, b, h, q, k: s * factor[h, q],
        "score * factor(h, q_idx)",
        lambda xp, t, s, b, h, q, k: s * t.factor[h, q + 0 * k],
        {"factor": factor},
        "grad * factor(h, q_idx)",
        {"factor": ("h, q_idx", "grad * score")},
    )


def _filled(sizes: Sizes) -> Function:
    """Scores are filled with a large negative number, as models mask them; some rows are filled whole."""
    fill = sizes.randn(sizes.s_k) * 0 - 1e9
    kept = "q_idx >= kv_idx && q_idx % 50 != 7"
    return Function(
        lambda s, b, h, q, k: _torch().where((q >= k) & (q % 50 != 7), s, fill[k]),
        f"{kept} ? score : fill(kv_idx)",
        lambda xp, t, s, b, h, q, k: xp.where((q >= k) & (q % 50 != 7), s, t.fill[k]),
        {"fill": fill},
        f"{kept} ? grad : 0.0f",
        {"fill": ("kv_idx", f"{kept} ? 0.0f : grad")},
    )


def _head_gate(sizes: Sizes) -> Function:
    gate = sizes.randn(sizes.h)
    return Function(
        lambda s, b, h, q, k: s * _torch().sigmoid(gate[h]),
        "score / (1.0f + expf(-gate(h)))",
        lambda xp, t, s, b, h, q, k: s / (1 + xp.exp(-t.gate[h])),
        {"gate": gate},
        "grad / (1.0f + expf(-gate(h)))",
        {
            "gate": (
                "h",
                "grad * score * expf(-gate(h)) / ((1.0f + expf(-gate(h))) * (1.0f + expf(-gate(h))))",
            )
        },
    )


def _bias(order: str, dtype: str = "float32", chained: bool = False) -> Builder:
    """A bias that is indexed in this order by b, h, q and k."""

    def build(sizes: Sizes) -> Function:
        extents = dict(zip("bhqk", (sizes.b, sizes.h, sizes.s_q, sizes.s_k), strict=True))
        bias = sizes.randn(*[extents[letter] for letter in order], dtype=dtype)

        def python(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            at = dict(zip("bhqk", (b, h, q, k), strict=True))
            if not chained:
                return s + bias[tuple(at[letter] for letter in order)]
            found = bias
            for letter in order:
                found = found[at[letter]]
            return s + found

        def arrays(xp: Any, t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            at = dict(zip("bhqk", (b, h, q, k), strict=True))
            return s + t.bias[tuple(at[letter] for letter in order)]

        names = dict(zip("bhqk", ("b", "h", "q_idx", "kv_idx"), strict=True))
        place = ", ".join(names[letter] for letter in order)
        return Function(
            python, f"score + bias({place})", arrays, {"bias": bias}, "grad", {"bias": (place, "grad")}
        )

    return build


def _symmetric(sizes: Sizes) -> Function:
    extent = max(sizes.s_q, sizes.s_k)
    bias = sizes.randn(extent, extent)
    return Function(
        lambda s, b, h, q, k: s + bias[q, k] + bias[k, q],
        "score + bias(q_idx, kv_idx) + bias(kv_idx, q_idx)",
        lambda xp, t, s, b, h, q, k: s + t.bias[q, k] + t.bias[k, q],
        {"bias": bias},
        "grad",
        {"bias": (("q_idx, kv_idx", "grad"), ("kv_idx, q_idx", "grad"))},
    )


def _scalar(sizes: Sizes) -> Function:
    factor = sizes.randn().abs() + 0.5
    return Function(
        lambda s, b, h, q, k: s * factor,
        "score * factor()",
        lambda xp, t, s, b, h, q, k: s * t.factor,
        {"factor": factor},
        "grad * factor()",
        {"factor": ("", "grad * score")},
    )


def _one_element(sizes: Sizes) -> Function:
    factor = sizes.randn(1).abs() + 0.5
    return Function(
        lambda s, b, h, q, k: s * factor[0],
        "score * factor(0)",
        lambda xp, t, s, b, h, q, k: s * t.factor[0],
        {"factor": factor},
        "grad * factor(0)",
        {"factor": ("0", "grad * score")},
    )


def _distance(sizes: Sizes) -> Function:
    places = sizes.randn(max(sizes.s_q, sizes.s_k), 3)
    return Function(
        lambda s, b, h, q, k: s - (places[q] - places[k]).square().sum(-1),
        """float far = 0.0f;
for (int i = 0; i < 3; ++i) {
    const float step = places(q_idx, i) - places(kv_idx, i);
    far += step * step;
}
return score - far;""",
        lambda xp, t, s, b, h, q, k: s - ((t.places[q] - t.places[k]) ** 2).sum(-1),
        {"places": places},
        "grad",
        {
            "places": [
                (f"{own}_idx, {i}", f"-2 * grad * (places({own}_idx, {i}) - places({other}_idx, {i}))")
                for own, other in (("q", "kv"), ("kv", "q"))
                for i in range(3)
            ]
        },
    )


def _documents_score(sizes: Sizes) -> Function:
    documents = sizes.documents()
    return Function(
        lambda s, b, h, q, k: _torch().where(documents[b, q] == documents[b, k], s, -inf),
        "documents(b, q_idx) == documents(b, kv_idx) ? score : -kInfinity",
        lambda xp, t, s, b, h, q, k: xp.where(t.documents[b, q] == t.documents[b, k], s, -inf),
        {"documents": documents},
        "documents(b, q_idx) == documents(b, kv_idx) ? grad : 0.0f",
    )


def _nested(sizes: Sizes) -> Function:
    """Positions count from the beginning of a document, which offsets of int64 say."""
    torch = _torch()
    extent = max(sizes.s_q, sizes.s_k)
    offsets = torch.tensor([0, extent // 3, extent // 2, extent], device=sizes.device)
    document = torch.bucketize(torch.arange(extent, device=sizes.device), offsets[1:], right=True)

    def python(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        own, other = document[q], document[k]
        apart = (q - offsets[own]) - (k - offsets[other])
        return torch.where(own == other, s + 0.01 * apart, -inf)

    def arrays(xp: Any, t: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        own, other = t.document[q], t.document[k]
        apart = (q - t.offsets[own]) - (k - t.offsets[other])
        return xp.where(own == other, s + 0.01 * apart, -inf)

    code = """const i64 own = document(q_idx), other = document(kv_idx);
const i64 apart = (q_idx - offsets(own)) - (kv_idx - offsets(other));
return own == other ? score + 0.01f * apart : -kInfinity;"""
    grad = "document(q_idx) == document(kv_idx) ? grad : 0.0f"
    return Function(python, code, arrays, {"document": document, "offsets": offsets}, grad)


def _paged(sizes: Sizes) -> Function:
    """Add a bias that is stored in pages, which a table of each request orders."""
    torch = _torch()
    count = -(-sizes.s_k // PAGE)
    pages = torch.stack([sizes.randn(count + i)[:count].argsort() for i in range(sizes.b)])
    bias = sizes.randn(count * PAGE)
    return Function(
        lambda s, b, h, q, k: s + bias[pages[b, k // PAGE] * PAGE + k % PAGE],
        "score + bias(pages(b, kv_idx / page) * page + kv_idx % page)",
        lambda xp, t, s, b, h, q, k: s + t.bias[t.pages[b, k // PAGE] * PAGE + k % PAGE],
        {"pages": pages, "bias": bias, "page": PAGE},
        "grad",
        {"bias": ("pages(b, kv_idx / page) * page + kv_idx % page", "grad")},
    )


def _gathered(sizes: Sizes) -> Function:
    """A table that is indexed by a load, of a narrow type."""
    table, buckets = sizes.randn(sizes.b, 64, dtype="bfloat16"), sizes.integers(-64, 64, sizes.s_k)
    narrow = buckets.to(_torch().int8)
    return Function(
        lambda s, b, h, q, k: s + table[b][narrow[k].int()],
        "score + table(b, narrow(kv_idx))",
        lambda xp, t, s, b, h, q, k: s + t.table[b, t.narrow[k] + 0 * k],  # 0 * k: as an index has to be
        {"table": table, "narrow": narrow},
        "grad",
        {"table": ("b, narrow(kv_idx)", "grad")},
    )


SCORES: dict[str, Builder] = {
    "identity": _same(lambda s, b, h, q, k: s, "score", "grad"),
    "twice": _same(lambda s, b, h, q, k: 2 * s, "2 * score", "2 * grad"),
    "square": _same(lambda s, b, h, q, k: s**2, "score * score", "2 * score * grad"),
    "reciprocal": _same(
        lambda s, b, h, q, k: 1 / s, "1.0f / score", "-grad / (score * score)", positive=True
    ),
    "log": _plain(
        lambda s, b, h, q, k: _torch().where(s > 0, _torch().log(s), -inf),
        "score > 0.0f ? logf(score) : -kInfinity",
        lambda xp, s, b, h, q, k: xp.where(s > 0, xp.log(s), -inf),
        "score > 0.0f ? grad / score : 0.0f",
    ),
    "softcap": _softcap,
    "silu": _plain(
        lambda s, b, h, q, k: _torch().nn.functional.silu(s),
        "score / (1.0f + expf(-score))",
        lambda xp, s, b, h, q, k: s / (1 + xp.exp(-s)),
        "const float t = 1.0f / (1.0f + expf(-score));\nreturn grad * t * (1.0f + score * (1.0f - t));",
    ),
    "trigonometric": _plain(
        lambda s, b, h, q, k: 2 * _torch().sin(s) + _torch().cos(s),
        "2 * torch_sin(score) + torch_cos(score)",
        lambda xp, s, b, h, q, k: 2 * xp.sin(s) + xp.cos(s),
        "grad * (2 * torch_cos(score) - torch_sin(score))",
    ),
    "causal": _plain(
        lambda s, b, h, q, k: _torch().where(q >= k, s, -inf),
        "q_idx >= kv_idx ? score : -kInfinity",
        lambda xp, s, b, h, q, k: xp.where(q >= k, s, -inf),
        "q_idx >= kv_idx ? grad : 0.0f",
    ),
    "inverse causal": _plain(
        lambda s, b, h, q, k: _torch().where(q <= k, s, -inf),
        "q_idx <= kv_idx ? score : -kInfinity",
        lambda xp, s, b, h, q, k: xp.where(q <= k, s, -inf),
        "q_idx <= kv_idx ? grad : 0.0f",
    ),
    "filled": _filled,
    "relative": _same(lambda s, b, h, q, k: s + (q - k), "score + (q_idx - kv_idx)", "grad"),
    "relative table": _relative_table,
    "clamped table": _clamped_table,
    "absolute": _same(
        lambda s, b, h, q, k: s - 0.05 * abs(q - k), "score - 0.05f * fabsf(q_idx - kv_idx)", "grad"
    ),
    "alibi": _alibi,
    "alibi table": _alibi_table,
    "head offset": _head_offset,
    "head scale": _head_scale,
    "query scale": _query_scale,
    "head gate": _head_gate,
    "bias q k": _bias("qk"),
    "bias k q": _bias("kq"),
    "bias b k": _bias("bk", "float16"),
    "bias h q k": _bias("hqk", "bfloat16"),
    "bias q h k": _bias("qhk"),
    "bias b h q k": _bias("bhqk"),
    "bias k q h b": _bias("kqhb"),
    "chained bias": _bias("bhqk", chained=True),
    "symmetric bias": _symmetric,
    "scalar": _scalar,
    "one element": _one_element,
    "distance": _distance,
    "xor": _plain(
        lambda s, b, h, q, k: _torch().where((q ^ k) % 2 == 0, s, s * 0.5),
        "(q_idx ^ kv_idx) % 2 == 0 ? score : score * 0.5f",
        lambda xp, s, b, h, q, k: xp.where((q ^ k) % 2 == 0, s, s * 0.5),
        "(q_idx ^ kv_idx) % 2 == 0 ? grad : grad * 0.5f",
    ),
    "documents": _documents_score,
    "nested": _nested,
    "paged": _paged,
    "gathered": _gathered,
}
"""Score functions by name."""

BIASES: dict[str, Builder] = {
    f"bias {' '.join(order)}": _bias("".join(order))
    for count in (2, 3, 4)
    for order in permutations("bhqk", count)
}
"""Biases of two to four dimensions in every order, by the names that some have in SCORES too."""


def _window(sizes: Sizes) -> Function:
    width = max(1, sizes.s_k // 5)

    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k <= width)

    code = "q_idx >= kv_idx && q_idx - kv_idx <= width"
    return Function(function, code, lambda xp, t, *at: function(*at), {"width": width})


def _documents_mask(sizes: Sizes) -> Function:
    documents = sizes.documents()
    return Function(
        lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k),
        "documents(b, q_idx) == documents(b, kv_idx) && q_idx >= kv_idx",
        lambda xp, t, b, h, q, k: (t.documents[b, q] == t.documents[b, k]) & (q >= k),
        {"documents": documents},
    )


def _prefix(sizes: Sizes) -> Function:
    prefix = sizes.integers(0, sizes.s_k + 1, sizes.b, dtype="int64")
    return Function(
        lambda b, h, q, k: (k < prefix[b]) | (q >= k),
        "kv_idx < prefix(b) || q_idx >= kv_idx",
        lambda xp, t, b, h, q, k: (k < t.prefix[b]) | (q >= k),
        {"prefix": prefix},
    )


def _padding(sizes: Sizes) -> Function:
    """The tokens of each request end early; with one request at least, without any."""
    length = sizes.integers(0, max(sizes.s_q, sizes.s_k) + 1, sizes.b)
    length[-1] = 0
    return Function(
        lambda b, h, q, k: (q < length[b]) & (k < length[b]),
        "q_idx < length(b) && kv_idx < length(b)",
        lambda xp, t, b, h, q, k: (q < t.length[b]) & (k < t.length[b]),
        {"length": length},
    )


def _lower_half(sizes: Sizes) -> Function:
    half = sizes.s_q // 2
    return Function(
        lambda b, h, q, k: q >= half,
        "q_idx >= half",
        lambda xp, t, b, h, q, k: (q >= t.half) & (k >= 0),
        {"half": half},
    )


def _random(sizes: Sizes) -> Function:
    chosen = sizes.randn(sizes.s_q, sizes.s_k) > 0
    return Function(
        lambda b, h, q, k: chosen[q, k],
        "chosen(q_idx, kv_idx)",
        lambda xp, t, b, h, q, k: t.chosen[q, k],
        {"chosen": chosen},
    )


MASKS: dict[str, Builder] = {
    "causal": _same(lambda b, h, q, k: q >= k, "q_idx >= kv_idx"),
    "window": _window,
    "documents": _documents_mask,
    "prefix": _prefix,
    "dilated": _same(
        lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0), "q_idx >= kv_idx && (q_idx - kv_idx) % 3 == 0"
    ),
    "diagonal": _same(lambda b, h, q, k: q // 48 == k // 48, "q_idx / 48 == kv_idx / 48"),
    "checkered": _same(
        lambda b, h, q, k: (q // 128 + k // 128) % 3 == 0, "(q_idx / 128 + kv_idx / 128) % 3 == 0"
    ),
    "odd keys": _same(lambda b, h, q, k: (q >= 0) & (k % 2 == 1), "kv_idx % 2 == 1"),
    "padding": _padding,
    "empty": _same(lambda b, h, q, k: (q < 0) & (k < 0), "false"),
    "lower half": _lower_half,
    "per batch": _same(lambda b, h, q, k: abs(q - k) < 20 + 90 * b, "fabsf(q_idx - kv_idx) < 20 + 90 * b"),
    "per head": _same(lambda b, h, q, k: abs(q - k) <= 40 * h, "fabsf(q_idx - kv_idx) <= 40 * h"),
    "random": _random,
}  # fmt: skip
"""Masks by name."""


# ---- cases


@dataclass(frozen=True)
class FlexCase:
    """One call.

    Attributes:
        b, b_kv: requests of q, and of k and v: b or 1; 0 is b.
        h_q, h_kv, s_q, s_k, d_qk, d_v: heads, tokens and head dimensions.
        dtype, kv_dtype: the dtype of q, and the one of k and v if it is another.
        score, mask: names in SCORES or BIASES, and in MASKS; "": none. With a mask there are lists of its
            blocks.
        block: query tokens and keys of a block.
        separate: whether full blocks have lists of their own.
        layout: of q, k and v: "plain" (contiguous), "slice" (of a larger array, all dimensions), "tokens"
            (the heads of a token one after the other).
        scale: as in the call.
        gap: what memory holds that no result may depend on: around the arrays, K of keys that no query
            attends, V of keys in no listed block.
        gap_keys: V holds it only in runs of this many keys, none of which is in a listed block.
    """

    b: int = 2
    b_kv: int = 0
    h_q: int = 4
    h_kv: int = 4
    s_q: int = 256
    s_k: int = 256
    d_qk: int = 64
    d_v: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    score: str = ""
    mask: str = ""
    block: tuple[int, int] = (128, 128)
    separate: bool = True
    layout: str = "plain"
    scale: float | None = None
    gap: float = nan
    gap_keys: int = 128
    seed: int = 0

    @property
    def id(self) -> str:
        """What differs from the defaults."""
        return changed_fields(self)

    def sizes(self, device: str) -> Sizes:
        """For its functions."""
        return Sizes(self.b, self.h_q, self.s_q, self.s_k, self.seed, device)


@dataclass
class FlexInputs:
    """The arrays and functions of a call; `block_mask` has the mask as a function of Python."""

    case: FlexCase
    q: Any
    k: Any
    v: Any
    score: Function | None
    mask: Function | None
    block_mask: BlockMask | None

    def keywords(self, form: str = "python") -> dict[str, Any]:
        """Arguments of the call that say how scores are made; functions in one form: "python" or "cuda"."""
        block_mask = self.block_mask
        if block_mask is not None and self.mask is not None:
            block_mask = with_mask_mod(block_mask, self.mask.form(form))
        return {
            "score_mod": None if self.score is None else self.score.form(form),
            "block_mask": block_mask,
            "scale": self.case.scale,
            "enable_gqa": self.case.h_q != self.case.h_kv,
        }


def with_mask_mod(block_mask: BlockMask, mask_mod: Any) -> BlockMask:
    """The same lists with another function."""
    parts: list[Any] = [*block_mask.as_tuple(flatten=False)[:-1], mask_mod]
    return BlockMask(*parts)


def make_flex_inputs(case: FlexCase, device: str = "cuda") -> FlexInputs:
    """Inputs of normal random numbers, of their absolute values where scores have to be positive."""
    import torch

    score, mask = (
        None if not name else table[name](case.sizes(device))
        for name, table in ((case.score, BIASES | SCORES), (case.mask, MASKS))
    )
    b_kv = case.b_kv or case.b
    draw = torch.Generator(device).manual_seed(case.seed)
    shapes = {
        "q": (case.b, case.h_q, case.s_q, case.d_qk),
        "k": (b_kv, case.h_kv, case.s_k, case.d_qk),
        "v": (b_kv, case.h_kv, case.s_k, case.d_v),
    }
    values = {name: torch.randn(shape, generator=draw, device=device) for name, shape in shapes.items()}
    if score is not None and score.positive:
        values["q"], values["k"] = values["q"].abs(), values["k"].abs()
    block_mask = None
    if mask is not None:
        seen = attended(mask, case, device)
        lengths = (case.s_q, case.s_k)
        block_mask = block_mask_of(seen, lengths, case.block, mask.python, separate=case.separate)
        if case.s_q and case.s_k:
            listed = _whole_runs(_of_kv_heads(listed_keys(block_mask), case), case.gap_keys)
            hidden = ~_of_kv_heads(seen.any(2), case), ~listed
            values["k"][hidden[0]], values["v"][hidden[1]] = case.gap, case.gap
    made = []
    for name in ("q", "k", "v"):
        dtype = case.kv_dtype if case.kv_dtype and name != "q" else case.dtype
        array = empty_array(shapes[name], case.layout, case.gap, getattr(torch, dtype), device)
        made.append(array.copy_(values[name]))
    q, k, v = made
    return FlexInputs(case, q, k, v, score, mask, block_mask)


def empty_array(shape: tuple[int, ...], layout: str, gap: float, dtype: Any, device: str) -> Any:
    """An array `[b, heads, tokens, columns]` full of `gap`, and around it as the layout has it."""
    b, heads, tokens, columns = shape
    if layout == "tokens":
        return in_gaps((b, tokens, heads, columns), "plain", gap, dtype, device).transpose(1, 2)
    return in_gaps(shape, layout, gap, dtype, device)


def attended(mask: Function, case: FlexCase, device: str) -> Any:
    """bool `[B, H, s_q, s_k]`, B and H 1 where the mask does not depend on the request or head."""
    import torch

    extents = (case.b, case.h_q, case.s_q, case.s_k)
    at = [
        torch.arange(extent, device=device).view([-1 if i == axis else 1 for i in range(4)])
        for axis, extent in enumerate(extents)
    ]
    seen = mask.torch()(*at)
    batches, heads = ((1, 1) + tuple(seen.shape))[-4:-2]
    return seen.expand(batches, heads, case.s_q, case.s_k)


def _of_kv_heads(keys: Any, case: FlexCase) -> Any:
    """From `[B, H, s_k]`, by query heads, to `[b_kv, h_kv, s_k]`: those that a query head marks."""
    keys = keys.expand(case.b, case.h_q, case.s_k).unflatten(1, (case.h_kv, -1)).any(2)
    return keys.any(0, keepdim=True) if case.b_kv == 1 else keys


def _whole_runs(keys: Any, size: int) -> Any:
    """bool `[.., s_k]`: the keys of aligned runs of which one is marked."""
    runs = keys.new_zeros((*keys.shape[:-1], -(-keys.shape[-1] // size), size))
    runs.flatten(-2)[..., : keys.shape[-1]] = keys
    return runs.any(-1).repeat_interleave(size, -1)[..., : keys.shape[-1]]


def block_mask_of(
    seen: Any,
    lengths: tuple[int, int],
    block: tuple[int, int],
    mask_mod: Any,
    *,
    separate: bool = True,
    by_columns: bool = False,
) -> BlockMask:
    """The mask of what is attended, bool `[B, H, s_q, s_k]`, in torch alone; `by_columns`: with the lists of
    columns, which a backward pass reads.
    """
    import torch

    rows, columns = (-(-length // size) for length, size in zip(lengths, block, strict=True))
    padded = seen.new_zeros((*seen.shape[:2], rows * block[0], columns * block[1]))
    padded[:, :, : lengths[0], : lengths[1]] = seen
    blocks = padded.view(*seen.shape[:2], rows, block[0], columns, block[1])
    some, full = blocks.any(5).any(3), blocks.all(5).all(3)
    kinds = [some & ~full, full] if separate else [some, None]
    kinds += [None if x is None else x.mT for x in kinds] if by_columns else [None, None]
    parts: list[Any] = [lengths]
    for listed in kinds:
        if listed is None:
            parts += [None, None]
            continue
        order = torch.argsort((~listed).int(), dim=-1, stable=True)
        parts += [listed.sum(-1, dtype=torch.int32), order.int()]
    parts += [block, mask_mod]
    return BlockMask(*parts)


def listed_keys(block_mask: Any) -> Any:
    """bool `[B, H, s_k]`: the keys in blocks that a row lists."""
    partial_blocks, full = listed_positions(block_mask)
    return (partial_blocks | full).any(2)


def listed_positions(block_mask: Any) -> tuple[Any, Any]:
    """bool `[B, H, s_q, s_k]`, of partial and of full blocks: the positions in listed ones."""
    import torch

    (s_q, s_k), (size_q, size_k) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    found: list[Any] = []
    for name in ("kv", "full_kv"):
        counts, indices = (getattr(block_mask, f"{name}_{what}") for what in ("num_blocks", "indices"))
        if counts is None:
            found.append(torch.zeros_like(found[0]))
            continue
        columns = -(-s_k // size_k)
        order = torch.arange(indices.shape[-1], device=indices.device)
        valid = (order < counts[..., None]) & (indices >= 0) & (indices < columns)
        dense = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
        dense.scatter_(-1, torch.where(valid, indices, columns).long(), True)
        at_q = torch.arange(s_q, device=indices.device) // size_q
        at_k = torch.arange(s_k, device=indices.device) // size_k
        found.append(dense[..., at_q, :][..., at_k])
    return found[0], found[1]


# ---- reference


def reference(inputs: FlexInputs, dtype: Any = None) -> tuple[Any, Any, Any]:
    """out `[B, Hq, L, Ev]`, lse and max_scores `[B, Hq, L]`, as `rawmla.reference` defines them.

    Products have the type `dtype`, None: float64. Their scores are float32 at least.
    """
    import torch

    case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v
    dtype = torch.float64 if dtype is None else dtype
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    (b, h_q, s_q, d_qk), (b_kv, h_kv, s_k, d_v) = q.shape, v.shape
    scale = d_qk**-0.5 if case.scale is None else case.scale
    if case.kv_dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    out = torch.zeros((b, h_q, s_q, d_v), dtype=dtype, device=q.device)
    lse = torch.full((b, h_q, s_q), -inf, dtype=torch.float64, device=q.device)
    top = lse.clone()
    if not prod((b, s_q, s_k)):
        return out, lse, top
    score_mod = None if inputs.score is None else inputs.score.torch()
    mask_mod = None if inputs.mask is None else inputs.mask.torch()
    lists = None if inputs.block_mask is None else listed_positions(inputs.block_mask)
    i, j = torch.arange(s_q, device=q.device)[:, None], torch.arange(s_k, device=q.device)
    for part in torch.arange(b * h_q, device=q.device).split(max(1, CHUNK_SCORES // (s_q * s_k))):
        request, head = part // h_q, part % h_q
        request_k, head_k = request % b_kv, head // (h_q // h_kv)
        at = (request[:, None, None], head[:, None, None], i, j)
        products = q[request, head].to(dtype) @ k[request_k, head_k].to(dtype).transpose(1, 2)
        scores = products.to(exact) * scale
        if score_mod is not None:
            scores = score_mod(scores, *at).to(exact)
        values = v[request_k, head_k].to(dtype)
        if lists is not None:
            some, full = (x[request % x.shape[0], head % x.shape[1]] for x in lists)
            visible = full | some & mask_mod(*at) if mask_mod is not None else full | some
            scores = scores.masked_fill(~visible, -inf)
            values = values.masked_fill(~visible.any(1)[..., None], 0.0)
        most = scores.amax(-1)
        weights = torch.softmax(scores, dim=-1).masked_fill_((most == -inf)[..., None], 0.0)
        out[request, head] = weights.to(dtype) @ values
        lse[request, head] = torch.logsumexp(scores, dim=-1).double()
        top[request, head] = most.double()
    return out, lse, top


# ---- comparison


def check_flex(
    inputs: FlexInputs,
    got: tuple[Any, Any, Any],
    want: tuple[Any, Any, Any] | None = None,
    *,
    plain: bool = False,
) -> None:
    """Raise AssertionError unless a call's out, lse and max_scores (None: not given) are as exact as products
    in the inputs' dtype allow.

    The bounds are as in `check_mha`; max_scores has the bound of lse. Functions for which kernels have
    approximate instructions have the bounds of a softcap. With `plain` the mean error of out is also held
    against plain torch in the inputs' dtype: at most 2.1 times as much.
    """
    import torch

    case = inputs.case
    want = reference(inputs) if want is None else want
    if got[0].dtype != getattr(torch, case.dtype) or got[0].shape != want[0].shape:
        raise AssertionError(f"{case.id}: out is {got[0].dtype} {tuple(got[0].shape)}")
    if not want[0].numel():
        return
    approximate = any(f is not None and f.approximate for f in (inputs.score, inputs.mask))
    problems = problems_of_out(got[0], want[0], case.dtype, 4.0 if approximate else 1.0)
    if plain:
        in_torch = reference(inputs, got[0].dtype)[0]
        error, allowed = ((x.double() - want[0]).abs().mean().item() for x in (got[0], in_torch))
        if not error <= 2.1 * allowed:
            problems.append(f"mean error of out {error:.3g}, plain torch has {allowed:.3g}")
    for name, one, wanted in (("lse", got[1], want[1]), ("max_scores", got[2], want[2])):
        if one is None:
            continue
        if one.dtype != torch.float32 or one.shape != wanted.shape:
            raise AssertionError(f"{case.id}: {name} is {one.dtype} {tuple(one.shape)}")
        if measure(one, wanted, _ANY).misplaced:
            problems.append(f"{name} is infinite or NaN elsewhere than in the reference")
        finite = wanted.isfinite() & one.isfinite()
        excess = (one.double() - wanted)[finite].abs()
        if not approximate:
            excess = excess - 2e-6 * wanted[finite].abs()
        most = float(excess.max()) if excess.numel() else 0.0
        if not most <= (1e-2 if approximate else 1e-4):
            problems.append(f"error of {name} {most:.3g}")
    if problems:
        raise AssertionError(f"{case.id}: {'; '.join(problems)}")
