"""Tensor maps: how a prepared call keeps them, and the maps of arrays in multi-head attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import jit
from .common import CHUNK

_MAX_MAPS = 1024
NO_MAP = bytes(jit.TENSOR_MAP_BYTES)


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


def head_map(
    address: int,
    dtype: str,
    d: int,
    rows: int,
    heads: int,
    tokens: int,
    batches: int,
    strides: tuple[int, int, int],
    group: int | None = None,
) -> bytes:
    """The tensor map of an array of heads: boxes of 64 columns and ``rows`` rows.

    A row is a token. With ``group`` it is a token of one of as many heads, which share the box. ``strides``
    as in `rawmla.kernels.mha_forward.MhaForwardCall`.
    """
    batch, token, head = (2 * stride for stride in strides)
    dims: tuple[int, ...] = (d, tokens, heads, batches)
    steps: tuple[int, ...] = (token, head, batch)
    box: tuple[int, ...] = (CHUNK, rows, 1, 1)
    if group is not None:
        dims = (d, group, tokens, heads // group, batches)
        steps = (head, token, head * group, batch)
        box = (CHUNK, group, rows // group, 1, 1)
    return jit.tensor_map(address, dtype, dims, steps, box, "128b", "256b")
