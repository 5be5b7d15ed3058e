"""The dense test matrix: 15,552 combinations in 108 tests of 144, in a file per d_qk and dtype, which run in
parallel.

A test draws its tokens once per shape, runs the kernel with every page size, computes the float64 reference
afterwards, and goes on after a mismatch, so that one run shows the whole pattern of what fails.
Non-causal calls have flat softmax rows, causal ones flat and sharp rows in turn.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from gpu_support import check, decode, poison, reference

from kit import DenseCase, make_dense_inputs, repage

BATCHES = (1, 2, 6, 64)
QUERY_TOKENS = (1, 2, 4)
CACHE_TOKENS = (20, 140, 4096)
HEADS = ((1, 1), (3, 1), (9, 3), (16, 1), (63, 3), (64, 2), (126, 2), (128, 1), (128, 8))
PAGES = (64, 16, 256)
METADATA_FORM = {16: "object", 64: "tensors", 256: "object"}
UNPOISONED_PAGE = 256  # so that plan and attention overlap, which a fill between them prevents


def matrix(test: Any) -> Any:
    """Parametrise a test by the shapes that one test of the matrix has in common."""
    test = pytest.mark.parametrize("s_k", CACHE_TOKENS)(test)
    return pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"h{heads[0]}x{heads[1]}")(test)


def check_matrix(heads: tuple[int, int], s_k: int, d_qk: int, dtype: str) -> None:
    """All combinations of one test."""
    checked = 0
    failures: list[str] = []
    for b, s_q, varlen, causal in product(BATCHES, QUERY_TOKENS, (False, True), (False, True)):
        case = DenseCase(
            b=b,
            s_q=s_q,
            s_k=s_k,
            h_q=heads[0],
            h_kv=heads[1],
            d_qk=d_qk,
            page_block_size=PAGES[0],
            varlen=varlen,
            causal=causal,
            dtype=dtype,
            seed=b + s_q,
            sharp=causal,
        )
        try:
            first = make_dense_inputs(case)
            results = []
            for page in PAGES:
                inputs = first if page == PAGES[0] else repage(first, page)
                with poison(page != UNPOISONED_PAGE):
                    results.append((inputs.case, decode(inputs, METADATA_FORM[page])))
                del inputs  # a cache of GiB
            want = reference(first)
        except Exception as error:
            raise RuntimeError(f"{case.id} and pages {PAGES[1:]}: {error}") from error
        for paged, got in results:
            checked += 1
            try:
                check(replace(first, case=paged), got, want)
            except AssertionError as error:
                failures.append(str(error))
    assert checked == len(BATCHES) * len(QUERY_TOKENS) * 4 * len(PAGES) == 144
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {checked} combinations failed:\n{shown}"
