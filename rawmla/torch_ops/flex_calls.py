"""Flex attention under torch.compile: it breaks the graph, since its functions are Python until they are
traced for a kernel of their own.
"""

from __future__ import annotations

import torch

from ..attention import create, flex

__all__ = ["create_block_mask", "flex_attention"]

flex_attention = torch.compiler.disable(flex.attend)
create_block_mask = torch.compiler.disable(create.make)
