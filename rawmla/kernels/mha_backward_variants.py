"""Variants of the kernels of dense attention's backward: forms, shared memory and defines of
cuda_src/kernels/mha_backward.cu and mha_backward_by_product.cu, and of the kernels around them.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from .. import jit
from ..jit.spec import MAX_SMEM_BYTES
from .common import CHUNK, DTYPES, ceil_div, padded

BLOCK_ROWS = 64
_BARRIER_BYTES = 640
_REFERENCE_THREADS = 128
CLEAR_SPEC = jit.KernelSpec("mha_backward_clear", (), threads=128, smem_bytes=0)


class Needs(NamedTuple):
    """Which gradients of a call somebody needs."""

    dq: bool
    dk: bool
    dv: bool
    others: bool
    """dsink; in flex attention the gradients of captured arrays."""

    @property
    def main(self) -> bool:
        """Whether the kernel of dq, dk and dv has something to compute."""
        return self.dq or self.dk or self.dv


ALL = Needs(True, True, True, True)


class Form(NamedTuple):
    """How the consumers of a CTA share its work; docs/kernels/mha_backward.md has the forms."""

    kernel: str
    is_wide: bool
    tile_keys: int
    threads: int

    @property
    def by_product(self) -> bool:
        """Whether consumers share products instead of keys."""
        return self.kernel == "mha_backward_by_product"

    def accum_columns(self, d_qk: int) -> int:
        """Columns of the sums of dQ."""
        return ceil_div(d_qk, CHUNK) * CHUNK if self.by_product else padded(d_qk)


BY_KEYS = Form("mha_backward", False, 128, 384)
BY_KEYS_WIDE = Form("mha_backward", True, 128, 384)
BY_PRODUCT = Form("mha_backward_by_product", False, 64, 512)


def form_of(
    dtype: str, d_qk: int, d_v: int, softcap: bool, alibi: bool, weights: bool, needs: Needs = ALL
) -> Form:
    """The form for a pair of head dimensions that `padded` returned, with the flags of `specs`."""
    # dK and dV take half a register a column: with more columns a consumer of all products spills.
    if max(d_qk, d_v) <= 128 and d_qk + d_v <= (224 if softcap and alibi and weights else 256):
        return BY_KEYS
    if (d_qk, d_v) == (192, 128) and not (softcap or alibi or weights):
        if not needs.dq and not needs.dk:
            return BY_KEYS
        # In other variants ptxas serialises the products, or P loses bits that dS needs.
        if dtype == "bfloat16":
            return BY_KEYS_WIDE
    return BY_PRODUCT


def _bytes_by_keys(is_wide: bool, d_qk: int, d_v: int, has_dq: bool, stages: int) -> int:
    """Shared memory of mha_backward.cu with a number of stages of Q and dO."""
    row_bytes = 2 * CHUNK * (ceil_div(d_qk, CHUNK) + ceil_div(d_v, CHUNK))
    ds_bytes = BLOCK_ROWS * 2 * 128 * (1 if is_wide else 2)
    dq_bytes = 2 * BLOCK_ROWS * 4 * (d_qk // 2 if d_qk > 96 else d_qk)
    return (
        128 * row_bytes
        + stages * BLOCK_ROWS * (row_bytes + 12)
        + (ds_bytes if has_dq or is_wide else 0)
        + (dq_bytes if has_dq else 0)
        + _BARRIER_BYTES
    )


def _bytes_by_product(d_qk: int, d_v: int, places: int) -> int:
    """Shared memory of mha_backward_by_product.cu with a number of places for chunks of dQ."""
    row_bytes = 2 * CHUNK * (ceil_div(d_qk, CHUNK) + ceil_div(d_v, CHUNK))
    factors = ds = BLOCK_ROWS * 2 * 64
    return (
        64 * row_bytes
        + 2 * BLOCK_ROWS * (row_bytes + 12)
        + ds
        + factors
        + BLOCK_ROWS * CHUNK * 4 * places
        + _BARRIER_BYTES
    )


@cache
def specs(
    dtype: str,
    d_qk: int,
    d_v: int,
    softcap: bool = False,
    alibi: bool = False,
    weights: bool = False,
    needs: Needs = ALL,
) -> tuple[jit.KernelSpec, jit.KernelSpec, jit.KernelSpec]:
    """The variants of the three kernels, in the order of their launch.

    ``weights``: there are sinks and dlse.
    """
    form = form_of(dtype, padded(d_qk), padded(d_v), softcap, alibi, weights, needs)
    prepare, finish = specs_around(dtype, d_v)
    features = {"SOFTCAP": softcap, "ALIBI": alibi, "WEIGHTS": weights}
    return prepare, _variant(dtype, d_qk, d_v, form, features, needs), finish


def specs_around(dtype: str, d_v: int) -> tuple[jit.KernelSpec, jit.KernelSpec]:
    """The variants of the kernels before and after the main one."""
    kind = ("DTYPE", DTYPES[dtype])
    lanes = ("LANES", 8 if d_v <= CHUNK else 16)  # of a row, 16 bytes each
    return (
        jit.KernelSpec("mha_backward_prepare", (kind, lanes), threads=128, smem_bytes=0),
        jit.KernelSpec("mha_backward_finish", (kind,), threads=128, smem_bytes=0),
    )


_FEATURES = {"ALIBI": False, "FLEX": False, "SOFTCAP": False, "WEIGHTS": False}


def _variant(
    dtype: str,
    d_qk: int,
    d_v: int,
    form: Form,
    features: dict[str, bool],
    needs: Needs,
    headers: tuple[tuple[str, str], ...] = (),
) -> jit.KernelSpec:
    """The variant of the main kernel in a form."""
    d_qk, d_v = padded(d_qk), padded(d_v)
    if form.is_wide and needs.dq:
        needs = ALL  # ptxas would serialise what is left without dk or dv; what nobody needs is not stored
    if form.by_product:
        parts = ceil_div(d_qk, CHUNK)
        places, smem_bytes = next(
            (n, smem_bytes)
            for n in range(parts, 0, -1)
            for smem_bytes in [_bytes_by_product(d_qk, d_v, n)]
            if parts % n == 0 and smem_bytes <= MAX_SMEM_BYTES
        )
        of_form: tuple[tuple[str, int], ...] = (("DQ_PLACES", places),)
    else:
        stages, smem_bytes = next(
            (n, smem_bytes)
            for n in (3, 2)
            for smem_bytes in [_bytes_by_keys(form.is_wide, d_qk, d_v, needs.dq, n)]
            if smem_bytes <= MAX_SMEM_BYTES
        )
        of_form = (("STAGES", stages), ("WIDE", form.is_wide))
    return jit.KernelSpec(
        form.kernel,
        (
            *of_form,
            ("DTYPE", DTYPES[dtype]),
            ("D_QK", d_qk),
            ("D_V", d_v),
            ("NEEDS_DK", needs.dk),
            ("NEEDS_DQ", needs.dq),
            ("NEEDS_DV", needs.dv),
            *(_FEATURES | features).items(),
        ),
        threads=form.threads,
        smem_bytes=smem_bytes,
        headers=headers,
        # Variants for some gradients are too many to be compiled by every NVRTC before a user does.
        may_lose=not (needs.dq and needs.dk and needs.dv),
    )


def flex_spec(
    dtype: str, d_qk: int, d_v: int, form: Form, header: tuple[str, str], needs: Needs = ALL
) -> jit.KernelSpec:
    """The variant of the main kernel with functions, in a form; ``header`` is of `rawmla.flex.mods`."""
    return _variant(dtype, d_qk, d_v, form, {"FLEX": True}, needs, headers=(header,))


def forms_of(d_qk: int, d_v: int) -> tuple[Form, ...]:
    """The forms that functions may have at head dimensions, the better one first."""
    return (BY_KEYS, BY_PRODUCT) if max(padded(d_qk), padded(d_v)) <= 128 else (BY_PRODUCT,)


def references_spec(dtype: str, d_qk: int, tile_keys: int, header: tuple[str, str]) -> jit.KernelSpec:
    """The variant of flex_row_references.cu for tiles of keys as the kernel after it has them."""
    d_qk = padded(d_qk)
    return jit.KernelSpec(
        "flex_row_references",
        (("DTYPE", DTYPES[dtype]), ("D_QK", d_qk), ("FLEX", True), ("TILE_KEYS", tile_keys)),
        threads=_REFERENCE_THREADS,
        smem_bytes=2 * CHUNK * ceil_div(d_qk, CHUNK) * (BLOCK_ROWS + tile_keys) + 16,
        headers=(header,),
    )
