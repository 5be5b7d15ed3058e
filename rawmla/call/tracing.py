"""Whether a call is to be seen by torch: as an operator, instead of as Python that launches a kernel.

torch.compile, torch.export, make_fx and fake tensors follow operators alone: they cannot follow an address,
DLPack or the driver. Public functions ask `is_traced`, and go through the operators of `rawmla.torch_ops`
where it says so; other calls pay for that question and no more (about 0.1 microseconds). torch is not
imported for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def _ask_without_torch(array: Any) -> bool:
    """Until somebody imports torch."""
    return hasattr(sys.modules.get("torch"), "compiler") and ask_torch()(array)


def _grad_without_torch() -> bool:
    return hasattr(sys.modules.get("torch"), "compiler") and (ask_torch(), is_grad_enabled())[1]


is_grad_enabled: Callable[[], bool] = _grad_without_torch
"""`torch.is_grad_enabled`, once torch is there; read from this module at every call, as `is_traced` is."""

is_traced: Callable[[Any], bool] = _ask_without_torch
"""Whether torch follows a call with this array, or list of arrays, as its first argument. Read it from this
module at every call: it is another function once torch is there.
"""


def ask_torch() -> Callable[[Any], bool]:
    """Make `is_traced` ask torch, which has been imported; returns it."""
    global is_traced, is_grad_enabled
    import torch

    is_dynamo_compiling = torch.compiler.is_dynamo_compiling
    modes = torch._C._len_torch_dispatch_stack

    def ask(array: Any) -> bool:
        return (is_dynamo_compiling() or modes() > 0) and follows(array)

    def follows(array: Any) -> bool:
        if isinstance(array, (list, tuple)):
            array = array[0] if array else None
        if array is not None and not isinstance(array, torch.Tensor):
            return False
        # A mode that is switched off, as it is while a kernel of an operator runs, sees no operator.
        return is_dynamo_compiling() or not torch._C._dispatch_tls_is_dispatch_key_excluded(
            torch._C.DispatchKey.Python
        )

    is_traced, is_grad_enabled = ask, torch.is_grad_enabled
    return ask


if hasattr(sys.modules.get("torch"), "compiler"):
    ask_torch()
