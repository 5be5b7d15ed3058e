"""What rawmla computes, written down in plain NumPy and float64, for the CPU.

The functions of rawmla have the same names and arguments here and follow their definitions line by line, with
nothing tiled, split or rounded in between; `warmup` has no counterpart. They are the oracle of the tests, and
a stand-in for rawmla on a machine without a GPU. They need NumPy alone and are slow on purpose: one request,
and one query token or head of it, at a time. `plan` is the scheduling plan that the GPU computes, equal in
every number.

Results come in the kind of the first array:

- NumPy arrays, of `ml_dtypes` types too, and lists: floats and integers of any width are accepted, and
  floating point results are float64, not rounded.
- torch CPU tensors: dtypes are checked as on the GPU, and results are tensors of the dtypes that the GPU
  functions return, rounded at the end.

Strides and addresses are free in both, and so are sizes that only kernels limit: page sizes, and the head
dimensions of dense attention (`flash_attn_*`), prefix prefill (`context_attention_fwd`) and flex attention
(`flex_attention`, `create_block_mask`), which take float32 too. Arguments are documented at the functions of
rawmla. Dtypes and shapes that do not fit are refused here, and arguments that would have no effect; any other
wrong argument fails where NumPy fails.

Score and mask functions are functions of NumPy arrays or, with tensors, those that the GPU functions take; a
score function with gradients is a `NumpyMod`. CUDA text does not run here: a `CudaMod` is refused.
"""

from ._attention import flash_mla_sparse_fwd, flash_mla_with_kvcache, visible_tokens
from ._cache import (
    D_V,
    LAYOUTS,
    MODEL1_MIN_AMAX,
    V32_MIN_SCALE,
    CacheLayout,
    convert_indices,
    dequantize_k_cache,
    gather_kv_cache,
    merge_attn_states,
    quantize_k_cache,
    write_kv_cache,
)
from ._flex import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    CudaMod,
    NumpyMod,
    and_masks,
    create_block_mask,
    flex_attention,
    flex_attention_backward,
    noop_mask,
    or_masks,
)
from ._formats import (
    E4M3_MAX,
    bf16_bits,
    decode_bf16,
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    encode_e4m3,
    round_to_bf16,
)
from ._mha import (
    flash_attn_backward,
    flash_attn_func,
    flash_attn_varlen_backward,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._plan import (
    BATCH_INVARIANT_MARK,
    BATCH_INVARIANT_MAX_SPLITS,
    BATCH_INVARIANT_MIN_BLOCKS,
    BLOCK_TOKENS,
    FIXED_COST_DIVISOR,
    MAX_FIXED_COST,
    MAX_SHORT_PART,
    PLAN_COLUMNS,
    SHORT_PART_FACTOR,
    SM_COUNT,
    FlashMLASchedMeta,
    Plan,
    SchedConfig,
    get_mla_metadata,
    plan,
    plan_blocks,
    sparse_blocks,
    sparse_num_parts,
)
from ._prefix import context_attention_fwd

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BATCH_INVARIANT_MARK",
    "BATCH_INVARIANT_MAX_SPLITS",
    "BATCH_INVARIANT_MIN_BLOCKS",
    "BLOCK_TOKENS",
    "BlockMask",
    "CudaMod",
    "D_V",
    "E4M3_MAX",
    "FIXED_COST_DIVISOR",
    "LAYOUTS",
    "MAX_FIXED_COST",
    "MAX_SHORT_PART",
    "MODEL1_MIN_AMAX",
    "PLAN_COLUMNS",
    "SHORT_PART_FACTOR",
    "SM_COUNT",
    "V32_MIN_SCALE",
    "CacheLayout",
    "FlashMLASchedMeta",
    "NumpyMod",
    "Plan",
    "SchedConfig",
    "and_masks",
    "bf16_bits",
    "context_attention_fwd",
    "convert_indices",
    "create_block_mask",
    "decode_bf16",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "dequantize_k_cache",
    "encode_e4m3",
    "flash_attn_backward",
    "flash_attn_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flex_attention",
    "flex_attention_backward",
    "gather_kv_cache",
    "get_mla_metadata",
    "merge_attn_states",
    "noop_mask",
    "or_masks",
    "plan",
    "plan_blocks",
    "quantize_k_cache",
    "round_to_bf16",
    "sparse_blocks",
    "sparse_num_parts",
    "visible_tokens",
    "write_kv_cache",
]
