"""Tensor maps of arrays with tokens and heads: what multi-head attention copies by TMA."""

from __future__ import annotations

from .. import jit
from .common import CHUNK

MAX_MAPS = 1024
"""The most sets of maps that a prepared call keeps, by the addresses of its arrays."""
NO_MAP = bytes(jit.TENSOR_MAP_BYTES)
_ROWS = 64
"""Query rows of a warpgroup, the rows of a box."""


def query_map(
    address: int,
    dtype: str,
    d: int,
    group: int,
    heads: int,
    tokens: int,
    batches: int,
    strides: tuple[int, int, int],
) -> bytes:
    """The tensor map of q or out: boxes of 64 columns and 64 rows, tokens times ``group`` heads.

    ``strides`` as in `rawmla.kernels.mha_forward.MhaForwardCall`.
    """
    batch, token, head = strides
    return jit.tensor_map(
        address,
        dtype,
        (d, group, tokens, heads // group, batches),
        (2 * head, 2 * token, 2 * head * group, 2 * batch),
        (CHUNK, group, _ROWS // group, 1, 1),
        "128b",
        "256b",
    )


def key_map(
    address: int,
    dtype: str,
    d: int,
    keys: int,
    heads: int,
    tokens: int,
    batches: int,
    strides: tuple[int, int, int],
) -> bytes:
    """The tensor map of k or v: boxes of 64 columns and ``keys`` tokens.

    ``strides`` as in `rawmla.kernels.mha_forward.MhaForwardCall`.
    """
    batch, token, head = strides
    return jit.tensor_map(
        address,
        dtype,
        (d, tokens, heads, batches),
        (2 * token, 2 * head, 2 * batch),
        (CHUNK, keys, 1, 1),
        "128b",
        "256b",
    )
