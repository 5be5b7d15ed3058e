"""The torch operators, on the CPU: torch's own checks of them, torch.compile, export, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_op_cases import CASES  # noqa: E402

import rawmla  # noqa: E402
import rawmla.torch_ops  # noqa: E402, F401
from rawmla import reference  # noqa: E402


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    name, arguments = CASES[case]
    torch.library.opcheck(getattr(torch.ops.rawmla, name).default, tuple(arguments("cpu")))


def test_every_operator_has_a_case() -> None:
    assert {name for name, _ in CASES.values()} == set(operators())


def operators() -> list[str]:
    return sorted(
        schema.name.removeprefix("rawmla::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("rawmla::")
    )


PAGE = 16


class Step:
    """What a step of a model does with rawmla, for torch.compile: tensors come as keywords."""

    @staticmethod
    def dense(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> tuple[Any, Any]:
        plan, _ = rawmla.get_mla_metadata()
        for _ in range(2):
            out, lse = rawmla.flash_mla_with_kvcache(
                q, k_cache, block_table, cache_seqlens, 512, plan, causal=True
            )
        return out * 2, lse
