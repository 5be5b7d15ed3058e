"""Graphs of autograd of dense attention: what the backward gets, and where its gradients go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rawmla
from kit.mha import MhaCase, make_mha_inputs

torch = pytest.importorskip("torch")
from calls.constants import DK, DQ, DSINK, DV, LSE, OUT, Launches, installed  # noqa: E402
from operations.dense import named_arguments  # noqa: E402

H, H_KV, D, D_V = 4, 2, 16, 8
Q_LENGTHS, K_LENGTHS = (5, 0, 9), (7, 3, 4)
FORMS = ("fixed", "varlen", "qkv", "qkv4", "kv", "kv4")


@pytest.fixture
def launches() -> Iterator[Launches]:
    with installed() as made:
        yield made


@pytest.fixture
def deterministic() -> Iterator[Callable[[bool], None]]:
    """Turns torch's switch, whose state after the test is off."""
    yield lambda on: torch.use_deterministic_algorithms(on, warn_only=True)
    torch.use_deterministic_algorithms(False)


class Case:
    """A call of one of the forms; `qkv4` and `kv4` are packed arrays of four dimensions."""

    def __init__(self, form: str, d: int = D, sink: bool = False, **options: Any) -> None:
        lengths: dict[str, Any] = {"s_q": 6, "s_k": 8}
        if form != "fixed":
            lengths = {"q_lengths": Q_LENGTHS, "k_lengths": Q_LENGTHS if "qkv" in form else K_LENGTHS}
        sizes = {"h_q": H, "h_kv": H if "qkv" in form else H_KV, "d_qk": d, "d_v": d if "4" in form else D_V}
        packed = form if "kv" in form else ""
        case = MhaCase(**lengths, **sizes, packed=packed, dtype="float16", sink="float32" if sink else None)
        name, given = named_arguments(make_mha_inputs(case, "cpu"))
        self.function, self.d, self.form = getattr(rawmla, name), d, form
        names = [name for name in GRADIENTS if given.get(name) is not None]
        self.leaves = {name: given.pop(name).contiguous() for name in names}
        self.keywords = given | options

    def fresh(self, needs: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The leaves, of which `needs` require grad; None: all."""
        return {n: x.clone().requires_grad_(needs is None or n in needs) for n, x in self.leaves.items()}

    def call(self, leaves: dict[str, Any], **more: Any) -> Any:
        return self.function(**{**self.keywords, **leaves, **more})

    def parts(self, name: str, grad: Any) -> list[Any]:
        """The parts of a gradient that are of one array."""
        if name not in ("qkv", "kv"):
            return [grad]
        if self.form.endswith("4"):
            return list(grad.unbind(1))
        sizes = [self.d] * (len(name) - 1) + [D_V]
        return list(grad.split(sizes, -1))


GRADIENTS = {"q": [DQ], "k": [DK], "v": [DV], "attn_sink": [DSINK], "qkv": [DQ, DK, DV], "kv": [DK, DV]}


def assert_gradients(case: Case, leaves: dict[str, Any]) -> None:
    """Every leaf that requires grad has what the kernel wrote for it, in its own dtype."""
    for name, x in leaves.items():
        assert (x.grad is None) == (not x.requires_grad)
        if x.grad is not None:
            assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
            values = zip(case.parts(name, x.grad), GRADIENTS[name], strict=True)
            assert all(bool((part == value).all()) for part, value in values), name


@pytest.mark.parametrize("of", ("out", "lse", "both"))
@pytest.mark.parametrize("form", FORMS)
def test_gradients(launches: Launches, form: str, of: str) -> None:
    case = Case(form, sink=True, causal=True, softcap=2.0, softmax_scale=0.3)
    leaves = case.fresh()
    out, lse = case.call(leaves)
    assert out.requires_grad and lse.requires_grad and bool((out == OUT).all()) and bool((lse == LSE).all())
    weights = torch.randn(out.shape).half(), torch.randn(lse.shape)
    results = [(out, weights[0]), (lse, weights[1])][of == "lse" : 1 + (of != "out")]
    torch.autograd.backward(*map(list, zip(*results, strict=True)))
    assert_gradients(case, leaves)
    (forward,), (backward,) = launches.forward, launches.backward
    for name in set(forward.call._fields) & set(backward.call._fields) - {"lse_strides", "mods"}:
        assert getattr(forward.call, name) == getattr(backward.call, name), name
    for name in set(forward.addresses._fields) & set(backward.addresses._fields):
        assert getattr(forward.addresses, name) == getattr(backward.addresses, name), name
    assert torch.equal(backward.dout, torch.zeros_like(out) if of == "lse" else weights[0])
    assert backward.call.has_dlse == (of != "out") == (backward.dlse is not None)
    if of != "out":
        assert torch.equal(backward.dlse, weights[1].mT if form == "fixed" else weights[1])


@pytest.mark.parametrize(
    ("form", "needs"),
    (
        *[(form, needs) for form in ("fixed", "varlen") for needs in (("q",), ("k", "attn_sink"), ("v",))],
        ("qkv", ("qkv",)),
        ("qkv", ("attn_sink",)),
        ("kv", ("q",)),
        ("kv4", ("kv",)),
        ("varlen", ("q", "v")),
    ),
)
def test_gradients_of_some(launches: Launches, form: str, needs: tuple[str, ...]) -> None:
    """Others are not computed: their addresses are 0. All parts of what is packed are needed, or none."""
    case = Case(form, sink=True)
    leaves = case.fresh(needs)
    case.call(leaves)[0].sum().backward()
    assert_gradients(case, leaves)
    (backward,) = launches.backward
    wanted = [any(name in needs for name in names) for names in (("q", "qkv"), ("k", "qkv", "kv"))]
    wanted += [any(name in needs for name in ("v", "qkv", "kv")), "attn_sink" in needs]
    results = [getattr(backward.addresses, name) for name in ("dq", "dk", "dv", "dsink")]
    assert [*backward.call.needs] == wanted == [address != 0 for address in results]


@pytest.mark.parametrize("form", ("qkv", "qkv4", "kv", "kv4"))
def test_packed_gradients_are_written_in_place(launches: Launches, form: str) -> None:
    """The kernel gets places in one array for them."""
    case = Case(form)
    leaves = case.fresh()
    case.call(leaves)[0].sum().backward()
    name = form.rstrip("4")
    (backward,) = launches.backward
    call, places, grad = backward.call, backward.addresses, leaves[name].grad
    assert call.dk_strides[1] == call.dv_strides[1] == leaves[name].stride(0) == grad.stride(0)
    heads = H if name == "qkv" else H_KV
    part = 2 * (heads * D if form.endswith("4") else D)  # bytes
    assert places.dv - places.dk == part and (places.dk - places.dq == part) == (name == "qkv")
    assert grad.data_ptr() == (places.dq if name == "qkv" else places.dk)


@pytest.mark.parametrize("form", ("qkv", "kv"))
def test_packed_gradients_off_16_bytes(launches: Launches, form: str) -> None:
    """Where the kernel cannot write into one array, its results are copied there."""
    case = Case(form, d=12)
    leaves = case.fresh()
    case.call(leaves)[0].sum().backward()
    assert_gradients(case, leaves)


def test_gradients_with_the_negative_bit(launches: Launches) -> None:
    """Autograd hands over what the imaginary part of a conjugate is: memory with the other sign."""
    case = Case("varlen")
    results = case.call(case.fresh())
    torch.autograd.backward(results, [torch._neg_view(torch.ones_like(x)) for x in results])
    (backward,) = launches.backward
    assert bool((backward.dout == -1).all()) and bool((backward.dlse == -1).all())


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode, None))
def test_without_gradients_no_graph_is_looked_for(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, context: Any
) -> None:
    from rawmla.mha import autograd

    monkeypatch.setattr(autograd, "attend", lambda *args: pytest.fail("a graph was made"))
    for form in FORMS:
        case = Case(form)
        if context is None:
            results = case.call(case.leaves)
        else:
            with context():
                results = case.call(case.fresh())
        assert not any(x.requires_grad for x in results)


@pytest.mark.parametrize("needs_grad", (False, True))
def test_each_array_is_read_once(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, needs_grad: bool
) -> None:
    from rawmla.call.arrays import READERS

    reads: list[str] = []
    read = READERS[torch.Tensor]
    monkeypatch.setitem(READERS, torch.Tensor, lambda x, name: (reads.append(name), read(x, name))[1])
    case = Case("varlen", sink=True)
    out, _ = case.call(case.fresh() if needs_grad else case.leaves)
    assert sorted(reads) == ["attn_sink", "cu_seqlens_k", "cu_seqlens_q", "k", "q", "v"]
    assert out.requires_grad == needs_grad


def test_second_derivative(launches: Launches) -> None:
    """It is refused though the gradient of out requires no grad."""
    case = Case("fixed")
    leaves = case.fresh()
    (dq,) = torch.autograd.grad(case.call(leaves)[0].sum(), leaves["q"], create_graph=True)
    text = "^dense attention has no second derivative: expected .* create_graph=True"
    with pytest.raises(NotImplementedError, match=text):
        dq.float().sum().backward()


@pytest.mark.parametrize("name", ("q", "k", "v", "attn_sink", "out", "cu_seqlens_q", "alibi_slopes"))
def test_changes_in_place_are_found(launches: Launches, name: str) -> None:
    case = Case("varlen", sink=True, alibi_slopes=torch.linspace(0, 1, H))
    leaves = case.fresh()
    out, _ = case.call(leaves)
    loss = out.float().sum()
    with torch.no_grad():
        {**leaves, **case.keywords, "out": out}[name].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("form", ("fixed", "qkv"))
def test_fixed_order(launches: Launches, deterministic: Callable[[bool], None], form: str) -> None:
    """Wanted by the argument of the forward, or by torch's switch as the backward pass finds it."""
    case = Case(form)
    for argument, switch, wanted in ((False, False, False), (True, False, True), (False, True, True)):
        deterministic(False)
        out, _ = case.call(case.fresh(), deterministic=argument)
        deterministic(switch)
        out.float().sum().backward()
        assert launches.backward[-1].call.deterministic is wanted


# ---- what raises

OUT_ARRAY, SLOPES = torch.zeros(2, 6, H, D_V).half(), torch.ones(H, requires_grad=True)
REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"attention_chunk": 4}, ValueError, "attention_chunk: expected 0"),
    ({"out": OUT_ARRAY}, ValueError, "out: expected None where a gradient is needed"),
    ({"alibi_slopes": SLOPES}, ValueError, "alibi_slopes: expected a tensor that needs no gradient here"),
    ({"k": [1]}, TypeError, "k: expected a torch tensor"),
    ({"v": torch.zeros(1, 8, H_KV, D_V).half()}, ValueError, "v: expected shape"),
    ({"q": OUT_ARRAY.sum()}, ValueError, r"q: expected shape \[b, s_q, h_q, d_qk\], got \[\]"),
)


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[case[2] for case in REFUSED])
def test_refused_before_a_launch(
    launches: Launches, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    for form in FORMS if "attention_chunk" in changes else FORMS[:1]:
        case = Case(form)
        with pytest.raises(error, match=f"^{text}") as caught:
            case.call({**case.fresh(), **changes})
        assert caught.value.__context__ is None, "the text of another error comes first"
    assert not launches.forward
