"""Patched operators of engines: stubs of the same schemas, whose CPU kernels are replaced here."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rawmla.compat import ops
from rawmla.compat.flash_mla import cuda
from rawmla.mla.plan import FlashMLASchedMeta

torch = pytest.importorskip("torch")
from torch.library import Library  # noqa: E402

OTHER = "permute_q_b_proj(Tensor q_b_proj, Tensor scale_factors, int h_q, int d_q) -> Tensor[]"
FALLBACK = "CompositeExplicitAutograd"
"""For CPU kernels of C++, which Python may replace: one of Python it may not, before torch 2.13."""


def theirs(*args: Any) -> Any:
    raise AssertionError("the engine's kernel")


@pytest.fixture
def engines() -> Iterator[dict[str, Any]]:
    """The namespaces of all engines, as their libraries define them; their CPU kernels fail."""
    made = {}
    for namespace, operators in ops.NAMESPACES.items():
        library = made[namespace] = Library(namespace, "DEF")
        for name, operator in operators.items():
            library.define(operator.schema)
            library.impl(name, theirs, FALLBACK)
        library.define(OTHER)
        library.impl("permute_q_b_proj", lambda *args: [args[0].clone()], "CPU")
    yield made
    for library in made.values():
        library._destroy()


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments by name of the calls of the stub core, which fills plans and writes `out` as the real one."""
    noted: list[dict[str, Any]] = []

    def replace(module: Any, name: str, answer: Callable[[SimpleNamespace], Any]) -> None:
        form = inspect.signature(getattr(module, name))

        def called(*args: Any, **kwargs: Any) -> Any:
            bound = form.bind(*args, **kwargs)
            bound.apply_defaults()
            noted.append(bound.arguments)
            return answer(SimpleNamespace(**bound.arguments))

        monkeypatch.setattr(module, name, called)

    def fill(plan: Any) -> None:
        plan.tile_scheduler_metadata = torch.full((3, 8), 7, dtype=torch.int32)
        plan.num_splits = torch.zeros(4, dtype=torch.int32)

    def decode(given: SimpleNamespace) -> Any:
        plan, q = given.tile_scheduler_metadata, given.q
        assert isinstance(plan, FlashMLASchedMeta) and given.num_splits is None
        if plan.tile_scheduler_metadata is None:
            fill(plan)
        out = torch.empty(*q.shape[:-1], 512) if given.out is None else given.out
        return out.fill_(len(noted)), torch.ones(q.shape[0], q.shape[2], q.shape[1])

    def prefill(given: SimpleNamespace) -> Any:
        out = torch.zeros(4, 16, 512) if given.out is None else given.out.fill_(1)
        return out, torch.ones(4, 16), torch.full((4, 16), 2.0)

    replace(cuda.decode, "flash_mla_with_kvcache", decode)
    replace(cuda.sparse_prefill, "flash_mla_sparse_fwd", prefill)
    replace(cuda.plan, "get_mla_metadata", lambda given: (fill(given.out), None))
    return noted


Q = torch.zeros(3, 2, 16, 576)
CACHE = torch.zeros(5, 64, 1, 656)
INDICES = torch.zeros(3, 2, 64, dtype=torch.int32)
LENGTHS = torch.full((3,), 9, dtype=torch.int32)
TABLE = torch.zeros(3, 4, dtype=torch.int32)
TILES = torch.zeros(6, 8, dtype=torch.int32)
SPLITS = torch.zeros(4, dtype=torch.int32)
SINK = torch.zeros(16)
SPARSE = (Q, CACHE, INDICES, LENGTHS, SINK, None, None, CACHE, INDICES, LENGTHS, 512, 0.25)
DENSE = (Q, CACHE, 512, LENGTHS, TABLE, 0.25, True)


def same(a: Any, b: Any) -> bool:
    """Whether two tensors are one: through an operator, Python objects may be new."""
    return (a is None) == (b is None) and (a is None or a.data_ptr() == b.data_ptr() and a.shape == b.shape)


@pytest.mark.parametrize("namespace", ops.NAMESPACES)
class TestEveryNamespace:
    def test_sparse_decode(self, engines: Any, core: list[dict[str, Any]], namespace: str) -> None:
        """Replaced, and restored afterwards; operators of other purposes are left alone."""
        operators = getattr(torch.ops, namespace)
        with ops.patch_key(namespace, "CPU") as patch:
            assert set(patch.operators) == set(ops.NAMESPACES[namespace])
            _, lse, tiles, splits = operators.sparse_decode_fwd(*SPARSE)
            assert int(tiles[0, 0]) == 7 and splits.shape == (4,) and lse.shape == (3, 16, 2)
            given = (*SPARSE[:5], TILES, SPLITS, *SPARSE[7:])
            _, _, tiles, splits = operators.sparse_decode_fwd(*given)
            assert same(tiles, TILES) and same(splits, SPLITS)
            (other,) = operators.permute_q_b_proj(SINK, SINK, 1, 1)
            assert torch.equal(other, SINK)
        gc.collect()
        with pytest.raises(AssertionError, match="the engine's kernel"):
            operators.sparse_decode_fwd(*SPARSE)
        patch.close()
        assert len(core) == 2
        tensors = {"q": Q, "k_cache": CACHE, "indices": INDICES, "attn_sink": SINK, "topk_length": LENGTHS}
        tensors |= {"extra_k_cache": CACHE, "extra_indices_in_kvcache": INDICES}
        tensors |= {"extra_topk_length": LENGTHS, **dict.fromkeys(("block_table", "cache_seqlens", "out"))}
        for call in core:
            assert call["is_fp8_kvcache"] is True and call["causal"] is False
            assert call["softmax_scale"] == 0.25 and call["head_dim_v"] == 512
            for name, tensor in tensors.items():
                assert same(call[name], tensor), name

    def test_another_schema(self, core: Any, namespace: str) -> None:
        """An engine of a version that is not known stays as it is, as a whole."""
        library = Library(namespace, "DEF")
        try:
            for name, operator in ops.NAMESPACES[namespace].items():
                library.define(operator.schema.replace("float sm_scale", "float sm_scale, bool new"))
                library.impl(name, theirs, FALLBACK)
            text = rf"^torch.ops.{namespace}.sparse_\w+_fwd: expected the schema '.*nothing was patched"
            with pytest.raises(RuntimeError, match=text):
                ops.patch_key(namespace, "CPU")
            if "get_mla_decoding_metadata" in ops.NAMESPACES[namespace]:
                with pytest.raises(AssertionError, match="the engine's kernel"):
                    getattr(torch.ops, namespace).get_mla_decoding_metadata(LENGTHS, 16, 1, 8, False, None)
        finally:
            library._destroy()

    def test_not_loaded(self, namespace: str) -> None:
        with pytest.raises(RuntimeError, match=r"got none of them; load its library first \(import"):
            ops.patch(namespace)


def test_vllm_out_and_batch_invariance(engines: Any, core: list[dict[str, Any]]) -> None:
    out = torch.zeros(3, 2, 16, 512)
    with ops.patch_key("_flashmla_C", "CPU"):
        got, *_ = torch.ops._flashmla_C.sparse_decode_fwd(*SPARSE, out, True)
        assert same(got, out) and float(out[0, 0, 0, 0]) == 1
        got, *_ = torch.ops._flashmla_C.sparse_decode_fwd(*SPARSE, None, True)
        assert not same(got, out)
        got, _, tiles, splits = torch.ops._flashmla_C.dense_decode_fwd(*DENSE, TILES, SPLITS, out)
        assert same(got, out) and same(tiles, TILES) and same(splits, SPLITS)
        got, _, tiles, _ = torch.ops._flashmla_C.dense_decode_fwd(*DENSE, None, None, None)
        assert tiles.shape == (3, 8)
        prefill_out = torch.zeros(4, 16, 512)
        got, max_logits, lse = torch.ops._flashmla_C.sparse_prefill_fwd(
            Q[0], CACHE[0], INDICES, 0.5, 512, SINK, None, prefill_out
        )
        assert same(got, prefill_out) and float(max_logits[0, 0]) == 1 and float(lse[0, 0]) == 2
    assert [call["enable_batch_invariant"] for call in core[:2]] == [True, True]
    assert core[2]["causal"] is True and same(core[2]["cache_seqlens"], LENGTHS)
    assert same(core[2]["block_table"], TABLE)
    assert core[4]["log_base"] == "e" and (core[4]["sm_scale"], core[4]["d_v"]) == (0.5, 512)


def test_sgl(engines: Any, core: list[dict[str, Any]]) -> None:
    current, legacy = torch.ops.flash_mla, torch.ops.flash_mla_legacy
    with ops.patch_key("flash_mla", "CPU"), ops.patch_key("flash_mla_legacy", "CPU"):
        current.sparse_decode_fwd(*SPARSE, True)
        legacy.sparse_decode_fwd(*SPARSE, "V32")
        with pytest.raises(ValueError, match="^kv_format: expected "):
            legacy.sparse_decode_fwd(*SPARSE, "V4")
        assert [call["enable_batch_invariant"] for call in core] == [True, False]
        _, _, tiles, _ = legacy.dense_decode_fwd(*DENSE, TILES, SPLITS)
        assert same(tiles, TILES)
        rows, splits = legacy.get_mla_decoding_metadata(LENGTHS, 32, 1, 16, True, 64)
        assert rows.shape == (3, 8) and [*core[-1].values()][1:6] == [32, 1, 16, True, 64]
        prefill = (Q[0], CACHE[0], INDICES, 0.5, 512)
        assert len(current.sparse_prefill_fwd(*prefill, None, None)) == 3
        assert core[-1]["log_base"] == "e"
        assert len(legacy.sparse_prefill_fwd(*prefill)) == 3
        legacy.sparse_prefill_fwd(*prefill, None, None, True)
        assert core[-1]["log_base"] == "2"
        out, max_logits, lse = legacy.sparse_prefill_fwd(*prefill, None, None, False, False)
        assert max_logits is None and lse is None and out.shape == (4, 16, 512)
