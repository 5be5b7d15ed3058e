"""The operations of this folder in programs of torch.compile: it breaks its graph for them. They cannot be
operators, since functions are no arguments of one.
"""

from __future__ import annotations

import torch

from . import backward, create, forward

attend = torch.compiler.disable(forward.attend)
backpropagate = torch.compiler.disable(backward.backpropagate)
make = torch.compiler.disable(create.make)
