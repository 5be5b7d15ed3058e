"""rawmla's attention backends for vLLM, which replace FLASHMLA and FLASHMLA_SPARSE with
RAWMLA_VLLM=backend.

They are vLLM's FlashMLA backends but for the calls of the kernels: any number of heads without padding, a
query in its two parts without concatenation, batch invariance, kernels loaded before the first graph is
captured, and memory that vLLM's profile sees. Writing the cache, prefill by multi-head attention, and the
exchange under context parallelism stay vLLM's. The parents' names are kept, since vLLM decides by them.

Their parents are in vllm/v1/attention/backends/mla/flashmla.py and flashmla_sparse.py. `rawmla.engines.vllm`
compares names and parameters before this module is imported.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.flashmla import (
    FlashMLABackend,
    FlashMLAImpl,
    FlashMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashmla_sparse import (
    FlashMLASparseBackend,
    FlashMLASparseImpl,
    FlashMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.utils import reshape_attn_output_for_spec_decode
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

import rawmla
from rawmla.jit import device_info
from rawmla.kernels.common import BLOCK_TOKENS, D_V, TILE_ROWS, ceil_div, max_splits
from rawmla.kernels.mla_combine import split_row_bytes
from rawmla.kernels.mla_metadata import MAX_BATCH


class _ForHopper:
    """The answers that both backends give to vLLM."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """As of vLLM's backends, like all methods here."""
        return bool(capability.major == 9 and capability.minor == 0)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class RawMLABackend(_ForHopper, FlashMLABackend):
    """Dense MLA. FP8 caches are decoded by vLLM's own kernel. Pages of 64 tokens: smaller ones are slower."""

    @staticmethod
    def get_builder_cls() -> type[RawMLAMetadataBuilder]:
        return RawMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[RawMLAImpl]:
        return RawMLAImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576, 512]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        if envs.VLLM_BATCH_INVARIANT and kv_cache_dtype and is_quantized_kv_cache(kv_cache_dtype):
            return "batch invariance needs a 16-bit kv-cache: FP8 ones are decoded by vLLM's kernel"
        reason: str | None = super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)
        return reason


class RawMLAMetadataBuilder(FlashMLAMetadataBuilder):
    """Loads the kernels; the patched `get_mla_metadata` makes the plan, which the first layer fills."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _decode_only_what_is_decoding(self)
        if not self.is_fp8_kvcache:
            rawmla.warmup(
                "dense_decode",
                "metadata",
                dtypes=[_dtype_of(vllm_config)],
                d_qk=[kv_cache_spec.head_size],
                device=device.index,
            )


class RawMLAImpl(FlashMLAImpl):
    """One layer of dense MLA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vllm_config = get_current_vllm_config()

    def reserve_workspace(self) -> None:
        """Take once, in vLLM's memory profile, what the largest decode call takes."""
        if not is_quantized_kv_cache(self.kv_cache_dtype):
            config = self._vllm_config
            tokens = config.scheduler_config.max_num_seqs * _decode_tokens(config.speculative_config)
            heads = self.num_heads * self.dcp_world_size
            _reserve(tokens, heads, config.model_config.max_model_len, _dtype_of(config))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode: q [T, h, d_qk] or its parts, the cache [nb, 64, d_qk]; out [T, h, 512], lse [T, h]."""
        if is_quantized_kv_cache(self.kv_cache_dtype):
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward_mqa(
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            return result
        decode = attn_metadata.decode
        out, lse = rawmla.flash_mla_with_kvcache(
            _by_request(q, attn_metadata.num_decodes),
            kv_c_and_k_pe_cache.unsqueeze(-2),
            decode.block_table,
            decode.seq_lens,
            D_V,
            decode.scheduler_metadata,
            softmax_scale=self.scale,
            causal=True,
            enable_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        out = reshape_attn_output_for_spec_decode(out)
        if not self.need_to_return_lse_for_decode:
            return out, None
        return out, lse.transpose(1, 2).reshape(-1, lse.shape[1])


class RawMLASparseBackend(_ForHopper, FlashMLASparseBackend):
    """Sparse MLA over bfloat16 and "fp8_ds_mla" (656-byte) caches."""

    @staticmethod
    def get_builder_cls() -> type[RawMLASparseMetadataBuilder]:
        return RawMLASparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[RawMLASparseImpl]:
        return RawMLASparseImpl


class RawMLASparseMetadataBuilder(FlashMLASparseMetadataBuilder):
    """Loads the kernels."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _decode_only_what_is_decoding(self)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        if envs.VLLM_BATCH_INVARIANT and self.use_fp8_kv_cache and tokens > MAX_BATCH:
            raise ValueError(
                f"max_num_batched_tokens: expected at most {MAX_BATCH} with VLLM_BATCH_INVARIANT and an FP8 "
                f"cache, whose query tokens are requests of their own, got {tokens}; set "
                f"--max-num-batched-tokens {MAX_BATCH}"
            )
        if self.use_fp8_kv_cache:
            rawmla.warmup("sparse_decode", "metadata", sparse_formats=["v32"], device=device.index)
        rawmla.warmup("sparse_prefill", prefill_formats=["bf16"], device=device.index)


class RawMLASparseImpl(FlashMLASparseImpl):
    """One layer of sparse MLA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._vllm_config = get_current_vllm_config()

    def reserve_workspace(self) -> None:
        """Take once, in vLLM's memory profile, what the largest call takes."""
        config = self._vllm_config
        tokens = config.scheduler_config.max_num_batched_tokens
        _reserve(tokens, self.num_heads * self.dcp_world_size, self.topk_indices_buffer.shape[-1])

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode and sparse prefill: q [T, h, d_qk] or its parts; out [T, h, 512], lse [T, h] or None."""
        if isinstance(q, tuple) and q[1].shape[-1]:
            q = _split(q)  # models without RoPE on FP8 caches have theirs padded by the parent
        result: tuple[torch.Tensor, torch.Tensor | None] = super().forward_mqa(
            q, kv_c_and_k_pe_cache, attn_metadata, layer
        )
        return result

    def _fp8_flash_mla_kernel(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, topk_indices: torch.Tensor, kernel_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The parent's without padding: q [b, s_q, h, 576], the cache [nb, 64, 656], slots [b, s_q, topk].

        A batch-invariant plan cuts requests. So every query token is a request of its own then, also where
        vLLM makes one request of the whole batch.
        """
        b, s_q, h = q.shape[:3]
        if envs.VLLM_BATCH_INVARIANT:
            q = q.view(b * s_q, 1, *q.shape[2:])
            topk_indices = topk_indices.reshape(b * s_q, 1, -1)
        out, lse = rawmla.flash_mla_with_kvcache(
            _as_argument(q),
            kv_c_and_k_pe_cache.view(torch.uint8).unsqueeze(-2),
            None,
            None,
            D_V,
            kernel_metadata.scheduler_metadata,
            softmax_scale=self.softmax_scale,
            is_fp8_kvcache=True,
            indices=topk_indices,
            enable_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        if envs.VLLM_BATCH_INVARIANT:
            return out.view(b, s_q, h, D_V), lse.view(b, s_q, h).transpose(1, 2)
        return out, lse

    def _bf16_flash_mla_kernel(
        self,
        q: Any,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_length: torch.Tensor | None = None,
        actual_num_heads: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The parent's, without padding: q [T, h, d_qk], rows [..., d_qk], topk_indices [T, topk].

        q and `out` may have more heads than the model: their first ones count. Returns out, and lse where the
        parent does, which is since vLLM 0.29.
        """
        heads = q.shape[1] if actual_num_heads is None else actual_num_heads
        out, _, lse = rawmla.flash_mla_sparse_fwd(
            _as_argument(q[:, :heads]),
            kv_c_and_k_pe_cache.view(-1, 1, kv_c_and_k_pe_cache.shape[-1]),
            topk_indices.unsqueeze(1),
            self.softmax_scale,
            topk_length=topk_length,
            out=None if out is None else out[:, :heads],
            log_base="e",
            enable_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        return (out, lse) if _PARENT_RETURNS_LSE else out


_PARENT_RETURNS_LSE = (
    "actual_num_heads" in inspect.signature(FlashMLASparseImpl._bf16_flash_mla_kernel).parameters
)


def _decode_only_what_is_decoding(builder: Any) -> None:
    """Under batch invariance, short prefills are no decodes: vLLM decodes them only if all requests of the
    batch have one length.
    """
    if envs.VLLM_BATCH_INVARIANT:
        builder._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=builder.reorder_batch_threshold > 1
        )


def _decode_tokens(speculative_config: Any) -> int:
    """Return the query tokens of a request that decodes: one, and those that were drafted for it."""
    if speculative_config is None:
        return 1
    places = 2 if speculative_config.parallel_drafting else 1
    return 1 + places * (speculative_config.num_speculative_tokens or 0)


def _reserve_in_profile(forward: Any) -> Any:
    """Wrap a layer's `forward_impl` of vLLM before 0.33, which does not call `reserve_workspace`."""

    @functools.wraps(forward)
    def forward_impl(
        layer: Any, q: Any, k_c: Any, k_pe: Any, cache: Any, metadata: Any, *more: Any, **by: Any
    ) -> Any:
        if metadata is None and isinstance(layer.impl, (RawMLAImpl, RawMLASparseImpl)):
            layer.impl.reserve_workspace()
        return forward(layer, q, k_c, k_pe, cache, metadata, *more, **by)

    return forward_impl


if not hasattr(FlashMLAImpl, "reserve_workspace"):
    MLAAttention.forward_impl = _reserve_in_profile(MLAAttention.forward_impl)


def _dtype_of(vllm_config: Any) -> str:
    """The name of the model's dtype."""
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


class _SplitQuery:
    """A query in its two parts, for those lines of vLLM that take slices of it and add or split axes."""

    def __init__(self, nope: torch.Tensor, rope: torch.Tensor) -> None:
        self.parts = nope, rope
        self.shape = torch.Size((*nope.shape[:-1], nope.shape[-1] + rope.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        """As a tensor's, like the rest."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def new_empty(self, *size: Any, **options: Any) -> torch.Tensor:
        return self.parts[0].new_empty(*size, **options)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, index: Any) -> _SplitQuery:
        nope, rope = self.parts
        return _SplitQuery(nope[index], rope[index])

    def unsqueeze(self, axis: int) -> _SplitQuery:
        nope, rope = self.parts
        return _SplitQuery(nope.unsqueeze(axis), rope.unsqueeze(axis))

    def view(self, *shape: int) -> _SplitQuery:
        nope, rope = self.parts
        outer = shape[:-1]
        return _SplitQuery(nope.view(*outer, nope.shape[-1]), rope.view(*outer, rope.shape[-1]))


def _split(q: Any) -> Any:
    """Join a query of vLLM, a tensor or the pair of its parts, to one object with a shape."""
    if not isinstance(q, tuple):
        return q
    nope, rope = q
    return _SplitQuery(nope, rope) if rope.shape[-1] else nope


def _by_request(q: Any, requests: int) -> Any:
    """Return a query of vLLM, [T, h, d_qk] or the pair of its parts, as rawmla takes it: [b, s_q, h, ...]."""
    nope, rope = q if isinstance(q, tuple) else (q, None)
    tokens = nope.shape[0] // requests
    nope = nope.view(requests, tokens, *nope.shape[1:])
    if rope is None or not rope.shape[-1]:
        return nope
    return nope, rope.view(requests, tokens, *rope.shape[1:])


def _as_argument(q: Any) -> Any:
    """Return the form that rawmla takes: a tensor or the pair of its parts."""
    return q.parts if isinstance(q, _SplitQuery) else q


def _reserve(tokens: int, heads: int, keys: int, dtype: str = "bfloat16") -> None:
    """Allocate and free the most that a call with these numbers of query tokens and keys takes.

    It takes `out`, lse and the splits. A plan has no more partitions than fill the GPU with tiles of query
    rows, and each of them has at most two splits; a batch-invariant plan cuts every request by its length.
    """
    device = torch.cuda.current_device()
    rows = max_splits(device_info(device).sm_count, 0, 2, False) * TILE_ROWS
    if envs.VLLM_BATCH_INVARIANT:
        rows = max(rows, max_splits(1, 1, ceil_div(keys, BLOCK_TOKENS), True) * tokens * heads)
    results = tokens * heads * (2 * D_V + 4)
    torch.empty(results + rows * split_row_bytes(dtype), dtype=torch.uint8, device=f"cuda:{device}")
