"""Any model of Hugging Face's transformers with rawmla: `attn_implementation="rawmla"`.

A tiny Llama with random weights continues prompts of several lengths, padded on the left, first with torch's
attention ("sdpa"), then with rawmla's. It prints tokens per second, and that the tokens agree. Where two
tokens have nearly equal logits, rounding to bfloat16 decides, so a text may go on in another way from there.

For a model of yours, call `rawmla.transformers.register()` and load it with
`AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="rawmla")`.

It needs a Hopper GPU (H100, H200, GH200) and transformers (pip install "transformers>=5.24"):
python examples/any_transformers_model.py
"""

import sys
import time
from typing import Any

import torch

import rawmla

try:
    from transformers import AutoModelForCausalLM, LlamaConfig
except ImportError:
    sys.exit('this example needs transformers: pip install "transformers>=5.24"')

PROMPTS, NEW_TOKENS = [1000, 517, 33, 1], 128
HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 16, 4, 128, 4, 1024
NEARLY_EQUAL = 0.1  # a difference of two logits, in standard deviations of all


def make_model(device: str) -> Any:
    """Make a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=2 * HEADS * HEAD_DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).eval()


def make_prompts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Make random tokens, and the mask of padding before them."""
    tokens = torch.randint(1, VOCABULARY, (len(PROMPTS), max(PROMPTS)))
    places = torch.arange(max(PROMPTS))
    mask = (places >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]).long()
    return (tokens * mask).to(device), mask.to(device)


def generate(model: Any, attention: str, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[Any, float]:
    """Continue the prompts. Returns the new tokens with their logits, and tokens per second."""
    model.set_attn_implementation(attention)
    seconds = 0.0
    for _ in range(2):  # the first time kernels are compiled and loaded
        began = time.perf_counter()
        result = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return result, len(tokens) * NEW_TOKENS / seconds


def compare(got: Any, want: Any) -> int:
    """Count the tokens before texts part. Ends the program if they part where logits are not nearly equal."""
    same = 0
    for row in range(len(PROMPTS)):
        for step, logits in enumerate(want.logits):
            place = max(PROMPTS) + step
            one, other = got.sequences[row, place], want.sequences[row, place]
            if one != other:
                apart = float((logits[row, other] - logits[row, one]) / logits[row].std())
                if not apart <= NEARLY_EQUAL:
                    sys.exit(f"any_transformers_model: request {row} differs at token {step}, by {apart:.2f}")
                break
            same += 1
    return same


def main() -> None:
    try:
        rawmla.warmup("mha", mha_head_dims=[(HEAD_DIM, HEAD_DIM)])
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    rawmla.transformers.register()
    model = make_model("cuda")
    tokens, mask = make_prompts("cuda")
    results = {}
    for attention in ("sdpa", "rawmla"):
        results[attention], rate = generate(model, attention, tokens, mask)
        print(f"{attention:8}{rate:10,.0f} tokens per second", flush=True)
    same, count = compare(results["rawmla"], results["sdpa"]), len(PROMPTS) * NEW_TOKENS
    parted = "" if same == count else "; texts part where logits are nearly equal"
    print(f"any_transformers_model: the tokens agree, {same} of {count}{parted}")


if __name__ == "__main__":
    main()
