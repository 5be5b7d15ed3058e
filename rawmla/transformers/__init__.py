"""Attention of Hugging Face's transformers by rawmla: `attn_implementation="rawmla"` (docs/transformers.md).

Importing this module does not import transformers or torch; `register` imports both.
"""

from __future__ import annotations

import rawmla

from ..errors import MissingDependencyError

__all__ = ["register"]

NAME = "rawmla"
"""The attention implementation. transformers treats every name with "flash" in it as its own."""


def register() -> None:
    """Register "rawmla" as an attention implementation of transformers, in this process.

    Models that are loaded with `attn_implementation="rawmla"`, or switched by
    `model.set_attn_implementation("rawmla")`, then attend by `rawmla.flash_attn_func`,
    `rawmla.flash_attn_varlen_func` and, over caches, `rawmla.flash_attn_with_kvcache`. May be called again.
    It needs no GPU and compiles nothing.

    Raises
    ------
    MissingDependencyError
        transformers is not installed, or is too old to take a mask function of another library.

    Examples
    --------
    >>> rawmla.transformers.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="rawmla")
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from .attention import FUNCTIONS, attend
        from .masks import make_mask
    except ImportError as error:
        raise MissingDependencyError(
            f'rawmla.transformers needs transformers ({error}): pip install "transformers>=5.24"'
        ) from error
    for function in FUNCTIONS:
        getattr(rawmla, function)  # loaded here, as torch.compile cannot follow the first use of a name
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
