"""Sparse decoding and prefill over every kind of cache, one kind for each kernel, called in one way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from gpu_support import assert_same_bits, torch

from kit import SparseCase, SparseInputs, make_sparse_inputs
from operations.mla_prefill import prefill, prefill_check, prefill_reference
from operations.mla_sparse import sparse_check, sparse_decode, sparse_reference


@dataclass(frozen=True)
class Kind:
    """Decoding or prefill over one kind of cache, with a number of heads that reaches one kernel.

    Attributes:
        name: for pytest.
        h_q: query heads of a call, unless a test says otherwise.
        cache: fields of `SparseCase` that describe the cache.
        prefill: the rows of a batch are query tokens, which select from the same tokens.
        clusters: calls are forced to the kernel for clusters.
    """

    name: str
    h_q: int
    cache: dict[str, Any]
    prefill: bool = False
    clusters: bool = False

    @property
    def fp8(self) -> bool:
        """Whether the cache is one of bytes."""
        return bool(self.cache["layout"] != "bf16")

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results."""
        return ("out", "max_logits", "lse") if self.prefill else ("out", "lse")

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of the plan."""
        return ("object",) if self.prefill else ("object", "tensors")

    def make(self, **changes: Any) -> SparseInputs:
        """Inputs of a case."""
        return make_sparse_inputs(
            SparseCase(**{"h_q": self.h_q, "shared": self.prefill, **self.cache, **changes})
        )

    def run(
        self, inputs: SparseInputs, scale: float | None = None, form: str = "object", **keywords: Any
    ) -> Any:
        """The results of a call; `lse` of prefill has base 2."""
        if self.prefill:
            return prefill(inputs, scale, **keywords)
        return sparse_decode(inputs, form, softmax_scale=scale, **keywords)

    def reference(self, inputs: SparseInputs, scale: float | None = None) -> Any:
        """The results in float64."""
        return prefill_reference(inputs, scale) if self.prefill else sparse_reference(inputs, scale)

    def check(self, inputs: SparseInputs, got: Any, want: Any = None) -> None:
        """Compare with the float64 reference."""
        (prefill_check if self.prefill else sparse_check)(inputs, got, want)

    def checked(self, inputs: SparseInputs, **keywords: Any) -> Any:
        """The results of a call, compared with the reference."""
        got = self.run(inputs, **keywords)
        self.check(inputs, got)
        return got

    def by_token(self, got: Any) -> list[Any]:
        """The results with the query tokens of all requests as the first dimension."""
        if self.prefill:
            return list(got)
        out, lse = got
        return [out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)]

    def assert_bits(self, text: str, got: Sequence[Any], want: Sequence[Any]) -> None:
        """Raise unless all results have the same bits."""
        for name, one, wanted in zip(self.results, got, want, strict=True):
            assert_same_bits(f"{name}, {text}", one, wanted)

    def assert_empty(self, got: Any, tokens: Any = slice(None)) -> None:
        """Raise unless these query tokens attended to nothing: out is 0, max_logits -inf, lse +inf."""
        out, *scores = (x[tokens] for x in self.by_token(got))
        assert_same_bits("out of empty rows", out, torch.zeros_like(out))
        assert bool((scores[-1] == math.inf).all())
        assert not self.prefill or bool((scores[0] == -math.inf).all())


BF16_576 = {"layout": "bf16", "d_qk": 576}
BF16_512 = {"layout": "bf16", "d_qk": 512}
V32, MODEL1 = {"layout": "v32"}, {"layout": "model1"}
# Prefill copies rows of FP8 that are selected often to bf16, which holds such scales exactly.
PREFILL_V32 = {**V32, "page_block_size": 53, "power_of_two_scales": True}
PREFILL_MODEL1 = {**MODEL1, "page_block_size": 61}
ROWS = {"page_block_size": 1}

KINDS = (
    Kind("decode_v32_few_heads", 16, V32),
    Kind("decode_v32", 66, V32),
    Kind("decode_v32_clusters", 128, V32, clusters=True),
    Kind("decode_model1", 16, MODEL1),
    Kind("decode_model1_clusters", 128, MODEL1, clusters=True),
    Kind("decode_bf16_576", 66, BF16_576),
    Kind("decode_bf16_512", 16, BF16_512),
    Kind("prefill_bf16_576", 17, {**BF16_576, **ROWS}, prefill=True),
    Kind("prefill_bf16_512", 66, {**BF16_512, **ROWS}, prefill=True),
    Kind("prefill_v32_few_heads", 16, PREFILL_V32, prefill=True),
    Kind("prefill_v32_clusters", 128, PREFILL_V32, prefill=True, clusters=True),
    Kind("prefill_model1", 64, PREFILL_MODEL1, prefill=True),
    Kind("prefill_model1_clusters", 128, PREFILL_MODEL1, prefill=True, clusters=True),
)
DECODE = tuple(kind for kind in KINDS if not kind.prefill)
PREFILL = tuple(kind for kind in KINDS if kind.prefill)


def for_kinds(kinds: Sequence[Kind] = KINDS) -> Any:
    """Parametrise a test by kinds; tests/gpu/conftest.py forces those for clusters to their kernel."""
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


def slots_of(inputs: SparseInputs) -> int:
    """Rows of kv, or slots of the cache."""
    return int(inputs.k_cache.shape[0] * inputs.k_cache.shape[1])


def valid(inputs: SparseInputs) -> Any:
    """Which indices name a slot of the cache."""
    return (inputs.indices >= 0) & (inputs.indices < slots_of(inputs))


def named(inputs: SparseInputs) -> Any:
    """Slots that a valid index names; of a case without lengths."""
    return inputs.indices[valid(inputs)].long().unique()
