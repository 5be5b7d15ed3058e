"""Host side of cuda_src/kernels/mha_backward_clear.cu: with cu_seqlens, zeros in the gradients of tokens that
belong to no request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import jit
from ..jit.params import I32, I64, POINTER, ParamStruct, changing
from .common import ceil_div

if TYPE_CHECKING:
    from .mha_backward import BackwardCall

CLEAR_SPEC = jit.KernelSpec("mha_backward_clear", (), threads=128, smem_bytes=0)
_CLEARED_ROWS = 64
CLEAR_PARAMS = ParamStruct(
    changing(POINTER("cu_seqlens_q", "cu_seqlens_k"), POINTER("gradients", length=3)),  # dq, dk and dv
    I64("strides_s", "strides_h", length=3),
    I32("tokens", "heads", "columns", "first_ctas", length=3),
    I32("b"),
)


def prepare_clear(call: BackwardCall, capturing: Callable[[], bool]) -> Callable[..., object]:
    """The launch of a call, which takes the addresses of cu_seqlens_q, cu_seqlens_k, dq, dk and dv."""
    kernel = jit.get_kernel(CLEAR_SPEC, call.device, capturing=capturing)
    tokens = (call.total_q * call.needs.dq, call.total_k * call.needs.dk, call.total_k * call.needs.dv)
    ctas = [ceil_div(count, _CLEARED_ROWS) for count in tokens]
    strides = (call.dq_strides, call.dk_strides, call.dv_strides)
    params = CLEAR_PARAMS.pack(
        strides_s=tuple(token for _, token, _ in strides),
        strides_h=tuple(head for _, _, head in strides),
        tokens=tokens,
        heads=(call.h_q, call.h_kv, call.h_kv),
        columns=(call.d_qk, call.d_qk, call.d_v),
        first_ctas=(0, ctas[0], ctas[0] + ctas[1]),
        b=call.b,
    )
    return kernel.prepare((sum(ctas), 1, 1), params, CLEAR_PARAMS.changing, pdl=True).launch
