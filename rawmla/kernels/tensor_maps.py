"""Tensor maps: how a prepared call keeps them, and the maps of arrays in multi-head attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import jit
from .common import CHUNK

_MAX_MAPS = 1024
NO_MAP = bytes(jit.TENSOR_MAP_BYTES)
_ROWS = 64
"""Query rows of a warpgroup, the rows of a box."""


class TensorMaps(dict[Any, tuple[bytes, ...]]):
    """The tensor maps of a prepared call, by the addresses of its arrays; ``encode`` makes them from these.

    They are kept for 1,024 sets of addresses at a time: a model has one for each layer.
    """

    def __init__(self, encode: Callable[[Any], tuple[bytes, ...]]) -> None:
        self._encode = encode

    def __missing__(self, addresses: Any) -> tuple[bytes, ...]:
        if len(self) >= _MAX_MAPS:
            self.clear()
        maps = self[addresses] = self._encode(addresses)
        return maps


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
