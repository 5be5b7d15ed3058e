"""What the functions of `rawmla.reference` refuse: a good call of each, changed in one argument."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawmla
from kit import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from rawmla import reference
from rawmla.reference._flex import flex_attention_backward

torch = pytest.importorskip("torch")

Z = np.zeros
I32, BYTE = np.int32, np.uint8
DENSE = make_dense_inputs(
    DenseCase(b=4, s_q=3, h_q=6, h_kv=2, lengths=(1, 2, 64, 65), causal=True, d_qk=512), "numpy"
)
TENSORS = make_dense_inputs(DenseCase(b=3, h_q=4, lengths=(5, 70, 17), page_block_size=16), "torch", "cpu")
SPARSE = make_sparse_inputs(SparseCase(b=3, s_q=2, h_q=5, s_k=40, topk=33, page_block_size=7), "numpy")
ROWS = make_sparse_inputs(SparseCase(b=7, h_q=5, topk=33, page_block_size=1, layout="bf16"), "numpy")
Q = torch.zeros(3, 1, 4, 576).bfloat16()
OUT, KV = Z((2, 3, 4, 5)), Z((2, 3, 2, 5))
OUT_T, KV_T, LSE_T = torch.zeros(2, 3, 4, 5).half(), torch.zeros(2, 3, 2, 5).half(), torch.zeros(2, 4, 3)
SEGMENTS = {
    "q": Z((9, 4, 6)),
    "k": Z((8, 2, 6)),
    "v": Z((8, 2, 5)),
    "cu_seqlens_q": [1, 4, 9],
    "cu_seqlens_k": [0, 2, 7],
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
}
FLEX = {"query": Z((2, 4, 40, 8)), "key": Z((2, 4, 50, 8)), "value": Z((2, 4, 50, 5))}
FLEX_OUT = {"grad_out": Z((2, 4, 40, 5)), "out": Z((2, 4, 40, 5)), "lse": Z((2, 4, 40))}
BLOCKS = {"mask_mod": lambda *at: True, "B": None, "H": None, "Q_LEN": 5, "KV_LEN": 5}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (
        reference.flash_mla_with_kvcache,
        {name: getattr(DENSE, name) for name in ("q", "k_cache", "block_table", "cache_seqlens")},
    ),
    "tensors": (
        reference.flash_mla_with_kvcache,
        {name: getattr(TENSORS, name) for name in ("q", "k_cache", "block_table", "cache_seqlens")},
    ),
    "sparse": (
        reference.flash_mla_with_kvcache,
        {"q": SPARSE.q, "k_cache": SPARSE.k_cache, "block_table": None, "cache_seqlens": None}
        | SPARSE.keywords(),
    ),
    "prefill": (
        reference.flash_mla_sparse_fwd,
        {"q": ROWS.q[:, 0], "kv": ROWS.k_cache[:, 0], "indices": ROWS.indices, "sm_scale": 0.1},
    ),
    "metadata": (
        reference.get_mla_metadata,
        {"cache_seqlens": [5], "num_q_tokens_per_head_k": 16, "num_heads_k": 1},
    ),
    "quantize": (reference.quantize_k_cache, {"k_cache": Z((2, 1, 1, 576)), "layout": "v32"}),
    "dequantize": (reference.dequantize_k_cache, {"cache": Z((1, 1, 1, 656), BYTE), "layout": "v32"}),
    "write": (
        reference.write_kv_cache,
        {
            "kv_c": Z((3, 512)),
            "k_pe": Z((3, 64)),
            "kv_cache": Z((2, 4, 1, 656), BYTE),
            "slot_mapping": np.arange(3),
        },
    ),
    "gather": (
        reference.gather_kv_cache,
        {
            "kv_cache": Z((2, 4, 1, 656), BYTE),
            "block_table": [[0], [1]],
            "cache_seqlens": [1, 1],
            "out": Z((4, 576)),
            "workspace_starts": [0, 1],
        },
    ),
    "convert": (
        reference.convert_indices,
        {"indices": Z((2, 3), I32), "block_table": Z((2, 3), I32), "page_block_size": 10},
    ),
    "merge": (reference.merge_attn_states, {"outs": [Z((2, 3, 5, 512))], "lses": [Z((2, 5, 3))]}),
    "segments": (reference.flash_attn_varlen_func, SEGMENTS),
    "packed": (
        lambda **given: reference.flash_attn_varlen_qkvpacked_func(given.pop("qkv"), [0, 4], 4, **given),
        {"qkv": Z((4, 3, 1, 2))},
    ),
    "backward": (
        reference.flash_attn_backward,
        {"dout": OUT, "q": Z((2, 3, 4, 6)), "k": Z((2, 3, 2, 6)), "v": KV, "out": OUT, "lse": Z((2, 4, 3))},
    ),
    "halves": (
        reference.flash_attn_backward,
        {"dout": OUT_T, "q": OUT_T, "k": KV_T, "v": KV_T, "out": OUT_T, "lse": LSE_T},
    ),
    "varlen backward": (
        reference.flash_attn_varlen_backward,
        SEGMENTS | {"dout": Z((9, 4, 5)), "out": Z((9, 4, 5)), "lse": Z((9, 4))},
    ),
    "prefix": (
        reference.context_attention_fwd,
        {
            **{name: Z((7, heads, 12)) for name, heads in (("q", 4), ("k", 2), ("v", 2), ("o", 4))},
            "kv_cache_dtype": "auto",
            "k_cache": Z((5, 2, 3, 4, 4)),
            "v_cache": Z((5, 2, 12, 4)),
            "b_loc": np.array([[0, 1], [2, 3]]),
            "b_start_loc": np.array([0, 3, 7]),
            "b_seq_len": np.array([8, 8]),
            "max_seq_len": None,
            "max_input_len": 4,
            "k_scale": 1.0,
            "v_scale": 1.0,
        },
    ),
    "flex": (reference.flex_attention, FLEX),
    "blocks": (reference.create_block_mask, BLOCKS),
    "flex backward": (flex_attention_backward, {**FLEX, **FLEX_OUT}),
}
BYTES = "expected dtype float8_e4m3fn or uint8 or int8, got "
TEXT_ON_GPU = "expected a Python function, as CUDA text runs on a GPU alone"
REFUSED: tuple[tuple[str, str, Any, type[Exception], str], ...] = (
    ("dense", "head_dim_v", 256, ValueError, "expected 512, got 256"),
    ("dense", "q", Z((3, 6, 512)), ValueError, r"expected shape \[b, s_q, h_q, 576 or 512\], got \[3, 6,"),
    ("dense", "q", Z((4, 3, 5, 512)), ValueError, "expected h_q to be a multiple of the h_kv of k_cache"),
    ("dense", "q", Z((4, 3, 6, 512), I32), TypeError, "expected dtype bfloat16 or float16, got int32"),
    ("dense", "q", None, TypeError, "expected a torch CPU tensor or a NumPy array, got NoneType"),
    ("dense", "k_cache", Z((64, 2, 512)), ValueError, r"expected shape \[num_blocks, page_block_size, h_"),
    ("dense", "k_cache", Z((9, 64, 2, 500)), ValueError, r"expected shape .* 512\], got"),
    ("dense", "k_cache", Z((9, 64, 2, 512), np.uint16), TypeError, "expected dtype bfloat16, got u"),
    ("dense", "block_table", Z((3, 2), I32), ValueError, r"expected shape \[4, max_blocks\], got"),
    ("dense", "block_table", Z((4, 2)), TypeError, "expected dtype int32, got float64"),
    ("dense", "cache_seqlens", [1], ValueError, r"expected shape \[4\], got \[1\]"),
    ("dense", "softmax_scale", 0.0, ValueError, "expected a finite float32 greater than 0"),
    ("dense", "out", Z((4, 3, 6, 576)), ValueError, r"expected shape \[4, 3, 6, 512\], got"),
    ("dense", "is_fp8_kvcache", True, NotImplementedError, ""),
    ("dense", "attn_sink", Z(3), ValueError, "expected None without indices"),
    ("dense", "topk_length", Z(3), ValueError, "expected None without indices"),
    ("tensors", "q", Q.float(), TypeError, "expected dtype bfloat16 or float16, got float32"),
    ("tensors", "q", Q.to("meta"), ValueError, "expected a tensor in CPU memory, got a torch tensor on d"),
    ("tensors", "q", Q.to_sparse(), TypeError, "expected a dense torch tensor with memory, got Tensor"),
    ("tensors", "q", Q.clone().requires_grad_(), ValueError, "expected a tensor that does not require grad"),
    ("tensors", "block_table", TENSORS.block_table.long(), TypeError, "expected dtype int32, got int64"),
    ("tensors", "out", torch.zeros(3, 1, 4, 512), TypeError, "expected dtype bfloat16, got float32"),
    ("sparse", "causal", True, ValueError, "expected False with indices, got True"),
    ("sparse", "extra_topk_length", np.ones(3, int), ValueError, "expected None without extra_k_cache"),
    ("sparse", "indices", Z((2, 2, 33), I32), ValueError, r"expected shape \[3, 2, topk\], got \[2, 2, 33\]"),
    ("sparse", "attn_sink", np.ones(4), ValueError, r"expected shape \[5\]"),
    ("sparse", "k_cache", Z((9, 7, 1, 9), BYTE), ValueError, r"expected shape \[num_blocks, .*, 1, 656\]"),
    ("sparse", "k_cache", Z((9, 7, 1, 656), I32), TypeError, f"{BYTES}int32"),
    ("prefill", "d_v", 576, ValueError, "expected 512, got 576"),
    ("prefill", "log_base", "10", ValueError, "expected '2' or 'e', got '10'"),
    ("prefill", "sm_scale", None, TypeError, "expected a float, got None"),
    ("prefill", "q", Z((7, 1, 5, 576)), ValueError, r"expected shape \[s_q, h_q, 576 or 512\], got \[7, 1"),
    ("prefill", "indices", Z((6, 1, 33), I32), ValueError, r"expected shape \[7, 1, topk\], got"),
    ("prefill", "topk_length", Z(3, I32), ValueError, r"expected shape \[7\], got"),
    ("metadata", "cache_seqlens", [0.5], TypeError, "expected dtype int32, got float64"),
    ("metadata", "num_heads_q", 3, ValueError, "expected a multiple of num_heads_k"),
    ("metadata", "is_fp8_kvcache", True, NotImplementedError, ""),
    ("metadata", "num_heads_per_head_k", 4, TypeError, "expected None when"),
    ("metadata", "out", reference.FlashMLASchedMeta(num_splits=Z(2, I32)), ValueError, "expected a FlashM"),
    ("quantize", "layout", "v4", ValueError, "expected 'v32' or 'model1', got 'v4'"),
    ("quantize", "k_cache", Z((1, 1, 1, 512)), ValueError, r"expected shape .* 576\], got \[1, 1, 1, 512\]"),
    ("quantize", "out", Z((1, 1, 1, 656), BYTE), ValueError, r"expected shape \[2, 1, 1, 656\], got \[1, 1"),
    ("dequantize", "cache", Z((1, 1, 1, 584), BYTE), ValueError, r"expected shape .* 656\], got \[1, 1, 1"),
    ("write", "kv_c", Z((3, 511)), ValueError, r"expected shape \[T, 512\]"),
    ("write", "k_pe", Z((2, 64)), ValueError, r"expected shape \[3, 64\], got"),
    ("write", "kv_cache", Z((4, 1, 656), BYTE), ValueError, r"expected shape \[num_blocks, page_block_size"),
    ("write", "slot_mapping", np.arange(2), ValueError, r"expected shape \[3\], got"),
    ("gather", "block_table", [0], ValueError, r"expected shape \[b, max_blocks\], got \[1\]"),
    ("gather", "cache_seqlens", [1], ValueError, r"expected shape \[2\], got"),
    ("gather", "out", Z((4, 575)), ValueError, r"expected shape \[rows, 576\]"),
    ("convert", "indices", torch.zeros(2, 3).long(), TypeError, "expected dtype int32, got int64"),
    ("convert", "block_table", Z(3, I32), ValueError, r"expected shape \[num_requests, max_blocks\]"),
    ("convert", "request_ids", [0], ValueError, r"expected shape \[2\]"),
    ("convert", "out", Z((1, 3), I32), ValueError, r"expected shape \[2, 3\], got"),
    ("merge", "lses", [Z((2, 5, 3))] * 2, ValueError, "expected as many as outs, 1, got 2"),
    ("merge", "lses", [Z((1, 5, 3))], ValueError, r"expected shape \[2, 5, 3\], got"),
    ("segments", "dropout_p", 0.1, ValueError, "expected 0, got 0.1"),
    ("segments", "window_size", (-2, 0), ValueError, "expected None, -1 or at least 0, got .-2, 0"),
    ("segments", "softcap", -1.0, ValueError, "expected a finite number of at least 0, got -1.0"),
    ("segments", "attention_chunk", -1, ValueError, "expected at least 0, got -1"),
    ("segments", "softmax_scale", 0.0, ValueError, "expected a finite float32 greater than 0"),
    ("segments", "q", Z((9, 4, 6), I32), TypeError, "expected dtype"),
    ("segments", "q", Z((9, 3, 6)), ValueError, "expected h_q to be a multiple of the h_kv of k"),
    ("segments", "k", Z((8, 2, 5)), ValueError, r"expected shape \[s, h, 6\]"),
    ("segments", "cu_seqlens_q", [[1, 4, 9]], ValueError, r"expected shape \[b \+ 1\]"),
    ("segments", "cu_seqlens_q", [9, 4, 1], ValueError, "expected numbers .* that do not decrease"),
    ("segments", "cu_seqlens_k", [0, 2, 9], ValueError, "expected numbers from 0 to 8"),
    ("segments", "seqused_k", [1], ValueError, r"expected shape \[2\]"),
    ("segments", "attn_sink", Z(3), ValueError, r"expected shape \[4\]"),
    ("segments", "alibi_slopes", Z((3, 4), np.float32), ValueError, r"expected shape \[4\] or \[2, 4\]"),
    ("packed", "qkv", Z((4, 1, 6)), ValueError, r"expected shape \[total, 3, h, d\]"),
    ("backward", "lse", Z((1, 4, 3)), ValueError, r"expected shape \[2, 4, 3\]"),
    ("backward", "dout", Z((2, 2, 4, 5)), ValueError, "expected shape"),
    ("backward", "dv", OUT, ValueError, r"expected shape \[2, 3, 2, 5\]"),
    ("halves", "dout", OUT_T.float(), TypeError, "expected dtype float16, got"),
    ("halves", "lse", LSE_T.half(), TypeError, "expected dtype float32"),
    (
        "halves",
        "q",
        OUT_T.clone().requires_grad_(),
        ValueError,
        "expected a tensor that does not require grad",
    ),
    ("backward", "attention_chunk", 2, TypeError, "unexpected keyword argument"),
    ("prefix", "k", None, ValueError, "expected an array, as v is one, or both None, got None"),
    ("prefix", "kv_cache_dtype", "fp4", ValueError, "expected one of auto, .*, got 'fp4'"),
    ("prefix", "k_cache", Z((5, 2, 3, 4, 4), BYTE), TypeError, "expected dtype float64, got uint8"),
    ("prefix", "v_cache", Z((4, 2, 12, 4)), ValueError, "expected shape"),
    ("prefix", "interleaved_v_pack_factor", 3, ValueError, "expected 0 or a divisor of"),
    ("prefix", "b_start_loc", Z(2, int), ValueError, r"expected shape \[3\]"),
    ("prefix", "b_loc", Z((1, 2), int), ValueError, r"expected shape \[2, max_blocks\]"),
    ("prefix", "b_loc", np.full((2, 2), 2**31 - 1), IndexError, "expected blocks of k_cache, which has"),
    ("prefix", "sinks", Z(3), ValueError, r"expected shape \[4\]"),
    ("prefix", "fp8_out_scale", np.ones(2), ValueError, "expected a number or shape"),
    ("flex", "query", Z((2, 3, 4)), ValueError, r"expected shape \[B, Hq, L, E\]"),
    ("flex", "query", Z((2, 6, 40, 8)), ValueError, "expected Hq"),
    ("flex", "key", Z((2, 4, 50, 9)), ValueError, r"expected shape \[Bkv, Hkv, S, 8\]"),
    ("flex", "scale", np.inf, ValueError, "expected a finite float32"),
    ("flex", "return_aux", SimpleNamespace(lse=1, max_scores=True), TypeError, "lse: expected a bool"),
    ("flex", "kernel_options", {"BLOCKM": 64}, ValueError, "expected names among"),
    ("flex", "score_mod", 3, TypeError, "expected a function, got int 3"),
    ("flex", "score_mod", rawmla.CudaMod("score"), TypeError, f"{TEXT_ON_GPU}, got CudaMod"),
    ("flex", "block_mask", reference.create_block_mask(**BLOCKS), ValueError, "expected seq_lengths of"),
    ("flex", "out", Z((2, 4, 40, 6)), ValueError, "expected"),
    ("blocks", "BLOCK_SIZE", 100, ValueError, "expected a multiple of 16"),
    ("blocks", "mask_mod", "q_idx >= kv_idx", TypeError, TEXT_ON_GPU),
    ("flex backward", "grad_out", Z((2, 4, 40, 6)), ValueError, "expected shape"),
    ("flex backward", "lse", Z((2, 40, 4)), ValueError, "expected shape"),
    ("flex backward", "score_mod", lambda s, b, h, q, k: s, TypeError, "expected a NumpyMod"),
    ("flex backward", "key", torch.zeros(2, 4, 50, 8).to(torch.float8_e5m2), TypeError, "expected dtype flo"),
)
"""Call, argument, a value that it must not have, the error, and how its text goes on after the name."""
TOGETHER: tuple[tuple[str, dict[str, Any], type[Exception], str], ...] = (
    (
        "flex",
        {"return_lse": True, "return_aux": SimpleNamespace(lse=1, max_scores=0)},
        ValueError,
        "return_lse:",
    ),
    ("flex", {x: Z((3, 4, 50, 8)) for x in ("key", "value")}, ValueError, "key: expected a batch of 2"),
    ("merge", {"outs": [OUT, OUT[1:]], "lses": [OUT, OUT]}, ValueError, r"outs\[1\]: expected shape"),
    ("sparse", {"is_fp8_kvcache": False}, TypeError, "k_cache: expected dtype bfloat16, got uint"),
    ("sparse", {"extra_k_cache": SPARSE.k_cache}, ValueError, "extra_indices_in_kvcache: expected an array"),
    ("metadata", {"topk": 64, "num_heads_k": 2}, ValueError, "num_heads_k: expected 1 with topk, got 2"),
    ("prefix", {"alibi_slopes": Z(4), "causal": False}, ValueError, "alibi_slopes: expected None"),
    ("prefix", {"kv_cache_dtype": "fp8"}, TypeError, f"k_cache: {BYTES}"),
    ("prefix", {"fp8_out_scale": 1.0}, TypeError, f"o: {BYTES}float64"),
    ("prefix", {"b_loc": np.array([[0], [2]])}, IndexError, "index 1 is out of bounds"),
    (
        "prefix",
        {"b_loc": np.full((2, 2), 8), "is_block_table_ptr": True},
        IndexError,
        "b_loc: expected blocks",
    ),
    ("packed", {"head_dim_qk": 2}, ValueError, r"qkv: expected shape \[total, h, columns\]"),
)
"""Arguments that do not go together."""


@pytest.mark.parametrize("name", CALLS)
def test_refusals(name: str) -> None:
    """The good call passes; each change is refused by its name."""
    function, good = CALLS[name]
    function(**good)
    for call, argument, value, error, text in REFUSED:
        if call == name:
            with pytest.raises(error, match=rf"^{argument}\b.*{text}|{text} '{argument}'"):
                function(**{**good, argument: value})
    for call, changes, error, text in TOGETHER:
        if call == name:
            with pytest.raises(error, match=f"^{text}"):
                function(**{**good, **changes})


def test_errors_of_functions() -> None:
    """A function that takes neither arrays nor tensors is named; its own error is not changed."""
    q, k, v = (torch.from_numpy(x) for x in FLEX.values())
    with pytest.raises(ValueError, match=r"^score_mod: expected a function .*\(RuntimeError.*\(ValueError"):
        reference.flex_attention(q, k, v, lambda s, b, h, q, k: s if q > k else -s)
    with pytest.raises(ZeroDivisionError):
        reference.flex_attention(*FLEX.values(), lambda *at: 1 / 0)


@pytest.mark.parametrize("page", (-1, 2147480000))
def test_pages_outside_the_cache(page: int) -> None:
    """They are an error within a request's length; the table's garbage past it is none."""
    function, good = CALLS["dense"]
    table = DENSE.block_table.copy()
    table[0, 0] = page
    with pytest.raises(IndexError):
        function(**{**good, "block_table": table})


def test_tensors_that_require_grad() -> None:
    function, good = CALLS["tensors"]
    with torch.no_grad():
        function(**{**good, "q": TENSORS.q.clone().requires_grad_()})
