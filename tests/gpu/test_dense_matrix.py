"""The matrix of dense decoding: 15,552 combinations in 108 tests of 144.

A test computes the float64 reference once for every page size, and goes on after a mismatch, so one run shows
all that fails. A default run has every head count once, with each other value in turn.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from full_cases import full_unless
from gpu_support import poison

from kit import DenseCase, make_dense_inputs, repage
from operations.mla_decode import check, decode, reference

BATCHES = (1, 2, 6, 64)
QUERY_TOKENS = (1, 2, 4)
HEADS = ((1, 1), (3, 1), (9, 3), (16, 1), (63, 3), (64, 2), (126, 2), (128, 1), (128, 8))
CACHE_TOKENS = (20, 140, 4096)
TYPES = ((512, "bfloat16"), (512, "float16"), (576, "bfloat16"), (576, "float16"))
PAGES = (64, 16, 256)
METADATA_FORM = {16: "object", 64: "tensors", 256: "object"}
UNPOISONED_PAGE = 256  # so that plan and attention overlap, which a fill between them prevents

Matrix = tuple[tuple[int, int], int, tuple[int, str]]


def is_quick(matrix: Matrix) -> bool:
    """Whether a default run has it."""
    heads, s_k, types = matrix
    number = HEADS.index(heads)
    return s_k == CACHE_TOKENS[number % 3] and types == TYPES[number % 4]


MATRICES = full_unless(is_quick, product(HEADS, CACHE_TOKENS, TYPES))


@pytest.mark.parametrize("matrix", MATRICES, ids=str)
def test_dense_matrix(matrix: Matrix) -> None:
    (h_q, h_kv), s_k, (d_qk, dtype) = matrix
    checked, failures = 0, []
    for b, s_q, varlen, causal in product(BATCHES, QUERY_TOKENS, (False, True), (False, True)):
        shape: dict[str, Any] = {"b": b, "s_q": s_q, "s_k": s_k, "h_q": h_q, "h_kv": h_kv, "d_qk": d_qk}
        flags: dict[str, Any] = {"varlen": varlen, "causal": causal, "sharp": causal}
        case = DenseCase(**shape, **flags, page_block_size=PAGES[0], dtype=dtype, seed=b + s_q)
        first = make_dense_inputs(case)
        results = []
        for page in PAGES:
            inputs = first if page == PAGES[0] else repage(first, page)
            with poison(page != UNPOISONED_PAGE):
                results.append((inputs.case, decode(inputs, METADATA_FORM[page])))
            del inputs  # a cache of GiB
        want = reference(first)
        for paged, got in results:
            checked += 1
            try:
                check(replace(first, case=paged), got, want)
            except AssertionError as error:
                failures.append(str(error))
    assert checked == len(BATCHES) * len(QUERY_TOKENS) * 4 * len(PAGES) == 144
    shown = "\n".join(failures[:20])
    assert not failures, f"{len(failures)} of {checked} combinations failed:\n{shown}"
