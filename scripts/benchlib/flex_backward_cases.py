"""The cases of the backward of flex attention: operation and byte counts."""

from dataclasses import dataclass, replace
from typing import Any

from .flex_cases import FlexCase


@dataclass(frozen=True)
class FlexBackwardCase(FlexCase):
    """The backward call of a forward case, with a gradient of out. `captured`: what the score
    function reads has a gradient too.
    """

    captured: bool = False

    @property
    def id(self) -> str:
        """The name of the case."""
        name = super().id.replace("flex-", "flex-backward-", 1)
        return f"{name}-captured" if self.captured else name

    def flops(self) -> int:
        """Multiplications and additions of five products, of which the forward case counts two."""
        return super().flops() * 5 // 2

    def bytes_moved(self) -> int:
        """Bytes that must cross device memory: q, k, v, out, dout and lse read once, dq, dk and dv
        written.
        """
        return 2 * super().bytes_moved() + 4 * self.b * self.s * self.h_q

    def fields(self) -> dict[str, Any]:
        """What identifies the case, as the leading fields of a result row."""
        return {**super().fields(), "op": "flex_attention_backward"}


def flex_backward_cases() -> list[FlexBackwardCase]:
    """The masks and score functions that torch's flex attention runs beside, then a table without and with a
    gradient of its own, and gradients that are sums over all pairs of a head, and over all pairs.
    """
    base = FlexBackwardCase()
    bias = replace(base, score="bias")
    return [
        replace(base, mask="full"),
        base,
        replace(base, h_kv=2),
        replace(base, mask="window", extent=1024),
        replace(base, score="alibi"),
        replace(base, score="softcap"),
        replace(base, mask="documents", extent=900),
        replace(base, d=64),
        bias,
        replace(bias, captured=True),
        replace(base, score="scale", captured=True),
        replace(base, score="scalar", captured=True),
    ]
