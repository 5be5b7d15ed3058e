"""The torch operators on the CPU: torch's own checks of them, torch.compile, torch.export, and refusals."""

from __future__ import annotations

import io
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import numpy as np
import pytest
from full_cases import full_unless

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_op_cases import (  # noqa: E402
    CASES,
    PAGE,
    SCALE,
    cache,
    dense,
    int32,
    out_of_buffer,
    parts,
    plan,
    prefix,
    sparse,
    tensors,
    varlen,
)

import rawmla  # noqa: E402
import rawmla.torch_ops  # noqa: E402
from rawmla import reference  # noqa: E402
from rawmla.call import tracing  # noqa: E402

OPS = torch.ops.rawmla
NO_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is None
BACKENDS = ("eager", "aot_eager", "inductor")
AOT_EAGER = pytest.mark.parametrize("backend", full_unless(lambda name: name == "aot_eager", BACKENDS))
AND_INDUCTOR = pytest.mark.parametrize("backend", full_unless(lambda name: name != "eager", BACKENDS))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """No test finds what another one compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(case: str) -> tuple[Any, list[Any]]:
    """The operator of a case, and its arguments on the CPU."""
    name, make = CASES[case]
    return getattr(OPS, name).default, make("cpu")


def assert_equal(got: Any, want: Any) -> None:
    """Tuples of tensors that are equal in shape, dtype and every number."""
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def compiled_by(backend: str, step: Callable[..., Any]) -> Callable[..., Any]:
    if backend == "inductor" and NO_COMPILER:
        pytest.skip("needs a C++ compiler")
    return torch.compile(step, fullgraph=True, backend=backend)


# ---- the operators


FIRST = {name: case for case, (name, _) in reversed(CASES.items())}
QUICK = {case for name, case in FIRST.items() if name.removesuffix("_out") not in FIRST.keys() - {name}}
QUICK |= {"decode_out", "flash_attn_varlen_backward_out"}
"""The first case of each operator. One that fills a given out has the checks of the one without."""
AHEAD_OF_TIME = ("test_aot_dispatch_dynamic",)
OTHERS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    op, args = arguments(case)
    torch.library.opcheck(op, tuple(args), test_utils=OTHERS)


@pytest.mark.parametrize("case", full_unless(lambda case: case in QUICK, CASES))
def test_opcheck_with_dynamic_shapes(case: str) -> None:
    op, args = arguments(case)
    torch.library.opcheck(op, tuple(args), test_utils=AHEAD_OF_TIME)


def test_every_operator_has_a_case_and_returns_no_argument() -> None:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("rawmla::")]
    assert {s.name.removeprefix("rawmla::") for s in schemas} == {name for name, _ in CASES.values()}
    for schema in schemas:
        assert all(result.alias_info is None for result in schema.returns), str(schema)


def test_the_page_has_every_operator() -> None:
    page = (Path(__file__).parents[1] / "docs" / "torch_operators.md").read_text()
    _, _, table = page.partition("## The operators")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))
    assert named == {name for name, _ in CASES.values()}


class TestNumbers:
    """The CPU kernels are the reference with its arguments in their places."""

    def test_decode(self) -> None:
        made, b = dense("cpu"), 3
        want = reference.flash_mla_with_kvcache(**made, softmax_scale=0.1, causal=True)
        q, *others = made.values()
        rows, splits = OPS.plan(made["cache_seqlens"], 8, 1, 4, None, False)
        assert_equal(OPS.decode(q, None, *others, rows, splits, 0.1, True, False, False), want)
        rows, splits = OPS.plan_object(2, 4, 1, made["cache_seqlens"], None, None, None, None, False)
        assert_equal(OPS.decode(q, None, *others, rows, splits, 0.1, True, False, True), want)
        out = out_of_buffer(made["q"])
        lse = OPS.decode_out(q, None, *others, *plan("cpu", b), 0.1, True, False, False, out)
        assert_equal((out, lse), want)
        assert not out._base[:, :, :4].any()
        assert_equal(OPS.decode(*parts(q), *others, rows, splits, 0.1, True, False, True), want)

    @pytest.mark.parametrize("layout", ("v32", "model1", "bf16"))
    def test_decode_sparse(self, layout: str) -> None:
        made = sparse("cpu", layout)
        optional = {
            "attn_sink": torch.linspace(-1, 1, 4),
            "extra_k_cache": cache("cpu", layout, 3),
            "extra_indices_in_kvcache": made["indices"].flip(2).contiguous(),
            "topk_length": int32([64, 3, 0], "cpu"),
            "extra_topk_length": int32([5, 64, 0], "cpu"),
        }
        is_fp8 = layout != "bf16"
        want = reference.flash_mla_with_kvcache(
            made["q"], made["k_cache"], None, None, indices=made["indices"], is_fp8_kvcache=is_fp8, **optional
        )
        scale = made["q"].shape[-1] ** -0.5
        q, *others = made.values()
        call = [q, None, *others, *plan("cpu", 3), scale, is_fp8, *optional.values(), False, False]
        assert_equal(OPS.decode_sparse(*call), want)
        out = out_of_buffer(made["q"])
        assert_equal((out, OPS.decode_sparse_out(*call, out)), want)

    @pytest.mark.parametrize("base", ("2", "e"))
    def test_sparse_fwd(self, base: str) -> None:
        _, args = arguments("sparse_fwd natural")
        q, _, kv, indices, scale, sink, lengths, *_ = args
        want = reference.flash_mla_sparse_fwd(q, kv, indices, scale, 512, sink, lengths, log_base=base)
        assert_equal(OPS.sparse_fwd(*args[:7], base, False, True), want)

    @pytest.mark.parametrize("full", (False, True))
    def test_flash_attn_varlen(self, full: bool) -> None:
        made = varlen("cpu", full=full)
        want = reference.flash_attn_varlen_func(**made)
        op, args = arguments(f"flash_attn_varlen{' full' * full}")
        got = op(*args)
        assert_equal(got, want)
        assert got[1].stride() == (1, 9)
        out = torch.ones(9, 8, 24, dtype=torch.bfloat16)
        assert_equal((out[:, 4:], OPS.flash_attn_varlen_out(*args, out[:, 4:])), want)
        assert (out[:, :4] == 1).all()

    @pytest.mark.parametrize("case", ("flash_attn", "flash_attn transposed", "flash_attn padded"))
    def test_flash_attn(self, case: str) -> None:
        op, args = arguments(case)
        q, k, v, *_ = args
        want = reference.flash_attn_func(q, k, v, causal=True, window_size=(3, -1))
        got = op(*args)
        assert_equal(got, want)
        order = sorted(range(4), key=lambda axis: -q.stride(axis))
        assert sorted(range(4), key=lambda axis: -got[0].stride(axis)) == order
        assert got[0].stride(3) == 1 and all(stride % 8 == 0 for stride in got[0].stride()[:3])
        out = torch.zeros(want[0].shape, dtype=torch.bfloat16)[..., :24]
        if v.shape[-1] == 24:
            assert_equal((out, OPS.flash_attn_out(*args, out)), want)

    @pytest.mark.parametrize(
        "case", ("context_attention", "context_attention full", "context_attention cached")
    )
    def test_context_attention(self, case: str) -> None:
        options = {name: True for name in case.split()[1:]}
        want, given = prefix("cpu", **options), prefix("cpu", **options)
        reference.context_attention_fwd(**want)
        op, args = arguments(case)
        assert op(*args) is None
        assert torch.equal(args[3], want["o"]) and not torch.equal(args[3], given["o"])
        assert (args[3][-1] == 7).all()
        assert all(torch.equal(args[i], given[name]) for i, name in ((0, "q"), (5, "k_cache")))

    @pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.uint8))
    def test_context_attention_of_fp8(self, dtype: Any) -> None:
        """Results, and caches of tensors of float8."""
        want = prefix("cpu", full=True)
        for name in ("k_cache", "v_cache"):
            want[name] = want[name].view(torch.float8_e4m3fn)
        memory = torch.zeros(2, 10, 4, 32, dtype=torch.uint8).view(dtype)[..., :24]
        want |= {"o": memory[0], "fp8_out_scale": 0.5}
        got = {**want, "o": memory[1]}
        reference.context_attention_fwd(**want)
        torch.compile(rawmla.context_attention_fwd, fullgraph=True, backend="eager")(**got)
        assert torch.equal(got["o"].view(torch.uint8), want["o"].view(torch.uint8))
        assert got["o"].view(torch.uint8).any()

    @pytest.mark.parametrize("batch_invariant", (False, True))
    def test_plans(self, batch_invariant: bool) -> None:
        """Equal to what the functions of the reference compute, for objects too."""
        made = dense("cpu", 3)
        lengths = made["cache_seqlens"] * 60
        assert_equal(
            OPS.plan(lengths, 8, 1, 4, None, batch_invariant),
            reference.get_mla_metadata(lengths, 8, 1, 4, enable_batch_invariant=batch_invariant),
        )
        filled = reference.FlashMLASchedMeta(enable_batch_invariant=batch_invariant)
        table = torch.zeros(3, 200, dtype=torch.int32)
        reference.flash_mla_with_kvcache(made["q"], made["k_cache"], table, lengths, 512, filled)
        got = OPS.plan_object(2, 4, 1, lengths, None, None, None, None, batch_invariant)
        assert_equal(got, (filled.tile_scheduler_metadata, filled.num_splits))

    @pytest.mark.parametrize("batch_invariant", (False, True))
    def test_plan_of_a_sparse_call(self, batch_invariant: bool) -> None:
        """It leaves out the blocks behind the lengths."""
        generator = torch.Generator().manual_seed(0)
        indices = torch.randint(0, 4 * PAGE, (3, 1, 640), dtype=torch.int32, generator=generator)
        lengths = (int32([640, 3, 0], "cpu"), int32([70, 128, 5], "cpu"))
        filled = reference.FlashMLASchedMeta(enable_batch_invariant=batch_invariant)
        made = sparse("cpu", s_q=1)
        extra = indices[..., :128]
        reference.flash_mla_with_kvcache(
            made["q"],
            made["k_cache"],
            None,
            None,
            512,
            filled,
            is_fp8_kvcache=True,
            indices=indices,
            topk_length=lengths[0],
            extra_k_cache=made["k_cache"],
            extra_indices_in_kvcache=extra,
            extra_topk_length=lengths[1],
        )
        got = OPS.plan_object(1, 4, 1, None, indices, lengths[0], extra, lengths[1], batch_invariant)
        assert_equal(got, (filled.tile_scheduler_metadata, filled.num_splits))

    def test_plan_in_place_of_a_larger_batch(self) -> None:
        """Requests that are not there have no splits."""
        rows, splits = plan("cpu", 5)
        OPS.plan_(int32([200, 70], "cpu"), 4, 1, 4, None, False, rows, splits, False)
        want_rows, want_splits = reference.plan([200, 70], 5)[1:]
        assert np.array_equal(rows, want_rows)
        assert np.array_equal(splits, [*want_splits, *want_splits[-1:].repeat(3)])

    def test_caches(self) -> None:
        values = tensors("cpu")(2, 3, 1, 512)
        quantised = OPS.quantize(values, "model1")
        assert torch.equal(quantised, reference.quantize_k_cache(values, "model1"))
        assert quantised.stride() == (2304, 584, 584, 1)  # 3 * 584 bytes, up to a multiple of 576
        assert torch.equal(
            OPS.dequantize(quantised, "model1"), reference.dequantize_k_cache(quantised, "model1")
        )

    @pytest.mark.parametrize("compact", (False, True))
    def test_convert_indices(self, compact: bool) -> None:
        _, args = arguments("convert_indices")
        want = reference.convert_indices(*args[:3], compact=compact)
        out = torch.zeros_like(args[0])
        if compact:
            assert_equal(OPS.convert_indices_compact(*args), want)
            assert_equal((out, OPS.convert_indices_compact_out(*args, out))[::-1], want[::-1])
        else:
            assert torch.equal(OPS.convert_indices(*args), want)
            OPS.convert_indices_out(*args, out)
            assert torch.equal(out, want)


# case, number of the argument, what it becomes, the error of the public function
WRONG: list[tuple[str, int, Callable[[Any], Any], type[Exception], str]] = [
    ("decode", 0, lambda q: q.float(), TypeError, "q: expected dtype bfloat16 or float16, got float32"),
    ("decode", 2, lambda k: k.half(), TypeError, "k_cache: expected dtype bfloat16, the dtype of q, got"),
    ("decode", 2, lambda k: k[..., 1:], ValueError, r"k_cache: expected shape \[.*, 576\] \(d_qk of q\)"),
    ("decode", 2, lambda k: k.repeat(1, 1, 1, 2)[..., ::2], ValueError, "k_cache: expected a contig"),
    ("decode", 3, lambda table: table[1:], ValueError, r"block_table: expected shape \[3, max_blocks\]"),
    ("decode", 4, lambda vector: vector.long(), TypeError, "cache_seqlens: expected dtype int32, got int64"),
    ("decode", 5, lambda rows: rows[:, :7], ValueError, "tile_scheduler_metadata: expected shape"),
    ("decode", 7, lambda scale: -1.0, ValueError, "softmax_scale: expected a finite float32"),
    ("decode_out", 11, lambda out: out[:, :, :1], ValueError, r"out: expected shape \[3, 2, 4, 512\]"),
    ("decode_out", 11, lambda out: out[:, :, :1].expand(3, 2, 4, 512), ValueError, "out: expected"),
    ("decode_sparse v32", 3, lambda x: x[:, :1], ValueError, r"indices: expected shape \[3, 2, topk\]"),
    ("decode_sparse v32", 7, lambda fp8: False, TypeError, "k_cache: expected dtype bfloat16"),
    ("sparse_fwd", 7, lambda base: "10", ValueError, "log_base: expected '2' or 'e', got '10'"),
    ("plan", 2, lambda h_kv: 0, ValueError, "num_heads_k: expected an int of at least 1, got 0"),
    ("plan_object dense", 3, lambda x: x.long(), TypeError, "cache_seqlens: expected dtype int32"),
    ("plan_object sparse", 5, lambda x: x[1:], ValueError, r"topk_length: expected shape \[3\]"),
    ("flash_attn_varlen", 1, lambda k: k.half(), TypeError, "k: expected dtype bfloat16, the dtype of q"),
    ("flash_attn_varlen", 4, lambda x: x[1:], ValueError, r"cu_seqlens_k: expected shape \[4\]"),
    ("flash_attn_varlen", 5, lambda length: -1, ValueError, "max_seqlen_q: expected an int of at least 0"),
    ("flash_attn_varlen", 10, lambda left: -2, ValueError, "window_size: expected at least 0"),
    ("flash_attn_varlen full", 13, lambda x: x.int(), TypeError, "attn_sink: expected dtype float32 or"),
    ("flash_attn_varlen_out", 18, lambda out: out[..., :8], ValueError, r"out: expected shape \[9, 4, 24\]"),
    ("flash_attn", 2, lambda v: v[:, 1:], ValueError, r"v: expected shape \[2, 5, 2, d_v\]"),
    ("flash_attn_backward", 0, lambda dout: dout.half(), TypeError, "dout: expected dtype bfloat16"),
    ("flash_attn_backward", 5, lambda lse: lse.mT, ValueError, r"lse: expected shape \[2, 4, 3\]"),
    ("flash_attn_varlen_backward full", 6, lambda dlse: dlse[1:], ValueError, "dlse: expected shape"),
    ("flash_attn_varlen_backward full", 16, lambda cap: -1.0, ValueError, "softcap: expected a finite"),
    ("flash_attn_varlen_backward_out", 24, lambda dv: dv[1:], ValueError, "dv: expected shape"),
    ("context_attention", 1, lambda k: None, ValueError, "k: expected an array, as v is one"),
    ("context_attention", 3, lambda o: o.half(), TypeError, "o: expected dtype bfloat16, the dtype of q"),
    ("context_attention", 4, lambda name: "fp4", ValueError, "kv_cache_dtype: expected one of auto"),
    ("context_attention", 5, lambda k: k[..., ::2, :], ValueError, r"v_cache: expected shape"),
    ("context_attention", 6, lambda v: v.mT.contiguous().mT, ValueError, "v_cache: expected a 16-byte"),
    ("context_attention", 11, lambda length: -1, ValueError, "max_input_len: expected an int of at least 0"),
    ("context_attention full", 12, lambda scale: scale.double(), TypeError, "k_scale: expected a number or"),
    ("context_attention full", 15, lambda scale: -1.0, ValueError, "v_scale: expected a finite float32"),
    ("context_attention full", 12, lambda scale: None, TypeError, "k_scale: expected a number or a float32"),
    ("context_attention cached", 16, lambda x: torch.ones(4), ValueError, "alibi_slopes: expected None"),
    ("write_kv v32", 1, lambda rope: rope[:, 1:], ValueError, r"k_pe: expected shape \[3, 64\]"),
    ("gather_kv v32", 3, lambda out: out[:, 1:], ValueError, r"out: expected shape \[rows, 576\]"),
    ("quantize v32", 1, lambda layout: "v33", ValueError, "layout: expected 'v32' or 'model1', got 'v33'"),
    ("dequantize", 0, lambda cache: cache.bfloat16(), TypeError, "cache: expected dtype float8_e4m3fn or"),
    ("convert_indices", 2, lambda page: 0, ValueError, "page_block_size: expected an int of at least 1"),
    ("merge", 1, lambda lses: lses[1:], ValueError, "lses: expected at least 1, and as many as outs, got 1"),
    ("merge", 1, lambda lses: [x.double() for x in lses], TypeError, r"lses\[0\]: expected dtype float32"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ("CPU", "fake"))
@pytest.mark.parametrize(("case", "place", "change", "error", "text"), WRONG)
def test_checks_of_the_public_function(
    case: str, place: int, change: Callable[[Any], Any], error: type[Exception], text: str, kind: str
) -> None:
    op, args = arguments(case)
    args[place] = change(args[place])
    if kind == "fake":
        mode = FakeTensorMode()
        args = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
    with pytest.raises(error, match=rf"^{text}"):
        op(*args)


def test_one_device() -> None:
    op, args = arguments("decode")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        fakes[3] = torch.empty(3, 2, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match="^block_table: expected .* device cpu, as q is, got cuda:0"):
            op(*fakes)


def test_sizes_without_an_example() -> None:
    """What depends on data is left to the kernel to check."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = shapes.create_unbacked_symint()
        q = torch.empty(tokens, 4, 576, dtype=torch.bfloat16)
        indices = torch.empty(tokens, 1, 64, dtype=torch.int32)
        kv = torch.empty(9, 1, 576, dtype=torch.bfloat16)
        out, max_logits, _ = OPS.sparse_fwd(q, None, kv, indices, SCALE, None, None, "2", False, False)
    assert out.shape[0] is not None and str(out.shape[0]) == str(max_logits.shape[0]) == str(tokens)


# ---- torch.compile


def decode_step(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> tuple[Any, Any]:
    """Two layers with one plan, made inside."""
    made, _ = rawmla.get_mla_metadata()
    for _ in range(2):
        out, lse = rawmla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, 512, made, causal=True
        )
    return out * 2, lse


def decode_wanted(made: dict[str, Any], **keywords: Any) -> tuple[Any, Any]:
    out, lse = reference.flash_mla_with_kvcache(**made, causal=True, **keywords)
    return out * 2, lse


def test_compiled_decode_of_a_pair() -> None:
    made = dense("cpu")
    pair = {**made, "q": parts(made["q"])}
    assert_equal(torch.compile(decode_step, fullgraph=True, backend="aot_eager")(**pair), decode_wanted(made))


@pytest.mark.parametrize("batch_invariant", (False, True))
def test_compiled_plan_of_an_empty_object(batch_invariant: bool) -> None:
    made = dense("cpu")
    filled = rawmla.FlashMLASchedMeta()

    def step(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> tuple[Any, Any]:
        rawmla.get_mla_metadata(cache_seqlens, 8, 1, 4, out=filled, enable_batch_invariant=batch_invariant)
        return rawmla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, filled, causal=True)

    want = reference.flash_mla_with_kvcache(**made, causal=True)
    assert_equal(torch.compile(step, fullgraph=True, backend="aot_eager")(**made), want)
    assert filled.config is not None and filled.config.enable_batch_invariant is batch_invariant


def test_what_is_no_plan_is_named() -> None:
    made = dense("cpu")
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in made.values()]
        for given in (None, rawmla.FlashMLASchedMeta, (None, None)):
            with pytest.raises(TypeError, match="^tile_scheduler_metadata: expected a FlashMLASchedMeta or "):
                rawmla.flash_mla_with_kvcache(*fakes, 512, given)


@AOT_EAGER
def test_compiled_decode(backend: str) -> None:
    made = dense("cpu")
    assert_equal(compiled_by(backend, decode_step)(**made), decode_wanted(made))


@AND_INDUCTOR
def test_compiled_call_with_tensor_plan_and_out(backend: str) -> None:
    """The out is a slice of a larger buffer, whose other half keeps its values."""

    def step(plan: Any, buffer: Any, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> Any:
        rows, splits = rawmla.get_mla_metadata(cache_seqlens, 8, 1, 4)
        rawmla.get_mla_metadata(cache_seqlens, 8, 1, 4, out=plan)
        out = buffer[:, :, 4:]
        got, lse = rawmla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, 512, rows, splits, causal=True, out=out
        )
        return buffer + 1, got * 2, lse

    made, given = dense("cpu"), plan("cpu", 3)
    buffer = torch.ones(3, 2, 8, 512, dtype=torch.bfloat16)
    whole, *got = compiled_by(backend, step)(given, buffer, **made)
    want = decode_wanted(made)
    assert_equal(got, want)
    assert torch.equal(buffer[:, :, 4:] * 2, want[0])
    assert torch.equal(whole, buffer + 1) and (buffer[:, :, :4] == 1).all()
    assert np.array_equal(given[0], reference.plan(made["cache_seqlens"], 5).tensor_rows)


@AND_INDUCTOR
def test_compiled_sparse_step(backend: str) -> None:
    """Write, convert, decode, merge: what one layer of sparse attention does."""

    def step(
        api: Any, kv_c: Any, k_pe: Any, kv_cache: Any, slots: Any, positions: Any, table: Any, q: Any
    ) -> Any:
        api.write_kv_cache(kv_c, k_pe, kv_cache, slots)
        indices, lengths = api.convert_indices(positions, table, PAGE, compact=True)
        made, _ = api.get_mla_metadata()
        out, lse = api.flash_mla_with_kvcache(
            q,
            kv_cache,
            None,
            None,
            512,
            made,
            is_fp8_kvcache=True,
            indices=indices,
            topk_length=lengths[:, 0],
        )
        rows = torch.zeros(40, 576, dtype=torch.bfloat16)
        seqlens = torch.full((3,), 20, dtype=torch.int32)
        api.gather_kv_cache(kv_cache, table, seqlens, rows, workspace_starts=seqlens - 20)
        kv = api.dequantize_k_cache(kv_cache, "v32").view(-1, 1, 576)
        again, top, prefill_lse = api.flash_mla_sparse_fwd(q[:, 0], kv, indices, SCALE, log_base="e")
        merged, merged_lse = api.merge_attn_states([out[:, 0], again], [lse[:, :, 0], prefill_lse])
        copied = api.quantize_k_cache(kv.view(-1, PAGE, 1, 576), "v32")
        return out, lse, rows, again, top, merged, merged_lse, copied

    make = tensors("cpu", 3)
    generator = torch.Generator().manual_seed(4)
    positions = torch.randint(-3, 2 * PAGE, (3, 1, 64), dtype=torch.int32, generator=generator)
    table, slots = int32([[1, 0], [3, 2], [0, 3]], "cpu"), torch.tensor([3, -1, 40])
    given = (make(3, 512), make(3, 64), cache("cpu", "v32"), slots, positions, table, make(3, 1, 4, 576))
    copies = [x.clone() for x in given]
    got = compiled_by(backend, step)(rawmla, *given)
    assert_equal(got, step(reference, *copies))
    assert_equal(given, copies)


@pytest.mark.parametrize("dynamic", (True, None))
def test_batches(dynamic: bool | None) -> None:
    """torch makes graphs of their own for batches of 0 and 1; all others share one, but for the first."""
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(decode_step, fullgraph=True, backend=counter, dynamic=dynamic)
    for b in (3, 17, 5, 1):
        made = dense("cpu", b, s_q=1, h_q=2)
        assert_equal(step(**made), decode_wanted(made))
    assert counter.frame_count <= (2 if dynamic else 3)


def test_tokens_and_topk() -> None:
    """Of prefill, with the rows of kv: one graph for all."""

    def step(q: Any, kv: Any, indices: Any) -> Any:
        return rawmla.flash_mla_sparse_fwd(q, kv, indices, 0.05)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    generator = torch.Generator().manual_seed(5)
    for tokens, rows, topk in ((3, 20, 64), (17, 9, 70), (2, 40, 5)):
        indices = torch.randint(-1, rows, (tokens, 1, topk), dtype=torch.int32, generator=generator)
        given = tensors("cpu")(tokens, 2, 576), tensors("cpu", 1)(rows, 1, 576), indices
        assert_equal(compiled(*given), reference.flash_mla_sparse_fwd(*given, 0.05))
    assert counter.frame_count == 1


@AOT_EAGER
def test_compiled_dense_attention(backend: str) -> None:
    """All forms, with and without an out."""

    def step(api: Any, qkv: Any, kv: Any, packed: Any, lengths: Any, made: dict[str, Any], out: Any) -> Any:
        results = [
            *api.flash_attn_varlen_func(**made, out=out[:, 4:]),
            *api.flash_attn_varlen_func(**{**made, "window_size": (None, 2)}),
            *api.flash_attn_varlen_qkvpacked_func(qkv, lengths, 9, 40, causal=True),
            *api.flash_attn_varlen_qkvpacked_func(packed, lengths, max_seqlen=9),
            *api.flash_attn_varlen_kvpacked_func(
                made["q"], kv, lengths, cu_seqlens_kv=lengths, max_seqlen_q=9, max_seqlen_kv=9, head_dim_qk=40
            ),
        ]
        q, k, v = (x.unsqueeze(0) for x in (made["q"], made["k"], made["v"]))
        return [*results, *api.flash_attn_func(q, k, v, 0.0, 0.5, window_size=(2, 2))]

    make = tensors("cpu")
    lengths, made = int32([0, 2, 9], "cpu"), varlen("cpu", full=True)
    given = (make(9, 2, 104), make(9, 2, 64), make(9, 3, 2, 32), lengths, made)
    outs = [torch.ones(9, 8, 24, dtype=torch.bfloat16) for _ in range(2)]
    got = compiled_by(backend, step)(rawmla, *given, outs[0])
    want = step(reference, *given, outs[1])
    assert_equal(got, want)
    assert_equal(outs[:1], outs[1:])


def test_lengths_of_dense_attention() -> None:
    """Tokens and their largest number per request: one graph for all."""

    def step(made: dict[str, Any]) -> Any:
        return rawmla.flash_attn_varlen_func(**made, causal=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for tokens in ((9, 13), (20, 7), (5, 64)):
        made = varlen("cpu", tokens)
        assert_equal(compiled(made), reference.flash_attn_varlen_func(**made, causal=True))
        counts.append(counter.frame_count)
    assert counts[0] == counts[2]  # the first call may compile twice: torch tries its floats as inputs


@AOT_EAGER
@pytest.mark.parametrize("options", ({}, {"full": True}, {"cached": True}), ids=str)
def test_compiled_prefix_prefill(backend: str, options: dict[str, Any]) -> None:
    """Also into a slice of a larger buffer, and with a scale for the results."""

    def step(api: Any, made: dict[str, Any], large: Any, fp8: Any) -> Any:
        first = api.context_attention_fwd(**made)
        second = api.context_attention_fwd(**{**made, "o": large[:, 4:]})
        third = api.context_attention_fwd(**{**made, "o": fp8, "fp8_out_scale": 0.25})
        return first, second + 1, third

    results = []
    for api in (rawmla, reference):
        made, large = prefix("cpu", **options), torch.zeros(10, 8, 24, dtype=torch.bfloat16)
        fp8 = torch.zeros(10, 4, 32, dtype=torch.uint8)[..., :24]
        run = compiled_by(backend, step) if api is rawmla else step
        results.append((*run(api, made, large, fp8), made["o"], large, fp8))
    assert_equal(*results)
    o, large = results[0][3:5]
    assert torch.equal(large[:9, 4:], o[:9] * (o[:9] != 7)) and not large[:, :4].any()


def test_tokens_of_prefix_prefill() -> None:
    """Tokens and their largest number per request: one graph for all."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rawmla.context_attention_fwd, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for own in ((3, 1, 0, 5), (7, 2, 1, 1), (1, 20, 4, 2)):
        made, want = prefix("cpu", own), prefix("cpu", own)
        compiled(**made)
        assert torch.equal(made["o"], reference.context_attention_fwd(**want))
        counts.append(counter.frame_count)
    assert counts[1] == counts[2]


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    (
        ({"dropout_p": 0.5}, ValueError, "dropout_p: expected 0.0"),
        ({"attention_chunk": 3}, ValueError, "attention_chunk: expected 0"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: expected at least 0"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q: expected an int of at least 0"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a finite float32"),
    ),
)
def test_wrong_number_of_traced_dense_attention(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    with FakeTensorMode() as mode:
        made = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in varlen("cpu").items()
        }
        with pytest.raises(error, match=rf"^{text}"):
            rawmla.flash_attn_varlen_func(**{**made, **changed})


def test_scale_that_changes() -> None:
    def step(scale: float, made: dict[str, Any], rows: Any, splits: Any) -> Any:
        return rawmla.flash_mla_with_kvcache(*made.values(), 512, rows, splits, scale)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    made = dense("cpu", 2)
    for scale in (0.1, 0.2, 0.3):
        want = reference.flash_mla_with_kvcache(**made, softmax_scale=scale)
        assert_equal(compiled(scale, made, *plan("cpu", 2)), want)


class TestPlanObject:
    """Objects that come from outside are filled and checked as in eager calls."""

    @staticmethod
    def step(plan: Any, made: dict[str, Any]) -> Any:
        return rawmla.flash_mla_with_kvcache(*made.values(), 512, plan, causal=True)

    @pytest.mark.parametrize("batch_invariant", (False, True))
    def test_filled(self, batch_invariant: bool) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        step = torch.compile(self.step, fullgraph=True, backend=counter)
        made = dense("cpu")
        want = reference.FlashMLASchedMeta(enable_batch_invariant=batch_invariant)
        reference.flash_mla_with_kvcache(**made, tile_scheduler_metadata=want, causal=True)
        plan, _ = rawmla.get_mla_metadata(enable_batch_invariant=batch_invariant)
        for _ in range(3):
            assert_equal(step(plan, made), reference.flash_mla_with_kvcache(**made, causal=True))
            assert plan.have_initialized
            assert plan.config == want.config
            assert_equal(
                (plan.tile_scheduler_metadata, plan.num_splits),
                (want.tile_scheduler_metadata, want.num_splits),
            )
        assert counter.frame_count == 2  # for an empty object, and for one with arrays

    def test_recomputed(self) -> None:
        """A filled object is recomputed in place, in its own order of fields."""

        def step(plan: Any, lengths: Any) -> Any:
            return rawmla.get_mla_metadata(lengths, 8, 1, 4, out=plan)[0].tile_scheduler_metadata

        made = dense("cpu")
        plan, _ = rawmla.get_mla_metadata()
        torch.compile(self.step, fullgraph=True, backend="aot_eager")(plan, made)
        rows, lengths = plan.tile_scheduler_metadata, int32([900, 5, 300], "cpu")
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(plan, lengths)
        want = reference.plan(lengths, len(rows))
        assert got is rows
        assert np.array_equal(rows, want.object_rows) and np.array_equal(plan.num_splits, want.num_splits)

    def test_of_another_kind_of_call(self) -> None:
        plan, _ = rawmla.get_mla_metadata()
        step = torch.compile(self.step, fullgraph=True, backend="aot_eager")
        step(plan, dense("cpu"))
        with pytest.raises(Exception, match="expected a plan for b = 2|Observed exception"):
            step(plan, dense("cpu", 2))
        with pytest.raises(Exception, match="expected None with a FlashMLASchedMeta|Observed exception"):
            torch.compile(
                lambda made: rawmla.flash_mla_with_kvcache(*made.values(), 512, plan, made["q"]),
                fullgraph=True,
            )(dense("cpu"))


def test_wrong_argument_of_a_compiled_call() -> None:
    made = dense("cpu")
    made["k_cache"] = made["k_cache"].half()
    with pytest.raises(Exception, match="k_cache: expected dtype bfloat16, the dtype of q, got float16"):
        torch.compile(decode_step, fullgraph=True, backend="aot_eager")(**made)


def test_no_graph_breaks() -> None:
    explained = torch._dynamo.explain(decode_step)(**dense("cpu"))
    assert explained.graph_count == 1 and explained.graph_break_count == 0


@pytest.mark.parametrize("strict", (True, False))
def test_export(strict: bool) -> None:
    """With a dynamic batch; saved and loaded again."""

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> Any:
            return decode_step(q, k_cache, block_table, cache_seqlens)

    b = torch.export.Dim("b")
    shapes = {"q": {0: b}, "k_cache": None, "block_table": {0: b}, "cache_seqlens": {0: b}}
    example, other = dense("cpu"), dense("cpu", 5)
    other["k_cache"] = example["k_cache"]
    other["block_table"] = other["block_table"] % 7
    exported = torch.export.export(Layer(), tuple(example.values()), dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in exported.graph.nodes]
    assert "rawmla.decode.default" in names and names.count("rawmla.plan_object.default") == 1
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    program = torch.export.load(stored).module()
    for made in (example, other):
        assert_equal(program(*made.values()), decode_wanted(made))


_FIRST_CALL = """
import sys
import rawmla
{before}
import torch
def step(indices, table):
    return rawmla.convert_indices(indices, table, 16)
indices = torch.tensor([[3, 17]], dtype=torch.int32)
table = torch.tensor([[5, 1]], dtype=torch.int32)
got = torch.compile(step, fullgraph=True, backend="eager")(indices, table)
assert got.tolist() == [[83, 17]], got
"""


@pytest.mark.parametrize(
    "before",
    full_unless(lambda before: not before, ("", "rawmla.convert_indices; assert 'torch' not in sys.modules")),
    ids=("nothing loaded", "loaded before torch"),
)
def test_compiled_call_is_the_first(before: str) -> None:
    """Whatever was imported first, torch.compile finds the operators."""
    text = _FIRST_CALL.format(before=before)
    done = fresh.run(("-c", text), Path(__file__).parents[1], imports="" if before else fresh.IMPORTS)
    assert done.returncode == 0, done.stderr


# ---- modes of torch outside torch.compile


@pytest.mark.parametrize("kind", ("real", "fake", "symbolic"))
def test_make_fx(kind: str) -> None:
    made = dense("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = make_fx(decode_step, tracing_mode=kind)(*made.values())
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("rawmla.decode.default") == 2 and names.count("rawmla.plan_object.default") == 1
    assert_equal(graph(*made.values()), decode_wanted(made))


@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_fake_mode(device: str) -> None:
    made = dense("cpu")
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        fakes = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in made.items()}
        out, lse = decode_step(**fakes)
    assert out.device == lse.device == fakes["q"].device
    assert (out.shape, lse.shape) == ((3, 2, 4, 512), (3, 4, 2))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """A tensor whose class answers operators."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ("FakeTensor", "Wrapper"))
def test_class_of_tensors(kind: str) -> None:
    """Nobody answers for such tensors without a mode or torch.compile: refused by name, without a warning."""
    made = dense("cpu")
    made["q"] = (
        FakeTensorMode().from_tensor(made["q"]) if kind == "FakeTensor" else made["q"].as_subclass(Wrapper)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match=rf"^q: expected a plain torch tensor, got .*{kind}; "):
            decode_step(**made)


def test_arrays_that_torch_does_not_follow() -> None:
    tensor = torch.zeros(3)
    assert not tracing.is_traced(tensor)
    with FlopCounterMode(display=False):
        assert tracing.is_traced(tensor) and tracing.is_traced([tensor])
        assert not tracing.is_traced(np.zeros(3)) and not tracing.is_traced([np.zeros(3)])
        with torch._C._DisableTorchDispatch():
            assert not tracing.is_traced(tensor)


# ---- gradients and vmap


def test_backward() -> None:
    op, args = arguments("decode")
    args[0].requires_grad_()
    text = (
        r"^rawmla::decode has no derivative: q: expected .* torch\.no_grad\(\) or torch\.inference_mode\(\)"
    )
    with pytest.raises(NotImplementedError, match=text):
        op(*args)[0].float().sum().backward()
    op, outs = arguments("merge")
    outs[0][1].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^rawmla::merge has no derivative: outs\[1\]: "):
        op(*outs)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not OPS.decode(*args)[0].requires_grad
    with pytest.raises(Exception, match="rawmla::decode has no derivative"):
        torch.compile(lambda *args: OPS.decode(*args), fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_compiled_without_gradients(context: Callable[[], Any]) -> None:
    made = dense("cpu")
    made["q"].requires_grad_()
    with context():
        got = torch.compile(decode_step, fullgraph=True, backend="aot_eager")(**made)
        assert_equal(got, decode_wanted(made))


def test_functional_gradients() -> None:
    op, (q, *others) = arguments("decode")

    def function(q: Any) -> Any:
        return op(q, *others)[0].float().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it loads forward mode
        for transform in (lambda: torch.func.grad(function)(q), lambda: torch.func.jvp(function, (q,), (q,))):
            with pytest.raises(NotImplementedError, match="^rawmla::decode has no derivative: q: "):
                transform()


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="torch.library.register_vmap: torch 2.5"
)
def test_vmap() -> None:
    op, (q, *others) = arguments("decode")
    with pytest.raises(NotImplementedError, match="^rawmla::decode cannot be mapped by torch.vmap: "):
        torch.vmap(lambda q: op(q, *others)[0])(torch.stack([q, q]))


def test_what_is_written_has_another_version() -> None:
    """So a graph that saved the tensor does not take the new values for the old ones."""
    op, args = arguments("decode_out")
    weight = torch.ones(512, dtype=torch.bfloat16, requires_grad=True)
    product = args[-1] * weight
    op(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        args[-1] = args[-1].clone()
        op(*args)


# ---- gradients of dense attention


def with_gradients(args: list[Any], *places: int) -> list[Any]:
    """The same arguments, of which these require grad."""
    return [x.detach().clone().requires_grad_() if i in places else x for i, x in enumerate(args)]


EVERY_GRADIENT = (("flash_attn", (0, 1, 2)), ("flash_attn_varlen full", (0, 1, 2, 13)))
SOME_GRADIENTS = (
    ("flash_attn transposed", (1,)),
    ("flash_attn padded", (0, 2)),
    ("flash_attn_varlen", (0, 1, 2)),
    ("flash_attn_varlen full", (13,)),
)
WITH_GRADIENTS = (*EVERY_GRADIENT, *SOME_GRADIENTS)


@pytest.mark.parametrize(("case", "places"), WITH_GRADIENTS)
def test_opcheck_with_gradients(case: str, places: tuple[int, ...]) -> None:
    op, args = arguments(case)
    torch.library.opcheck(op, tuple(with_gradients(args, *places)), test_utils=OTHERS)


@pytest.mark.parametrize("which", full_unless(lambda which: which in EVERY_GRADIENT, WITH_GRADIENTS), ids=str)
def test_opcheck_with_gradients_and_dynamic_shapes(which: tuple[str, tuple[int, ...]]) -> None:
    case, places = which
    op, args = arguments(case)
    torch.library.opcheck(op, tuple(with_gradients(args, *places)), test_utils=AHEAD_OF_TIME)


def gradients_of(api: Any, made: dict[str, Any], dout: Any, dlse: Any) -> dict[str, Any]:
    """The gradients of the reference's function, by the names of the leaves."""
    fixed = "cu_seqlens_q" not in made
    kind = "" if fixed else "_varlen"
    out, lse = getattr(api, f"flash_attn{kind}_func")(**made)
    got = getattr(api, f"flash_attn{kind}_backward")(dout, out=out, lse=lse, dlse=dlse, **made)
    return dict(zip(("q", "k", "v", "attn_sink"), got, strict=False))


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@pytest.mark.parametrize("full", (False, True))
def test_gradients_of_operators(full: bool, of: str) -> None:
    """Through out and lse, of some and of all arrays; those of the reference's backward, in every bit."""
    made = varlen("cpu", full=full)
    dout = tensors("cpu", 7)(9, 4, 24) * (of != "lse")
    dlse = torch.linspace(-1, 1, 36).reshape(9, 4)
    want = gradients_of(reference, made, dout, None if of == "out" else dlse)
    op, args = arguments(f"flash_attn_varlen{' full' * full}")
    for places in ((0, 1, 2), (1,), (0, 2, 13)):
        places = tuple(i for i in places if args[i] is not None)
        given = with_gradients(args, *places)
        out, lse = op(*given)
        grads = {"out": (dout,), "lse": (dlse,), "both": (dout, dlse)}[of]
        results = {"out": (out,), "lse": (lse,), "both": (out, lse)}[of]
        torch.autograd.backward(results, grads)
        for i, name in ((0, "q"), (1, "k"), (2, "v"), (13, "attn_sink")):
            if i in places:
                assert torch.equal(given[i].grad, want[name]), name
            elif given[i] is not None:
                assert given[i].grad is None


def test_second_derivative_of_an_operator() -> None:
    op, args = arguments("flash_attn")
    given = with_gradients(args, 0, 1)
    (dq,) = torch.autograd.grad(op(*given)[0].float().square().sum(), given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="^dense attention has no second derivative"):
        dq.float().sum().backward()


def test_saved_tensors_of_an_operator_that_were_changed() -> None:
    op, args = arguments("flash_attn_varlen")
    given = with_gradients(args, 0)
    out, _ = op(*given)
    given[3].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_what_has_no_gradient() -> None:
    op, args = arguments("flash_attn_varlen full")
    text = r"^rawmla::flash_attn_varlen has no derivative: alibi_slopes: .* of flash_attn_func, flash_attn_v"
    with pytest.raises(NotImplementedError, match=text):
        op(*with_gradients(args, 0, 14))
    op, args = arguments("flash_attn_varlen_out")
    with pytest.raises(NotImplementedError, match="^rawmla::flash_attn_varlen_out has no derivative: q: "):
        op(*with_gradients(args, 0))
    op, args = arguments("flash_attn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it loads forward mode
        for transform in (torch.func.grad, lambda f: lambda q: torch.func.jvp(f, (q,), (q,))):
            with pytest.raises(NotImplementedError, match="^rawmla::flash_attn has no derivative: q: "):
                transform(lambda q: op(q, *args[1:])[0].float().sum())(args[0])


@AND_INDUCTOR
@pytest.mark.parametrize(
    "form", full_unless(lambda form: form in ("fixed", "qkv"), ("fixed", "varlen", "qkv", "kv"))
)
def test_compiled_training(backend: str, form: str) -> None:
    """A step that differentiates a loss of out and lse; its gradients are those that eager operators give."""
    make, lengths = tensors("cpu", 8), int32([0, 4, 4, 9], "cpu")
    leaves = {
        "fixed": {"q": make(2, 3, 4, 40), "k": make(2, 5, 2, 40), "v": make(2, 5, 2, 24)},
        "varlen": {"q": make(9, 4, 40), "k": make(9, 2, 40), "v": make(9, 2, 24)},
        "qkv": {"qkv": make(9, 3, 4, 40)},
        "kv": {"q": make(9, 4, 40), "kv": make(9, 2, 64)},
    }[form]
    leaves["attn_sink"] = torch.linspace(-1, 1, 4)

    def step(leaves: dict[str, Any]) -> Any:
        if form == "fixed":
            out, lse = rawmla.flash_attn_func(**leaves, causal=True)
        elif form == "varlen":
            out, lse = rawmla.flash_attn_varlen_func(
                **leaves, cu_seqlens_qo=lengths, cu_seqlens_kv=lengths, max_seqlen_qo=5, max_seqlen_kv=5
            )
        elif form == "qkv":
            out, lse = rawmla.flash_attn_varlen_qkvpacked_func(**leaves, cu_seqlens=lengths, max_seqlen=5)
        else:
            out, lse = rawmla.flash_attn_varlen_kvpacked_func(
                **leaves, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=5, max_seqlen_k=5,
                head_dim_qk=40,
            )  # fmt: skip
        return (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.square().sum()

    results = []
    for run in (compiled_by(backend, step), torch.compile(step, backend="eager")):
        given = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        run(given).backward()
        results.append([x.grad for x in given.values()])
        assert all(x.grad is not None and bool(x.grad.any()) for x in given.values())
    assert_equal(*results)


def test_compiled_training_of_many_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(made: dict[str, Any]) -> Any:
        return rawmla.flash_attn_varlen_func(**made, causal=True)[0].float().square().sum()

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for tokens in ((9, 13), (20, 7), (5, 64)):
        made = varlen("cpu", tokens)
        for name in ("q", "k", "v"):
            made[name].requires_grad_()
        compiled(made).backward()
        counts.append(counter.frame_count)
        detached = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in made.items()}
        out, _ = reference.flash_attn_varlen_func(**detached, causal=True)
        want = gradients_of(reference, {**detached, "causal": True}, 2 * out, None)
        for name in ("q", "k", "v"):
            assert torch.equal(made[name].grad, want[name])
    assert counts[0] == counts[2]


@AOT_EAGER
def test_compiled_plain_backward(backend: str) -> None:
    """Fresh gradients, given ones, one that is given; with a sink and without."""

    def step(api: Any, made: dict[str, Any], fixed: list[Any], dout: Any, dlse: Any, given: Any) -> Any:
        out, lse = api.flash_attn_varlen_func(**made)
        results = [*api.flash_attn_varlen_backward(dout, out=out, lse=lse, dlse=dlse, **made)]
        names = {"learnable_sink": made["attn_sink"], "cu_seqlens_qo": made["cu_seqlens_q"]}
        others = {n: x for n, x in made.items() if n not in ("attn_sink", "cu_seqlens_q")}
        api.flash_attn_varlen_backward(
            dout, out=out, lse=lse, **others, **names, dq=given[0], dk=given[1], dv=given[2][..., 8:]
        )
        q, k, v = fixed
        out, lse = api.flash_attn_func(q, k, v)
        results += api.flash_attn_backward(out, q, k, v, out, lse)
        results += api.flash_attn_backward(out, q, k, v, out, lse, None, given[3])
        return results

    made, fixed = varlen("cpu", full=True), [x for x in arguments("flash_attn")[1][:3]]
    dout, dlse = tensors("cpu", 7)(9, 4, 24), torch.linspace(-1, 1, 36).reshape(9, 4)
    results = []
    for api in (rawmla, reference):
        given = [torch.ones_like(x) for x in (made["q"], made["k"])]
        given += [torch.ones(13, 2, 32, dtype=torch.bfloat16), torch.ones_like(fixed[1])]
        run = compiled_by(backend, step) if api is rawmla else step
        results.append([*run(api, made, fixed, dout, dlse, given), *given])
    assert_equal(*results)
    assert bool((results[0][-2][..., :8] == 1).all())


def test_wrong_argument_of_a_traced_backward() -> None:
    _, (q, k, v, *_) = arguments("flash_attn")
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (q, k, v))
        out, lse = rawmla.flash_attn_func(q, k, v)
        for changes, error, text in (
            ({"deterministic": 1}, TypeError, "deterministic: expected a bool"),
            ({"softmax_scale": torch.ones(())}, TypeError, "softmax_scale: expected a number, got a tensor"),
            ({"window_size": (-2, 0)}, ValueError, "window_size: expected at least 0"),
            ({"dlse": lse.mT}, ValueError, "dlse: expected shape"),
        ):
            with pytest.raises(error, match=rf"^{text}"):
                rawmla.flash_attn_backward(out, q, k, v, out, lse, **changes)
