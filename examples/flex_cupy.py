"""Flex attention with CuPy and no torch: mask and score function are CUDA text.

Documents follow one another in a row of tokens, with ALiBi. `CudaMod` says what a Python function says
with torch; arrays and numbers that the text reads are captures, and other ones need no new kernel.

Run it on a machine with a Hopper GPU: python examples/flex_cupy.py
"""

import sys
from typing import Any

import cupy

import rawmla

B, HEADS, D = 2, 8, 64
LENGTHS = [700, 48, 800, 500]  # tokens of the documents
CALLS, REPEATS = 20, 5  # the fastest of REPEATS times of CALLS calls
TOLERANCE = 2e-3  # of the norm of a row of results, which are rounded to fp16, as are softmax's numerators


def plain(q: Any, k: Any, v: Any, slopes: Any, document: Any) -> Any:
    """Float32 math with all scores in memory."""
    tokens = cupy.arange(len(document))
    back = tokens[:, None] - tokens[None]
    scores = q.astype(cupy.float32) @ k.astype(cupy.float32).swapaxes(-1, -2) * D**-0.5
    scores -= slopes[:, None, None] * back
    scores[..., (back < 0) | (document[:, None] != document[None])] = -cupy.inf
    weights = cupy.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v.astype(cupy.float32)


def milliseconds(call: Any) -> float:
    """The time of a call."""
    times = []
    for _ in range(REPEATS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / CALLS)
    return min(times)


def main() -> None:
    try:
        rawmla.warmup("mha", mha_head_dims=[(D, D)])
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    tokens = sum(LENGTHS)
    draw = cupy.random.default_rng(0)
    q, k, v = draw.standard_normal((3, B, HEADS, tokens, D), dtype=cupy.float32).astype(cupy.float16)
    numbers = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    document = cupy.asarray(numbers, dtype=cupy.int32)
    slopes = 0.5 ** cupy.arange(1, HEADS + 1, dtype=cupy.float32)

    mask_mod = rawmla.CudaMod(
        "q_idx >= kv_idx && document(q_idx) == document(kv_idx)", {"document": document}
    )
    score_mod = rawmla.CudaMod("score - slopes(h) * (q_idx - kv_idx)", {"slopes": slopes})
    mask = rawmla.create_block_mask(mask_mod, None, None, tokens, tokens)
    print(mask)  # a character for each 128 query tokens and 128 keys

    out = rawmla.flex_attention(q, k, v, score_mod, mask)
    assert isinstance(out, cupy.ndarray) and out.dtype == cupy.float16
    want = plain(q, k, v, slopes, document)
    off = cupy.linalg.norm(out.astype(cupy.float32) - want, axis=-1)
    difference = float((off / cupy.linalg.norm(want, axis=-1)).max())
    if not difference <= TOLERANCE:  # nor NaN
        sys.exit(f"flex_cupy: a row differs by {difference:.4f} of its norm from float32 math")

    elapsed = milliseconds(lambda: rawmla.flex_attention(q, k, v, score_mod, mask))
    everything = milliseconds(lambda: rawmla.flex_attention(q, k, v, score_mod))
    print(f"{elapsed:.3f} ms a call; without the mask {everything:.3f} ms")
    print(f"flex_cupy: every row within {difference:.4f} of its norm of float32 math")


if __name__ == "__main__":
    main()
