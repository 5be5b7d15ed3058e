"""The part of the dense test matrix with d_qk 576 and bfloat16 (dense_matrix.py)."""

from dense_matrix import check_matrix, matrix


@matrix
def test_dense_matrix(heads: tuple[int, int], s_k: int) -> None:
    check_matrix(heads, s_k, 576, "bfloat16")
