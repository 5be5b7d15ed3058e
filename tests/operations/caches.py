"""Caches in every layout: random values, poison around them, and arrays of NumPy on a device and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from rawmla import reference

LAYOUTS = ("v32", "model1")
KINDS = (*LAYOUTS, "bf16 576", "bf16 512")
COLUMNS = {"v32": 576, "model1": 512, "bf16 576": 576, "bf16 512": 512}
POISON = 0xFF  # NaN as e4m3, as e8m0 and, twice, as bfloat16
PAGES = (1, 2, 53, 61, 64, 256)


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bfloat16 with zero tiles and wide ranges."""
    draw = np.random.default_rng(seed)
    numbers = draw.standard_normal(shape) * np.exp2(draw.integers(-6, 7, (*shape[:-1], 1)))
    numbers[..., :200] *= draw.random((*shape[:-1], 1)) < 0.9
    return numbers.astype(ml_dtypes.bfloat16)


def to_device(array: np.ndarray, device: Any = "cuda") -> Any:
    """A torch tensor; bfloat16 goes over as integers."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(array).to(device)


def to_host(tensor: Any) -> np.ndarray:
    """A NumPy array; bfloat16 and float8 come back as integers."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    if tensor.dtype == torch.float8_e4m3fn:
        tensor = tensor.view(torch.uint8)
    return tensor.cpu().numpy()


def same_values(got: Any, want: np.ndarray) -> None:
    """bfloat16 against float32, bit for bit, any NaN for any NaN."""
    numbers = reference.decode_bf16(to_host(got).view(np.uint16))
    np.testing.assert_array_equal(numbers, want)
    np.testing.assert_array_equal(np.signbit(numbers)[want == 0], np.signbit(want)[want == 0])


def host_cache(kind: str, num_blocks: int, page: int) -> np.ndarray:
    """A cache of poison, for the reference to write to."""
    if kind in LAYOUTS:
        return np.full((num_blocks, page, 1, reference.LAYOUTS[kind].token_bytes), POISON, np.uint8)
    return np.full((num_blocks, page, 1, COLUMNS[kind]), -1, np.int16).view(ml_dtypes.bfloat16)


class PaddedCache:
    """A cache of poison with room between its blocks."""

    def __init__(
        self, kind: str, num_blocks: int, page: int, padding: int = 48, device: Any = "cuda"
    ) -> None:
        shape = host_cache(kind, 1, page).shape
        dtype = torch.uint8 if kind in LAYOUTS else torch.bfloat16
        used = shape[1] * shape[3]
        stride = -(-used // 16) * 16 + padding
        self.blocks = torch.full(
            (num_blocks, stride * dtype.itemsize), POISON, dtype=torch.uint8, device=device
        )
        self.view = self.blocks.view(dtype)[:, :used].unflatten(1, shape[1:])
        self._used_bytes = used * dtype.itemsize

    @classmethod
    def of(cls, kind: str, array: np.ndarray, device: Any = "cuda") -> PaddedCache:
        """With this cache of the host in it."""
        made = cls(kind, *array.shape[:2], device=device)
        made.view.copy_(to_device(array, device))
        return made

    def check(self, want: np.ndarray) -> None:
        """The cache is as wanted and what is between blocks is as it was."""
        np.testing.assert_array_equal(
            to_host(self.view), want.view(np.int16) if want.dtype != np.uint8 else want
        )
        assert bool((self.blocks[:, self._used_bytes :] == POISON).all())


def filled(kind: str, k_cache: np.ndarray) -> np.ndarray:
    """The cache of these values, on the host."""
    return reference.quantize_k_cache(k_cache, kind) if kind in LAYOUTS else k_cache
