"""The twins in `transformers_twins` compute what `rawmla.reference` does."""

from __future__ import annotations

from typing import Any

import pytest

from rawmla import reference

torch = pytest.importorskip("torch")
import transformers_twins as twins  # noqa: E402

OPTIONS = [
    {"causal": True},
    {"causal": True, "window_size": (4, 0), "softcap": 5.0, "softmax_scale": 0.4},
    {"window_size": (2, 3), "attn_sink": True},
]


def same(name: str, arrays: dict[str, Any], options: dict[str, Any]) -> None:
    if options.get("attn_sink"):
        options = {**options, "attn_sink": torch.randn(4)}
    got, want = (getattr(module, name)(**arrays, **options) for module in (twins, reference))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), torch.as_tensor(other).float(), atol=2e-2, rtol=0)


def lengths(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("options", OPTIONS)
def test_twins(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = [torch.randn(3, s, h, 16).bfloat16() for s, h in ((5, 4), (9, 2), (9, 2))]
    same("flash_attn_func", {"q": q, "k": k, "v": v}, options)
    cache = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths(9, 4, 0)}
    same("flash_attn_with_kvcache", cache, options)
    same("flash_attn_with_kvcache", {**cache, "cache_leftpad": lengths(3, 2, 0)}, options)
    packed = {name: x.flatten(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
    packed |= {"cu_seqlens_q": lengths(0, 2, 9, 9, 15), "cu_seqlens_k": lengths(0, 9, 9, 20, 27)}
    packed |= {"max_seqlen_q": 7, "max_seqlen_k": 11}
    same("flash_attn_varlen_func", packed, options)
    packed |= {"seqused_q": lengths(1, 7, 0, 4), "seqused_k": lengths(4, 0, 3, 6)}
    same("flash_attn_varlen_func", packed, options)
