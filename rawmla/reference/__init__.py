"""What rawmla computes, written down in plain NumPy and float64.

`flash_mla_with_kvcache` and `flash_mla_sparse_fwd` have the names and the argument order of the GPU functions
and follow their definitions line by line, with nothing tiled, split or rounded. `plan` is the scheduling plan
that the GPU computes, equal in every number. They are the oracle of the tests and the place to look up what
an argument means. They run on the CPU, need NumPy alone, and are slow on purpose: one request and one query
token at a time.

Inputs are NumPy arrays of any float type, `ml_dtypes.bfloat16` included; results are float64.
"""

from ._attention import D_V, flash_mla_sparse_fwd, flash_mla_with_kvcache, visible_tokens
from ._cache import (
    E4M3_MAX,
    LAYOUTS,
    MODEL1_MIN_AMAX,
    V32_MIN_SCALE,
    CacheLayout,
    bf16_bits,
    convert_indices,
    decode_bf16,
    decode_e4m3,
    decode_e8m0,
    dequantize_k_cache,
    encode_e4m3,
    gather_kv_cache,
    merge_attn_states,
    quantize_k_cache,
    round_to_bf16,
    write_kv_cache,
)
from ._plan import (
    BATCH_INVARIANT_MARK,
    BATCH_INVARIANT_MAX_PIECES,
    BATCH_INVARIANT_MIN_BLOCKS,
    BLOCK_TOKENS,
    FIXED_COST_DIVISOR,
    MAX_FIXED_COST,
    MAX_SHORT_PART,
    PLAN_COLUMNS,
    SHORT_PART_FACTOR,
    Plan,
    get_mla_metadata,
    plan,
    plan_blocks,
    sparse_blocks,
    sparse_num_parts,
)

__all__ = [
    "BATCH_INVARIANT_MARK",
    "BATCH_INVARIANT_MAX_PIECES",
    "BATCH_INVARIANT_MIN_BLOCKS",
    "BLOCK_TOKENS",
    "D_V",
    "E4M3_MAX",
    "FIXED_COST_DIVISOR",
    "LAYOUTS",
    "MAX_FIXED_COST",
    "MAX_SHORT_PART",
    "MODEL1_MIN_AMAX",
    "PLAN_COLUMNS",
    "SHORT_PART_FACTOR",
    "V32_MIN_SCALE",
    "CacheLayout",
    "Plan",
    "bf16_bits",
    "convert_indices",
    "decode_bf16",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize_k_cache",
    "encode_e4m3",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "gather_kv_cache",
    "get_mla_metadata",
    "merge_attn_states",
    "plan",
    "plan_blocks",
    "quantize_k_cache",
    "round_to_bf16",
    "sparse_blocks",
    "sparse_num_parts",
    "visible_tokens",
    "write_kv_cache",
]
