"""The cases of the backward of dense attention: operation and byte counts."""

from dataclasses import dataclass, replace
from typing import Any

from .mha_cases import MhaCase


@dataclass(frozen=True)
class MhaBackwardCase(MhaCase):
    """The backward call of a forward case, with a gradient of out."""

    @property
    def id(self) -> str:
        """The name of the case."""
        return super().id.replace("mha-", "mha-backward-", 1)

    def flops(self) -> int:
        """Multiplications and additions of Q·K^T, dS·K and dS^T·Q over d_qk, and of dO·V^T and P^T·dO over
        d_v, for the pairs that the forward case counts.
        """
        return super().flops() // (self.d_qk + self.d_v) * (3 * self.d_qk + 2 * self.d_v)

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: q, k, v, out, dout and lse read once, dq, dk and dv written
        (two bytes a value, four of lse).
        """
        queries = sum(queries for queries, _ in self.lengths())
        return 2 * super().bytes_moved() + 4 * queries * self.h_q

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {**super().fields(), "op": "mha_backward"}


def mha_backward_cases() -> list[MhaBackwardCase]:
    """Rows of d 128, 192/128 and 64, other head dimensions, fp16, score steps, a window, varied lengths."""
    base = MhaBackwardCase(2, 8192)
    mixed = replace(base, d_qk=192)
    d256 = replace(base, d_qk=256, d_v=256, h_q=8, h_kv=8)
    return [
        base,
        replace(base, causal=False),
        replace(base, b=1, s=16384),
        replace(base, b=8, s=2048),
        replace(base, h_kv=2),
        mixed,
        replace(mixed, causal=False),
        replace(mixed, h_kv=2),
        replace(base, d_qk=64, d_v=64),
        replace(base, d_qk=96, d_v=96),
        d256,
        replace(base, dtype="fp16"),
        replace(base, softcap=30.0),
        replace(base, sink=True),
        replace(base, window=1024),
        replace(base, varlen=True),
    ]
