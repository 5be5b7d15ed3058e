"""The formats of a paged cache: how a token's row is stored (cuda_src/mla/cache_rows.cuh)."""

from __future__ import annotations

from typing import NamedTuple

from .common import ceil_div

UNIT_TOKENS = 4
"""Tokens that a warp takes at a time."""


class CacheFormat(NamedTuple):
    """One way to store a token."""

    name: str
    code: int  # value of the define FORMAT
    d_nope: int  # columns before the RoPE columns
    d_qk: int  # all columns
    token_bytes: int  # of a token; they are the last dimension of a cache
    row_bytes: int
    """Bytes from a token's values to the next token's in a contiguous block. "model1" stores the scales of a
    block after its rows.
    """
    alignment: int  # the cache's address and its strides in bytes are multiples of it
    is_quantized: bool  # the columns before RoPE are FP8 with scales


V32 = CacheFormat("v32", 0, 512, 576, 656, 656, 16, True)
MODEL1 = CacheFormat("model1", 1, 448, 512, 584, 576, 8, True)
BF16_576 = CacheFormat("bf16 576", 2, 512, 576, 1152, 1152, 16, False)
BF16_512 = CacheFormat("bf16 512", 3, 448, 512, 1024, 1024, 16, False)
CACHE_FORMATS = (V32, MODEL1, BF16_576, BF16_512)
FORMATS = {"v32": (V32,), "model1": (MODEL1,), "bf16": (BF16_576, BF16_512)}
"""The formats that a public name stands for: one for each d_qk."""
QUANTIZED = {format.name: format for format in CACHE_FORMATS if format.is_quantized}
_MODEL1_BLOCK_MULTIPLE = 576


def padded_block_bytes(format: CacheFormat, page_block_size: int) -> int:
    """Bytes from block to block in a cache that is allocated here: "model1" blocks are multiples of 576."""
    block_bytes = page_block_size * format.token_bytes
    if format is not MODEL1:
        return block_bytes
    return ceil_div(block_bytes, _MODEL1_BLOCK_MULTIPLE) * _MODEL1_BLOCK_MULTIPLE
