"""Gradients of dense attention through autograd: the public functions on CPU tensors, their kernels by the
reference. Wanted are the gradients of the same attention in plain torch and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mha_on_cpu
import numpy as np
import pytest

import rawmla

torch = pytest.importorskip("torch")

H, H_KV, D, D_V = 4, 2, 16, 8
Q_LENGTHS, K_LENGTHS = (5, 0, 9), (7, 3, 4)
FORMS = ("fixed", "varlen", "qkv", "qkv4", "kv", "kv4")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return mha_on_cpu.install(monkeypatch)


def starts(lengths: tuple[int, ...]) -> Any:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


class Case:
    """A call by keywords, its tensors with a gradient as float64 leaves, and plain attention of these."""

    def __init__(self, form: str, dtype: Any = torch.float16, seed: int = 0, **options: Any) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.form, self.options, self.dtype = form, options, dtype

        def randn(*shape: int) -> Any:
            return torch.randn(shape, generator=draw).to(dtype)

        d_v = D if form.endswith("4") else D_V
        self.q_lengths = (6, 6) if form == "fixed" else Q_LENGTHS
        self.k_lengths = (8, 8) if form == "fixed" else Q_LENGTHS if form.startswith("qkv") else K_LENGTHS
        n_q, n_k = sum(self.q_lengths), sum(self.k_lengths)
        if form == "fixed":
            shapes = {"q": (2, 6, H, D), "k": (2, 8, H_KV, D), "v": (2, 8, H_KV, d_v)}
        elif form == "varlen":
            shapes = {"q": (n_q, H, D), "k": (n_k, H_KV, D), "v": (n_k, H_KV, d_v)}
        elif form.startswith("qkv"):
            shapes = {"qkv": (n_q, 3, H, D) if form == "qkv4" else (n_q, H, 2 * D + d_v)}
        else:
            kv = (n_k, 2, H_KV, D) if form == "kv4" else (n_k, H_KV, D + d_v)
            shapes = {"q": (n_q, H, D), "kv": kv}
        self.leaves = {name: randn(*shape) for name, shape in shapes.items()}
        self.d_v = d_v
        if options.pop("sink", False):
            self.leaves["attn_sink"] = torch.linspace(-1, 1, H).to(torch.float32)

    @property
    def function(self) -> Callable[..., Any]:
        names = {"fixed": "func", "varlen": "varlen_func"}
        kind = self.form.rstrip("4")
        name = names.get(self.form, f"varlen_{kind}packed_func")
        return getattr(rawmla, f"flash_attn_{name}")

    def keywords(self) -> dict[str, Any]:
        """All but the leaves."""
        made = dict(self.options)
        if self.form in ("qkv", "kv"):
            made["head_dim_qk"] = D
        if self.form.startswith("qkv"):
            made |= {"cu_seqlens": starts(self.q_lengths), "max_seqlen": max(self.q_lengths)}
        elif self.form != "fixed":
            made |= {
                "cu_seqlens_q": starts(self.q_lengths),
                "cu_seqlens_k": starts(self.k_lengths),
                "max_seqlen_q": max(self.q_lengths),
                "max_seqlen_k": max(self.k_lengths),
            }
        return made

    def call(self, leaves: dict[str, Any], **more: Any) -> Any:
        return self.function(**leaves, **{**self.keywords(), **more})

    def plain(self, leaves: dict[str, Any]) -> tuple[Any, Any]:
        """out and lse of float64 leaves; 0 and -inf where nothing is attended."""
        given = dict(leaves)
        if "qkv" in given:
            qkv = given["qkv"]
            q, k, v = qkv.unbind(1) if qkv.ndim == 4 else qkv.split([D, D, self.d_v], dim=-1)
        else:
            q = given["q"]
            kv = given.get("kv")
            k, v = (
                (given["k"], given["v"])
                if kv is None
                else kv.unbind(1)
                if kv.ndim == 4
                else kv.split([D, self.d_v], -1)
            )
        if self.form == "fixed":
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        outs, lses = [], []
        q_parts, k_parts = q.split(list(self.q_lengths)), k.split(list(self.k_lengths))
        for one_q, one_k, one_v in zip(q_parts, k_parts, v.split(list(self.k_lengths)), strict=True):
            group = H // one_k.shape[1]
            keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (one_k, one_v))
            scores = D**-0.5 * one_q.transpose(0, 1) @ keys.mT
            if self.options.get("softcap"):
                scores = self.options["softcap"] * torch.tanh(scores / self.options["softcap"])
            s_q, s_k = scores.shape[1:]
            t = torch.arange(s_q)[:, None] + s_k - s_q
            hidden = torch.zeros(s_q, s_k, dtype=torch.bool)
            if self.options.get("causal"):
                hidden = torch.arange(s_k) > t
            seen = ~hidden.all(1)
            scores = scores.masked_fill(hidden, -torch.inf)[:, seen]
            lse = torch.logsumexp(scores, -1)
            total = lse
            if "attn_sink" in given:
                total = torch.logaddexp(lse, given["attn_sink"][:, None])
            part = torch.exp(scores - total[..., None]) @ values
            out = torch.zeros(H, s_q, self.d_v, dtype=part.dtype).index_put(
                (torch.arange(H)[:, None], torch.nonzero(seen)[:, 0][None]), part
            )
            whole = torch.full((H, s_q), -torch.inf, dtype=lse.dtype).index_put(
                (torch.arange(H)[:, None], torch.nonzero(seen)[:, 0][None]), lse
            )
            outs.append(out.transpose(0, 1))
            lses.append(whole.T)
        out, lse = torch.cat(outs), torch.cat(lses)
        if self.form == "fixed":
            return out.unflatten(0, (2, 6)), lse.unflatten(0, (2, 6)).mT
        return out, lse


def loss_of(out: Any, lse: Any, of: str) -> Any:
    """A sum with weights that depend on place alone; rows without a key are left out of lse."""
    total = 0.0
    if of != "lse":
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        total = total + (out.float() * weights if out.dtype != torch.float64 else out * weights).sum()
    if of != "out":
        weights = torch.linspace(1, -0.5, lse.numel()).reshape(lse.shape)
        total = total + torch.where(lse.isfinite(), lse * weights, 0).sum()
    return total


def check(case: Case, of: str = "both", needs: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Compare the gradients of a call with those of plain attention; returns the call's leaves."""
    names = tuple(case.leaves) if needs is None else needs
    ours = {n: x.clone().requires_grad_(n in names) for n, x in case.leaves.items()}
    exact = {n: x.double().requires_grad_(n in names) for n, x in case.leaves.items()}
    out, lse = case.call(ours)
    want_out, want_lse = case.plain(exact)
    assert out.requires_grad and lse.requires_grad and out.dtype == case.dtype
    torch.testing.assert_close(out.double(), want_out, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    loss_of(out, lse, of).backward()
    loss_of(want_out, want_lse, of).backward()
    for name, x in ours.items():
        assert (x.grad is None) == (name not in names)
        if x.grad is not None:
            assert x.grad.dtype == x.dtype
            want = exact[name].grad
            want = torch.zeros_like(exact[name]) if want is None else want
            torch.testing.assert_close(x.grad.double(), want, atol=6e-3, rtol=6e-3)
    return ours


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", ({}, {"causal": True, "sink": True}), ids=("plain", "sink"))
def test_gradients(launched: list[Any], form: str, of: str, options: dict[str, Any]) -> None:
    ours = check(Case(form, **options), of)
    assert len(launched) == 2
    if of == "lse":
        for name in ("v", "qkv", "kv"):
            if name in ours:
                grad = ours[name].grad
                part = grad if name == "v" else grad[:, -1] if form.endswith("4") else grad[..., -D_V:]
                assert not part.any(), "dv is not exactly 0"
    assert launched[1].has_dlse == (of != "out")


@pytest.mark.parametrize(
    "options", ({"softcap": 2.0}, {"softmax_scale": D**-0.5, "is_varlen": False}), ids=str
)
def test_options_reach_the_backward(launched: list[Any], options: dict[str, Any]) -> None:
    check(Case("varlen", **options))
    forward, backward = launched
    for name in ("softmax_scale", "softcap", "window_left", "window_right", "b", "max_seqlen_q"):
        assert getattr(forward, name) == getattr(backward, name)


@pytest.mark.parametrize("form", ("fixed", "varlen"))
@pytest.mark.parametrize("needs", (("q",), ("k",), ("v",), ("attn_sink",), ("q", "v"), ("k", "attn_sink")))
def test_gradients_of_some(launched: list[Any], form: str, needs: tuple[str, ...]) -> None:
    """Others are not computed: their addresses are 0."""
    check(Case(form, sink=True), needs=needs)
    assert launched[1].needs == tuple(name in needs for name in ("q", "k", "v", "attn_sink"))


@pytest.mark.parametrize("needs", (("qkv",), ("attn_sink",)))
def test_gradients_of_a_packed_array_or_of_the_sink(launched: list[Any], needs: tuple[str, ...]) -> None:
    """All parts of what is packed are needed, or none."""
    check(Case("qkv", sink=True), needs=needs)
    assert launched[1].needs == (*["qkv" in needs] * 3, "attn_sink" in needs)


@pytest.mark.parametrize("form", ("kv", "kv4"))
@pytest.mark.parametrize("needs", (("q",), ("kv",)))
def test_gradients_beside_a_packed_array(launched: list[Any], needs: tuple[str, ...], form: str) -> None:
    check(Case(form), needs=needs)
    assert launched[1].needs == ("q" in needs, "kv" in needs, "kv" in needs, False)


@pytest.mark.parametrize("form", ("qkv", "qkv4", "kv", "kv4"))
def test_packed_gradients_are_written_in_place(launched: list[Any], form: str) -> None:
    """The kernel gets places in one array for them."""
    ours = check(Case(form))
    name = form.rstrip("4")
    call, stride = launched[1], ours[name].stride(0)
    assert call.dk_strides[1] == call.dv_strides[1] == stride == ours[name].grad.stride(0)
    heads = H if name == "qkv" else H_KV
    part = 2 * (heads * D if form.endswith("4") else D)  # bytes
    assert call.addresses.dv - call.addresses.dk == part
    assert (call.addresses.dk - call.addresses.dq == part) == (name == "qkv")


def test_packed_gradients_off_16_bytes(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    """Where the kernel cannot write into one array, its results are copied there."""
    monkeypatch.setattr(f"{__name__}.D", 12)
    for form in ("qkv", "kv"):
        check(Case(form))


def test_sink_that_is_a_parameter_and_learnable_sink(launched: list[Any]) -> None:
    case = Case("fixed", sink=True)
    leaves = {n: x.clone() for n, x in case.leaves.items()}
    sink = torch.nn.Parameter(leaves.pop("attn_sink").bfloat16())
    out, _ = rawmla.flash_attn_func(**leaves, learnable_sink=sink)
    out.float().sum().backward()
    assert sink.grad.dtype == torch.bfloat16 and bool((sink.grad != 0).all())


@pytest.mark.parametrize("form", ("fixed", "varlen"))
def test_lse_is_stored_as_without_a_graph(launched: list[Any], form: str) -> None:
    case = Case(form)
    want = case.call(case.leaves)
    got = case.call({n: x.requires_grad_() for n, x in case.leaves.items()})
    for one, other in zip(got, want, strict=True):
        assert one.stride() == other.stride() and torch.equal(one, other)
        assert one.requires_grad and not other.requires_grad
    assert got[1].stride(-2 if form == "varlen" else -1) == 1


def test_gradients_of_any_strides(launched: list[Any]) -> None:
    """A sum gives a gradient with strides of 0, a transpose one of lse in another order."""
    case = Case("varlen")
    leaves = {n: x.clone().requires_grad_() for n, x in case.leaves.items()}
    out, lse = case.call(leaves)
    (out.sum() + (lse.T * torch.arange(lse.numel()).view(lse.T.shape)).nan_to_num(neginf=0).sum()).backward()
    exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    out, lse = case.plain(exact)
    (out.sum() + (lse.T * torch.arange(lse.numel()).view(lse.T.shape)).nan_to_num(neginf=0).sum()).backward()
    for name, x in leaves.items():
        torch.testing.assert_close(x.grad.double(), exact[name].grad, atol=0.1, rtol=6e-3)


def test_gradients_with_the_negative_bit(launched: list[Any]) -> None:
    """Autograd hands over what the imaginary part of a conjugate is: memory with the other sign."""
    case, found = Case("varlen"), []
    for dress in (torch._neg_view, torch.neg):
        leaves = {n: x.clone().requires_grad_() for n, x in case.leaves.items()}
        results = case.call(leaves)
        torch.autograd.backward(results, [dress(torch.ones_like(x)) for x in results])
        found.append([x.grad for x in leaves.values()])
    assert all(torch.equal(*pair) and bool(pair[0].any()) for pair in zip(*found, strict=True))


def test_an_unused_result_changes_no_bit(launched: list[Any]) -> None:
    case = Case("fixed")
    grads = []
    for dlse in (None, 0):
        leaves = {n: x.clone().requires_grad_() for n, x in case.leaves.items()}
        out, lse = case.call(leaves)
        loss = out.float().sum() if dlse is None else out.float().sum() + 0 * lse.sum()
        loss.backward()
        grads.append([x.grad for x in leaves.values()])
    assert [x.has_dlse for x in launched[1::2]] == [False, True]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode, None))
def test_without_gradients_no_graph_is_looked_for(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, context: Any
) -> None:
    from rawmla.mha import autograd

    monkeypatch.setattr(autograd, "attend", lambda *args: pytest.fail("a graph was made"))
    for form in FORMS:
        case = Case(form)
        if context is None:
            out, lse = case.call(case.leaves)
        else:
            with context():
                out, lse = case.call({n: x.clone().requires_grad_() for n, x in case.leaves.items()})
        assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("needs_grad", (False, True))
def test_each_array_is_read_once(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, needs_grad: bool
) -> None:
    from rawmla.call import arrays

    reads: list[str] = []
    read = arrays.READERS[torch.Tensor]
    monkeypatch.setitem(arrays.READERS, torch.Tensor, lambda x, name: (reads.append(name), read(x, name))[1])
    case = Case("varlen", sink=True)
    out, _ = case.call(leaves_of(case) if needs_grad else case.leaves)
    assert sorted(reads) == ["attn_sink", "cu_seqlens_k", "cu_seqlens_q", "k", "q", "v"]
    assert out.requires_grad == needs_grad


# ---- what raises


def leaves_of(case: Case) -> dict[str, Any]:
    return {n: x.clone().requires_grad_() for n, x in case.leaves.items()}


def test_second_derivative(launched: list[Any]) -> None:
    case = Case("fixed", sink=True)
    leaves = leaves_of(case)
    out, lse = case.call(leaves)
    loss = (out.float() ** 2).sum() + lse.sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    assert all(x.requires_grad for x in grads)
    text = "^dense attention has no second derivative: expected .* create_graph=True"
    with pytest.raises(NotImplementedError, match=text):
        grads[0].float().sum().backward()
    out, _ = case.call(leaves)
    (dq,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=text):  # though the gradient of out requires no grad
        dq.float().sum().backward()


@pytest.mark.parametrize("name", ("q", "k", "v", "attn_sink", "out", "cu_seqlens_q", "alibi_slopes"))
def test_changes_in_place_are_found(launched: list[Any], name: str) -> None:
    case = Case("varlen", sink=True)
    leaves, keywords = leaves_of(case), {**case.keywords(), "alibi_slopes": torch.linspace(0, 1, H)}
    out, _ = case.function(**leaves, **keywords)
    changed = {**leaves, **keywords, "out": out}[name]
    loss = out.float().sum()
    with torch.no_grad():
        changed.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_twice(launched: list[Any]) -> None:
    case = Case("fixed")
    leaves = leaves_of(case)
    loss = case.call(leaves)[0].float().sum()
    loss.backward(retain_graph=True)
    first = leaves["q"].grad.clone()
    loss.backward()
    torch.testing.assert_close(leaves["q"].grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.fixture
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"attention_chunk": 4}, ValueError, "attention_chunk: expected 0"),
    ({"dropout_p": 0.1}, ValueError, r"dropout_p: expected 0\.0"),
    ({"deterministic": 1}, TypeError, "deterministic: expected a bool"),
    ({"softcap": -1.0}, ValueError, "softcap: "),
    ({"window_size": (-2, 0)}, ValueError, "window_size: "),
)


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[str(case[0]) for case in REFUSED])
@pytest.mark.parametrize("form", FORMS)
def test_refused_before_a_launch(
    launched: list[Any], form: str, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    case = Case(form)
    with pytest.raises(error, match=f"^{text}") as caught:
        case.call(leaves_of(case), **changes)
    assert caught.value.__context__ is None, "the text of another error comes first"
    assert not launched


def test_wrong_arrays(launched: list[Any]) -> None:
    case = Case("fixed")
    leaves = leaves_of(case)
    out = torch.zeros(2, 6, H, D_V, dtype=torch.float16)
    slopes = torch.ones(H, requires_grad=True)
    for changes, error, text in (
        ({"out": out}, ValueError, "out: expected None where a gradient is needed"),
        ({"out": out.requires_grad_()}, ValueError, "out: expected None where a gradient is needed"),
        ({"alibi_slopes": slopes}, ValueError, "alibi_slopes: expected a tensor that needs no gradient here"),
        ({"k": [1]}, TypeError, "k: expected a torch tensor"),
        ({"v": leaves["v"][1:]}, ValueError, "v: expected shape"),
        ({"q": leaves["q"].sum()}, ValueError, r"q: expected shape \[b, s_q, h_q, d_qk\], got \[\]"),
        ({"attn_sink": torch.ones(H - 1)}, ValueError, "attn_sink: expected shape"),
        ({"v": leaves["v"].float()}, TypeError, "v: expected dtype float16"),
    ):
        with pytest.raises(error, match=f"^{text}"):
            case.call({**leaves, **{n: x for n, x in changes.items() if n in leaves}}, **{
                n: x for n, x in changes.items() if n not in leaves
            })  # fmt: skip
    with pytest.raises(ValueError, match="^alibi_slopes: expected a tensor that needs no gradient here"):
        case.call(case.leaves, alibi_slopes=slopes)
    assert not launched


def test_functions_that_have_a_backward_are_named(launched: list[Any]) -> None:
    """In the error of those that have none."""
    kv = torch.zeros(9, 1, 576, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.zeros(2, 1, 64, dtype=torch.int32)
    with pytest.raises(ValueError, match="^kv: expected .* no gradient .* of flash_attn_func, flash_attn_va"):
        rawmla.flash_mla_sparse_fwd(torch.zeros(2, 64, 576, dtype=torch.bfloat16), kv, rows, 0.1)


# ---- fixed order


@pytest.mark.parametrize("form", ("fixed", "qkv"))
def test_fixed_order(launched: list[Any], deterministic: None, form: str) -> None:
    """Wanted by the argument of the forward, or by torch's switch as the backward pass finds it."""
    case = Case(form)
    for argument, switch, wanted in ((False, False, False), (True, False, True), (False, True, True)):
        launched.clear()
        out, _ = case.call(leaves_of(case), deterministic=argument)
        torch.use_deterministic_algorithms(switch, warn_only=True)
        out.float().sum().backward()
        torch.use_deterministic_algorithms(False)
        assert launched[1].deterministic is wanted
