"""The parameter struct of every kernel, and what its bytes say."""

from __future__ import annotations

import struct
from typing import Any

from rawmla.jit import KernelSpec
from rawmla.jit.params import ParamStruct
from rawmla.kernels import (
    block_mask,
    flex_captured,
    mha_backward,
    mha_combine,
    mha_decode,
    mha_forward,
    mla_cache_gather,
    mla_cache_write,
    mla_combine,
    mla_convert_indices,
    mla_dense_decode,
    mla_merge_states,
    mla_metadata,
    mla_sparse,
    mla_unite_selections,
)

DENSE_DECODE = ("mla_dense_decode", "mla_dense_decode_few_rows")
SPARSE_DECODE = ("mla_sparse_fp8", "mla_sparse_fp8_cluster", "mla_sparse_fp8_few_heads", "mla_sparse_bf16")

# By kernel, and by whether the variant is one for prefill, or for a cache of rows
PARAMS: dict[tuple[str, bool], ParamStruct] = {
    ("block_mask_lists", False): block_mask.LISTS_PARAMS,
    ("block_mask_ranks", False): block_mask.RANKS_PARAMS,
    ("block_mask_scatter", False): block_mask.SCATTER_PARAMS,
    ("flex_captured_finish", False): flex_captured.CAPTURED_FINISH_PARAMS,
    ("mha_backward", False): mha_backward.params_of(),
    ("mha_backward_by_product", False): mha_backward.params_of(),
    ("mha_backward_clear", False): mha_backward.CLEAR_PARAMS,
    ("mha_backward_finish", False): mha_backward.FINISH_PARAMS,
    ("mha_backward_prepare", False): mha_backward.PREPARE_PARAMS,
    ("mha_combine", False): mha_combine.PARAMS,
    ("mha_decode", False): mha_decode.PARAMS,
    ("mha_decode_combine", False): mha_decode.PARAMS,
    ("mha_forward", False): mha_forward.params_of(),
    ("mha_forward", True): mha_forward.params_of(has_rows=True),
    ("mla_cache_gather", False): mla_cache_gather.PARAMS,
    ("mla_cache_write", False): mla_cache_write.PARAMS,
    ("mla_convert_indices", False): mla_convert_indices.PARAMS,
    ("mla_find_not_finite", False): mla_unite_selections.FIND_PARAMS,
    ("mla_merge_states", False): mla_merge_states.PARAMS,
    ("mla_metadata", False): mla_metadata.PARAMS,
    ("mla_unite_selections", False): mla_unite_selections.UNITE_PARAMS,
    **{(name, False): mla_dense_decode.PARAMS for name in DENSE_DECODE},
    **{(name, prefill): mla_sparse.PARAMS[prefill] for name in SPARSE_DECODE for prefill in (False, True)},
    **{("mla_combine", prefill): mla_combine.PARAMS[prefill] for prefill in (False, True)},
}


def family(spec: KernelSpec) -> tuple[str, bool]:
    """The kernel of a variant, and whether it is one for prefill, or for a cache of rows."""
    defines = dict(spec.defines)
    return spec.name, bool(defines.get("MAX_LOGITS") or defines.get("PAGE_ROWS"))


def read_params(spec: KernelSpec, params: bytes) -> dict[str, Any]:
    """The members of a parameter struct by name; arrays and structs are tuples."""
    declared = PARAMS[family(spec)]
    assert len(params) == declared.size
    found = {}
    for member in declared.members:
        values = struct.unpack_from(f"<{member.code}", params, member.offset)
        found[member.name] = values if member.length or member.type.members else values[0]
    return found
