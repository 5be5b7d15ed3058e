"""Small models with random weights, in the shapes of well-known ones, as folders that engines and
transformers load.

    python scripts/engines models FOLDER [NAME ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = 2048


class Model(NamedTuple):
    """A model type of transformers with its configuration."""

    kind: str
    config: dict[str, Any]


def _mla(heads: int, **more: Any) -> dict[str, Any]:
    """DeepSeek-V3's attention with other head counts, in thin layers."""
    config: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": heads}
    config |= {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    config |= {"q_lora_rank": 768, "kv_lora_rank": 512, "v_head_dim": 128}
    config |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "first_k_dense_replace": 4}
    config |= {"n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 512}
    config |= {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
    config |= {"routed_scaling_factor": 1.0, "max_position_embeddings": 16384}
    # Fields of DeepSeek's own files, which engines read and transformers does not.
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    config["moe_layer_freq"] = 1
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return config | more


def _gqa(heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    """Grouped-query attention in thin layers."""
    config: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": head_dim, "hidden_size": 1024, "intermediate_size": 2048}
    config |= {"num_hidden_layers": 4, "max_position_embeddings": 16384}
    return config | more


INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
MODELS = {
    "dense16": Model("deepseek_v3", _mla(16)),
    "dense128": Model("deepseek_v3", _mla(128)),
    "moe16": Model("deepseek_v3", _mla(16, first_k_dense_replace=1)),
    "dsa16": Model("deepseek_v32", _mla(16, **INDEXER)),
    "dsa64": Model("deepseek_v32", _mla(64, **INDEXER)),
    "llama": Model("llama", _gqa(32, 8, 128)),
    "qwen": Model("qwen2", _gqa(28, 4, 128, hidden_size=3584)),  # its head_dim is hidden_size / heads
    "gemma": Model(
        "gemma2",
        # A softcap below the scores' range and a window below the prompts' lengths, or neither would show.
        # SGLang reads hidden_act, which Gemma's own files have.
        _gqa(8, 4, 256, attn_logit_softcapping=5.0, sliding_window=256, query_pre_attn_scalar=256)
        | {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "gpt_oss": Model(
        "gpt_oss",
        _gqa(64, 8, 64, sliding_window=128, num_local_experts=8, num_experts_per_tok=4, swiglu_limit=7.0),
    ),
}


def deviation(name: str, shape: tuple[int, ...], kind: str) -> float | None:
    """Standard deviation of a weight's random values. None: it keeps what transformers sets (norms).

    Queries are doubled, so that scores have a deviation of 2 and softmax is peaked. The last product is
    doubled, so that few tokens are nearly as likely as the chosen one.
    """
    if "norm" in name:
        return None
    if len(shape) == 1:  # biases and sinks
        return 1.0 if "sinks" in name else 0.5
    if "embed_tokens" in name:
        return 0.125 * shape[-1] ** -0.5 if kind == "gemma2" else 1.0  # Gemma multiplies its by the rest
    if "bias" in name:  # of each expert
        return 0.1
    inputs = shape[1] if kind == "gpt_oss" and "experts" in name else shape[-1]
    gain = 2.0 if any(part in name for part in ("q_proj", "q_b_proj", "o_proj", "lm_head")) else 1.0
    return gain * float(inputs) ** -0.5


def make(folder: Path, name: str, device: str) -> None:
    """Write a model's configuration and weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, own = MODELS[name]
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, **own)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(7)
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            scale = deviation(parameter, tuple(values.shape), kind)
            if scale is not None:
                values.normal_(0.0, scale, generator=generator)
        if kind == "gemma2":  # its head is its small embedding
            model.model.norm.weight.fill_(15.0)
    model.save_pretrained(folder / name)


def is_made(folder: Path, name: str) -> bool:
    """Whether a model is there: weights are written last."""
    return (folder / name / "model.safetensors").exists()


def make_missing(folder: Path, names: list[str]) -> None:
    """Write the models that are not there, on the GPU if there is one."""
    import torch

    for name in names:
        if not is_made(folder, name):
            make(folder, name, "cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engines models", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; none: all")
    options = parser.parse_args(arguments)
    make_missing(options.folder, options.names or list(MODELS))
    return 0
