"""Prefill in two chunks over a paged cache: each chunk sees what the ones before it have left in the cache.

The cache has vLLM's layout, in bf16 and then in FP8. The results are compared with attention over the whole
prompts at once, which needs no cache. FP8 has 3 bits after the leading one, so its results differ more.

Run it on a machine with a Hopper GPU: python examples/prefix_prefill.py
"""

import sys

import torch

import rawmla

HEADS, KV_HEADS, D, PAGE = 16, 4, 128, 16
PROMPTS = [1500, 333, 70]  # tokens of each request
FIRST_CHUNK = [1024, 7, 70]  # of these; the last request has no second one
SCALES = 0.02, 0.03  # of K and V in an FP8 cache: a value is its byte times this

# Largest difference of a row of results, as a part of its norm.
TOLERANCES = {"auto": 0.01, "fp8": 0.1}


class Cache:
    """K `[blocks, heads, D / x, PAGE, x]`, where x values are 16 bytes, V `[blocks, heads, D, PAGE]`."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.x, kind = (16, torch.uint8) if dtype == "fp8" else (8, torch.bfloat16)
        pages = -(-max(PROMPTS) // PAGE)  # of each request
        blocks = len(PROMPTS) * pages
        self.k = torch.zeros(blocks, KV_HEADS, D // self.x, PAGE, self.x, dtype=kind, device="cuda")
        self.v = torch.zeros(blocks, KV_HEADS, D, PAGE, dtype=kind, device="cuda")
        self.table = torch.randperm(blocks, device="cuda").to(torch.int32).view(len(PROMPTS), pages)

    def write(self, request: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the tokens of a request from position `first` on."""
        positions = torch.arange(first, first + len(k), device="cuda")
        blocks, offsets = self.table[request, positions // PAGE].long(), positions % PAGE
        if self.dtype == "fp8":
            k, v = (to_bytes(x, scale) for x, scale in zip((k, v), SCALES, strict=True))
        self.k[blocks, :, :, offsets] = k.view(len(k), KV_HEADS, D // self.x, self.x)
        self.v[blocks, :, :, offsets] = v


def main() -> None:
    try:
        rawmla.warmup("mha", mha_head_dims=[(D, D)])  # of the comparison
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    torch.manual_seed(0)
    prompts = [(bf16(n, HEADS, D), bf16(n, KV_HEADS, D), bf16(n, KV_HEADS, D)) for n in PROMPTS]
    wanted = []
    for q, k, v in prompts:
        out, _ = rawmla.flash_attn_func(q[None], k[None], v[None], causal=True)
        wanted.append(out[0])

    starts, middles = [0] * len(PROMPTS), FIRST_CHUNK
    for dtype, tolerance in TOLERANCES.items():
        cache = Cache(dtype)
        chunks = [prefill(cache, prompts, starts, middles), prefill(cache, prompts, middles, PROMPTS)]
        differences = []
        for first, second, want in zip(*chunks, wanted, strict=True):
            difference = torch.cat([first, second]).float() - want.float()
            differences.append((difference.norm(dim=-1) / want.float().norm(dim=-1)).max())
        largest = torch.stack(differences).max()  # NaN if there is one
        print(f"{dtype:5} cache: every row within {largest:.4f} of its norm of attention over whole prompts")
        if not largest <= tolerance:
            sys.exit(f"prefix_prefill: a row differs by more than {tolerance} of its norm")
    print(f"prefix_prefill: {len(PROMPTS)} prompts of {PROMPTS} tokens in two chunks, as in one")


def prefill(
    cache: Cache, prompts: list[tuple[torch.Tensor, ...]], starts: list[int], ends: list[int]
) -> list[torch.Tensor]:
    """The results of a chunk of each prompt, whose tokens are then in the cache too."""
    chunk = [[x[i:j] for x in prompt] for prompt, i, j in zip(prompts, starts, ends, strict=True)]
    q, k, v = (torch.cat(parts) for parts in zip(*chunk, strict=True))
    lengths = [j - i for i, j in zip(starts, ends, strict=True)]
    start_loc = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(ends, dtype=torch.int32, device="cuda")  # with the tokens of the chunk
    call = (
        *(q, k, v, torch.empty_like(q), cache.dtype, cache.k, cache.v),
        *(cache.table, start_loc, seq_lens, max(ends), max(lengths), *SCALES),
    )
    rawmla.warmup_call(rawmla.context_attention_fwd, *call)  # a server does this once, when it starts
    o = rawmla.context_attention_fwd(*call)
    for request, (_, own_k, own_v) in enumerate(chunk):
        cache.write(request, starts[request], own_k, own_v)
    return list(o.split(lengths))


def to_bytes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Bytes of e4m3 numbers, which times `scale` are nearly `x`."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def bf16(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
