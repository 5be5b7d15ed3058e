"""Plans of dense calls: the configurations of objects."""

from typing import Any

import pytest
from gpu_support import (
    assert_same_bits,
    call_arguments,
)

import rawmla
from kit import DenseCase, make_dense_inputs

CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("b", {"b": 4}),
    ("s_q", {"s_q": 3}),
    ("h_q", {"h_q": 64}),
    ("h_k", {"h_kv": 2}),
    ("page_block_size", {"page_block_size": 128}),
    ("causal", {"causal": False}),
)


@pytest.mark.parametrize(("field", "change"), CHANGES, ids=[field for field, _ in CHANGES])
def test_reused_object_with_another_configuration(field: str, change: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"b": 5, "s_q": 2, "h_q": 128, "s_k": 300, "causal": True}
    inputs = make_dense_inputs(DenseCase(**shape))
    other = make_dense_inputs(DenseCase(**{**shape, **change}))
    metadata, _ = rawmla.get_mla_metadata()
    want = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    with pytest.raises(ValueError, match=rf"\b{field} = "):
        rawmla.flash_mla_with_kvcache(*call_arguments(other), metadata, causal=other.case.causal)
    again = rawmla.flash_mla_with_kvcache(*call_arguments(inputs), metadata, causal=True)
    assert_same_bits("out after the refused call", again[0], want[0])
