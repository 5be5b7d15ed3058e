"""The benchmark's cases: counts, inputs and checks, with references for kernels; and how a row is made."""

import sys
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import json  # noqa: E402

import rawmla  # noqa: E402
from bench import dense, families, flash_attention_3, flex, kvcache, measure, mla, prefix, tables, timing  # noqa: E402
from bench.cases import CONTIGUOUS, CUDNN, FLASH_ATTENTION_3, FLASH_ATTENTION_4, OURS, Prepared  # noqa: E402
from bench.families import named  # noqa: E402
from rawmla import reference  # noqa: E402

PEERS = json.loads((ROOT / "docs" / "peers-h200.json").read_text())
STORED = [row for rows in PEERS.values() if isinstance(rows, list) for row in rows]


def test_names() -> None:
    """Every case has one name and one family."""
    names = [name for family in families.FAMILIES for name in families.expanded(family.names)]
    assert len(names) == len(set(names)) == len(families.table()) == 245
    assert [case.id for case in families.select(None)] == names


def test_counts_agree_with_published_rates() -> None:
    """The rates of the stored times; each of these has a case."""
    checked = 0
    for row in STORED:
        case = families.table()[row["case"]][1]
        for rate, count, scale in (("tflops", case.flops, 1e6), ("gbps", case.bytes_moved, 1e3)):
            if rate in row:
                checked += 1
                assert count() / row["us"] / scale == pytest.approx(row[rate], rel=0.01), (row, rate)
    assert checked > 100 and len(STORED) == 107


@pytest.mark.parametrize(
    ("name", "flops", "moved"),
    [
        ("mha-b2-s8-h16-d128-causal-bf16-fixed", 2 * 16 * 2 * 32 * 256, 2 * (16 * 16 + 16 * 16) * 256),
        ("mha-b1-s8-h16kv4-d128-window2-bf16-fixed", 2 * 16 * 49 * 256, 2 * 8 * 20 * 256),
        ("mha-b1-s8-h16-d128-causal-window2-bf16-fixed", 2 * 16 * 21 * 256, 2 * 8 * 32 * 256),
        ("mha-backward-b2-s8-h16-d192v128-causal-bf16-fixed", 2048 * 832, 64 * (32 * 320 + 16)),
        ("prefix-b2-q4-ctx10-h32kv8-d128-fp8page16-window3-fp8out", 2**14 * 24, 2**10 * (96 + 32 + 8)),
        ("kvcache-b2-q3-k100-h8kv2-d64-fp8-page16", 2**11 * 2 * (300 - 3), 2**7 * (2 * 200 + 2 * 48)),
        ("kvcache-b3-q1-k9-h4kv2-d64-bf16-contiguous-first2q4", 2**10 * 69, 2**7 * (2 * 2 * 27 + 2 * 36)),
        ("kvcache-b2-q1-k100-h8kv2-d64-bf16-page1-append", 2**11 * 200, 2**7 * (4 * 200 + 4 * 10)),
        ("flex-b2-s256-h16-d128-causal", 4 * 128 * 16 * 2 * 3 * 128**2, 2 * 256 * 512 * 32),
        ("flex-b2-q1-k256-h16kv2-d128-causal", 4 * 128 * 16 * 2 * 256, 2 * 512 * (16 + 2 * 256)),
        ("flex-b2-s384-h16-d128-window1-lse-max", 4 * 128 * 16 * 2 * 5 * 128**2, None),
        ("flex-b2-s384-h16-d128-documents100", 4 * 128 * 16 * 2 * 5 * 128**2, None),
        ("flex-backward-b2-s256-h16-d128-prefix200", 10 * 128 * 32 * 4 * 128**2, None),
        ("cache-gather-v32-t128-b1", 0, 128 * (2 * 576 + 656) + 8),
        ("convert-r3-k5-compact", 0, 3 * 44),
        ("merge-p2-b3-h4-bfloat16", 0, 3 * 3 * 4 * 1028),
    ],
)
def test_counts(name: str, flops: int, moved: int | None) -> None:
    case = named(name)
    assert case.flops() == flops and moved in (None, case.bytes_moved())


def test_drawn_lengths() -> None:
    """They have the mean of the fixed ones, and are the same at every call."""
    lengths = named("decode-b128-q2-k4096-h128-bf16-varlen").lengths()
    assert lengths[:3] == named("decode-b3-q2-k4096-h1-bf16-varlen").lengths() and min(lengths) >= 2
    assert 0.9 * 4096 < sum(lengths) / 128 < 1.1 * 4096
    for case in list(families.select("^mha-b[0-9]")):
        queries, keys = (sum(each) for each in zip(*case.lengths(), strict=True))
        assert queries == pytest.approx(case.b * case.s, abs=case.b) and keys >= queries
    cached = named("kvcache-b32-q8-k4096-h32kv8-d128-bf16-page16-ragged").keys
    assert sum(cached) == pytest.approx(32 * 4096, abs=64) and 8 <= min(cached) < max(cached) > 6000
    ragged = named("prefix-b8-q1024-ctx8192-h32kv8-d128-bf16page16-ragged").query_lengths()
    assert (min(ragged), max(ragged), sum(ragged) // 8) == (1, 2048, 1024)
    for case in list(families.select("^sparse-model1.*-lengths")):
        extra = case.extra_lengths()
        assert sum(extra) == case.extra_tokens and 0 <= min(extra) <= max(extra) <= case.extra_topk


def plain_flex(q: Any, k: Any, v: Any, score: Any = None, mask: Any = None, **_: Any) -> Any:
    """out, lse and the scores by plain operations in float64, which autograd follows."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    at = torch.meshgrid(*[torch.arange(extent) for extent in scores.shape], indexing="ij")
    scores = scores if score is None else score(scores, *at)
    scores = scores if mask is None else scores.masked_fill(~mask(*at), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1), scores


def flex_forward(*given: Any, return_lse: bool = False, return_aux: Any = None, **_: Any) -> Any:
    out, lse, scores = plain_flex(*given)
    out = out.bfloat16()
    if return_aux is not None:
        return out, types.SimpleNamespace(lse=lse.float(), max_scores=scores.amax(-1).float())
    return (out, lse.float()) if return_lse else out


def flex_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *mods: Any, **_: Any) -> Any:
    """As kernels do it: from `out` and lse as they are given, and with sums in another type."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    captured = []
    for cell in getattr(mods[0], "__closure__", None) or ():
        if torch.is_tensor(cell.cell_contents) and cell.cell_contents.requires_grad:
            cell.cell_contents = cell.cell_contents.detach().double().requires_grad_()
            captured.append(cell.cell_contents)
    with torch.enable_grad():
        weights = (plain_flex(*leaves, *mods)[2] - lse[..., None]).exp()
        values = leaves[2].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        result = weights @ values - weights.sum(-1, keepdim=True) * out
    dq, dk, dv, *others = torch.autograd.grad(result, [*leaves, *captured], dout.double())
    return (*(x.bfloat16() for x in (dq, dk, dv)), dict(enumerate(others)))


def on_host(monkeypatch: pytest.MonkeyPatch, times: float = 1.0) -> list[tuple[str, dict[str, Any]]]:
    """Put references in the place of kernels, whose first result (of a backward the third) is `times` the
    right one; and make inputs on the CPU. Return the calls, by name, with what they have by keyword.
    """
    called: list[tuple[str, dict[str, Any]]] = []
    names = ["flash_mla_with_kvcache", "flash_mla_sparse_fwd", "context_attention_fwd", "gather_kv_cache"]
    names += ["flash_attn_with_kvcache"]
    names += [f"flash_attn_{kind}" for kind in ("func", "backward", "varlen_func", "varlen_backward")]
    functions = {name: getattr(reference, name) for name in names} | {
        "get_mla_metadata": lambda *args, **options: (None, None),
        "flex_attention": flex_forward,
        "flex_attention_backward": flex_backward,
        "create_block_mask": lambda mask, *args, **options: mask,
    }

    def replaced(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            called.append((name, options))
            found = function(*args, **{k: v for k, v in options.items() if k != "enable_batch_invariant"})
            if times == 1.0 or name in ("get_mla_metadata", "gather_kv_cache", "create_block_mask"):
                return found
            if "backward" in name:
                return (*found[:2], times * found[2], *found[3:])
            if isinstance(found, tuple):
                return (times * found[0], *found[1:])
            return (times * found.double()).to(found.dtype)

        return call

    for name, function in functions.items():
        monkeypatch.setattr(rawmla, name, replaced(name, function), raising=False)
    monkeypatch.setattr(mla, "rotated_sets", lambda case: 2)
    for kind in (mla.DecodeCase, mla.SparseCase, mla.PrefillCase, kvcache.KvCacheCase):
        make: Any = kind.make_inputs
        monkeypatch.setattr(kind, "make_inputs", lambda self, sets=1, make=make: make(self, sets, "cpu"))
    for kind in (dense.DenseCase, prefix.PrefixCase, flex.FlexCase):
        make = kind.make_inputs
        monkeypatch.setattr(kind, "make_inputs", lambda self, device="", make=make: make(self, "cpu"))
    return called


MHA = "s20-h4kv2-d24v16"
FLEX = "flex-b2-s128-h4kv2-d16"
CASES = (
    "decode-b3-q2-k150-h16-causal-bf16-varlen",
    "decode-b1-q1-k150-h16-fp16-fixed",
    "sparse-v32-b2-q2-k256-h16-top64",
    "sparse-bf16d576-b2-q2-k256-h16-top64",
    "sparse-model1-b2-q1-k256-h16-top64-extra32page16-lengths",
    "prefill-bf16d576-q20-kv128-h16-top32",
    "prefill-v32-q3-kv128-h16-top32",
    f"mha-b2-{MHA}-causal-sink-bf16-fixed",
    f"mha-b2-{MHA}-softcap1-fp16-fixed",
    f"mha-b3-{MHA}-causal-window3-bf16-varlen",
    f"mha-b2-{MHA}-window3-bf16-fixed",
    f"mha-backward-b2-{MHA}-causal-sink-bf16-fixed",
    f"mha-backward-b2-{MHA}-softcap1-bf16-fixed",
    f"mha-backward-b3-{MHA}-causal-window3-bf16-varlen",
    "kvcache-b2-q2-k75-h4kv2-d32-bf16-page16",
    "kvcache-b3-q1-k75-h4kv2-d32-fp8-page1-ragged",
    "kvcache-b2-q2-k40-h4kv2-d32-bf16-page16-append",
    "kvcache-b3-q1-k40-h4kv2-d32-bf16-contiguous-append",
    "kvcache-b2-q20-k75-h4kv2-d32-bf16-page16-segments",
    "kvcache-b3-q1-k75-h4kv2-d32-bf16-contiguous-first2q20",
    "prefix-b2-q20-ctx37-h4kv2-d32-bf16page16",
    "prefix-b2-q20-ctx37-h4kv2-d32-fp8page16-window9-alibi-ragged",
    "prefix-b2-q20-ctx2000-h4kv2-d32-bf16page16-sink-fp8out",
    f"{FLEX}-causal-lse-max",
    f"{FLEX}-full-alibi",
    f"{FLEX}-window7-softcap",
    f"{FLEX}-documents9-bias",
    f"{FLEX}-prefix40-scale",
    "flex-b2-q1-k128-h4kv2-d16-causal-alibi",
    "flex-b2-q5-k128-h4kv2-d16-window7-bias",
    "flex-backward-b2-s128-h4kv2-d16-causal-alibi",
    "flex-backward-b2-s128-h4kv2-d16-documents9-softcap",
    "flex-backward-b2-s128-h4kv2-d16-causal-bias-captured",
    "flex-backward-b2-s128-h4kv2-d16-causal-scale-captured",
    "flex-backward-b2-s128-h4kv2-d16-window7-scalar-captured",
)


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right result passes, one that is 2 % off (FP8: 10) does not; what is timed is what was checked."""
    monkeypatch.setitem(mla.EXTRA_TOKENS, (2, 16), 50)
    case = named(name)
    bound = 0.04 if "fp8out" in name else 0.004
    with monkeypatch.context() as patched:
        called = on_host(patched)
        ready = case.prepare()
        assert 0 < ready.error < bound
        names, first = [name for name, _ in called if name != "get_mla_metadata"], len(called)
        ready.call(ready.sets - 1)
        assert called[-1][0] == names[-1] and len(called) == first + 1
        if ready.ordered is not None:
            ready.ordered(0)
            assert [options["deterministic"] for _, options in called[-2:]] == [False, True]
    with monkeypatch.context() as patched:
        on_host(patched, 1.1 if bound > 0.01 else 1.02)
        with pytest.raises(AssertionError, match="has a relative error of"):
            case.prepare()


def test_pages_lie_apart() -> None:
    """Each set of pages holds its own tokens, in a random order."""
    inputs = named("decode-b3-q2-k150-h16-bf16-varlen").make_inputs(2, "cpu")
    pages = torch.cat([table[table < len(inputs.k_cache)] for table in inputs.block_tables])
    assert pages.sort().values.tolist() == list(range(len(inputs.k_cache))) != pages.tolist()
    for layout, page in (("v32", 64), ("model1", 256)):
        sparse = named(f"sparse-{layout}-b2-q2-k1024-h16-top64").make_inputs(2, "cpu")
        sets = [{slot // page for slot in indices.flatten().tolist()} for indices, _ in sparse.index_sets]
        assert not sets[0] & sets[1] and len(sparse.k_cache) == 4096 // page
    rows = named("prefill-bf16d576-q20-kv128-h16-top32").make_inputs(1, "cpu").indices[:, 0]
    assert all(len(set(row)) == 32 for row in rows.tolist()) and len(set(map(tuple, rows.tolist()))) == 20
    case = named("prefill-bf16d576-q4096-kv8192-h128-top2048")
    assert mla.rotated_sets(case, 50 << 20) == 1
    small = named("prefill-bf16d576-q1-kv8192-h128-top2048")
    assert (mla.rotated_sets(small, 50 << 20) - 1) * small.bytes_moved() >= 150 << 20


def test_libraries_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 gets the arguments of ours, its gradients are checked; cuDNN refuses other cases."""
    on_host(monkeypatch)
    given: list[dict[str, Any]] = []

    def function(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.append(options)
        out = plain_flex(*(x.transpose(1, 2) for x in (q, k, v)), mask=flex.causal)[0]
        return out.transpose(1, 2).to(q.dtype), None

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func = module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    case = named("mha-backward-b2-s20-h4kv2-d16-causal-bf16-fixed")
    ready = case.prepare()
    assert list(ready.peers) == [CUDNN, FLASH_ATTENTION_4]
    call = ready.peers[FLASH_ATTENTION_4]()
    assert len(call(0)) == 3 and len(given) == 1, "one forward for all backwards"
    assert given[0] == {"causal": True, "window_size": (None, 0), "softcap": 0.0, "learnable_sink": None}
    monkeypatch.setattr(module, "flash_attn_func", lambda *a, **k: (1.02 * function(*a, **k)[0],))
    with pytest.raises(AssertionError, match="has a relative error"):
        ready.peers[FLASH_ATTENTION_4]()
    for changed in ("sink-bf16-fixed", "window3-bf16-fixed", "softcap1-bf16-fixed", "bf16-varlen"):
        other = named(f"mha-b2-s20-h4-d16-causal-{changed}")
        with pytest.raises(ValueError, match="neither varied lengths"):
            other.cudnn(other.make_inputs("cpu"))


OPERATORS_OF_VLLM = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads,"
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k,"
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q,"
    "Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left,"
    "int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor",
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,"
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q,"
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx,"
    "Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,"
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal,"
    "int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved,"
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,"
    "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]",
)
"""As vLLM's wheel has them."""


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("kvcache")])
def test_libraries_beside_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives the result of the case by its own arguments, and a wrong one is refused."""
    on_host(monkeypatch)
    factor = 1.0

    def attend(q: Any, k: Any, v: Any, **given: Any) -> Any:
        names = {"page_table": "block_table", "seqused_k": "cache_seqlens", "is_causal": "causal"}
        given = {names.get(key, key): value for key, value in given.items() if key != "max_seqlen_k"}
        out, lse = reference.flash_attn_with_kvcache(q, k, v, **given)
        return [factor * out, lse]

    def fwd(*given: Any) -> Any:
        names = [one.name for one in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]
        values = dict(zip(names, given, strict=True))
        assert values["scheduler_metadata"].item() == 7 and values["cu_seqlens_q"] is not None
        kept = "q k v cu_seqlens_q seqused_k max_seqlen_q page_table is_causal softmax_scale"
        kept += " q_descale k_descale v_descale"
        return attend(**{key: values[key] for key in kept.split()})

    library = torch.library.Library("_vllm_fa3_C", "DEF")
    for schema, function in zip(OPERATORS_OF_VLLM, (lambda *_: torch.tensor(7), fwd), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    monkeypatch.setattr(flash_attention_3, "library", lambda: Path("there"))
    monkeypatch.setattr(flash_attention_3, "run_alone", lambda name: None)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    try:
        case = named(name)
        peers = case.prepare().peers
        if "fp8" in name:
            del peers[FLASH_ATTENTION_4]  # which knows no factors
        wanted = [] if "append" in name else [FLASH_ATTENTION_3, FLASH_ATTENTION_4][: 1 + ("fp8" not in name)]
        assert list(peers) == wanted + ([CONTIGUOUS] if "segments" in name else [])
        for make in peers.values():
            make()(1)
        factor = 1.2
        for library_name in wanted:
            with pytest.raises(AssertionError, match="has a relative error"):
                peers[library_name]()
    finally:
        library._destroy()


def test_the_library_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in a folder; a call that ends its process is an error with the last line it said."""
    monkeypatch.setenv(flash_attention_3.SITE, str(tmp_path))
    with pytest.raises(ImportError, match="names no folder of it"):
        flash_attention_3.library()
    path = tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    path.parent.mkdir(parents=True)
    path.touch()
    assert flash_attention_3.library() == path
    monkeypatch.setattr(flash_attention_3, "ALONE", "print('no kernel'); raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="a case: no kernel"):
        flash_attention_3.run_alone("a case")


def test_a_block_mask_is_checked() -> None:
    case = named("flex-block-mask-causal-s512")
    blocks = torch.ones(4, 4, dtype=torch.int32).tril()
    full = types.SimpleNamespace(
        to_dense=lambda: blocks[None, None], full_kv_num_blocks=torch.arange(4)[None, None]
    )
    case.check(full)
    full.full_kv_num_blocks = torch.arange(1, 5)[None, None]
    with pytest.raises(AssertionError, match="other full blocks"):
        case.check(full)
    blocks[0, 1] = 1
    with pytest.raises(AssertionError, match="other blocks"):
        case.check(full)


class FakeTimer:
    """Writes down what is timed, and how: the first call of a library gives its name."""

    log: list[str] = []
    current: list[str]

    def __init__(self, calls: Callable[[], None], count: int, how: str = "") -> None:
        FakeTimer.current = []
        calls()
        self.name = f"{self.current[0]} x{count}{how}"

    def rested(self, replays: int) -> dict[str, float]:
        self.log.append(f"rested {self.name}")
        return timing.timing_of([float(len(self.log)), 1.0, 99.0])

    def without_rests(self, replays: int) -> dict[str, float]:
        self.log.append(f"no rests {self.name}")
        return timing.timing_of([20.0])

    def sustained(self, seconds: float) -> dict[str, float]:
        self.log.append(f"{seconds:.1f} s {self.name}")
        return {"us": 30.0, "watts": 700.0}


@pytest.mark.parametrize("kind", ("beside", "backward", "alone", "in turn"))
def test_a_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries take turns, all timed alike; one is not installed, one fails. A row alone is of one round."""

    def call(name: str) -> Callable[[int], None]:
        return lambda number: FakeTimer.current.append(name) or given.add((name, number))

    given: set[tuple[str, int]] = set()
    peers = {"theirs": lambda: call("theirs"), "missing": lambda: import_module("no_such"), "failing": len}
    more: dict[str, Any] = {"sets": 3} if kind == "alone" else {"peers": peers}
    if kind == "backward":
        more["ordered"] = call("ordered")
    if kind == "in turn":
        more |= {"sets": 4, "in_turn": True}
    ready = Prepared(call("ours"), 0.002, **more)
    case = named("mha-b2-s8192-h16-d128-causal-bf16-fixed")
    monkeypatch.setattr(FakeTimer, "log", [])
    monkeypatch.setattr(case, "prepare", lambda: ready)
    monkeypatch.setattr(measure, "Graph", FakeTimer)
    monkeypatch.setattr(measure, "Enqueued", partial(FakeTimer, how=" enqueued"))
    monkeypatch.setattr(measure, "time_graph", lambda calls, count, _: FakeTimer(calls, count).rested(5))
    monkeypatch.setattr(measure, "rest", lambda: FakeTimer.log.append("rest"))
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(sleep=lambda _: FakeTimer.log.append("rest")))
    row = measure.time_attention(case, 1 if kind == "alone" else 3, 5, 0.6)
    calls = {"alone": 9, "beside": 2, "backward": 2, "in turn": 4}[kind]
    ours, theirs = (f"{name} x{calls}{' enqueued' * (kind == 'backward')}" for name in ("ours", "theirs"))
    assert row["rel_l2"] == 0.002 and row["tflops"] == case.flops() / row["us"] / 1e6
    assert (row["us_min"], row["us_max"], row["unrested_us"], row["sustained_us"]) == (1, 99, 20, 30)
    if kind == "alone":
        rested = ["rest", f"rested {ours}", "rested ours x3"]
        assert FakeTimer.log == ["no rests ours x10", *rested, f"0.6 s {ours}", "rest"]
        assert row["cold_us"] and "beside" not in row
        return
    graphs = ["rested ours x2", "rested ordered x2"] if kind == "backward" else []
    turns = [[f"{way} {name}" for name in (ours, theirs)] for way in ("rested", "no rests", "0.2 s")]
    assert FakeTimer.log == [
        *("rest", *3 * turns[0], *graphs, f"no rests {theirs}"),
        *(*3 * turns[1], *3 * turns[2], "rest"),
    ]
    assert "cold_us" not in row and (("ours", 3) in given) == (kind == "in turn")
    assert set(row["beside"]) == {OURS, "theirs"} and row["beside"][OURS]["us"] == row["us"]
    assert row["beside"]["theirs"]["sustained_watts"] == 700 and list(row["not_compared"]) == ["failing"]
    assert ("deterministic_ratio" in row) == (kind == "backward")
    assert {pair.way for pair in tables.pairs(row, {})} == set(tables.WAYS)
