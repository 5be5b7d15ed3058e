"""Calls of every operator of rawmla.torch_ops on small tensors, for the tests with and without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from rawmla import reference

torch = pytest.importorskip("torch")

SCALE = 576**-0.5
PAGE = 16


def tensors(device: str, seed: int = 0) -> Callable[..., Any]:
    """A function that makes bfloat16 tensors of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)


def int32(values: Any, device: str) -> Any:
    return torch.tensor(values, dtype=torch.int32, device=device)


def dense(
    device: str, b: int = 3, s_q: int = 2, h_q: int = 4, d_qk: int = 576, h_kv: int = 1
) -> dict[str, Any]:
    """The tensors of a dense call: two pages a request, the first request without a token."""
    make = tensors(device)
    lengths = [(11 * i) % (2 * PAGE + 1) for i in range(b)]
    return {
        "q": make(b, s_q, h_q, d_qk),
        "k_cache": make(2 * b + 1, PAGE, h_kv, d_qk),
        "block_table": int32([[2 * i + 1, 2 * i] for i in range(b)], device).reshape(b, 2),
        "cache_seqlens": int32(lengths, device),
    }


def plan(device: str, b: int, rows: int = 5, blocks: int = 1) -> tuple[Any, Any]:
    """A plan for so many blocks of every request, as tensors."""
    made = reference.plan_blocks([blocks] * b, rows)
    return torch.from_numpy(made.tensor_rows).contiguous().to(device), torch.from_numpy(made.num_splits).to(
        device
    )


def cache(device: str, layout: str, num_blocks: int = 4) -> Any:
    """A cache for sparse calls."""
    d_qk = 512 if layout == "model1" else 576
    made = tensors("cpu", 1)(num_blocks, PAGE, 1, d_qk)
    return (made if layout == "bf16" else reference.quantize_k_cache(made, layout)).to(device)


def sparse(device: str, layout: str = "v32", b: int = 3, s_q: int = 2, h_q: int = 4) -> dict[str, Any]:
    """The tensors of a sparse call."""
    generator = torch.Generator().manual_seed(2)
    return {
        "q": tensors(device)(b, s_q, h_q, 512 if layout == "model1" else 576),
        "k_cache": cache(device, layout),
        "indices": torch.randint(-1, 4 * PAGE, (b, s_q, 64), dtype=torch.int32, generator=generator).to(
            device
        ),
    }


def parts(q: Any) -> tuple[Any, Any]:
    """q as a pair of arrays with strides of their own."""
    return q[..., :-64].clone(), q[..., -64:]


def _decode(device: str, b: int = 3, pair: bool = False, **sizes: int) -> list[Any]:
    q, *others = dense(device, b, **sizes).values()
    queries = parts(q) if pair else (q, None)
    return [*queries, *others, *plan(device, b), None, True, False, False]


def _decode_sparse(device: str, layout: str, full: bool = False, b: int = 3, pair: bool = False) -> list[Any]:
    made = sparse(device, layout, b)
    optional = [None] * 5
    if full:
        optional = [
            torch.linspace(-1, 1, 4, device=device),
            cache(device, layout, 3),
            made["indices"].flip(2).contiguous(),
            int32([64, 3, 0][:b], device),
            int32([5, 64, 0][:b], device),
        ]
    q, *others = made.values()
    queries = parts(q) if pair else (q, None)
    made_plan = plan(device, b, blocks=1 + full)  # with an extra cache there is a block of it too
    return [*queries, *others, *made_plan, SCALE, layout != "bf16", *optional, False, False]


def _sparse_fwd(
    device: str, layout: str = "bf16", full: bool = False, base: str = "2", pair: bool = False
) -> list[Any]:
    made = sparse(device, layout, 5, 1)
    kv = made["k_cache"]
    optional = (
        [torch.linspace(-1, 1, 4, device=device), int32([64, 3, 0, 70, 1], device)] if full else [None] * 2
    )
    q = made["q"][:, 0]
    return [
        *(parts(q) if pair else (q, None)),
        kv.reshape(-1, 1, 576) if layout == "bf16" else kv,
        made["indices"],
        SCALE,
        *optional,
        base,
        layout != "bf16",
        False,
    ]


def out_of_buffer(q: Any) -> Any:
    """An out for q: the second half of the heads of a larger buffer."""
    *rows, h_q, _ = q.shape
    return torch.zeros(*rows, 2 * h_q, 512, dtype=q.dtype, device=q.device)[..., h_q:, :]


def _with_out(args: list[Any]) -> list[Any]:
    return [*args, out_of_buffer(args[0])]


def _plan_object(device: str, is_sparse: bool) -> list[Any]:
    if not is_sparse:
        made = dense(device)
        return [2, 4, 1, made["cache_seqlens"], None, None, None, None, False]
    made = sparse(device)
    return [2, 4, 1, None, made["indices"], int32([64, 3, 0], device), made["indices"], None, True]


def _positions(device: str) -> list[Any]:
    positions = int32([[[0, 17, -1, 40]], [[31, 2, 3, 4]]], device)
    return [positions, int32([[1, 0], [3, -1], [2, 2]], device), PAGE, None]


def _states(device: str, parts: int = 2) -> list[Any]:
    make = tensors(device)
    generator = torch.Generator().manual_seed(3)
    lse = [torch.randn(2, 4, 3, generator=generator).to(device) for _ in range(parts)]
    return [[make(2, 3, 4, 512) for _ in range(parts)], lse]


def _gather(device: str, layout: str) -> list[Any]:
    return [
        cache(device, layout),
        int32([[1, 0], [3, 2]], device),
        int32([17, 5], device),
        torch.zeros(30, 512 if layout == "model1" else 576, dtype=torch.bfloat16, device=device),
        int32([0, 20], device),
        None,
    ]


def _write(device: str, layout: str) -> list[Any]:
    make = tensors(device)
    slots = torch.tensor([3, -1, 20], device=device)
    return [make(3, 448 if layout == "model1" else 512), make(3, 64), cache(device, layout), slots]


def varlen(device: str, tokens: tuple[int, int] = (9, 13), full: bool = False) -> dict[str, Any]:
    """The arguments of `flash_attn_varlen_func`, of three requests, the second without a query."""
    make, (total_q, total_k) = tensors(device), tokens
    made: dict[str, Any] = {
        "q": make(total_q, 4, 40),
        "k": make(total_k, 2, 40),
        "v": make(total_k, 2, 24),
        "cu_seqlens_q": int32([0, total_q // 3, total_q // 3, total_q], device),
        "cu_seqlens_k": int32([0, total_k // 2, total_k - total_k % 3, total_k], device),
        "max_seqlen_q": total_q,
        "max_seqlen_k": total_k,
    }
    if full:
        made.update(
            softmax_scale=0.3,
            causal=True,
            is_varlen=False,
            window_size=(4, 1),
            softcap=5.0,
            attn_sink=torch.linspace(-1, 1, 4, device=device).half(),
            alibi_slopes=torch.linspace(0, 1, 4, device=device),
            seqused_q=int32([1, 0, 2], device),
            seqused_k=int32([2, 2, 0], device),
        )
    return made


def _varlen(device: str, tokens: tuple[int, int] = (9, 13), full: bool = False) -> list[Any]:
    made = varlen(device, tokens, full)
    left, right = made.get("window_size", (-1, -1))
    arrays = ("attn_sink", "alibi_slopes", "seqused_q", "seqused_k")
    return [
        *list(made.values())[:7],
        made.get("softmax_scale"),
        made.get("causal", False),
        made.get("is_varlen", True),
        left,
        right,
        made.get("softcap", 0.0),
        *[made.get(name) for name in arrays],
        False,
    ]


def _fixed(device: str, d_qk: int = 40, d_v: int = 24, b: int = 2, transposed: bool = False) -> list[Any]:
    make = tensors(device)
    shapes = ((b, 3, 4, d_qk), (b, 5, 2, d_qk), (b, 5, 2, d_v))
    made = [make(*shape) for shape in shapes]
    if transposed:
        made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
    return [*made, None, True, 3, -1, 0.0, None, None, False]


EVERY = (True, True, True, True)


def _backward_of(
    op: str, args: list[Any], *, dlse: bool = False, given: bool = False, mask: tuple[bool, ...] = EVERY
) -> list[Any]:
    """The arguments of the backward of a forward call, made by the reference."""
    q, k, v, *options = args
    device = q.device
    make = tensors(device, 5)
    on_cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    out, lse = (x.to(device) for x in getattr(torch.ops.rawmla, op).default(*on_cpu))
    logs = torch.linspace(-1, 1, lse.numel(), device=device).reshape(lse.shape) if dlse else None
    targets = [torch.full_like(x, 7.0) for x in (q, k, v)] if given else [list(mask)]
    return [make(*out.shape), q, k, v, out, lse, logs, *options, *targets]


def _empty_for(q: Any, v: Any) -> Any:
    return q.new_zeros((*q.shape[:-1], v.shape[-1]))


def prefix(
    device: str, own: tuple[int, ...] = (3, 1, 0, 5), *, full: bool = False, cached: bool = False
) -> dict[str, Any]:
    """The arguments of `context_attention_fwd`: requests with so many new tokens, over older ones."""
    make, heads, d, pages = tensors(device), 2, 24, 3
    b = len(own)
    tokens = sum(own) + 1  # the last row is of no request
    older = [(5, 20, 3, 0)[i % 4] for i in range(b)]
    new = [None] * 2 if cached else [make(tokens, heads, d) for _ in range(2)]
    table = torch.randperm(b * pages, generator=torch.Generator().manual_seed(4)).reshape(b, pages)
    caches = [make(b * pages, heads, d // 8, PAGE, 8), make(b * pages, heads, d, PAGE)]
    if full:  # bytes of e4m3 that are finite
        caches = [(x.float() * 20).round().clamp(0, 100).to(torch.uint8) for x in caches]
    made: dict[str, Any] = {
        "q": make(tokens, 4, d),
        "k": new[0],
        "v": new[1],
        "o": torch.full((tokens, 4, d), 7.0, dtype=torch.bfloat16, device=device),
        "kv_cache_dtype": "fp8" if full else "auto",
        "k_cache": caches[0],
        "v_cache": caches[1],
        "b_loc": table.to(device) if full else table.int().to(device),
        "b_start_loc": int32([sum(own[:i]) for i in range(b + 1)], device),
        "b_seq_len": int32([x + y for x, y in zip(own, older, strict=True)], device),
        "max_seq_len": None,
        "max_input_len": tokens,
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    if full:
        made.update(
            max_seq_len=30,
            k_scale=torch.tensor(0.5, device=device),
            v_scale=0.25,
            alibi_slopes=torch.linspace(0, 1, 4, device=device),
            sliding_window=6,
            sm_scale=0.3,
            skip_decode=True,
            sinks=torch.linspace(-1, 1, 4, device=device).half(),
            interleaved_v_pack_factor=8,
        )
    if cached:
        made["causal"] = False
    return made


def _prefix(device: str, *args: Any, **options: Any) -> list[Any]:
    """In the order of the operator, where a scale is a tensor and a number."""
    made = prefix(device, *args, **options)
    call: list[Any] = []
    defaults = {
        "skip_decode": False,
        "is_block_table_ptr": False,
        "interleaved_v_pack_factor": 0,
        "causal": True,
    }
    for name in inspect.signature(reference.context_attention_fwd).parameters:
        value = made.get(name, defaults.get(name))
        if name.endswith("out_scale") or name in ("k_scale", "v_scale"):
            call += [value, None] if isinstance(value, torch.Tensor) else [None, value]
        else:
            call.append(value)
    return call


Case = tuple[str, Callable[[str], list[Any]]]

CASES: dict[str, Case] = {
    "plan": ("plan", lambda d: [int32([5, 0, 70], d), 8, 1, 4, None, False]),
    "plan sparse": ("plan", lambda d: [int32([5, 0, 70], d), 8, 1, None, 128, True]),
    "plan empty": ("plan", lambda d: [int32([], d), 8, 1, 4, None, False]),
    "plan in place": ("plan_", lambda d: [int32([5, 0, 70], d), 8, 1, 4, None, False, *plan(d, 5), False]),
    "plan object in place": (
        "plan_",
        lambda d: [int32([5, 0, 70], d), 8, 1, 4, None, True, *plan(d, 3), True],
    ),
    "plan_object dense": ("plan_object", lambda d: _plan_object(d, False)),
    "plan_object sparse": ("plan_object", lambda d: _plan_object(d, True)),
    "decode": ("decode", _decode),
    "decode pair": ("decode", lambda d: _decode(d, pair=True)),
    "decode_sparse pair": ("decode_sparse", lambda d: _decode_sparse(d, "v32", pair=True)),
    "sparse_fwd pair": ("sparse_fwd", lambda d: _sparse_fwd(d, pair=True)),
    "decode two kv heads": ("decode", lambda d: _decode(d, 2, h_kv=2, s_q=1)),
    "decode empty": ("decode", lambda d: _decode(d, 0)),
    "decode one": ("decode", lambda d: _decode(d, 1)),
    "decode_out": ("decode_out", lambda d: _with_out(_decode(d))),
    "decode_out empty": (
        "decode_out",
        lambda d: [*_decode(d, 0), torch.zeros(0, 2, 4, 512, dtype=torch.bfloat16, device=d)],
    ),
    "decode_sparse v32": ("decode_sparse", lambda d: _decode_sparse(d, "v32")),
    "decode_sparse model1": ("decode_sparse", lambda d: _decode_sparse(d, "model1", full=True)),
    "decode_sparse bf16": ("decode_sparse", lambda d: _decode_sparse(d, "bf16", full=True)),
    "decode_sparse empty": ("decode_sparse", lambda d: _decode_sparse(d, "v32", b=0)),
    "decode_sparse_out": ("decode_sparse_out", lambda d: _with_out(_decode_sparse(d, "v32", full=True))),
    "sparse_fwd": ("sparse_fwd", _sparse_fwd),
    "sparse_fwd natural": ("sparse_fwd", lambda d: _sparse_fwd(d, full=True, base="e")),
    "sparse_fwd_out": ("sparse_fwd_out", lambda d: _with_out(_sparse_fwd(d, "v32", full=True))),
    "flash_attn_varlen": ("flash_attn_varlen", _varlen),
    "flash_attn_varlen full": ("flash_attn_varlen", lambda d: _varlen(d, full=True)),
    "flash_attn_varlen no keys": ("flash_attn_varlen", lambda d: _varlen(d, (4, 0))),
    "flash_attn_varlen empty": ("flash_attn_varlen", lambda d: _varlen(d, (0, 5))),
    "flash_attn_varlen_backward": (
        "flash_attn_varlen_backward",
        lambda d: _backward_of("flash_attn_varlen", _varlen(d)),
    ),
    "flash_attn_varlen_backward full": (
        "flash_attn_varlen_backward",
        lambda d: _backward_of("flash_attn_varlen", _varlen(d, full=True), dlse=True),
    ),
    "flash_attn_varlen_backward no keys": (
        "flash_attn_varlen_backward",
        lambda d: _backward_of("flash_attn_varlen", _varlen(d, (4, 0))),
    ),
    "flash_attn_varlen_backward_out": (
        "flash_attn_varlen_backward_out",
        lambda d: _backward_of("flash_attn_varlen", _varlen(d, full=True), given=True),
    ),
    "flash_attn_backward": (
        "flash_attn_backward",
        lambda d: _backward_of("flash_attn", _fixed(d), dlse=True),
    ),
    "flash_attn_backward transposed": (
        "flash_attn_backward",
        lambda d: _backward_of("flash_attn", _fixed(d, transposed=True)),
    ),
    "flash_attn_varlen_backward dq": (
        "flash_attn_varlen_backward",
        lambda d: _backward_of("flash_attn_varlen", _varlen(d, full=True), mask=(True, False, False, False)),
    ),
    "flash_attn_varlen_backward dsink": (
        "flash_attn_varlen_backward",
        lambda d: _backward_of("flash_attn_varlen", _varlen(d, full=True), mask=(False, False, False, True)),
    ),
    "flash_attn_backward dk, dv": (
        "flash_attn_backward",
        lambda d: _backward_of("flash_attn", _fixed(d), mask=(False, True, True, False)),
    ),
    "flash_attn_backward padded": (
        "flash_attn_backward",
        lambda d: _backward_of("flash_attn", _fixed(d, 17, 33)),
    ),
    "flash_attn_backward empty": (
        "flash_attn_backward",
        lambda d: _backward_of("flash_attn", _fixed(d, b=0)),
    ),
    "flash_attn_backward_out": (
        "flash_attn_backward_out",
        lambda d: _backward_of("flash_attn", _fixed(d), given=True),
    ),
    "flash_attn_varlen_out": (
        "flash_attn_varlen_out",
        lambda d: (args := _varlen(d, full=True)) + [_empty_for(args[0], args[2])],
    ),
    "flash_attn": ("flash_attn", _fixed),
    "flash_attn transposed": ("flash_attn", lambda d: _fixed(d, transposed=True)),
    "flash_attn padded": ("flash_attn", lambda d: _fixed(d, 17, 33)),
    "flash_attn empty": ("flash_attn", lambda d: _fixed(d, b=0)),
    "flash_attn_out": ("flash_attn_out", lambda d: (args := _fixed(d)) + [_empty_for(args[0], args[2])]),
    "context_attention": ("context_attention_out", _prefix),
    "context_attention full": ("context_attention_out", lambda d: _prefix(d, full=True)),
    "context_attention cached": ("context_attention_out", lambda d: _prefix(d, cached=True)),
    "context_attention no queries": ("context_attention_out", lambda d: _prefix(d, (0, 0))),
    "write_kv v32": ("write_kv", lambda d: _write(d, "v32")),
    "write_kv model1": ("write_kv", lambda d: _write(d, "model1")),
    "write_kv bf16": ("write_kv", lambda d: _write(d, "bf16")),
    "gather_kv v32": ("gather_kv", lambda d: _gather(d, "v32")),
    "gather_kv bf16": ("gather_kv", lambda d: [*_gather(d, "bf16")[:-1], int32([2, 0], d)]),
    "quantize v32": ("quantize", lambda d: [tensors(d)(2, 3, 1, 576), "v32"]),
    "quantize model1": ("quantize", lambda d: [tensors(d)(2, 3, 1, 512), "model1"]),
    "quantize_out": ("quantize_out", lambda d: [tensors(d)(4, PAGE, 1, 576), "v32", cache(d, "v32")]),
    "dequantize": ("dequantize", lambda d: [cache(d, "model1"), "model1"]),
    "convert_indices": ("convert_indices", _positions),
    "convert_indices_out": ("convert_indices_out", lambda d: [*_positions(d), int32([[[9] * 4]] * 2, d)]),
    "convert_indices_compact": (
        "convert_indices_compact",
        lambda d: [_positions(d)[0][:, 0].contiguous(), *_positions(d)[1:3], int32([2, 0], d)],
    ),
    "convert_indices_compact_out": (
        "convert_indices_compact_out",
        lambda d: [*_positions(d), int32([[[9] * 4]] * 2, d)],
    ),
    "merge": ("merge", _states),
    "merge_out": ("merge_out", lambda d: [*_states(d, 3), out_of_buffer(_states(d)[0][0])]),
}
"""Test id -> the name of an operator, and its arguments on a device."""
