"""The definitions of rawmla's operations in plain NumPy and float64, for the CPU.

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

from ..flex.block_mask import BlockMask as BlockMask
from ..flex.block_mask import and_masks as and_masks
from ..flex.block_mask import noop_mask as noop_mask
from ..flex.block_mask import or_masks as or_masks
from ..flex.forward import AuxOutput as AuxOutput
from ..flex.forward import AuxRequest as AuxRequest
from ..flex.mods import CudaMod as CudaMod
from ..mla.plan import FlashMLASchedMeta as FlashMLASchedMeta
from ..mla.plan import SchedConfig as SchedConfig
from ._attention import flash_mla_sparse_fwd as flash_mla_sparse_fwd
from ._attention import flash_mla_with_kvcache as flash_mla_with_kvcache
from ._attention import visible_tokens as visible_tokens
from ._cache import D_V as D_V
from ._cache import LAYOUTS as LAYOUTS
from ._cache import MODEL1_MIN_AMAX as MODEL1_MIN_AMAX
from ._cache import V32_MIN_SCALE as V32_MIN_SCALE
from ._cache import CacheLayout as CacheLayout
from ._cache import convert_indices as convert_indices
from ._cache import dequantize_k_cache as dequantize_k_cache
from ._cache import gather_kv_cache as gather_kv_cache
from ._cache import merge_attn_states as merge_attn_states
from ._cache import quantize_k_cache as quantize_k_cache
from ._cache import write_kv_cache as write_kv_cache
from ._flex import NumpyMod as NumpyMod
from ._flex import create_block_mask as create_block_mask
from ._flex import flex_attention as flex_attention
from ._flex import flex_attention_backward as flex_attention_backward
from ._formats import E4M3_MAX as E4M3_MAX
from ._formats import bf16_bits as bf16_bits
from ._formats import decode_bf16 as decode_bf16
from ._formats import decode_e4m3 as decode_e4m3
from ._formats import decode_e5m2 as decode_e5m2
from ._formats import decode_e8m0 as decode_e8m0
from ._formats import encode_e4m3 as encode_e4m3
from ._formats import round_to_bf16 as round_to_bf16
from ._kvcache import flash_attn_with_kvcache as flash_attn_with_kvcache
from ._mha import flash_attn_backward as flash_attn_backward
from ._mha import flash_attn_func as flash_attn_func
from ._mha import flash_attn_varlen_backward as flash_attn_varlen_backward
from ._mha import flash_attn_varlen_func as flash_attn_varlen_func
from ._mha import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from ._mha import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from ._plan import BATCH_INVARIANT_MARK as BATCH_INVARIANT_MARK
from ._plan import BATCH_INVARIANT_MAX_SPLITS as BATCH_INVARIANT_MAX_SPLITS
from ._plan import BATCH_INVARIANT_MIN_BLOCKS as BATCH_INVARIANT_MIN_BLOCKS
from ._plan import BLOCK_TOKENS as BLOCK_TOKENS
from ._plan import FIXED_COST_DIVISOR as FIXED_COST_DIVISOR
from ._plan import MAX_FIXED_COST as MAX_FIXED_COST
from ._plan import MAX_SHORT_PART as MAX_SHORT_PART
from ._plan import PLAN_COLUMNS as PLAN_COLUMNS
from ._plan import SHORT_PART_FACTOR as SHORT_PART_FACTOR
from ._plan import SM_COUNT as SM_COUNT
from ._plan import Plan as Plan
from ._plan import get_mla_metadata as get_mla_metadata
from ._plan import plan as plan
from ._plan import plan_blocks as plan_blocks
from ._plan import sparse_blocks as sparse_blocks
from ._plan import sparse_num_parts as sparse_num_parts
from ._prefix import context_attention_fwd as context_attention_fwd

__all__ = [name for name in globals() if not name.startswith("_")]  # noqa: PLE0605
