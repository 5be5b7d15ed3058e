"""The benchmark of backward passes: counts, definitions that results are held against, peers, and how all
take turns. Nothing here needs a GPU.
"""

import inspect
import json
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from benchlib import (  # noqa: E402
    against,
    families,
    flex_backward_cases,
    flex_cases,
    mha_backward_cases,
    mha_cases,
    report,
)
from benchlib.flex_backward_cases import FlexBackwardCase  # noqa: E402
from benchlib.mha_backward_cases import MhaBackwardCase  # noqa: E402

torch = pytest.importorskip("torch")


def test_dense_backward_counts() -> None:
    """Rates that were published with times, and bytes counted array by array."""
    by_id = {case.id: case for case in mha_backward_cases.mha_backward_cases()}
    assert len(by_id) == 16
    for name, us, tflops in (
        ("b2-s8192-h16-d128-causal-bf16-fixed", 2530, 543),
        ("b2-s8192-h16-d128-bf16-fixed", 4532, 607),
        ("b1-s16384-h16-d128-causal-bf16-fixed", 4848, 567),
        ("b8-s2048-h16-d128-causal-bf16-fixed", 957.6, 359),
        ("b2-s8192-h16kv2-d128-causal-bf16-fixed", 2667, 515),
        ("b2-s8192-h16-d192v128-causal-bf16-fixed", 3759, 475),
        ("b2-s8192-h16-d192v128-bf16-fixed", 6823, 524),
        ("b2-s8192-h16-d64-causal-bf16-fixed", 1544, 445),
    ):
        assert by_id[f"mha-backward-{name}"].flops() / us / 1e6 == pytest.approx(tflops, abs=0.51)
    grouped = MhaBackwardCase(2, 10, h_q=4, h_kv=2, d_qk=5, d_v=3)
    of_queries, of_keys = 20 * 4 * (5 + 5 + 3 + 3), 20 * 2 * (5 + 5 + 3 + 3)  # q, dq, out, dout; k, dk, v, dv
    assert grouped.bytes_moved() == 2 * (of_queries + of_keys) + 4 * 20 * 4


def test_flex_backward_counts() -> None:
    by_id = {case.id: case for case in flex_backward_cases.flex_backward_cases()}
    assert len(by_id) == 12
    for name, us, tflops in (
        ("h16-d128-causal", 2386, 585),
        ("h16-d128-full", 5937, 463),
        ("h16kv2-d128-causal", 4190, 333),
        ("h16-d128-window1024", 1186, 305),
        ("h16-d128-causal-alibi", 3511, 398),
        ("h16-d128-causal-softcap", 3103, 450),
        ("h16-d64-causal", 2354, 296),
    ):
        assert by_id[f"flex-backward-b2-s8192-{name}"].flops() / us / 1e6 == pytest.approx(tflops, abs=0.7)
    grouped = FlexBackwardCase(3, 512, h_q=4, h_kv=2, d=8)
    assert grouped.bytes_moved() == 3 * 512 * (2 * 8 * 4 * (4 + 2) + 4 * 4)
    # torch's has the same as the forward cases that it is compared in.
    compared = [case for case in by_id.values() if case.is_compared]
    assert [case.id for case in compared] == [
        case.id.replace("flex-", "flex-backward-", 1) for case in flex_cases.flex_cases() if case.is_compared
    ]


def test_stored_rows_match_one_case_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside the forward cases, whose fields they have."""
    backward = [*mha_backward_cases.mha_backward_cases(), *flex_backward_cases.flex_backward_cases()]
    everything = [*mha_cases.mha_cases(), *flex_cases.flex_cases(), *backward]
    monkeypatch.setattr(against, "all_cases", lambda: everything)
    path = tmp_path / "list.json"
    for case in backward:
        path.write_text(json.dumps({"Another@1": [{**case.fields(), "us": 10.0}]}))
        assert against.load(path) == [against.Stored("Another", case.id, {"no rests": 10.0})]


MHA_CASES = (
    MhaBackwardCase(2, 20, h_q=6, h_kv=2, d_qk=24, d_v=16, sink=True),
    MhaBackwardCase(2, 20, causal=False, h_q=2, h_kv=2, d_qk=16, d_v=16, softcap=1.0, dtype="fp16"),
    MhaBackwardCase(3, 20, h_q=4, h_kv=2, d_qk=16, d_v=24, window=3, varlen=True),
    MhaBackwardCase(3, 20, causal=False, h_q=2, h_kv=1, d_qk=16, d_v=24, window=5),
)


def rounded(arrays: Any, like: Any) -> tuple[Any, ...]:
    """Results as a kernel gives them."""
    return tuple(torch.from_numpy(np.asarray(array)).to(like.dtype) for array in arrays)


@pytest.mark.parametrize("case", MHA_CASES, ids=lambda case: case.id)
def test_timed_dense_backward_and_its_check(case: MhaBackwardCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition of the check agrees with the reference for every token, and what is timed gets the
    arguments of the forward.
    """
    from benchlib import mha_backward_measure, mha_measure, turns
    from rawmla import reference

    given = mha_measure.make_inputs(case, "cpu")
    keywords = mha_measure.options(case, given, "attn_sink")
    on_host = {
        name: value.double().numpy() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in keywords.items()
    }
    on_host |= {
        name: value.numpy()
        for name, value in keywords.items()
        if name.startswith("cu_seqlens")
        if case.varlen
    }
    kind = "flash_attn_varlen" if case.varlen else "flash_attn"
    called: list[tuple[Any, ...]] = []

    def forward(*arrays: Any, **options: Any) -> tuple[Any, Any]:
        assert options.keys() == keywords.keys()
        function = getattr(reference, f"{kind}_func")
        out, lse = function(*[array.double().numpy() for array in arrays], **on_host)
        return rounded([out], given.q)[0], torch.from_numpy(lse).float()

    monkeypatch.setattr(mha_backward_measure.rawmla, f"{kind}_func", forward)
    inputs = mha_backward_measure.make_inputs(case, "cpu")
    arrays = (inputs.dout, inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse)
    wanted = getattr(reference, f"{kind}_backward")(*[array.double().numpy() for array in arrays], **on_host)
    exact = [torch.from_numpy(array) for array in wanted[:3]]
    everything = slice(None)
    for request, (queries, keys) in enumerate(case.lengths()):
        dq, dk, dv = (
            mha_measure.of_request(case, array, request, side)
            for array, side in zip(exact, (0, 1, 1), strict=True)
        )
        for got, want in zip(
            mha_backward_measure.gradients_of(case, inputs, request, everything, everything),
            (dq, dk, dv),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
        for begin, end in ((0, queries // 2), (queries // 2, queries)):
            rows = slice(begin, end)
            got, _, _ = mha_backward_measure.gradients_of(case, inputs, request, rows, everything)
            torch.testing.assert_close(got, dq[rows], rtol=1e-6, atol=1e-9)
        column = slice(keys // 2, keys // 2 + 1)
        _, *got = mha_backward_measure.gradients_of(case, inputs, request, everything, column)
        torch.testing.assert_close(got, [dk[column], dv[column]], rtol=1e-6, atol=1e-9)
    right = rounded(wanted, inputs.q)
    assert 0 < mha_backward_measure.check_gradients(case, inputs, right) < 0.003
    for number in range(3):
        wrong = [1.02 * array if i == number else array for i, array in enumerate(right)]
        name = ("dq", "dk", "dv")[number]
        with pytest.raises(AssertionError, match=f"{name} of token .* has an error"):
            mha_backward_measure.check_gradients(case, inputs, wrong)

    def backward(*given: Any, **options: Any) -> Any:
        called.append((given, options))
        return right

    monkeypatch.setattr(mha_backward_measure.rawmla, f"{kind}_backward", backward)
    monkeypatch.setattr(mha_backward_measure, "make_inputs", lambda _: inputs)
    monkeypatch.setattr(turns, "time_graph", lambda calls, count, replays: (calls(), TIMING)[1])
    ready = mha_backward_measure.prepare(case)
    assert (ready.sets, ready.calls) == (1, 10) and 0 < ready.rel_l2 < 0.003
    assert [options["deterministic"] for _, options in called] == [False, True]
    called.clear()
    ready.call(0)
    assert ready.more(5) == {"deterministic_us": TIMING.us, "deterministic_ratio": 1.0}
    assert [options.pop("deterministic") for _, options in called] == [False] * 11 + [True] * 10
    for given_arrays, options in called:
        assert all(x is y for x, y in zip(given_arrays, arrays, strict=True))
        assert options.keys() == keywords.keys()


TIMING = types.SimpleNamespace(us=123.0, us_min=120.0, us_max=126.0)

FLEX_CASES = (
    FlexBackwardCase(2, 40, h_q=4, h_kv=2, d=24, score="alibi"),
    FlexBackwardCase(2, 40, h_q=2, h_kv=2, d=16, score="softcap"),
    FlexBackwardCase(1, 40, h_q=2, h_kv=1, d=16, mask="window", extent=7, score="bias"),
    FlexBackwardCase(2, 40, h_q=2, h_kv=2, d=16, score="bias", captured=True),
    FlexBackwardCase(2, 40, h_q=4, h_kv=2, d=16, score="scale", captured=True),
    FlexBackwardCase(2, 40, h_q=2, h_kv=2, d=16, score="scalar", captured=True, mask="window", extent=7),
    FlexBackwardCase(3, 40, h_q=2, h_kv=2, d=16, mask="documents", extent=9),
    FlexBackwardCase(2, 40, h_q=2, h_kv=2, d=16, mask="full"),
)


def attention(q: Any, k: Any, v: Any, score: Any, mask: Any) -> tuple[Any, Any]:
    """out and lse by plain operations, which autograd follows; torch's own has no backward on the CPU."""
    group = q.shape[1] // k.shape[1]
    k, v = (array.repeat_interleave(group, dim=1) for array in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    at = torch.meshgrid(*[torch.arange(extent) for extent in scores.shape], indexing="ij")
    if score is not None:
        scores = score(scores, *at)
    if mask is not None:
        scores = scores.masked_fill(~mask(*at), -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def gradients_by_autograd(case: FlexBackwardCase, given: Any) -> tuple[Any, Any, Any, Any]:
    """out, lse, a gradient of out, and the gradients of q, k, v and perhaps the table, in float64 but for
    dout.
    """
    from benchlib import flex_measure

    leaves = [array.double().requires_grad_() for array in (given.q, given.k, given.v)]
    out, lse = attention(*leaves, *flex_measure.functions(case, given))
    dout = torch.randn(out.shape).to(given.q.dtype)
    wanted = [*leaves, given.table] if case.captured else leaves
    return out.detach(), lse.detach(), dout, torch.autograd.grad(out, wanted, dout.double())


@pytest.mark.parametrize("case", FLEX_CASES, ids=lambda case: case.id)
def test_timed_flex_backward_and_its_check(case: FlexBackwardCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition of the check agrees with autograd, which asks the functions of the case."""
    import rawmla
    from benchlib import flex_backward_measure, flex_measure, turns

    given = flex_measure.make_inputs(case, "cpu")
    if case.captured:
        kind = given.table.dtype
        given = types.SimpleNamespace(**{**vars(given), "table": given.table.double().requires_grad_()})
    out, lse, dout, exact = gradients_by_autograd(case, given)
    arrays = {**vars(given), "dout": dout, "out": out, "lse": lse}
    inputs = flex_backward_measure.FlexBackwardArrays(**arrays)
    every = torch.arange(case.s)
    group = case.h_q // case.h_kv
    for request in range(case.b):
        for token in range(case.s):
            own = torch.full_like(every, token)
            pairs = flex_backward_measure.gradients_of_pairs(case, inputs, request, own, every)
            dq = torch.einsum("hn,hnd->hd", pairs.by_product, pairs.k)
            torch.testing.assert_close(dq, exact[0][request, :, token], rtol=1e-5, atol=1e-5)
            pairs = flex_backward_measure.gradients_of_pairs(case, inputs, request, every, own)
            dk = torch.einsum("hn,hnd->hd", pairs.by_product, pairs.q).unflatten(0, (-1, group)).sum(1)
            dv = torch.einsum("hn,hnd->hd", pairs.p, pairs.dout).unflatten(0, (-1, group)).sum(1)
            torch.testing.assert_close(dk, exact[1][request, :, token], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(dv, exact[2][request, :, token], rtol=1e-5, atol=1e-5)

    captured = {"a name": exact[3].to(kind)} if case.captured else {}
    right = (*(array.to(given.q.dtype) for array in exact[:3]), captured)
    assert 0 < flex_backward_measure.check_gradients(case, inputs, right) < 0.003
    for number, name in enumerate(("dq", "dk", "dv")):
        wrong = [1.02 * array if i == number else array for i, array in enumerate(right)]
        with pytest.raises(AssertionError, match=f"{name} of token .* has an error"):
            flex_backward_measure.check_gradients(case, inputs, wrong)
    if case.captured:
        wrong = (*right[:3], {"a name": 1.02 * captured["a name"]})
        of = "distance 0" if case.score == "bias" else "factors"
        with pytest.raises(AssertionError, match=f"gradient of {of} has an error"):
            flex_backward_measure.check_gradients(case, inputs, wrong)

    called: list[tuple[Any, ...]] = []

    def forward(*given: Any, **options: Any) -> Any:
        assert options == {"enable_gqa": case.h_kv != case.h_q, "return_lse": True}
        assert not torch.is_grad_enabled()
        called.append(given)
        return out, lse

    def backward(*given: Any, **options: Any) -> Any:
        assert not torch.is_grad_enabled()
        called.append((given, options))
        return right

    make_inputs = flex_measure.make_inputs
    monkeypatch.setattr(rawmla, "flex_attention", forward, raising=False)
    monkeypatch.setattr(rawmla, "flex_attention_backward", backward, raising=False)
    monkeypatch.setattr(rawmla, "create_block_mask", lambda *a, **k: "mask", raising=False)
    monkeypatch.setattr(flex_measure, "make_inputs", lambda case: make_inputs(case, "cpu"))
    monkeypatch.setattr(torch, "randn_like", lambda out: dout)
    monkeypatch.setattr(turns, "time_graph", lambda calls, count, replays: (calls(), TIMING)[1])
    ready = flex_backward_measure.prepare(case)
    assert (ready.sets, ready.calls) == (1, 10) and 0 < ready.rel_l2 < 0.003
    more = {"deterministic_us": TIMING.us, "deterministic_ratio": 1.0}
    assert ready.more(5) == (more | {"captured_ratio": 1.0} if case.captured else more)
    (q, k, v, score, block_mask), *backwards = called
    without = 10 if case.captured else 0
    assert [options["deterministic"] for _, options in backwards] == [
        *[False, True],
        *[False] * 10,
        *[True] * 10,
        *[False] * without,
    ]
    for arguments, _ in backwards[22:]:
        table = inspect.getclosurevars(arguments[6]).nonlocals["table"]
        assert not table.requires_grad and torch.equal(table, ready.inputs.table)
    backwards = backwards[:22]
    assert block_mask == (None if case.mask == "full" else "mask") and (score is None) == (case.score is None)
    assert ready.inputs.table is None or ready.inputs.table.requires_grad == case.captured
    for arguments, options in backwards:
        assert all(
            x is y
            for x, y in zip(
                arguments,
                (dout, q, k, v, ready.inputs.out, ready.inputs.lse, score, block_mask),
                strict=True,
            )
        )
        assert options.keys() == {"enable_gqa", "deterministic"}


def test_peers_of_dense_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the same inputs, again and again, of a forward that ran once on each stream; what gives
    other gradients is not compared.
    """
    from benchlib import backward_peers, mha_backward_measure

    cudnn, flash = backward_peers.MHA
    plain = torch.nn.functional.scaled_dot_product_attention
    ran: list[str] = []
    stream, factor = "first", 1.0

    def attention(q: Any, k: Any, v: Any, is_causal: bool, enable_gqa: bool) -> Any:
        ran.append(stream)
        return factor * plain(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    def flash_attention(q: Any, k: Any, v: Any, causal: bool, **_: Any) -> Any:
        q, k, v = (array.transpose(1, 2) for array in (q, k, v))
        return attention(q, k, v, causal, k.shape[1] != q.shape[1]).transpose(1, 2), "lse"

    module = types.SimpleNamespace(flash_attn_func=flash_attention, flash_attn_varlen_func=None)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    case = MhaBackwardCase(2, 40, h_q=4, h_kv=2, d_qk=24, d_v=24)

    def forward(q: Any, k: Any, v: Any, **_: Any) -> Any:
        q, k, v = (array.transpose(1, 2).float() for array in (q, k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * case.d_qk**-0.5
        hidden = torch.ones(case.s, case.s, dtype=torch.bool).triu(1)
        lse = scores.masked_fill(hidden, -torch.inf).logsumexp(-1)
        out = plain(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).to(torch.bfloat16), lse

    monkeypatch.setattr(mha_backward_measure.rawmla, "flash_attn_func", forward)
    inputs = mha_backward_measure.make_inputs(case, "cpu")
    for peer in (cudnn, flash):
        ran.clear()
        stream = "first"
        (call,) = peer.calls(case, inputs)
        call(0)
        assert ran == ["first"]
        stream = "second"
        for _ in range(2):
            gradients = call(0)
            assert [x.shape for x in gradients] == [x.shape for x in (inputs.q, inputs.k, inputs.v)]
            assert mha_backward_measure.check_gradients(case, inputs, gradients) < 0.01
        assert ran == ["first", "second"]
        assert not any(array.requires_grad for array in (inputs.q, inputs.k, inputs.v))
        factor = 1.02
        with pytest.raises(AssertionError, match="has an error"):
            peer.calls(case, inputs)
        factor = 1.0
    for other in MHA_CASES[:3]:
        with pytest.raises(ValueError, match="neither varied lengths"):
            cudnn.calls(other, inputs)


def test_peers_of_flex_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flex attention is compiled once, with what lets its backward run again, and is held against the
    definition.
    """
    from torch._functorch import config
    from torch.nn.attention import flex_attention as torch_flex

    from benchlib import backward_peers, flex_backward_measure, flex_measure

    triton, flash = backward_peers.FLEX
    assert (triton.name, flash.name) == ("torch's Triton", "torch's FLASH")
    compiled: list[Any] = []
    ran: list[Any] = []

    def flex_attention(q: Any, k: Any, v: Any, score: Any, block_mask: Any, **keywords: Any) -> Any:
        assert config.donated_buffer is False and q.requires_grad
        ran.append(keywords)
        return attention(q, k, v, score, block_mask.mask_mod)[0]

    def compile_now(function: Any, **keywords: Any) -> Any:
        assert function is flex_attention
        compiled.append(keywords)
        return function

    monkeypatch.setattr(torch_flex, "flex_attention", flex_attention)
    monkeypatch.setattr(torch, "compile", compile_now)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "a stream")
    case = FlexBackwardCase(2, 40, h_q=4, h_kv=2, d=24, score="alibi")
    assert case.is_compared
    given = flex_measure.make_inputs(case, "cpu")
    out, lse, dout, exact = gradients_by_autograd(case, given)
    inputs = flex_backward_measure.FlexBackwardArrays(**vars(given), dout=dout, out=out, lse=lse)
    (call,) = triton.calls(case, inputs)
    assert compiled == [{"dynamic": False, "fullgraph": True}]
    assert ran == 2 * [{"enable_gqa": True, "kernel_options": None}]  # for the check of out, for gradients
    for _ in range(2):
        for got, want in zip(call(0), exact, strict=True):
            assert float((got - want).norm() / want.norm()) < 0.02
    assert len(compiled) == 1 and len(ran) == 2
    really = torch.autograd.grad
    for number, name in enumerate(("dq", "dk", "dv")):
        with monkeypatch.context() as patched:
            patched.setattr(
                torch.autograd,
                "grad",
                lambda *a, at=number, **k: [x * (2 if i == at else 1) for i, x in enumerate(really(*a, **k))],
            )
            with pytest.raises(AssertionError, match=f"{name} of token .* has an error"):
                triton.calls(case, inputs)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError):
        flash.calls(case, inputs)


class FakeTimer:
    """What times calls, noting what is done with it and by whom."""

    log: list[tuple[str, ...]] = []
    called: list[str] = []
    kinds: set[str] = set()
    kind = "graphs"

    def __init__(self, calls: Callable[[], None], count: int) -> None:
        self.called.clear()
        calls()
        assert len(self.called) == count
        self.name = self.called[0]
        self.kinds.add(self.kind)

    def us(self, way: str) -> float:
        self.log.append((self.name, way))
        return {"ours": 100.0, "theirs": 150.0}.get(self.name, 200.0)

    def rested(self, replays: int) -> Any:
        from benchlib.timing import Timing

        us = self.us("rested") + len(self.log)
        return Timing(us, us - 1, us + 1)

    def without_rests(self, replays: int) -> Any:
        from benchlib.timing import Timing

        return Timing.of([self.us("no rests") + 5])

    def sustained(self, seconds: float, rest_after: float) -> dict[str, float]:
        assert rest_after == 0
        return {"us": self.us(f"{seconds:.2f} s") + 20, "watts": 690.0, "mhz": 1600.0}


class FakeCalls(FakeTimer):
    kind = "calls"


def make_ready(name: str, calls: int = 4) -> Any:
    from benchlib import measure

    def call(_: int) -> None:
        FakeTimer.called.append(name)

    def more(replays: int) -> dict[str, float]:
        FakeTimer.log.append(("ours", "deterministic"))
        return {"deterministic_us": 140.0, "deterministic_ratio": 1.4}

    return measure.Prepared(None, call, 1, 0.001, more, calls)


def in_turns(monkeypatch: pytest.MonkeyPatch, names: list[str], seconds: float = 0.5) -> dict[str, Any]:
    from benchlib import peers, turns

    def peer(name: str) -> Any:
        def calls(case: Any, inputs: Any) -> list[Any]:
            if name == "missing":
                raise ImportError("no module named missing")
            if name == "broken":
                raise ValueError("no such shape\nand many more lines")
            return [make_ready(name).call]

        return peers.Peer(name, "a module", calls)

    monkeypatch.setattr(turns, "Graph", FakeTimer)
    monkeypatch.setattr(turns, "Enqueued", FakeCalls)
    monkeypatch.setattr(turns, "rest", lambda: FakeTimer.log.append(("rest",)))
    naps: list[float] = []
    monkeypatch.setattr(turns, "time", types.SimpleNamespace(sleep=naps.append))
    FakeTimer.log.clear()
    FakeTimer.kinds.clear()
    settings = families.Settings(5, seconds, False)
    case = MhaBackwardCase(2, 8192)
    row = turns.time_in_turns(case, lambda _: make_ready("ours"), settings, [peer(name) for name in names])
    assert naps == ([turns.REST_AFTER_LOAD_SECONDS] if seconds else [])
    assert row["case"] == case.id and row["op"] == "mha_backward"
    return row


def test_a_backward_and_its_peers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    row = in_turns(monkeypatch, ["missing", "theirs", "broken"])
    assert row["not_compared"] == {
        "missing": "a module: not importable here",
        "broken": "ValueError: no such shape",
    }
    each = [("ours", "rested"), ("theirs", "rested")]
    unrested = [("ours", "no rests"), ("theirs", "no rests")]
    load = [("ours", "0.17 s"), ("theirs", "0.17 s")]
    uncounted = [("theirs", "no rests")]
    assert FakeTimer.log == [
        *[("rest",), *3 * each, ("ours", "deterministic")],
        *[*uncounted, *3 * unrested, *3 * load],
    ]
    # Ours was timed second, fourth and sixth of what is noted: 102, 104, 106.
    assert (row["us"], row["us_min"], row["us_max"]) == (104.0, 101.0, 107.0)
    assert (row["unrested_us"], row["sustained_us"]) == (105.0, 120.0)
    assert (row["sustained_watts"], row["sustained_mhz"]) == (690.0, 1600.0)
    assert (row["deterministic_us"], row["rel_l2"]) == (140.0, 0.001)
    assert row["tflops"] == pytest.approx(MhaBackwardCase(2, 8192).flops() / 104e6)
    assert set(row["beside"]) == {"rawmla", "theirs"}
    ratios = {(pair.label, pair.way): pair.ratio for pair in against.pairs(row, [])}
    assert ratios["theirs beside", "rested"] == pytest.approx(155 / 104)
    assert ratios["theirs beside", "no rests"] == pytest.approx(155 / 105)

    row = in_turns(monkeypatch, [], seconds=0)
    assert "beside" not in row and "sustained_us" not in row and row["us"] == 103.0
    assert len(FakeTimer.log) == 1 + 3 + 1 + 1 + 3


def test_beside_a_peer_all_are_timed_as_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer is captured in a graph: where that fails, torch keeps memory that was freed."""
    for names, kind in ((["theirs"], "calls"), (["missing"], "graphs")):
        row = in_turns(monkeypatch, names)
        assert FakeTimer.kinds == {kind}
        headings, cells = report.family_cells(families.family_of(row["case"]), [row], [])
        shown = dict(zip(headings, cells, strict=True))
        assert (shown["timed as"], shown["deterministic rested µs"]) == (kind, "140.0")
        assert shown["deterministic / plain"] == "1.400"


def test_enqueued_calls_are_timed_as_a_graph_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the host's time before the first kernel."""
    from test_scripts import on_fake_gpu

    from benchlib import turns

    gpu = on_fake_gpu(monkeypatch, 5e-3)
    monkeypatch.setattr(turns, "torch", gpu.torch)
    monkeypatch.setattr(turns, "time", gpu.time)
    launches = gpu.torch.cuda.CUDAGraph()

    def calls() -> None:
        gpu.now += 1e-3  # of the host, before anything is enqueued
        launches.replay()

    timer = turns.Enqueued(calls, 10)
    assert not gpu.runs
    assert timer.without_rests(5).us == pytest.approx(500, rel=0.01) and not gpu.naps
    assert timer.rested(5).us == pytest.approx(500, rel=0.01)
    gpu.naps.clear()
    assert timer.sustained(0.2, rest_after=0)["us"] == pytest.approx(500, rel=0.01)
    assert gpu.naps == [(pytest.approx(gpu.now), 0)]


def test_calls_of_a_graph() -> None:
    from benchlib import turns

    every = [*mha_backward_cases.mha_backward_cases(), *flex_backward_cases.flex_backward_cases()]
    for case in every:
        calls = turns.calls_per_graph(case)
        assert 1 <= calls <= 10 and (calls == 1 or calls * case.flops() <= turns.GRAPH_FLOPS)
        assert calls == 10 or (calls + 1) * case.flops() > turns.GRAPH_FLOPS


def test_what_runs_beside_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchlib import backward_peers, flex_backward_measure, mha_backward_measure, turns

    seen: list[Any] = []
    monkeypatch.setattr(turns, "time_in_turns", lambda *arguments: seen.append(arguments))
    settings = families.Settings(5, 2.0, False)
    case = mha_backward_cases.mha_backward_cases()[0]
    families.family_of(case.id).measure(case, settings)
    assert seen.pop() == (case, mha_backward_measure.prepare, settings, backward_peers.MHA)
    for case in flex_backward_cases.flex_backward_cases():
        families._time_flex_backward(case, settings)
        beside = backward_peers.FLEX if case.is_compared else ()
        assert seen.pop() == (case, flex_backward_measure.prepare, settings, beside)


@pytest.mark.parametrize(
    ("d", "d_v", "causal", "share"),
    (
        (128, 128, True, 0.87),
        (96, 96, True, 0.75),
        (256, 256, True, 1.11),
        (192, 128, False, 0.57),
        (192, 128, True, 0.87),
    ),
)
def test_the_stand_in_of_a_backward(d: int, d_v: int, causal: bool, share: float) -> None:
    case = next(
        case
        for case in mha_backward_cases.mha_backward_cases()
        if (case.d_qk, case.d_v, case.causal) == (d, d_v, causal)
    )
    ours, theirs = {"us": 800.0, "sustained_us": 900.0}, {"us": 1000.0, "sustained_us": 900.0}
    row = {"case": case.id, **case.fields(), "us": 800.0, "beside": {"rawmla": ours, "cuDNN": theirs}}
    headings, cells = report.family_cells(families.family_of(case.id), [row], [])
    shown = dict(zip(headings, cells, strict=True))
    assert shown["timed as"] == "calls"
    stand_in = "stand-in for FlashAttention-4 / ours"
    assert float(shown[f"{stand_in}, rested"]) == pytest.approx(share * 1.25, abs=0.001)
    assert float(shown[f"{stand_in}, sustained"]) == share
