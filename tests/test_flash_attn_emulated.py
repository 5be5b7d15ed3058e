"""FlashAttention-2's calls over caches by rawmla's own kernels, on the emulated device."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from emulator import Emulator  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from rawmla.compat.flash_attn import fa2, fa2_cuda  # noqa: E402

LENGTHS, D = (9, 30), 59


def randn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def expected(q: Any, k: Any, v: Any) -> Any:
    """Attention of one query token of a request over its keys."""
    heads = [x.float().transpose(0, 1) for x in (q, k, v)]
    return scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1)


def test_caches_of_odd_columns(emulator: Emulator) -> None:
    """New tokens come into the caches themselves, which the kernels cannot read in place."""
    q, k, v = randn(2, 1, 4, D), randn(2, 1, 2, D), -randn(2, 1, 2, D)
    caches = randn(2, 40, 2, D), -randn(2, 40, 2, D)
    wanted = [cache.clone() for cache in caches]
    for cache, new in zip(wanted, (k, v), strict=True):
        cache[0, LENGTHS[0]], cache[1, LENGTHS[1]] = new[0, 0], new[1, 0]
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = fa2.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)
    assert all(map(torch.equal, caches, wanted)) and out.shape == q.shape
    for r, length in enumerate(LENGTHS):
        want = expected(q[r], *[cache[r, : length + 1] for cache in wanted])
        torch.testing.assert_close(out[r].float(), want, atol=4e-3, rtol=0)


@pytest.mark.parametrize("d", [D, 64])
def test_pages_have_no_gradient(d: int, emulator: Emulator) -> None:
    """Out is computed although q requires a gradient: its backward says that there is none."""
    q, pages = randn(2, 4, d).requires_grad_(), randn(5, 16, 2, d)
    table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 1, 2), (0, 9, 39)))
    out = fa2.flash_attn_varlen_func(q, pages, pages, starts_q, starts_k, 1, 30, block_table=table)
    for r, length in enumerate(LENGTHS):
        keys = pages[table[r].long()].flatten(0, 1)[:length]
        torch.testing.assert_close(
            out[r : r + 1].float(), expected(q[r : r + 1], keys, keys), atol=4e-3, rtol=0
        )
    with pytest.raises(NotImplementedError, match="block_table: rawmla has no gradient of keys in pages"):
        out.sum().backward()
    given = randn(2, 4, d)
    with torch.no_grad():
        written = fa2.flash_attn_varlen_func(
            q, pages, pages, starts_q, starts_k, 1, 30, block_table=table, out=given
        )
    assert written is given and torch.equal(given, out)


def test_generators_are_refused() -> None:
    x, error = randn(1, 1, 2, 8), "`generator` argument is no longer supported"
    numbers = (0.0, 1.0, True, -1, -1, 0.0, False)
    with pytest.raises(RuntimeError, match=error):
        fa2_cuda.fwd(x, x, x, None, None, *numbers, x)
    with pytest.raises(RuntimeError, match=error):
        fa2_cuda.bwd(x, x, x, x, x, x, None, None, None, None, *numbers, x)
