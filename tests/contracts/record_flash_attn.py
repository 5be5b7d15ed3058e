"""Record what an engine passes to FlashAttention: python tests/contracts/record_flash_attn.py ENGINE
[--sources DIR]

As record.py does for FlashMLA, whose help says how. The files are
tests/contracts/flash_attn/ENGINE.json; tests/test_flash_attn_engines.py and
tests/gpu/test_engine_flash_attn.py repeat the calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contracts.record import (  # noqa: E402
    CONTRACTS,
    Recorder,
    alone,
    call,
    distribution_of,
    file_of,
    first_module,
    int32,
    numbers,
    record_into,
    vllm_without_gpu,
)

FP8 = torch.float8_e4m3fn
VARLEN = (
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal "
    "window_size softcap alibi_slopes deterministic return_attn_probs block_table return_softmax_lse out "
    "scheduler_metadata q_descale k_descale v_descale num_splits output_scale fa_version s_aux cp_world_size "
    "cp_rank cp_tot_seqused_k mask_mod block_sparse_tensors aux_tensors aux_tensor_leading_dims "
    "dynamic_causal gather_kv_indices gather_kv_valid_length"
).split()
KVCACHE = (
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
    "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale "
    "causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa "
    "only_qv sm_margin return_softmax_lse sinks score_mod aux_tensors sfq sfk sfv rel_bias "
    "rel_bias_prep_cache ver out max_seqlen_k mask_mod"
).split()


def results_of(arguments: dict[str, Any]) -> Any:
    """Results of the right shapes: out, and lse where it is asked for."""
    q, v = arguments["q"], arguments.get("v", arguments.get("v_cache"))
    out = arguments.get("out")
    if out is None:
        out = numbers(*q.shape[:-1], v.shape[-1])
    return (out, torch.zeros(q.shape[1], q.shape[0])) if arguments.get("return_softmax_lse") else out


# ---- vLLM

Shape = tuple[int, int, int]
LLAMA, QWEN, GEMMA, GPT_OSS = (8, 2, 128), (7, 1, 128), (4, 2, 256), (16, 2, 64)
"""Heads, KV heads and the head dimension of a rank of four."""
DECODE, MIXED = (1, 1, 1, 1), (1, 1, 37, 90)
CASES: dict[str, tuple[Shape, tuple[int, ...], dict[str, Any]]] = {
    # name: (shape, query tokens of the requests, what differs)
    "Llama, decode": (LLAMA, DECODE, {}),
    "Llama, decode and prefill": (LLAMA, MIXED, {}),
    "Llama, graph with padded requests": (LLAMA, (*DECODE, 0, 0, 0, 0), {}),
    "Llama, heads outside of tokens (HND)": (LLAMA, MIXED, {"layout": "HND"}),
    "Llama, FP8 cache": (LLAMA, DECODE, {"cache": "fp8"}),
    "Llama, FP8 cache, heads outside of tokens (HND)": (LLAMA, DECODE, {"cache": "fp8", "layout": "HND"}),
    "Llama, FP8 cache, decode and prefill": (LLAMA, MIXED, {"cache": "fp8"}),
    "Llama, three tokens a request": (LLAMA, (3,) * 4, {}),
    "Llama, float16": (LLAMA, DECODE, {"dtype": torch.float16}),
    "Llama, batch invariance": (LLAMA, MIXED, {"num_splits": 1}),
    "Llama, pages of 64 tokens": (LLAMA, MIXED, {"page": 64}),
    "Qwen, decode, one KV head": (QWEN, DECODE, {}),
    "Gemma 2, window and softcap": (GEMMA, MIXED, {"window": 32, "softcap": 50.0}),
    "gpt-oss, window and sinks": (GPT_OSS, MIXED, {"window": 32, "sinks": True}),
    "gpt-oss, sinks, decode": (GPT_OSS, DECODE, {"sinks": True}),
    "ALiBi, version 2": (LLAMA, DECODE, {"alibi": True, "version": 2}),
    "encoder with a window": (LLAMA, (20, 60), {"window": 16, "type": "encoder_only"}),
    "Llama, contexts of two ranks": (LLAMA, MIXED, {"ranks": 2}),
    "Llama, shared prefix": (LLAMA, MIXED, {"prefix": 64}),
    "values of other columns than keys": ((4, 1, 192), MIXED, {"d_v": 128}),
}


def starts_of(tokens: tuple[int, ...]) -> torch.Tensor:
    """First tokens of requests."""
    return torch.tensor([0, *accumulate(tokens)], dtype=torch.int32)


def record_vllm() -> Recorder:
    """Drive vLLM's FlashAttention backends, a vision encoder's attention, and the prefill of MLA models."""
    vllm_without_gpu()
    from vllm.v1.attention.backends import fa_utils, flash_attn, flash_attn_diffkv

    recorder = Recorder()
    function = recorder.function("flash_attn_varlen_func", VARLEN, results_of)
    for module in (fa_utils, flash_attn, flash_attn_diffkv):
        module.flash_attn_varlen_func = function
        module.get_flash_attn_version = lambda **_: 3
    flash_attn.flash_attn_supports_kv_cache_dtype = lambda *_, **__: True
    has_cascade = hasattr(flash_attn, "cascade_attention")  # before 0.33
    for name, case in CASES.items():
        if has_cascade or "prefix" not in case[-1]:
            vllm_layer(recorder, name, *case)
    vllm_vision(recorder)
    vllm_mla_prefill(recorder, function)
    return recorder


def vllm_layer(
    recorder: Recorder, name: str, shape: Shape, tokens: tuple[int, ...], more: dict[str, Any]
) -> None:
    """FlashAttentionImpl.forward, as of one layer in one step."""
    from vllm.v1.attention.backends import flash_attn, flash_attn_diffkv

    (heads, h_kv, d), d_v = shape, more.get("d_v", shape[2])
    page, dtype, cache_dtype = more.get("page", 16), more.get("dtype", torch.bfloat16), more.get("cache")
    kind = flash_attn_diffkv.FlashAttentionDiffKVImpl if d_v != d else flash_attn.FlashAttentionImpl
    sinks = torch.nn.Parameter(numbers(heads), requires_grad=False) if more.get("sinks") else None
    impl = kind(
        heads, d, d**-0.5, h_kv, [0.5] * heads if more.get("alibi") else None, more.get("window"),
        cache_dtype or "auto", more.get("softcap"), more.get("type", "decoder"), None, sinks,
    )  # fmt: skip
    impl.vllm_flash_attn_version = more.get("version", 3)
    b, total, columns = len(tokens), sum(tokens), 128 // page
    cache = vllm_cache(
        kind, page, h_kv, d, d_v, more.get("layout", "NHD"), torch.uint8 if cache_dtype else dtype
    )
    fields = dataclasses.fields(flash_attn.FlashAttentionMetadata)
    unused = {one.name: None for one in fields if one.default is dataclasses.MISSING}
    given = dict(
        num_actual_tokens=total, max_query_len=max(tokens), query_start_loc=int32(64)[: b + 1],
        max_seq_len=128, seq_lens=int32(64)[:b], block_table=int32(64, 2 * columns)[:b, :columns],
        slot_mapping=int32(total), causal=True, max_num_splits=more.get("num_splits", 0),
    )  # fmt: skip
    if "prefix" in more:
        flash_attn.merge_attn_states = lambda *_: None
        given |= dict(
            use_cascade=True, common_prefix_len=more["prefix"], cu_prefix_query_lens=int32(2),
            prefix_kv_lens=int32(1), suffix_kv_lens=int32(b),
        )  # fmt: skip
    metadata = flash_attn.FlashAttentionMetadata(**unused | given)
    ranks = more.get("ranks", 1)
    if ranks > 1:
        _divide_contexts(flash_attn, impl, metadata, ranks)
    widths = (heads + 2 * h_kv) * d
    padded = total + 4 if 0 in tokens else total  # graphs have rows of no request
    qkv = numbers(padded, widths, dtype=dtype)
    query = qkv[:, : heads * d].view(padded, heads, d)
    if cache_dtype:
        query = query.contiguous().to(FP8)
    key = qkv[:, heads * d : (heads + h_kv) * d].view(padded, h_kv, d)
    value = qkv[:, (heads + h_kv) * d :].view(padded, h_kv, d)[..., :d_v]
    output = numbers(padded, heads, d_v, dtype=dtype)
    scale = torch.ones(())
    layer = SimpleNamespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)
    recorder.at(f"{file_of(kind)} {kind.__name__}.forward", name)
    impl.forward(layer, query, key, value, cache, metadata, output)


def vllm_cache(
    kind: type, page: int, h_kv: int, d: int, d_v: int, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """A layer's cache as vLLM allocates it. Before 0.29 the backend has its shape and its order in memory."""
    module = sys.modules[kind.__module__]
    backend = getattr(module, kind.__name__.replace("Impl", "Backend"))
    shape, order = (32, h_kv, page, d + d_v), (0, 1, 2, 3) if layout == "HND" else (0, 2, 1, 3)
    if hasattr(backend, "get_kv_cache_shape"):
        vars(module)["get_kv_cache_layout"] = lambda: layout
        shape, order = backend.get_kv_cache_shape(32, page, h_kv, d), backend.get_kv_cache_stride_order()
    memory = numbers(*[shape[axis] for axis in order], dtype=dtype)
    return memory.permute([order.index(axis) for axis in range(len(order))])


def _divide_contexts(module: Any, impl: Any, metadata: Any, ranks: int) -> None:
    """Give a rank its part of the contexts of requests, with what vLLM calls between ranks."""
    group = SimpleNamespace(all_gather=lambda q, dim: torch.cat([q] * ranks, dim))
    module.get_dcp_group = lambda: group
    module.merge_attn_states = lambda *_: None
    impl.dcp_combine = lambda out, lse, *_, **__: (out[:, ::ranks], lse[:, ::ranks])
    impl.dcp_world_size, impl._dcp_dtype, impl._dcp_max_num_tokens = ranks, torch.bfloat16, 256
    metadata.dcp_context_kv_lens = int32(64)[: len(metadata.seq_lens)]
    metadata.max_dcp_context_kv_len = 128


def vllm_vision(recorder: Recorder) -> None:
    """The wrapper for encoders of pictures."""
    from vllm.v1.attention.ops import vit_attn_wrappers as vit

    recorder.at("vllm/v1/attention/ops/vit_attn_wrappers.py flash_attn_maxseqlen_wrapper", "Qwen, pictures")
    torch.cuda.is_current_stream_capturing = lambda: False
    q, k, v = (numbers(1, 100, 4, 80) for _ in range(3))
    wrapper = vit.flash_attn_maxseqlen_wrapper
    wrapper(q, k, v, 1, False, 3, 80**-0.5, int32(4), torch.tensor(60))


def vllm_mla_prefill(recorder: Recorder, function: Any) -> None:
    """New tokens, and a part of their context, of MLA models, in 0.20 by a method of the layer."""
    module = first_module(
        "vllm.v1.attention.backends.mla.prefill.flash_attn",
        "vllm.model_executor.layers.attention.mla_attention",
    )
    kind, form = getattr(module, "FlashAttnPrefillBackend", None), "run_prefill_{}"
    if kind is None:
        kind, form = module.MLACommonImpl, "_run_prefill_{}_fa"
    kind.__abstractmethods__ = frozenset()
    backend = object.__new__(kind)
    backend.flash_attn_varlen_func, backend.scale = partial(function, fa_version=3), 0.1147
    backend.requires_v_padding = backend._pad_v = False
    backend._is_vllm_fa, backend.vllm_flash_attn_version = True, 3
    tokens, context, longest = (30, 50), 70, 40
    heads, total = 4, sum(tokens)
    starts = starts_of(tokens)
    chunk = SimpleNamespace(
        query_start_loc=starts, cu_seq_lens=starts, max_query_len=max(tokens), max_seq_len=longest
    )
    chunks = SimpleNamespace(cu_seq_lens=[starts], max_seq_lens=[longest])
    prefill = SimpleNamespace(query_start_loc=starts, max_query_len=max(tokens), chunked_context=chunks)
    backend._prefill_metadata = prefill
    q = numbers(total, heads, 192)
    for name, part, rows in (
        ("MLA, new tokens", "new_tokens", total),
        ("MLA, part of the context", "context_chunk", context),
    ):
        method = form.format(part)
        recorder.at(f"{file_of(kind)} {kind.__name__}.{method}", name)
        kv = numbers(rows, heads, 128 + 128)  # values are columns of the projected latents
        call(
            getattr(backend, method), prefill=prefill, chunk=chunk, chunk_idx=0, q=q,
            k=numbers(rows, heads, 192), v=kv[..., 128:], return_softmax_lse=True,
        )  # fmt: skip


# ---- SGLang


def record_sglang(root: Path) -> Recorder:
    """Compile the methods of the fa3 backend that attend, and call them."""
    recorder = Recorder()
    function = recorder.function("flash_attn_with_kvcache", KVCACHE, results_of)
    file = "sglang/srt/layers/attention/flashattention_backend.py"
    kind = "FlashAttentionBackend"
    types = SimpleNamespace(ENCODER_ONLY="encoder", DECODER_BIDIRECTIONAL="bidirectional")
    names = {"flash_attn_with_kvcache": function, "AttentionType": types, "is_cp_active": lambda batch: False}
    prepare = alone(root / file, f"{kind}.prepare_paged_mha_query")
    cases: dict[str, tuple[Shape, tuple[int, ...], dict[str, Any]]] = {
        "Llama, decode, pages of one token": (LLAMA, DECODE, {"page": 1}),
        "Llama, prefill, pages of one token": (LLAMA, MIXED, {"page": 1}),
        "Llama, decode, pages of 64 tokens": (LLAMA, DECODE, {}),
        "Llama, prefill, pages of 64 tokens": (LLAMA, MIXED, {}),
        "Llama, FP8 cache, decode": (LLAMA, DECODE, {"cache": FP8}),
        "gpt-oss, window and sinks, decode": (GPT_OSS, DECODE, {"window": 31, "sinks": True}),
        "gpt-oss, window and sinks, prefill": (GPT_OSS, MIXED, {"window": 31, "sinks": True}),
        "Gemma 2, softcap, decode": (GEMMA, DECODE, {"softcap": 50.0}),
        "Llama, deterministic, pages of 64 tokens": (LLAMA, DECODE, {"num_splits": 1}),
        "Llama, deterministic, pages of one token": (LLAMA, DECODE, {"num_splits": 1, "page": 1}),
    }
    for name, ((heads, h_kv, d), tokens, more) in cases.items():
        page, cache_dtype, splits = more.get("page", 64), more.get("cache"), more.get("num_splits", 0)
        b, total = len(tokens), sum(tokens)
        caches = [numbers(512 // page, page, h_kv, d, dtype=cache_dtype or torch.bfloat16) for _ in "kv"]
        metadata = SimpleNamespace(
            cache_seqlens_int32=int32(64)[:b], max_seq_len_q=max(tokens), max_seq_len_k=128,
            cu_seqlens_q=int32(65)[: b + 1], cu_seqlens_k=int32(65)[: b + 1],
            page_table=int32(64, 256)[:b, : 128 // page], scheduler_metadata=int32(17),
            local_attn_metadata=None, swa_spec_metadata=None, image_token_ranges=None,
        )  # fmt: skip
        backend = SimpleNamespace(
            forward_metadata=metadata, topk=1, use_mla=False, use_sliding_window_kv_pool=False,
            fa_impl_ver=3, num_splits=splits, decode_num_splits=splits, local_attn_builder=None,
            has_local_attention=False, attention_chunk_size=None, page_size=page,
            is_prefill_aware_swa=False, _decode_uses_static_max_seqlen_k=False, full_cg_prefill_metadata=None,
            fa_skip_kv_cache=False, kv_cache_is_mxfp8=False, kv_cache_dtype=cache_dtype or torch.bfloat16,
            kv_cache_dtype_str="fp8_e4m3" if cache_dtype else "auto", _mxfp8_sf_kwargs=lambda *_: {},
            get_paged_mha_kv_cache=lambda layer, caches=caches: caches,
        )  # fmt: skip
        backend.prepare_paged_mha_query = lambda *args, backend=backend, **kwargs: prepare(
            backend, *args, **kwargs
        )
        layer = SimpleNamespace(
            tp_q_head_num=heads, tp_k_head_num=h_kv, tp_v_head_num=h_kv, head_dim=d, v_head_dim=d,
            scaling=d**-0.5, logit_cap=more.get("softcap", 0.0), layer_id=0, is_cross_attention=False,
            attn_type="decoder", sliding_window_size=more.get("window", -1), k_scale=torch.ones(()),
            v_scale=torch.ones(()),
        )  # fmt: skip
        kinds = "is_target_verify", "is_draft_extend_v2", "is_context_parallel_extend"
        mode = SimpleNamespace(**dict.fromkeys(kinds, lambda: False))
        batch = SimpleNamespace(
            batch_size=b, spec_info=None, spec_algorithm=None, forward_mode=mode,
            attn_attend_prefix_cache=None, _attn_output=numbers(total, heads * d),
        )  # fmt: skip
        sinks = torch.nn.Parameter(numbers(heads), requires_grad=False) if more.get("sinks") else None
        method = "forward_decode" if max(tokens) == 1 else "forward_extend"
        recorder.at(f"{file} {kind}.{method}", name)
        q = numbers(total, heads * d)
        forward = alone(root / file, f"{kind}.{method}", **names)
        forward(backend, q, None, None, layer, batch, save_kv_cache=False, sinks=sinks)
    return recorder


def main() -> int:
    """Record one engine."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("--sources", type=Path, help="folder of SGLang's unpacked wheel")
    parser.add_argument("--out", type=Path, default=CONTRACTS / "flash_attn", help="folder; %(default)s")
    options = parser.parse_args()
    found = distribution_of(parser, options.engine, options.sources)
    recorder = record_vllm() if options.engine == "vllm" else record_sglang(Path(str(found.locate_file(""))))
    record_into(options.out / f"{options.engine}.json", found.version, recorder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
