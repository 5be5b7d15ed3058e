"""What the tests and the benchmark share: input generators, comparison, references on the device.

Nothing here is needed to use rawmla. Importing the package imports NumPy only; torch and CuPy are imported by
the functions that build or compare their arrays.
"""

from rawmla.testing.compare import (
    Difference,
    Tolerance,
    check_close,
    lse_tolerance,
    measure,
    out_tolerance,
    prefill_lse_tolerance,
    prefill_out_tolerance,
)
from rawmla.testing.generators import DenseCase, DenseInputs, make_dense_inputs, repage
from rawmla.testing.gpu import missing_hopper_reason
from rawmla.testing.sparse import SparseCase, SparseInputs, make_sparse_inputs

__all__ = [
    "DenseCase",
    "DenseInputs",
    "Difference",
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
