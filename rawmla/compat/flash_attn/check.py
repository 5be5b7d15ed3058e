"""The answers of transformers' checks for flash-attn, with reasons."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from importlib import metadata

from .install import GENERATIONS, Generation

OLDEST = (2, 3, 3)
"""The oldest flash-attn that transformers uses as FlashAttention-2."""


def answers() -> Iterator[str]:
    """Yield a line for each generation, and what transformers itself answers where it is installed."""
    owners = metadata.packages_distributions()
    for version, generation in GENERATIONS.items():
        name = generation.modules[0].partition(".")[0]
        spec = importlib.util.find_spec(name)
        if spec is None:
            answer = f"no, there is no module {name}"
        else:
            reason = _reason(name, generation, owners.get(name, ()))
            place = spec.origin or list(spec.submodule_search_locations or ())
            answer = f"{'no, ' + reason if reason else 'yes'} ({name} is {place})"
        yield f"is_flash_attn_{version}_available: {answer}"
    if importlib.util.find_spec("transformers") is not None:
        try:
            import transformers
        except Exception as error:
            yield f"transformers cannot be imported: {type(error).__name__}: {error}"
            return
        for version in GENERATIONS:
            ask = getattr(transformers.utils, f"is_flash_attn_{version}_available", None)
            if ask is not None:
                yield f"transformers {transformers.__version__}, is_flash_attn_{version}_available(): {ask()}"


def _reason(name: str, generation: Generation, owners: Sequence[str]) -> str:
    """Why transformers would not use a module, in the order of its checks; empty if it would."""
    names = [owner.replace("_", "-") for owner in owners]
    if generation.distribution not in names:
        return f"it is of {', '.join(names) or 'no distribution'}, not of {generation.distribution}"
    version = metadata.version(generation.distribution)
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))  # a build's own suffix may follow: 2.8.3+cu12
    if generation.distribution == "flash-attn" and numbers < OLDEST:
        return f"{generation.distribution} {version} is too old"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch.cuda.is_available() is False"
