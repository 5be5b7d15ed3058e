"""Tiny random models of transformers, and comparisons of their attention implementations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from kit.gpu import missing_hopper_reason

HAS_GPU = missing_hopper_reason() is None
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float32)
GAP = 0.1 if HAS_GPU else 0.0
"""Logits of two tokens may differ by this much where one attention takes the one and another the other."""

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "initializer_range": 0.2, "pad_token_id": 0}
GROUPED = {**SMALL, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}  # all: rounding would choose others
KINDS = ["full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 5, "head_dim": 16, "layer_types": KINDS}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=32),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED, **WINDOWS, attn_logit_softcapping=5.0),
    "gpt_oss": lambda: hf.GptOssConfig(**GROUPED, **WINDOWS, **EXPERTS),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, **EXPERTS),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=5),
}
WITHOUT_WINDOW = ("llama", "qwen3", "mixtral")


def other_attention(name: str) -> str:
    """What transformers itself attends with."""
    return "eager" if name in ("gemma2", "gpt_oss") else "sdpa"


PADDINGS: dict[str, list[tuple[int, int]] | None] = {
    "none": None,
    "left": [(4, 11), (0, 11), (1, 11)],
    "right": [(0, 7), (0, 11), (0, 10)],
    "holes": [(4, 11), (0, 11), (1, 11)],
}
"""The visible tokens of requests of 11 tokens; "holes" hides some of them."""


def make(config: Any, kind: Any = hf.AutoModelForCausalLM) -> Any:
    """Make a model with random weights, which attends by rawmla."""
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation="rawmla").to(DEVICE, DTYPE).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_()
    return model


def tokens(b: int = 3, s: int = 11) -> torch.Tensor:
    return torch.randint(1, 97, (b, s), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def padding(name: str) -> torch.Tensor | None:
    """Make an attention mask of 3 x 11 tokens."""
    ranges = PADDINGS[name]
    if ranges is None:
        return None
    mask = torch.zeros(3, 11, dtype=torch.int64)
    for row, (start, end) in enumerate(ranges):
        mask[row, start:end] = 1
    if name == "holes":
        mask[0, 6:8] = mask[2, 4] = 0
    return mask.to(DEVICE)


def check_close(model: Any, inputs: dict[str, Any], mask: torch.Tensor | None = None) -> None:
    """Hold results against eager attention in float32: the error is at most twice that of eager attention."""
    exact, results = copy.deepcopy(model).float(), {}
    for name, one in (("want", exact), ("eager", model), ("rawmla", model)):
        one.set_attn_implementation("eager" if name == "want" else name)
        with torch.no_grad():
            result = one(
                **{key: x.to(one.dtype) if key == "pixel_values" else x for key, x in inputs.items()}
            )
        result = result[0].float()
        results[name] = result if mask is None else result[mask.bool()]
    error, own = [float((results[name] - results["want"]).abs().max()) for name in ("rawmla", "eager")]
    assert results["want"].std() > 0.3
    assert error <= 2 * own + 1e-4


def losses(model: Any, attention: str, mask: torch.Tensor | None, step: Any = None) -> list[float]:
    """The losses of ten steps of training."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation(attention)
    call = model if step is None else step(model)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=3e-3), tokens()
    labels: torch.Tensor = ids
    if mask is not None:  # a token after padding is predicted by padding, whose attention is not defined
        labels = ids.masked_fill((mask & torch.nn.functional.pad(mask, (1, 0))[:, :-1]) == 0, -100)
    result = []
    for _ in range(10):
        loss = call(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(float(loss.detach()))
    assert result[-1] < 0.9 * result[0]
    return result
