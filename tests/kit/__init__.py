"""What the tests and the benchmark share: input generators, comparison, references on the device.

It is not installed with rawmla: tests and scripts put the folder `tests` on the module search path. Importing
it imports NumPy only; torch and CuPy are imported by the functions that build or compare their arrays.
"""

from kit.compare import (
    Tolerance,
    check_close,
    lse_tolerance,
    measure,
    out_tolerance,
    prefill_lse_tolerance,
    prefill_out_tolerance,
)
from kit.generators import DenseCase, DenseInputs, make_dense_inputs, repage
from kit.gpu import missing_hopper_reason
from kit.sparse import SparseCase, SparseInputs, make_sparse_inputs

__all__ = [
    "DenseCase",
    "DenseInputs",
    "SparseCase",
    "SparseInputs",
    "Tolerance",
    "check_close",
    "lse_tolerance",
    "make_dense_inputs",
    "make_sparse_inputs",
    "measure",
    "missing_hopper_reason",
    "out_tolerance",
    "prefill_lse_tolerance",
    "prefill_out_tolerance",
    "repage",
]
