"""The operations of this folder in programs of torch.compile: it breaks its graph for them. They cannot be
operators, since functions are no arguments of one.
"""

from __future__ import annotations

import torch

from . import create, flex

__all__ = ["attend", "make"]

attend = torch.compiler.disable(flex.attend)
make = torch.compiler.disable(create.make)
