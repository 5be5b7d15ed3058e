"""The prompts of the models, made from a seed, so that results need not store them."""

from __future__ import annotations

import random

from .models import VOCABULARY

SHORT = [1, 2, 5, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257]
SHORT += [400, 513, 777, 1023, 1024, 1025, 1500, 2000]
LONG = [*SHORT[:12], 300, 1025, 2000, 2047, 2048, 2049, 2500, 3000]
"""DSA selects 2,048 keys, so some prompts are longer."""
SHARED = 320
"""Tokens at the start of every third prompt, if it is longer: what prefix caching finds again."""
PERIOD = 7
"""Tokens of the phrase that every third prompt repeats: speculation by n-grams can continue it."""


def random_tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(2, VOCABULARY) for _ in range(count)]


def prompts(kind: str) -> list[list[int]]:
    """Token ids. "short" and "long" have random, shared and repeated texts in turn, "plain" random ones."""
    rng = random.Random(5)
    start = random_tokens(SHARED, rng)
    texts = []
    for number, length in enumerate(LONG if kind == "long" else SHORT):
        text = random_tokens(length, rng)
        if kind != "plain" and number % 3 == 1 and length > SHARED:
            text[:SHARED] = start
        elif kind != "plain" and number % 3 == 2:
            text = (text[:PERIOD] * (length // PERIOD + 1))[:length]
        texts.append(text)
    return texts
