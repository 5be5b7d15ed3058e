"""Flex attention with torch: masks and score functions of Python, beside plain float32 math.

Several cases run through `rawmla.flex_attention`: each is a mask function, made into a block mask once, and
perhaps a score function. The same functions, called on whole arrays of indices, say what is wanted.

Run it on a machine with a Hopper GPU: python examples/flex_attention.py
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import rawmla

B, HEADS, TOKENS, D = 2, 16, 2048, 128
WINDOW, SOFTCAP = 512, 20.0
LENGTHS = [700, 48, 800, 500]  # of the documents in a row of tokens
CALLS, REPEATS = 10, 5  # the fastest of REPEATS times of CALLS calls
TOLERANCE = 1e-2  # of the norm of a row of results, which are rounded to bf16, as are softmax's numerators


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def in_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < WINDOW


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def cases() -> dict[str, tuple[Any, Any]]:
    """Score functions, or None, and mask functions."""
    document = torch.arange(len(LENGTHS), device="cuda").repeat_interleave(
        torch.tensor(LENGTHS, device="cuda")
    )
    slopes = 0.5 ** torch.arange(1, HEADS + 1, device="cuda", dtype=torch.float32)

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document[q_idx] == document[kv_idx]

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    return {
        "causal": (None, causal),
        "sliding window": (None, rawmla.and_masks(causal, in_window)),
        "documents": (None, rawmla.and_masks(causal, same_document)),
        "ALiBi": (alibi, causal),
        "softcap": (softcap, causal),
    }


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, mask_mod: Any) -> torch.Tensor:
    """Float32 math with all scores in memory."""
    b, h, i, j = torch.meshgrid(
        *[torch.arange(n, device="cuda") for n in (B, HEADS, TOKENS, TOKENS)],
        indexing="ij",
    )
    scores = q.float() @ k.float().mT * D**-0.5
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    return scores.masked_fill(~mask_mod(b, h, i, j), float("-inf")).softmax(dim=-1) @ v.float()


def seconds(call: Callable[[], torch.Tensor]) -> float:
    """The time of a call, the host's part included where the GPU waits for it."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / CALLS)
    return min(times)


def main() -> None:
    try:
        rawmla.warmup("mha", mha_head_dims=[(D, D)])  # of dense attention, which is timed too
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, HEADS, TOKENS, D, device="cuda", dtype=torch.bfloat16)
    print(f"{B} requests of {TOKENS} tokens, {HEADS} heads of {D}")
    print(f"{'':16} blocks listed  largest difference  ms/call")
    for name, (score_mod, mask_mod) in cases().items():
        mask = rawmla.create_block_mask(mask_mod, None, None, TOKENS, TOKENS)

        def call(score_mod: Any = score_mod, mask: Any = mask) -> torch.Tensor:
            return rawmla.flex_attention(q, k, v, score_mod, mask)

        got, want = call().float(), plain(q, k, v, score_mod, mask_mod)
        difference = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
        listed = 100 - mask.sparsity()
        print(f"{name:16}{listed:12.0f} %{difference:20.4f}{1e3 * seconds(call):9.3f}")
        if not difference <= TOLERANCE:  # nor NaN
            sys.exit(f"flex_attention: {name}: a row differs by {difference:.4f} of its norm")

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dense = seconds(lambda: rawmla.flash_attn_func(q, k, v, causal=True)[0])
    print(f"causal, by rawmla.flash_attn_func: {1e3 * dense:.3f} ms")
    print("flex_attention: all cases agree with float32 math")


if __name__ == "__main__":
    main()
