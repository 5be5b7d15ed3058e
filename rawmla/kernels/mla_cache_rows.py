"""The layouts of a paged cache: cuda_src/mla/cache_rows.cuh."""

from __future__ import annotations

from typing import NamedTuple

from .common import ceil_div

__all__ = [
    "BF16_NARROW",
    "BF16_WIDE",
    "LAYOUTS",
    "MODEL1",
    "OF_FORMAT",
    "QUANTIZED",
    "UNIT_TOKENS",
    "V32",
    "CacheLayout",
    "padded_block_bytes",
]

UNIT_TOKENS = 4
"""Tokens that a warp takes at a time."""


class CacheLayout(NamedTuple):
    """One way to store a token.

    `code` is the value of the define LAYOUT; `token_bytes` what the last dimension of the array has,
    `row_bytes` the distance of tokens in a block, `alignment` what addresses and strides in bytes are
    multiples of.
    """

    name: str
    code: int
    d_nope: int
    token_bytes: int
    row_bytes: int
    alignment: int
    is_quantized: bool

    @property
    def d_qk(self) -> int:
        """Columns of a row, the 64 of RoPE among them."""
        return self.d_nope + 64


V32 = CacheLayout("v32", 0, 512, 656, 656, 16, True)
MODEL1 = CacheLayout("model1", 1, 448, 584, 576, 8, True)
BF16_WIDE = CacheLayout("bf16 576", 2, 512, 1152, 1152, 16, False)
BF16_NARROW = CacheLayout("bf16 512", 3, 448, 1024, 1024, 16, False)
LAYOUTS = (V32, MODEL1, BF16_WIDE, BF16_NARROW)
QUANTIZED = {layout.name: layout for layout in (V32, MODEL1)}
OF_FORMAT = {"v32": [V32], "model1": [MODEL1], "bf16": [BF16_WIDE, BF16_NARROW]}
_MODEL1_BLOCK_MULTIPLE = 576


def padded_block_bytes(layout: CacheLayout, page_block_size: int) -> int:
    """Distance of blocks in a cache that is allocated here: MODEL1 blocks are multiples of 576 bytes."""
    block_bytes = page_block_size * layout.token_bytes
    if layout is not MODEL1:
        return block_bytes
    return ceil_div(block_bytes, _MODEL1_BLOCK_MULTIPLE) * _MODEL1_BLOCK_MULTIPLE
