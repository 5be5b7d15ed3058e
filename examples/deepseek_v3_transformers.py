"""DeepSeek-V3 of transformers with its attention replaced by rawmla.

The paged cache holds latents: 512 columns and 64 of RoPE for a token, whatever the number of heads. Queries
are brought to the latents (q_nope @ W_UK) and results back (out @ W_UV), so attention has one KV head of 576
columns whose first 512 are the values. The cache is bf16, which dense decoding reads, or FP8 in the layout of
DeepSeek-V3.2 ("v32"), which sparse decoding reads. Prompts go through in pieces of many tokens, then all
requests continue together, a token at a time.

Weights are random. Logits of every token are compared with the logits of transformers' own model: over each
cache rawmla has to be as close to float32 as that model in bf16, its cache rounded the same way.

It needs transformers (pip install "transformers>=5.17") and a machine with a Hopper GPU, or the switch --cpu:
python examples/deepseek_v3_transformers.py
"""

import argparse
import copy
import sys
from typing import Any

import torch

import rawmla

try:
    from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave as rotate
except ImportError:
    sys.exit('this example needs transformers: pip install "transformers>=5.17"')

LATENT, ROPE, NOPE, V, PAGE = 512, 64, 128, 128, 64
PROMPTS, NEW_TOKENS, PIECE = [150, 64, 21], 12, 64  # tokens of the prompts, after them, and in a piece of one
MEAN_LIMIT, MAX_LIMIT = 1.1, 1.3  # times the error of transformers' bf16: equal but for chance

mla: Any = rawmla  # --cpu: the same functions in NumPy


class Batch:
    """What all layers of a step share: places of the new tokens, lengths or selections, the plan."""

    def __init__(self, layers: int, is_fp8: bool, device: str) -> None:
        pages = -(-(max(PROMPTS) + NEW_TOKENS) // PAGE)  # of each request
        num_blocks = len(PROMPTS) * pages
        shape = (num_blocks, PAGE, 1, 656 if is_fp8 else LATENT + ROPE)
        dtype = torch.uint8 if is_fp8 else torch.bfloat16
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.pages = torch.randperm(num_blocks).to(device, torch.int32).view(len(PROMPTS), pages)
        self.tokens = torch.arange(pages * PAGE, dtype=torch.int32, device=device)
        self.is_fp8 = is_fp8

    def begin(self, requests: slice, positions: torch.Tensor) -> None:
        """A step of some requests, with new tokens at `positions`, int32 [b, s_q]."""
        self.block_table = self.pages[requests]
        self.slots = mla.convert_indices(positions, self.block_table, PAGE).flatten()
        self.lengths = positions[:, -1] + 1  # the new tokens are in the cache when attention reads it
        self.indices = None
        if self.is_fp8:
            # A token attends what is selected for it. DeepSeek-V3.2 has an indexer for that; here every token
            # selects all up to itself. -1 selects nothing.
            selected = torch.where(self.tokens <= positions[..., None], self.tokens, -1)
            self.indices = mla.convert_indices(selected, self.block_table, PAGE)
        self.plan, _ = mla.get_mla_metadata()  # empty: the first layer fills it, the others use it again


class RawMLAAttention(torch.nn.Module):
    """Stands where DeepseekV3Attention stood, and uses its weights."""

    def __init__(self, module: Any, batch: Batch) -> None:
        super().__init__()
        self.module, self.batch = module, batch
        per_head = module.kv_b_proj.weight.view(module.num_heads, NOPE + V, LATENT)
        self.w_uk, self.w_uv = per_head.split([NOPE, V], dim=1)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        module, batch = self.module, self.batch
        cache = batch.caches[module.layer_idx]
        b, s_q, _size = hidden_states.shape

        # As in transformers, up to the latents.
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
        q_nope, q_pe = q.view(b, s_q, module.num_heads, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = module.kv_a_proj_with_mqa(hidden_states).split([LATENT, ROPE], dim=-1)
        kv_c = module.kv_a_layernorm(kv_c)
        q_pe, k_pe = rotate(q_pe, k_pe[:, :, None], *position_embeddings, unsqueeze_dim=2)

        mla.write_kv_cache(kv_c.reshape(-1, LATENT), k_pe.reshape(-1, ROPE), cache, batch.slots)
        q = torch.einsum("bshn,hnc->bshc", q_nope, self.w_uk), q_pe  # a pair: nothing is joined
        # The model's own scale: 192**-0.5, as its heads have 192 columns, times YaRN's factor; not 576**-0.5.
        plan, scale, slots = batch.plan, module.scaling, batch.indices
        if slots is not None:
            out, _lse = mla.flash_mla_with_kvcache(
                q, cache, None, None, LATENT, plan, softmax_scale=scale, is_fp8_kvcache=True, indices=slots
            )
        else:
            out, _lse = mla.flash_mla_with_kvcache(
                q, cache, batch.block_table, batch.lengths, LATENT, plan, softmax_scale=scale, causal=True
            )
        out = torch.einsum("bshc,hvc->bshv", out, self.w_uv)
        return module.o_proj(out.reshape(b, s_q, -1)), None


class QuantizedCache(DynamicCache):
    """transformers' cache, but what goes in is rounded as a "v32" cache rounds it."""

    def update(self, kv_c: torch.Tensor, k_pe: torch.Tensor, *layer: Any, **options: Any) -> Any:
        rows = torch.cat([kv_c, k_pe], dim=-1).transpose(1, 2).bfloat16().cpu()  # [b, tokens, 1, 576]
        rows = rawmla.reference.dequantize_k_cache(rawmla.reference.quantize_k_cache(rows, "v32"), "v32")
        return super().update(rows[..., :LATENT].transpose(1, 2).to(kv_c), k_pe, *layer, **options)


def run_rawmla(model: Any, batch: Batch, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The logits of every token of the texts, from a model whose attention is rawmla's."""

    def step(requests: slice, tokens: torch.Tensor, starts: list[int]) -> torch.Tensor:
        first = torch.tensor(starts, dtype=torch.int32, device=tokens.device)
        positions = first[:, None] + torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        batch.begin(requests, positions)
        return model(tokens, position_ids=positions.long(), use_cache=False).logits

    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    for i, text in enumerate(texts):
        for start in range(0, PROMPTS[i], PIECE):
            piece = text[start : min(start + PIECE, PROMPTS[i])]
            logits[i].append(step(slice(i, i + 1), piece[None], [start])[0])
    for done in range(NEW_TOKENS):
        starts = [prompt + done for prompt in PROMPTS]
        newest = torch.stack([text[start : start + 1] for text, start in zip(texts, starts, strict=True)])
        for i, row in enumerate(step(slice(None), newest, starts)):
            logits[i].append(row)
    return [torch.cat(parts) for parts in logits]


@torch.no_grad()
def main() -> None:
    global mla
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=16, help="attention heads of the model, 16 by default")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, by rawmla.reference")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    if options.cpu:
        mla = rawmla.reference
    else:
        try:
            rawmla.warmup(sparse_formats=["v32"])
        except rawmla.RawMLAError as error:
            sys.exit(str(error))

    torch.manual_seed(0)
    # DeepSeek-V3's sizes of heads and latents, and its RoPE; the rest is small. Every token goes to all four
    # experts: tokens that a rounding sends to other experts would hide the errors of attention.
    rope: Any = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "vocab_size": 1024}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    heads = {"num_attention_heads": options.heads, "num_key_value_heads": options.heads, "q_lora_rank": 256}
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "initializer_range": 0.04}
    config = DeepseekV3Config(**sizes, **experts, **heads, **layers, rope_parameters=rope)
    load = AutoModelForCausalLM.from_config
    model = load(config, dtype=torch.bfloat16, experts_implementation="eager").to(device).eval()
    exact = load(config, dtype=torch.float32, experts_implementation="eager").to(device).eval()
    exact.load_state_dict(model.state_dict())  # the same numbers

    # The prompts, and what the model in float32 says after them: the tokens that every run below is given.
    texts = [torch.randint(config.vocab_size, (prompt,)).to(device) for prompt in PROMPTS]
    for _ in range(NEW_TOKENS):
        texts = [torch.cat([text, exact(text[None]).logits[0, -1:].argmax(-1)]) for text in texts]
    want = torch.cat([exact(text[None]).logits[0] for text in texts])

    def report(cache: str, name: str, logits: list[torch.Tensor]) -> tuple[float, float]:
        """Print a line, and return the largest error and the mean."""
        got = torch.cat(logits)
        error = (got.float() - want).abs()
        same = int((got.argmax(-1) == want.argmax(-1)).sum())
        print(f"{cache:9}{name:20}{error.max():10.4f}{error.mean():12.5f}{same:10d} of {len(want)}")
        return float(error.max()), float(error.mean())

    print(f"Logits against float32, whose standard deviation is {want.std():.2f}; {options.heads} heads")
    print(f"{'cache':9}{'model':20}{'max error':>10}{'mean error':>12}{'same token':>17}")
    kinds: list[tuple[str, Any]] = [("bf16", DynamicCache), ("FP8 v32", QuantizedCache)]
    is_close = True
    for name, kind in kinds:
        own = [model(text[None], past_key_values=kind()).logits[0] for text in texts]
        own_max, own_mean = report(name, "transformers, bf16", own)
        batch = Batch(config.num_hidden_layers, name != "bf16", device)
        patched = copy.deepcopy(model)
        for layer in patched.model.layers:
            layer.self_attn = RawMLAAttention(layer.self_attn, batch)
        our_max, our_mean = report(name, "with rawmla", run_rawmla(patched, batch, texts))
        is_close &= our_max <= MAX_LIMIT * own_max and our_mean <= MEAN_LIMIT * own_mean
    if not is_close:
        sys.exit("deepseek_v3_transformers: rawmla is further from float32 than transformers' own bf16")
    print("deepseek_v3_transformers: as close to float32 as transformers' own bf16, over both caches")


if __name__ == "__main__":
    main()
