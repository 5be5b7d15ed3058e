"""Calls of flash_attn_with_kvcache, made of stand-ins: what the table of operations has no entry for."""

from __future__ import annotations

from typing import Any

import pytest

import rawmla
from calls.fakes import FakeArray, World


def call(**changes: Any) -> Any:
    """A call of two requests with a table."""
    arguments = {
        "q": FakeArray((2, 3, 8, 64), "bfloat16"),
        "k_cache": FakeArray((9, 16, 2, 64), "bfloat16"),
        "v_cache": FakeArray((9, 16, 2, 64), "bfloat16"),
        "cache_seqlens": 5,
        "block_table": FakeArray((2, 4)),
    }
    return rawmla.flash_attn_with_kvcache(**arguments | changes)


@pytest.mark.parametrize(
    ("length", "kept"), ((5, 5), (-7, -7), (2**40 + 5, 2**30), (10**30, 2**30), (-(2**40), -(2**30)))
)
def test_a_number_of_tokens_of_any_size(world: World, length: int, kept: int) -> None:
    call(cache_seqlens=length)
    assert world.kvcache[-1].cache_length == kept


def test_more_query_rows_than_int32_counts(world: World) -> None:
    """Tokens alone are few enough."""
    with pytest.raises(ValueError, match="^q: expected less than .* tokens times h_q / h_kv"):
        call(q=FakeArray((2, 2**28, 8, 64), "bfloat16"))
    assert not world.launched and not world.framework.allocated


def test_rows_of_more_tokens_than_positions_reach(world: World) -> None:
    """Their tokens may all lie at one place."""
    cache = FakeArray((2, 2**30, 2, 64), "bfloat16", strides=(64, 0, 0, 1))
    with pytest.raises(ValueError, match=r"^k_cache: expected less than 2\*\*30 tokens in a row"):
        call(k_cache=cache, v_cache=cache, block_table=None)
    assert not world.launched and not world.framework.allocated


def test_a_table_without_rows_has_no_columns(world: World) -> None:
    """Its address may be 0, which stands for no table."""
    call(block_table=FakeArray((0, 4), ptr=0), cache_batch_idx=FakeArray((2,)))
    assert world.kvcache[-1].call.table_columns == 0


def test_no_tokens_after_a_number_of_tokens(world: World) -> None:
    """A call that is known with a number is another one without."""
    new = {name: FakeArray((2, 3, 2, 64), "bfloat16") for name in "kv"}
    for _ in range(2):
        call(**new)
        with pytest.raises(ValueError, match="^cache_seqlens: expected the positions"):
            call(cache_seqlens=None, **new)
