"""The table of operations that the shared suites run over: how each public function is called,
what its results should be, and what is special about it. A new operation is one entry.

Those suites are test_contracts.py, test_refusals.py, test_bits.py, test_graphs.py, test_plans.py,
test_frameworks.py, test_poison.py and test_sanitizer.py of tests/gpu, and tests/test_emulated.py, which needs
no GPU. What one operation alone does has its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from .cache import CONVERT, DEQUANTIZE, GATHER, QUANTIZE, WRITE  # noqa: E402
from .core import Arguments, Call, Operation, assert_results, is_planned  # noqa: E402
from .dense import MHA, MHA_KV, MHA_QKV, MHA_VARLEN  # noqa: E402
from .dense_backward import MHA_BACKWARD, MHA_VARLEN_BACKWARD  # noqa: E402
from .flex import BLOCK_MASK, BLOCK_MASK_TRACED, FLEX, FLEX_TRACED  # noqa: E402
from .flex_backward import FLEX_BACKWARD, FLEX_BACKWARD_TRACED  # noqa: E402
from .kvcache import KVCACHE, KVCACHE_FP8, KVCACHE_ROWS, KVCACHE_VARLEN  # noqa: E402
from .merge import MERGE  # noqa: E402
from .mla_decode import DENSE  # noqa: E402
from .mla_prefill import prefill_operation  # noqa: E402
from .mla_sparse import sparse_operation  # noqa: E402
from .prefix import PREFIX, PREFIX_FP8, PREFIX_GATHERED  # noqa: E402

__all__ = [
    "OPERATIONS",
    "Arguments",
    "Call",
    "Operation",
    "assert_results",
    "for_each",
    "for_first",
    "is_planned",
]

OPERATIONS = (
    DENSE,
    sparse_operation("v32"),
    sparse_operation("v32", clusters=True),
    sparse_operation("model1"),
    sparse_operation("model1", clusters=True),
    sparse_operation("bf16"),
    prefill_operation("bf16"),
    prefill_operation("v32"),
    prefill_operation("v32", clusters=True),
    prefill_operation("model1"),
    prefill_operation("model1", clusters=True),
    WRITE,
    GATHER,
    QUANTIZE,
    DEQUANTIZE,
    CONVERT,
    MERGE,
    MHA,
    MHA_VARLEN,
    MHA_QKV,
    MHA_KV,
    MHA_BACKWARD,
    MHA_VARLEN_BACKWARD,
    KVCACHE,
    KVCACHE_ROWS,
    KVCACHE_VARLEN,
    KVCACHE_FP8,
    PREFIX,
    PREFIX_GATHERED,
    PREFIX_FP8,
    FLEX,
    FLEX_TRACED,
    BLOCK_MASK,
    BLOCK_MASK_TRACED,
    FLEX_BACKWARD,
    FLEX_BACKWARD_TRACED,
)


def every(operation: Operation) -> bool:
    """Choose every operation."""
    return True


def for_each(cases: str, *, only: Callable[[Operation], Any] = every) -> Any:
    """Parametrise a test by every operation (`only` those) and each of its `cases` ("rerun_cases", ...)."""
    pairs = [
        (operation, case)
        for operation in OPERATIONS
        if only(operation)
        for case in (getattr(operation, cases) or operation.cases)
    ]
    ids = [f"{operation.name}-{case.id}" for operation, case in pairs]
    return pytest.mark.parametrize(("operation", "case"), pairs, ids=ids)


def for_first(*, only: Callable[[Operation], Any] = every) -> Any:
    """Parametrise a test by every operation (`only` those) and the first of its cases."""
    pairs = [(operation, operation.cases[0]) for operation in OPERATIONS if only(operation)]
    return pytest.mark.parametrize(("operation", "case"), pairs, ids=[one.name for one, _ in pairs])
