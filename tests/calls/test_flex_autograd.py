"""Graphs of autograd of flex attention: what the backward gets, where gradients go, and what is saved."""

from __future__ import annotations

import functools
import gc
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from full_cases import full_unless

import rawmla
from rawmla import preload
from rawmla.call.arrays import READERS
from rawmla.flex.block_lists import LISTS, Q_LISTS
from rawmla.flex.block_mask import with_columns

torch = pytest.importorskip("torch")
from calls.constants import DK, DQ, DV, FIRST_CAPTURE, LSE, MAX_SCORES, OUT, Launches, installed  # noqa: E402
from calls.test_dense_autograd import deterministic as deterministic  # noqa: E402
from rawmla.flex import autograd  # noqa: E402

B, H, H_KV, L, S, E, EV = 2, 4, 2, 140, 150, 16, 8
SHAPES = {"query": (B, H, L, E), "key": (B, H_KV, S, E), "value": (B, H_KV, S, EV)}
TABLE, GATE = torch.randn(H, L + S).bfloat16(), torch.randn(H)
KINDS = torch.arange(S, dtype=torch.int32) % 3
DOCUMENTS = torch.arange(S) // 60
NAMES = (*SHAPES, "table", "gate")


@pytest.fixture
def launches() -> Iterator[Launches]:
    with installed() as made:
        yield made


def biased(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, gate: Any) -> Any:
    return s * gate[h] + table[h, q - k + S] * KINDS[k]


def score_mod(leaves: dict[str, Any], form: str = "python") -> Any:
    """A score function of `table`, `gate` and integers, by torch's names or in CUDA text."""
    captures = {name: leaves[name] for name in ("table", "gate")}
    if form == "python":
        return functools.partial(biased, **captures)
    at_key = f"h, q_idx - kv_idx + {S}"
    return rawmla.CudaMod(
        f"score * gate(h) + table({at_key}) * kinds(kv_idx)",
        {**captures, "kinds": KINDS},
        grad="grad * gate(h)",
        capture_grads={"table": (at_key, "grad * kinds(kv_idx)"), "gate": ("h", "grad * score")},
    )


def mask_of(documents: Any = DOCUMENTS, mask_mod: Any = None) -> Any:
    """A mask of documents, with lists by rows and by columns."""
    read = documents.numpy()

    def of_numpy(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (read[q] == read[k])

    made = rawmla.reference._flex.create_block_mask(of_numpy, B, H, L, S)
    lengths, *lists, sizes, _ = made.as_tuple(flatten=False)
    tensors = [None if x is None else torch.from_numpy(x) for x in lists]
    mask_mod = mask_mod or (lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]))
    return rawmla.BlockMask(lengths, *tensors, BLOCK_SIZE=sizes, mask_mod=mask_mod)


def leaves_of(needs: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """Arrays and captured tensors, of which `needs` require grad."""
    made = {name: torch.randn(shape).half() for name, shape in SHAPES.items()}
    made |= {"table": TABLE.clone(), "gate": GATE.clone()}
    return {name: x.requires_grad_(name in needs) for name, x in made.items()}


def call(leaves: dict[str, Any], form: str = "python", **more: Any) -> Any:
    given = {"block_mask": None, "scale": 0.3, "enable_gqa": True, **more}
    mod = given.pop("score_mod", None) or score_mod(leaves, form)
    return rawmla.flex_attention(*[leaves[name] for name in SHAPES], mod, **given)


def plain(leaves: dict[str, Any], **more: Any) -> Any:
    """A call without a score function."""
    return rawmla.flex_attention(*[leaves[name] for name in SHAPES], enable_gqa=True, **more)


def assert_gradients(launches: Launches, leaves: dict[str, Any]) -> None:
    """Every leaf that requires grad has what the kernel wrote for it, in its own dtype."""
    written = {"query": DQ, "key": DK, "value": DV}
    sizes = [wanted.elements for wanted in launches.backward[-1].call.mods.captured]
    written |= {
        n: FIRST_CAPTURE + sizes.index(leaves[n].numel()) for n in NAMES[3:] if leaves[n].requires_grad
    }
    for name, x in leaves.items():
        assert (x.grad is None) == (not x.requires_grad), name
        if x.grad is not None:
            assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
            assert bool((x.grad == written[name]).all()), name


# ---- gradients


@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize("of", ("out", "lse", "both"))
def test_gradients(launches: Launches, form: str, of: str) -> None:
    leaves, mask = leaves_of(), mask_of()
    out, lse = call(leaves, form, block_mask=mask, return_lse=True)
    assert out.requires_grad and lse.requires_grad and bool((out == OUT).all()) and bool((lse == LSE).all())
    weights = torch.randn(out.shape).half(), torch.randn(lse.shape)
    results = [(out, weights[0]), (lse, weights[1])][of == "lse" : 1 + (of != "out")]
    torch.autograd.backward(*map(list, zip(*results, strict=True)))
    assert_gradients(launches, leaves)
    (forward,), (backward,) = launches.forward, launches.backward
    for name in set(forward.call._fields) & set(backward.call._fields) - {"lse_strides", "mods"}:
        assert getattr(forward.call, name) == getattr(backward.call, name), name
    for name in ("q", "k", "v", "out", "lse"):
        assert getattr(forward.addresses, name) == getattr(backward.addresses, name), name
    dout = torch.zeros_like(out) if of == "lse" else weights[0]
    assert torch.equal(backward.dout, dout.transpose(1, 2))
    assert (backward.dlse is not None) == (of != "out")
    if of != "out":
        assert torch.equal(backward.dlse, weights[1].transpose(1, 2))
    assert forward.lists == [getattr(mask, name).data_ptr() for name in LISTS]
    assert backward.lists == [getattr(mask, name).data_ptr() for name in Q_LISTS]


@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize(
    "needs", (("query",), ("key",), ("value",), ("query", "gate"), ("table",), ("table", "gate"))
)
def test_gradients_of_some(launches: Launches, needs: tuple[str, ...], form: str) -> None:
    """Only tensors that require grad have a gradient in the kernel's text."""
    leaves = leaves_of(needs)
    call(leaves, form).sum().backward()
    assert_gradients(launches, leaves)
    (backward,) = launches.backward
    captured = [leaves[name].numel() for name in ("table", "gate") if name in needs]
    assert sorted(x.elements for x in backward.call.mods.captured) == sorted(captured)
    assert backward.call.needs == (*[name in needs for name in SHAPES], bool(captured))
    assert [getattr(backward.addresses, f"d{letter}") != 0 for letter in "qkv"] == [*backward.call.needs[:3]]


def test_captured_tensors_of_other_kinds(launches: Launches) -> None:
    """Without dimensions, not used, used without the score, and detached by the function."""
    strength = torch.nn.Parameter(torch.tensor(0.8))
    gradients = {"strength": ("", "grad * score")}
    captures = {"strength": strength}
    mod = rawmla.CudaMod("score * strength()", captures, grad="grad", capture_grads=gradients)
    call(leaves_of(()), score_mod=mod).sum().backward()
    assert strength.grad.shape == () and strength.grad == FIRST_CAPTURE

    unused, leaves = torch.zeros(H, requires_grad=True), leaves_of()

    def with_unused(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        unused[h]
        return s + leaves["table"][h, q - k + S]

    call(leaves, score_mod=with_unused).sum().backward()
    assert unused.grad is None and bool((leaves["table"].grad == FIRST_CAPTURE).all())

    leaves = leaves_of()
    call(leaves, score_mod=lambda s, b, h, q, k: leaves["table"][h, q - k + S] * 1.0).sum().backward()
    assert bool((leaves["table"].grad == FIRST_CAPTURE).all())

    def detached(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + leaves["table"].detach()[h, q - k + S]

    request = rawmla.AuxRequest(lse=True, max_scores=True)
    out, aux = call(leaves_of(()), score_mod=detached, return_aux=request)
    assert not out.requires_grad and not aux.lse.requires_grad and not aux.max_scores.requires_grad


@pytest.mark.parametrize("lacking", (("q", "full_q"), ("full_q",)))
def test_lists_by_columns_are_made_in_the_backward(launches: Launches, lacking: tuple[str, ...]) -> None:
    """The backward walks what came with a mask that had them."""
    found = []
    for names in ((), lacking, lacking):
        mask = mask_of()
        for name in names:
            setattr(mask, f"{name}_num_blocks", None)
            setattr(mask, f"{name}_indices", None)
        plain(leaves_of(), block_mask=mask).sum().backward()
        backward = launches.backward[-1]
        assert (backward.lists[0] == getattr(mask.q_num_blocks, "data_ptr", int)()) == (not names)
        found.append((backward.call.mods.lists, with_columns(mask)))
    assert found[0][0] == found[1][0] == found[2][0] and mask.full_q_indices is None
    dense = found[0][1].to_dense()
    for _, columns in found:
        assert torch.equal(columns.q_num_blocks + columns.full_q_num_blocks, dense.sum(-2).int())
        assert all(torch.equal(getattr(columns, n), getattr(found[0][1], n)) for n in Q_LISTS[::2])


def test_what_stands_for_lists_by_columns_in_a_warmup(launches: Launches) -> None:
    whole = mask_of()
    lengths, *lists, sizes, mask_mod = whole.as_tuple(flatten=False)
    for count in (4, 2):  # with lists of full blocks, and without
        by_rows = rawmla.BlockMask(lengths, *lists[:count], BLOCK_SIZE=sizes, mask_mod=mask_mod)
        made = preload._stand_in(by_rows)
        for name in Q_LISTS[:count]:
            _, shape, _, dtype, *_ = READERS[type(getattr(made, name))](getattr(made, name), name)
            assert shape == tuple(getattr(whole, name).shape) and dtype == "int32"
        assert count == 4 or made.full_q_indices is None


# ---- results


def assert_same(ours: Any, other: Any) -> None:
    assert ours.requires_grad and not other.requires_grad
    assert ours.stride() == other.stride() and torch.equal(ours, other)


def test_results_are_those_without_a_graph(launches: Launches) -> None:
    """In all forms, and of the same kernel."""
    leaves, alone = leaves_of(), leaves_of(())
    request = rawmla.AuxRequest(lse=True, max_scores=True)
    assert_same(call(leaves), call(alone))
    for one, other in zip(call(leaves, return_lse=True), call(alone, return_lse=True), strict=True):
        assert_same(one, other)
    (out, aux), (want, want_aux) = (call(x, return_aux=request) for x in (leaves, alone))
    assert_same(out, want)
    assert_same(aux.lse, want_aux.lse)
    assert not aux.max_scores.requires_grad and bool((aux.max_scores == MAX_SCORES).all())
    _, aux = call(leaves, return_aux=rawmla.AuxRequest())
    assert aux == rawmla.AuxOutput(None, None)
    _, aux = call(leaves, return_aux=rawmla.AuxRequest(max_scores=True))
    assert aux.lse is None and not aux.max_scores.requires_grad
    assert len({launch.call.mods.header for launch in launches.forward}) == 1


@pytest.mark.parametrize("name", ("query", "key", "value", "table"))
def test_whether_there_is_a_graph_is_decided_once(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Arguments before any of them is read, captured tensors before anything is allocated or launched."""
    read: list[str] = []
    original = READERS[torch.Tensor]
    monkeypatch.setitem(READERS, torch.Tensor, lambda x, name: read.append(name) or original(x, name))
    call(leaves_of(()))
    assert [read.count(x) for x in SHAPES] == [1, 1, 1] and len(launches.forward) == 1
    read.clear()
    monkeypatch.setattr(autograd, "attention", lambda *arguments: "with a graph")
    for form in ("python", "cuda"):
        assert call(leaves_of((name,)), form) == "with a graph"
    seen = [x for x in read if x in SHAPES]
    assert len(launches.forward) == 1 and seen == ([*SHAPES] * 2 if name == "table" else [])


# ---- what is saved


def test_functions_are_those_of_the_forward_call(launches: Launches) -> None:
    """Names that they read may stand for something else by the time of the backward pass."""
    leaves, mask, documents, cap = leaves_of(), mask_of(), DOCUMENTS, 2.0
    table, slope = leaves["table"], torch.tensor(3.0, dtype=torch.float64)
    mask.mask_mod = lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])
    lists = [getattr(mask, name).data_ptr() for name in Q_LISTS]
    out = call(leaves, score_mod=lambda s, b, h, q, k: s / cap * slope + table[h, q - k + S], block_mask=mask)
    table, documents, cap = torch.zeros(1, 1), torch.zeros(1), 9.0  # noqa: F841
    slope.fill_(7.0)
    for name in Q_LISTS:
        setattr(mask, name, torch.zeros_like(getattr(mask, name)))
    mask.mask_mod = rawmla.noop_mask
    out.sum().backward()
    (forward,), (backward,) = launches.forward, launches.backward
    assert backward.lists == lists and backward.mask_mod == forward.mask_mod
    assert struct.unpack_from("<Q", backward.mask_mod)[0] == DOCUMENTS.data_ptr()
    assert struct.unpack_from("<Q", backward.score_mod)[0] == leaves["table"].data_ptr()
    floats = struct.unpack(f"<{len(backward.score_mod) // 4}f", backward.score_mod)
    assert {2.0, 3.0} <= {*floats} and not {7.0, 9.0} & {*floats}


@pytest.mark.parametrize("name", ("query", "key", "value", "table", "documents", "q_indices", "q_num_blocks"))
def test_changes_in_place_are_found(launches: Launches, name: str) -> None:
    documents, leaves = DOCUMENTS.clone(), leaves_of()
    mask = mask_of(documents)
    out = call(leaves, block_mask=mask)
    with torch.no_grad():
        {**leaves, **vars(mask), "documents": documents}[name].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice(launches: Launches) -> None:
    leaves = leaves_of()
    with torch.autograd.set_detect_anomaly(True):
        loss = call(leaves).sum()
        loss.backward(retain_graph=True)
    first = leaves["table"].grad.clone()
    loss.backward()
    assert torch.equal(leaves["table"].grad, 2 * first) and bool((leaves["query"].grad == 2 * DQ).all())
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_backward_pass_frees_what_was_saved(launches: Launches) -> None:
    documents = DOCUMENTS.clone()
    mask = mask_of(mask_mod=lambda b, h, q, k, d=documents: (q >= k) & (d[q] == d[k]))
    refs = [weakref.ref(x) for x in (documents, mask.q_indices)]
    out = call(leaves_of(), block_mask=mask)
    del documents, mask
    gc.collect()
    assert None not in [ref() for ref in refs]
    out.sum().backward()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 2
    assert out.requires_grad


def test_checkpointed(launches: Launches) -> None:
    """The forward is computed again in the backward pass. Functions are traced in the checkpoint at first."""
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        launches.forward.clear()
        leaves = leaves_of()
        layer = lambda *tensors: call(dict(zip(NAMES, tensors, strict=True)))  # noqa: E731
        checkpoint(layer, *leaves.values(), use_reentrant=reentrant).sum().backward()
        assert len(launches.forward) == 2
        assert_gradients(launches, leaves)


@pytest.mark.parametrize(
    ("given", "switch", "wanted"),
    ((None, False, False), (True, False, True), (None, True, True), (False, True, False)),
)
def test_fixed_order(launches: Launches, deterministic: Any, given: Any, switch: bool, wanted: bool) -> None:
    """Wanted by the argument of the forward, or by torch's switch as the backward pass finds it."""
    out = plain(leaves_of(), deterministic=given)
    deterministic(switch)
    out.float().sum().backward()
    assert launches.backward[0].call.deterministic is wanted


# ---- what raises

NEEDED, NUMBER = torch.ones(H, requires_grad=True), torch.tensor(1.0, requires_grad=True)
NO_GRAD_HERE = "mask_mod: expected captured tensors that do not require grad, got one of shape"
ON_DEVICE = ".*: expected captured tensors that .*require grad on the device of query, got a number"
WITHOUT_GRADIENT: dict[str, tuple[str, Any, str]] = {
    "a number of the CPU": ("score_mod", lambda s, b, h, q, k: s * NUMBER, ON_DEVICE),
    "a mask": ("mask_mod", lambda b, h, q, k: NEEDED[h] > 0, NO_GRAD_HERE),
    "text of a mask": ("mask_mod", rawmla.CudaMod("x(h) > 0", {"x": NEEDED}), NO_GRAD_HERE),
    "a number in a mask": ("mask_mod", lambda b, h, q, k: q > NUMBER, NO_GRAD_HERE),
}
"""Functions that read what requires grad and cannot have a gradient."""


@pytest.mark.parametrize(("kind", "mod", "text"), WITHOUT_GRADIENT.values(), ids=WITHOUT_GRADIENT)
def test_functions_without_a_gradient(launches: Launches, kind: str, mod: Any, text: str) -> None:
    """They are refused even if nothing else requires grad: the gradient would be missing without a word."""
    more = {"score_mod": mod} if kind == "score_mod" else {"block_mask": mask_of(mask_mod=mod)}
    for needs in ((), NAMES):
        with pytest.raises(ValueError, match=f"^{text}") as caught:
            call(leaves_of(needs), **more)
        assert caught.value.__context__ is None, "the text of another error comes first"
    assert not launches.forward
    with torch.no_grad():  # as ever
        call(leaves_of(), **more)


def zeros(name: str, dtype: Any) -> dict[str, Any]:
    return {name: torch.zeros(SHAPES[name]).to(dtype)}


OUT_ARRAY = torch.zeros(B, H, L, EV).half()
OF_QUERY = "expected the dtype of query where a gradient is needed, got float8"
WITHOUT_BIAS = rawmla.CudaMod("score + bias(h)", {"bias": NEEDED}, grad="grad")
REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"out": OUT_ARRAY}, ValueError, "out: expected None where a gradient is needed"),
    (zeros("key", torch.float8_e5m2), ValueError, f"key: {OF_QUERY}"),
    (zeros("value", torch.float8_e4m3fn), ValueError, f"value: {OF_QUERY}"),
    (zeros("key", torch.bfloat16), TypeError, "key: expected dtype float16"),
    ({"value": np.zeros(SHAPES["value"], np.float16)}, ValueError, "value: expected an array in CUDA memory"),
    ({"score_mod": "score * 2"}, ValueError, "score_mod: expected a CudaMod with grad, since gradients "),
    ({"score_mod": WITHOUT_BIAS}, ValueError, "score_mod: expected a CudaMod with capture_grads for bias"),
)


@pytest.mark.parametrize(("changes", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_refused_before_a_launch(launches: Launches, changes: dict[str, Any], error: Any, text: str) -> None:
    leaves = leaves_of() | {name: x for name, x in changes.items() if name in SHAPES}
    with pytest.raises(error, match=f"^{text}") as caught:
        call(leaves, **{name: x for name, x in changes.items() if name not in SHAPES})
    assert caught.value.__context__ is None, "the text of another error comes first"
    assert not launches.forward


@pytest.mark.parametrize("backend", full_unless(lambda name: name != "eager", ("eager", "aot_eager")))
def test_torch_compile(launches: Launches, backend: str) -> None:
    """Gradients go through the call, from the graph after it to the one before it."""
    torch._dynamo.reset()
    mask = mask_of()

    def step(query: Any, key: Any, value: Any, table: Any, gate: Any) -> Any:
        scaled = table * 1.5
        score = lambda s, b, h, q, k: s * gate[h] + scaled[h, q - k + S]  # noqa: E731
        out, lse = rawmla.flex_attention(query * 2, key, value, score, mask, enable_gqa=True, return_lse=True)
        return out.float().sin().sum() + lse.sum() * 0.1

    def gradients(function: Any) -> list[Any]:
        leaves = leaves_of()
        function(*leaves.values()).backward()
        return [x.grad for x in leaves.values()]

    wanted = gradients(step)
    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        for got, want in zip(gradients(compiled), wanted, strict=True):
            torch.testing.assert_close(got, want)
    assert bool((wanted[0] == 2 * DQ).all()) and len(launches.backward) == 3
    report = torch._dynamo.explain(step)(*leaves_of(()).values())
    assert (report.graph_break_count, report.graph_count) == (1, 2)
