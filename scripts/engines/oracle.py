"""Log probabilities of the tokens that engines chose, by transformers in float32 and without a cache.

    python scripts/engines oracle RESULTS.jsonl MODEL --folder F

Prints one line of JSON for each result of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import record
from .prompts import prompts

Scores = tuple[list[float], list[float]]
"""For each chosen token: its log probability, and the largest of any token."""


def scorer(folder: Path) -> Callable[[tuple[int, ...], tuple[int, ...]], Scores]:
    """A function of a prompt and of the tokens after it, over a model of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()

    @torch.no_grad()
    def score(prompt: tuple[int, ...], chosen: tuple[int, ...]) -> Scores:
        logits = model(torch.tensor([prompt + chosen], device=device), use_cache=False).logits[0]
        scores = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        its = scores.gather(1, torch.tensor(chosen, device=device)[:, None])[:, 0]
        return its.tolist(), scores.max(-1).values.tolist()

    return score


def compare(
    rows: Iterable[dict[str, Any]], score: Callable[[tuple[int, ...], tuple[int, ...]], Scores]
) -> Iterable[dict[str, Any]]:
    """A row for each result; equal texts are scored once."""
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Scores] = {}
    for row in rows:
        errors, losses = [], []
        for prompt, chosen, logprobs in zip(
            prompts(row["prompts"]), row["ids"], row["logprobs"], strict=True
        ):
            key = tuple(prompt), tuple(chosen)
            if key not in known:
                known[key] = score(*key)
            its, best = known[key]
            errors += [abs(one - other) for one, other in zip(its, logprobs, strict=True)]
            losses += [one - other for one, other in zip(best, its, strict=True)]
        found = {"mean": sum(errors) / len(errors), "max": max(errors), "tokens": len(errors)}
        found |= {"not_best": sum(loss > 0 for loss in losses), "worst_loss": max(losses)}
        yield {"oracle": row["name"], **found}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engines oracle", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows = [row for row in record.unscored(record.read(options.results)) if row["model"] == options.model]
    for line in compare(rows, scorer(options.folder / "models" / options.model)):
        print(json.dumps(line), flush=True)
    return 0
