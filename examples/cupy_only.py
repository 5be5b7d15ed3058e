"""Dense decoding with CuPy arrays and no torch: bf16 is the type of ml_dtypes.

The plan is computed ahead into two arrays, which any number of calls may use. All work is enqueued on CuPy's
current stream.

It needs ml_dtypes (pip install ml_dtypes) and a machine with a Hopper GPU: python examples/cupy_only.py
"""

import sys

import cupy
import numpy as np

import rawmla

try:
    import ml_dtypes
except ImportError:
    sys.exit("this example needs ml_dtypes: pip install ml_dtypes")

HEADS, D_QK, D_V, PAGE = 64, 576, 512, 64
LENGTHS = [900, 130, 64, 0]  # tokens in the cache of each request

# The GPU rounds softmax's numerators and the result to bf16; the reference is float64.
RTOL, ATOL = 1e-2, 2e-4
LSE_TOL = 1e-4


def main() -> None:
    try:
        rawmla.warmup()
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    draw = np.random.default_rng(0)
    requests = len(LENGTHS)
    pages = -(-max(LENGTHS) // PAGE)  # of each request
    num_blocks = requests * pages
    host = (
        draw.standard_normal((requests, 1, HEADS, D_QK)).astype(ml_dtypes.bfloat16),
        (0.1 * draw.standard_normal((num_blocks, PAGE, 1, D_QK))).astype(ml_dtypes.bfloat16),
        draw.permutation(num_blocks).astype(np.int32).reshape(requests, pages),
        np.array(LENGTHS, np.int32),
    )

    with cupy.cuda.Stream(non_blocking=True) as stream:
        q, k_cache, block_table, cache_seqlens = (cupy.asarray(array) for array in host)
        tiles, splits = rawmla.get_mla_metadata(cache_seqlens, HEADS, 1)
        out, lse = rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, D_V, tiles, splits)
        stream.synchronize()
    assert isinstance(out, cupy.ndarray) and out.dtype == ml_dtypes.bfloat16

    want_out, want_lse = rawmla.reference.flash_mla_with_kvcache(*host, D_V)
    np.testing.assert_allclose(cupy.asnumpy(out).astype(np.float64), want_out, rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(cupy.asnumpy(lse), want_lse, rtol=LSE_TOL, atol=LSE_TOL)
    print(f"cupy_only: {requests} requests of {LENGTHS} tokens agree with the reference")


if __name__ == "__main__":
    main()
