"""What the functions of `rawmla.reference` refuse: good calls, the table's too, changed in one argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawmla
from kit import DenseCase, SparseCase, make_dense_inputs, make_sparse_inputs
from rawmla import reference
from rawmla.reference._flex import flex_attention_backward

torch = pytest.importorskip("torch")
from operations import OPERATIONS, Arguments, Operation  # noqa: E402

# ---- the table, in tensors of the CPU

OF_GPU_ALONE = ("flex", "block_mask", "flex_backward", "flex_backward_traced")
"""Entries with functions that the reference does not take."""
ENTRIES = [one for one in OPERATIONS if not one.clusters and one.name not in OF_GPU_ALONE]
OF_KERNELS = {
    "page of 48 tokens",
    "k_cache with odd strides",
    "no columns of indices",
    "cache on the CPU",
    "no parts",
    "a tensor of parts",
    "block of 0",
}
"""Rows of the table that the reference takes, or that are an error by themselves."""
FP8 = torch.float8_e4m3fn  # torch makes no sparse tensors of it
WRONG: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "array, got object": (TypeError, lambda x: object()),
    "dtype": (TypeError, lambda x: x.float().bool() if x.is_floating_point() else x.long()),
    "shape": (ValueError, lambda x: x[None, None]),
    "": (ValueError, lambda x: x.flatten()[:-1] if x.numel() > 1 else x.new_zeros(7)),
    "a tensor in CPU memory": (ValueError, lambda x: x.to("meta")),
    "a dense torch tensor": (TypeError, lambda x: (x.float() if x.dtype == FP8 else x).to_sparse()),
    "a tensor that does not require grad": (ValueError, lambda x: x.detach().requires_grad_()),
}
"""What was expected -> the exception, and how an array is spoilt."""
PARTS = {("qkv", "dtype"): "q", ("kv", "dtype"): "kv?", ("indices", "shape"): "(indices|request_ids)"}
"""What the text names instead of an array."""


def spoilt(operation: Operation, good: Arguments) -> Iterator[tuple[type[Exception], str, Arguments]]:
    """Every array and output spoilt in every way, and the rows of the table: error, text and change."""
    for name in (*operation.arrays, *operation.outputs):
        value = good.get(name)
        for text, (error, change) in WRONG.items() if value is not None else ():
            array = value[-1] if isinstance(value, list) else value
            if text == "dtype" and name in operation.any_integer or text == "" and name == "cu_seqlens":
                continue
            if "grad" in text and not array.is_floating_point():
                continue
            named = PARTS.get((name, text), name)
            pattern = rf"^{named}(\[\d+\])?: expected.* {text}" if text else "expected"
            changed = change(array)
            yield error, pattern, {name: [*value[:-1], changed] if isinstance(value, list) else changed}
    for row, (error, name, changes) in operation.bad.items():
        if row not in OF_KERNELS:
            yield error, rf"^{name}\b.*expected", changes(good)


@pytest.mark.parametrize("operation", ENTRIES, ids=lambda operation: operation.name)
def test_calls_of_the_table(operation: Operation) -> None:
    call = operation.make(operation.cases[0], "cpu")
    function = getattr(reference, call.function)
    good = call.arguments | call.target()
    if call.plan is not None:
        metadata, num_splits = reference.get_mla_metadata(**call.plan)
        good |= {"tile_scheduler_metadata": metadata, "num_splits": num_splits}
    results = function(**good)
    if operation.out is not None and not operation.writes:
        results = results if isinstance(results, tuple) else (results,)
        for name, result in zip(operation.outputs, results, strict=False):
            good[name] = torch.empty_like(result)
            with pytest.raises(ValueError, match=f"^{name}: expected shape"):
                function(**{**good, name: result[..., :-1]})
    for error, text, changes in spoilt(operation, good):
        with pytest.raises(error, match=text):
            function(**{**good, **changes})


# ---- calls of their own

Z = np.zeros
I32, BYTE = np.int32, np.uint8
DENSE = make_dense_inputs(
    DenseCase(b=4, s_q=3, h_q=6, h_kv=2, lengths=(1, 2, 64, 65), causal=True, d_qk=512), "numpy"
)
SPARSE = make_sparse_inputs(SparseCase(b=3, s_q=2, h_q=5, s_k=40, topk=33, page_block_size=7), "numpy")
OUT, KV = Z((2, 3, 4, 5)), Z((2, 3, 2, 5))
FLEX = {"query": Z((2, 4, 40, 8)), "key": Z((2, 4, 50, 8)), "value": Z((2, 4, 50, 5))}
FLEX_OUT = {"grad_out": Z((2, 4, 40, 5)), "out": Z((2, 4, 40, 5)), "lse": Z((2, 4, 40))}
BLOCKS = {"mask_mod": lambda *at: True, "B": None, "H": None, "Q_LEN": 5, "KV_LEN": 5}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (
        reference.flash_mla_with_kvcache,
        {name: getattr(DENSE, name) for name in ("q", "k_cache", "block_table", "cache_seqlens")},
    ),
    "sparse": (
        reference.flash_mla_with_kvcache,
        {"q": SPARSE.q, "k_cache": SPARSE.k_cache, "block_table": None, "cache_seqlens": None}
        | SPARSE.keywords(),
    ),
    "metadata": (
        reference.get_mla_metadata,
        {"cache_seqlens": [5], "num_q_tokens_per_head_k": 16, "num_heads_k": 1},
    ),
    "dequantize": (reference.dequantize_k_cache, {"cache": Z((1, 1, 1, 656), BYTE), "layout": "v32"}),
    "merge": (reference.merge_attn_states, {"outs": [OUT], "lses": [Z((2, 4, 3))]}),
    "segments": (
        reference.flash_attn_varlen_func,
        {
            "q": Z((9, 4, 6)),
            "k": Z((8, 2, 6)),
            "v": Z((8, 2, 5)),
            "cu_seqlens_q": [1, 4, 9],
            "cu_seqlens_k": [0, 2, 7],
            "max_seqlen_q": 5,
            "max_seqlen_k": 5,
        },
    ),
    "packed": (
        lambda **given: reference.flash_attn_varlen_qkvpacked_func(given.pop("qkv"), [0, 4], 4, **given),
        {"qkv": Z((4, 3, 1, 2))},
    ),
    "backward": (
        reference.flash_attn_backward,
        {"dout": OUT, "q": Z((2, 3, 4, 6)), "k": Z((2, 3, 2, 6)), "v": KV, "out": OUT, "lse": Z((2, 4, 3))},
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
    ("dense", "q", Z((4, 3, 5, 512)), ValueError, "expected h_q to be a multiple of the h_kv of k_cache"),
    ("dense", "attn_sink", Z(3), ValueError, "expected None without indices"),
    ("sparse", "extra_topk_length", np.ones(3, int), ValueError, "expected None without extra_k_cache"),
    ("sparse", "k_cache", Z((9, 7, 1, 9), BYTE), ValueError, r"expected shape \[num_blocks, .*, 1, 656\]"),
    ("metadata", "cache_seqlens", [0.5], TypeError, "expected dtype int32, got float64"),
    ("metadata", "num_heads_q", 3, ValueError, "expected a multiple of num_heads_k"),
    ("metadata", "is_fp8_kvcache", True, NotImplementedError, ""),
    ("metadata", "num_heads_per_head_k", 4, TypeError, "expected None when"),
    ("metadata", "out", reference.FlashMLASchedMeta(num_splits=Z(2, I32)), ValueError, "expected a FlashM"),
    ("dequantize", "cache", Z((1, 1, 1, 584), BYTE), ValueError, r"expected shape .* 656\], got \[1, 1, 1"),
    ("segments", "window_size", (-2, 0), ValueError, "expected None, -1 or at least 0, got .-2, 0"),
    ("segments", "attention_chunk", -1, ValueError, "expected at least 0, got -1"),
    ("segments", "q", Z((9, 3, 6)), ValueError, "expected h_q to be a multiple of the h_kv of k"),
    ("segments", "k", Z((8, 2, 5)), ValueError, r"expected shape \[s, h, 6\]"),
    ("segments", "cu_seqlens_q", [9, 4, 1], ValueError, "expected numbers .* that do not decrease"),
    ("segments", "cu_seqlens_k", [0, 2, 9], ValueError, "expected numbers from 0 to 8"),
    ("packed", "qkv", Z((4, 1, 6)), ValueError, r"expected shape \[total, 3, h, d\]"),
    ("backward", "attention_chunk", 2, TypeError, "unexpected keyword argument"),
    ("prefix", "k", None, ValueError, "expected an array, as v is one, or both None, got None"),
    ("prefix", "v_cache", Z((4, 2, 12, 4)), ValueError, "expected shape"),
    ("prefix", "interleaved_v_pack_factor", 3, ValueError, "expected 0 or a divisor of"),
    ("prefix", "b_loc", np.full((2, 2), 2**31 - 1), IndexError, "expected blocks of k_cache, which has"),
    ("prefix", "fp8_out_scale", np.ones(2), ValueError, "expected a number or shape"),
    ("flex", "query", Z((2, 6, 40, 8)), ValueError, "expected Hq"),
    ("flex", "key", Z((2, 4, 50, 9)), ValueError, r"expected shape \[Bkv, Hkv, S, 8\]"),
    ("flex", "return_aux", SimpleNamespace(lse=1, max_scores=True), TypeError, "lse: expected a bool"),
    ("flex", "kernel_options", {"BLOCKM": 64}, ValueError, "expected names among"),
    ("flex", "score_mod", 3, TypeError, "expected a function, got int 3"),
    ("flex", "score_mod", rawmla.CudaMod("score"), TypeError, f"{TEXT_ON_GPU}, got CudaMod"),
    ("flex", "block_mask", reference.create_block_mask(**BLOCKS), ValueError, "expected seq_lengths of"),
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
    q, k, v = (torch.from_numpy(x) for x in FLEX.values())
    with torch.no_grad():
        reference.flex_attention(q.requires_grad_(), k, v)
