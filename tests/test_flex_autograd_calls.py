"""Gradients of flex attention through autograd: the public function on CPU tensors, forward and backward by
the reference, held against autograd of plain attention in float64.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import flex_on_cpu
import numpy as np
import pytest
from flex_on_cpu import Launches
from full_cases import full_unless

import rawmla
from rawmla import preload
from rawmla.call.arrays import READERS
from rawmla.flex.block_lists import Q_LISTS
from rawmla.flex.block_mask import with_columns
from rawmla.reference._flex import NumpyMod, create_block_mask

torch = pytest.importorskip("torch")
from rawmla.flex import autograd  # noqa: E402

B, H, H_KV, L, S, E, EV = 2, 4, 2, 140, 150, 16, 8
TOLERANCE = (
    2**-8
)  # of a whole gradient: out and what is returned are rounded to float16, captures to bfloat16
DRAW = torch.Generator().manual_seed(0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return flex_on_cpu.install(monkeypatch)


class Score(NamedTuple):
    """A score function of what it reads by name, of tensors and of arrays; `code`, `grad` and `capture_grads`
    are its CUDA text.
    """

    captures: dict[str, Any]
    function: Callable[..., Any]
    numpy: Callable[..., NumpyMod]
    code: str
    grad: str
    capture_grads: dict[str, Any]

    def python(self, captures: dict[str, Any]) -> Callable[..., Any]:
        """A function that closes over these."""
        return functools.partial(self.function, **captures)

    def cuda(self, captures: dict[str, Any]) -> rawmla.CudaMod:
        return rawmla.CudaMod(self.code, captures, grad=self.grad, capture_grads=self.capture_grads)


def _draw(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=DRAW).to(dtype)


def table_of(name: str, table: Any) -> NumpyMod:
    """A table of relative biases that has this name."""
    return NumpyMod(
        lambda s, b, h, q, k: s + table[h, q - k + S],
        lambda grad, s, b, h, q, k: grad,
        {name: (table, lambda grad, s, b, h, q, k: ((h, q - k + S), grad))},
    )


BIAS_ALONE = Score(
    {},
    lambda s, b, h, q, k, table: table[h, q - k + S] * 1.0,
    lambda table: NumpyMod(
        lambda s, b, h, q, k: table[h, q - k + S] + 0 * s,
        lambda grad, s, b, h, q, k: 0 * grad,
        {"table": (table, lambda grad, s, b, h, q, k: ((h, q - k + S), grad))},
    ),
    "",
    "",
    {},
)
SCORES: dict[str, Score | None] = {
    "none": None,
    "softcap": Score(
        {},
        lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
        lambda: NumpyMod(
            lambda s, b, h, q, k: 2 * np.tanh(s / 2),
            lambda grad, s, b, h, q, k: grad * (1 - np.tanh(s / 2) ** 2),
        ),
        "2 * tanhf(score / 2)",
        "grad * (1 - tanhf(score / 2) * tanhf(score / 2))",
        {},
    ),
    "table": Score(
        {"table": _draw(H, L + S, dtype=torch.bfloat16)},
        lambda s, b, h, q, k, table: s + table[h, q - k + S],
        lambda table: table_of("table", table),
        f"score + table(h, q_idx - kv_idx + {S})",
        "grad",
        {"table": (f"h, q_idx - kv_idx + {S}", "grad")},
    ),
    "several": Score(
        {
            "gate": _draw(H) + 1.5,
            "bias": _draw(H, S, S),
            "kinds": torch.randint(0, 3, (S,), generator=DRAW),
            "by_kind": _draw(3),
            "strength": torch.tensor([0.7]),
        },
        lambda s, b, h, q, k, gate, bias, kinds, by_kind, strength: (
            s * gate[h] * strength[0] + bias[h, q, k] + bias[h, k, q] + by_kind[kinds[k]]
        ),
        lambda gate, bias, kinds, by_kind, strength: NumpyMod(
            lambda s, b, h, q, k: (
                s * gate[h] * strength[0] + bias[h, q, k] + bias[h, k, q] + by_kind[kinds[k]]
            ),
            lambda grad, s, b, h, q, k: grad * gate[h] * strength[0],
            {
                "gate": (gate, lambda grad, s, b, h, q, k: ((h,), grad * s * strength[0])),
                "bias": (
                    bias,
                    lambda grad, s, b, h, q, k: (
                        (h, np.stack([q + 0 * k, k + 0 * q]), np.stack([k + 0 * q, q + 0 * k])),
                        grad,
                    ),
                ),
                "by_kind": (by_kind, lambda grad, s, b, h, q, k: ((kinds[k],), grad)),
                "strength": (strength, lambda grad, s, b, h, q, k: ((0,), grad * s * gate[h])),
            },
        ),
        "score * gate(h) * strength(0) + bias(h, q_idx, kv_idx) + bias(h, kv_idx, q_idx)"
        " + by_kind(kinds(kv_idx))",
        "grad * gate(h) * strength(0)",
        {
            "gate": ("h", "grad * score * strength(0)"),
            "bias": [("h, q_idx, kv_idx", "grad"), ("h, kv_idx, q_idx", "grad")],
            "by_kind": ("kinds(kv_idx)", "grad"),
            "strength": ("0", "grad * score * gate(h)"),
        },
    ),
}
DOCUMENTS = torch.arange(S) // 60
PER_HEAD = torch.tensor([3, 20, 70, 160])


class Mask(NamedTuple):
    """A mask function of the tensors it reads, of tensors and of arrays."""

    reads: tuple[Any, ...]
    python: Callable[..., Callable[..., Any]]
    code: str
    names: tuple[str, ...]

    def cuda(self) -> rawmla.CudaMod:
        return rawmla.CudaMod(self.code, dict(zip(self.names, self.reads, strict=True)))


MASKS: dict[str, Mask | None] = {
    "no mask": None,
    "documents": Mask(
        (DOCUMENTS,),
        lambda documents: lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
        "q_idx >= kv_idx && documents(q_idx) == documents(kv_idx)",
        ("documents",),
    ),
    "windows": Mask(  # some rows of which attend nothing
        (PER_HEAD,),
        lambda per_head: lambda b, h, q, k: (q >= k + 5 * b) & (q - k < per_head[h]),
        "q_idx >= kv_idx + 5 * b && q_idx - kv_idx < per_head(h)",
        ("per_head",),
    ),
}


class Case:
    """A call, its leaves, and plain attention."""

    def __init__(
        self, launches: Launches, score: str = "none", mask: str = "no mask", h_kv: int = H_KV, b_kv: int = B,
        form: str = "python",
    ) -> None:  # fmt: skip
        self.score, self.mask, self.form = SCORES[score], MASKS[mask], form
        draw = torch.Generator().manual_seed(1)
        shapes = {"query": (B, H, L, E), "key": (b_kv, h_kv, S, E), "value": (b_kv, h_kv, S, EV)}
        self.leaves = {n: torch.randn(shape, generator=draw).half() for n, shape in shapes.items()}
        self.captures = {} if self.score is None else self.score.captures
        self.block_mask = None
        launches.score = None if self.score is None else self.score.numpy
        if self.mask is not None:
            numbers = [flex_on_cpu.exact(x) for x in self.mask.reads]
            launches.mask = self.mask.python
            block_mask = create_block_mask(self.mask.python(*numbers), B, H, L, S)
            mask_mod = self.mask.python(*self.mask.reads) if form == "python" else self.mask.cuda()
            self.block_mask = flex_on_cpu.in_torch(block_mask, mask_mod)

    def all_leaves(self, needs: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Arrays and what the score function reads; those of `needs`, None: all floats, require grad."""
        made = {}
        for name, x in {**self.leaves, **self.captures}.items():
            wanted = x.is_floating_point() if needs is None else name in needs
            made[name] = x.clone().requires_grad_(wanted)
        return made

    def call(self, leaves: dict[str, Any], **more: Any) -> Any:
        arrays = {name: leaves[name] for name in ("query", "key", "value")}
        score_mod = None
        if self.score is not None:
            captures = {name: leaves[name] for name in self.captures}
            score_mod = self.score.python(captures) if self.form == "python" else self.score.cuda(captures)
        given = {"score_mod": score_mod, "block_mask": self.block_mask, "scale": 0.3, "enable_gqa": True}
        return rawmla.flex_attention(**arrays, **{**given, **more})

    def plain(self, leaves: dict[str, Any]) -> tuple[Any, Any]:
        """out and lse of plain attention, in the dtype of the leaves."""
        q, k, v = (leaves[name] for name in ("query", "key", "value"))
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        scores = 0.3 * q @ k.mT
        at = [
            torch.arange(n).view([-1 if i == d else 1 for d in range(4)]) for i, n in enumerate((B, H, L, S))
        ]
        if self.score is not None:
            scores = self.score.function(scores, *at, **{name: leaves[name] for name in self.captures})
        seen = torch.ones(B, H, L, S, dtype=torch.bool)
        if self.mask is not None:
            seen = self.mask.python(*self.mask.reads)(*at).expand(B, H, L, S)
        some = seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen, -torch.inf).masked_fill(~some, 0.0)
        lse = torch.logsumexp(scores, -1).masked_fill(~some[..., 0], -torch.inf)
        return torch.softmax(scores, -1).masked_fill(~some, 0.0) @ v, lse


def loss_of(out: Any, lse: Any, of: str) -> Any:
    """A sum with random weights, the same always; rows that attend nothing are left out of lse."""
    total, draw = torch.zeros((), dtype=torch.float64), torch.Generator().manual_seed(2)
    if of != "lse":
        total = total + (out.double() * torch.randn(out.shape, generator=draw)).sum()
    if of != "out":
        weights = torch.randn(lse.shape, generator=draw)
        total = total + (torch.where(lse.isfinite(), lse, 0).double() * weights).sum()
    return total


def assert_near(name: str, got: Any, want: Any) -> None:
    assert got.shape == want.shape
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    assert error <= TOLERANCE, f"{name}: relative error {error:.2g}"


def check(case: Case, of: str = "both", needs: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Compare the gradients of a call with those of plain attention; returns the call's leaves."""
    ours = case.all_leaves(needs)
    exact = {
        n: (x.detach().double() if x.is_floating_point() else x).requires_grad_(x.requires_grad)
        for n, x in ours.items()
    }
    out, lse = case.call(ours, return_lse=True)
    want_out, want_lse = case.plain(exact)
    assert out.requires_grad and lse.requires_grad and out.dtype == torch.float16
    assert_near("out", out.detach(), want_out.detach())
    torch.testing.assert_close(lse.detach().double(), want_lse.detach(), atol=1e-5, rtol=1e-5)
    loss_of(out, lse, of).backward()
    loss_of(want_out, want_lse, of).backward()
    for name, x in ours.items():
        assert (x.grad is None) == (not x.requires_grad), name
        if x.grad is not None:
            assert x.grad.dtype == x.dtype
            if exact[name].grad is None:
                assert name == "value" and of == "lse" and not x.grad.any(), "dv is not exactly 0"
            else:
                assert_near(f"gradient of {name}", x.grad, exact[name].grad)
    return ours


FORMS = ("python", "cuda")
IN_ONE_FORM = [
    (score, mask, FORMS[(i + j) % 2]) for i, score in enumerate(SCORES) for j, mask in enumerate(MASKS)
]
"""Each pair of functions once, and each function in both forms."""


@pytest.mark.parametrize(
    "which", full_unless(lambda which: which in IN_ONE_FORM, product(SCORES, MASKS, FORMS)), ids="-".join
)
def test_gradients(launches: Launches, which: tuple[str, str, str]) -> None:
    score, mask, form = which
    check(Case(launches, score, mask, form=form))
    assert len(launches.forward) == len(launches.backward) == 1


@pytest.mark.parametrize("of", ("out", "lse"))
def test_gradients_through_one_result(launches: Launches, of: str) -> None:
    check(Case(launches, "several", "documents"), of)
    _, _, addresses = launches.backward[0]
    assert (addresses.dlse == 0) == (of == "out")


@pytest.mark.parametrize(("h_kv", "b_kv"), ((4, 2), (1, 2), (2, 1), (1, 1)))
def test_shared_keys(launches: Launches, h_kv: int, b_kv: int) -> None:
    check(Case(launches, "table", "documents", h_kv, b_kv))


@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize(
    "needs", (("query",), ("key",), ("value",), ("query", "gate"), ("bias",), ("strength", "by_kind"))
)
def test_gradients_of_some(launches: Launches, needs: tuple[str, ...], form: str) -> None:
    """Only tensors that require grad have a gradient in the kernel's text."""
    case = Case(launches, "several", "windows", form=form)
    check(case, needs=needs)
    mod, *_ = launches.backward[0]
    assert {mod.captures[i].name for i in mod.backward.gradients} == {*needs} & {*case.captures}
    ((_, call, _),) = launches.backward
    arrays = tuple(name in needs for name in ("query", "key", "value"))
    assert call.needs == (*arrays, bool({*needs} & {*case.captures}))


def test_a_captured_tensor_without_dimensions(launches: Launches) -> None:
    """On the CPU it would be a number, so it is of CUDA text here."""
    case = Case(launches)
    launches.score = lambda strength: NumpyMod(
        lambda s, *at: s * strength,
        lambda grad, s, *at: grad * strength,
        {"strength": (strength, lambda grad, s, *at: ((), grad * s))},
    )
    strength = torch.nn.Parameter(torch.tensor(0.8))
    mod = rawmla.CudaMod(
        "score * strength()", {"strength": strength}, grad="grad * strength()",
        capture_grads={"strength": ("", "grad * score")},
    )  # fmt: skip
    leaves = case.all_leaves(())
    out = case.call(leaves, score_mod=mod)
    loss_of(out, None, "out").backward()
    exact = strength.detach().double().requires_grad_()
    want, _ = case.plain(
        {**{n: x.double() for n, x in leaves.items()}, "query": leaves["query"].double() * exact}
    )
    loss_of(want, None, "out").backward()
    assert strength.grad.shape == () and strength.grad.dtype == torch.float32
    assert_near("strength", strength.grad, exact.grad)


def test_a_capture_that_the_result_does_not_depend_on(launches: Launches) -> None:
    case = Case(launches, "table", "documents")
    table, unused = case.captures["table"].clone().requires_grad_(), torch.zeros(H, requires_grad=True)

    def with_unused(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        unused[h]
        return s + table[h, q - k + S]

    launches.score = lambda table, unused: SCORES["table"].numpy(table)  # type: ignore[union-attr]
    out = case.call(case.all_leaves(), score_mod=with_unused)
    loss_of(out, None, "out").backward()
    assert unused.grad is None and table.grad is not None


def test_a_result_that_does_not_depend_on_the_score(launches: Launches) -> None:
    """dq and dk are 0, as plain attention has them; dv and the gradient of the table are as ever."""
    case = Case(launches, "table", "documents")
    case.score = BIAS_ALONE
    launches.score = BIAS_ALONE.numpy
    ours = case.all_leaves()
    loss_of(*case.call(ours, return_lse=True), "both").backward()
    exact = {name: x.detach().double().requires_grad_() for name, x in ours.items()}
    loss_of(*case.plain(exact), "both").backward()
    for name in ("query", "key"):
        assert exact[name].grad is None and not ours[name].grad.any()
    for name in ("value", "table"):
        assert_near(f"gradient of {name}", ours[name].grad, exact[name].grad)


@pytest.mark.parametrize("lacking", (("q", "full_q"), ("full_q",)))
@pytest.mark.parametrize("mask", ("documents", "windows"))
def test_lists_by_columns_are_made_in_the_backward(
    launches: Launches, mask: str, lacking: tuple[str, ...]
) -> None:
    """Gradients have the bits of a mask that came with them."""
    case = Case(launches, "table", mask)

    def gradients() -> tuple[dict[str, Any], list[Any]]:
        leaves = case.all_leaves()
        out, lse = case.call(leaves, return_lse=True, deterministic=True)
        loss_of(out, lse, "both").backward()
        call, addresses = launches.backward[-1][1:]
        return leaves, [call.mods.lists, addresses.q_num_blocks]

    want, (walked, there) = gradients()
    assert there == case.block_mask.q_num_blocks.data_ptr()
    for name in lacking:
        setattr(case.block_mask, f"{name}_num_blocks", None)
        setattr(case.block_mask, f"{name}_indices", None)
    for _ in range(2):
        got, (made, place) = gradients()
        assert made == walked and place not in (0, there)
        for name, x in got.items():
            assert torch.equal(x.grad, want[name].grad)
    assert case.block_mask.full_q_indices is None, "the user's mask was changed"
    dense = case.block_mask.to_dense()
    columns = with_columns(case.block_mask)
    assert torch.equal(columns.q_num_blocks + columns.full_q_num_blocks, dense.sum(-2).int())


def test_what_stands_for_lists_by_columns_in_a_warmup(launches: Launches) -> None:
    case = Case(launches, "none", "documents")
    whole = case.block_mask
    lengths, *lists, sizes, mask_mod = whole.as_tuple(flatten=False)
    for full in (True, False):
        by_rows = rawmla.BlockMask(lengths, *lists[: 4 if full else 2], BLOCK_SIZE=sizes, mask_mod=mask_mod)
        made = preload._stand_in(by_rows)
        for name in Q_LISTS[: 4 if full else 2]:
            _, shape, _, dtype, *_ = READERS[type(getattr(made, name))](getattr(made, name), name)
            assert shape == tuple(getattr(whole, name).shape) and dtype == "int32"
        assert full or made.full_q_indices is None


def test_in_anomaly_mode(launches: Launches) -> None:
    with torch.autograd.set_detect_anomaly(True):
        check(Case(launches, "several", "documents"))


def test_what_a_function_detaches_has_no_graph(launches: Launches) -> None:
    case = Case(launches, "table")
    table = case.captures["table"].clone().requires_grad_()
    leaves = case.all_leaves(())

    def detached(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table.detach()[h, q - k + S]

    out, aux = case.call(leaves, score_mod=detached, return_aux=rawmla.AuxRequest(lse=True, max_scores=True))
    want, lse = case.call(leaves, return_lse=True)
    assert not out.requires_grad and not aux.lse.requires_grad and not aux.max_scores.requires_grad
    assert torch.equal(out, want) and torch.equal(aux.lse, lse)


# ---- results


@pytest.mark.parametrize("score", ("none", "several"))
def test_results_are_those_without_a_graph(launches: Launches, score: str) -> None:
    """In all forms, and of the same kernel."""
    case = Case(launches, score, "windows")
    leaves, plain = case.all_leaves(), case.all_leaves(())
    request = rawmla.AuxRequest(lse=True, max_scores=True)
    assert_same(case.call(leaves), case.call(plain))
    for one, other in zip(case.call(leaves, return_lse=True), case.call(plain, return_lse=True), strict=True):
        assert_same(one, other)
    (out, aux), (want, want_aux) = (case.call(x, return_aux=request) for x in (leaves, plain))
    assert_same(out, want)
    assert_same(aux.lse, want_aux.lse)
    assert not aux.max_scores.requires_grad and torch.equal(aux.max_scores, want_aux.max_scores)
    _, aux = case.call(leaves, return_aux=rawmla.AuxRequest())
    assert aux == rawmla.AuxOutput(None, None)
    _, aux = case.call(leaves, return_aux=rawmla.AuxRequest(max_scores=True))
    assert aux.lse is None and not aux.max_scores.requires_grad
    for ours, other in zip(launches.forward[::2], launches.forward[1::2], strict=False):
        assert (ours and ours.text) == (other and other.text)
        assert ours is None or ours.backward is None


def assert_same(ours: Any, other: Any) -> None:
    assert ours.requires_grad and not other.requires_grad
    assert ours.stride() == other.stride() and torch.equal(ours, other)


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_without_grad_there_is_no_graph(launches: Launches, context: Any) -> None:
    case = Case(launches, "several", "documents")
    with context():
        out, lse = case.call(case.all_leaves(), return_lse=True)
    assert not out.requires_grad and not lse.requires_grad


def test_without_tensors_that_require_grad_no_graph_is_looked_for(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "attention", lambda *args: pytest.fail("a graph was made"))
    case = Case(launches, "several", "documents")
    assert not case.call(case.all_leaves(())).requires_grad


# ---- what is saved


@pytest.mark.parametrize("form", ("python", "cuda"))
@pytest.mark.parametrize("name", ("query", "key", "value", "table"))
def test_whether_there_is_a_graph_is_decided_once(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    """Arguments before any of them is read, captured tensors before anything is allocated or launched."""
    case = Case(launches, "table", form=form)
    read: list[str] = []
    original = READERS[torch.Tensor]
    monkeypatch.setitem(READERS, torch.Tensor, lambda x, name: read.append(name) or original(x, name))
    case.call(case.all_leaves(needs=()))
    assert [read.count(x) for x in ("query", "key", "value")] == [1, 1, 1] and len(launches.forward) == 1
    read.clear()
    monkeypatch.setattr(autograd, "attention", lambda *arguments: "with a graph")
    assert case.call(case.all_leaves(needs=(name,))) == "with a graph"
    assert len(launches.forward) == 1 and [x for x in read if not x.startswith("captures")] == (
        ["query", "key", "value"] if name == "table" else []
    )


def test_functions_are_those_of_the_forward_call(launches: Launches) -> None:
    """Names that they read may stand for something else by the time of the backward pass."""
    case = Case(launches, "table", "documents")
    leaves = case.all_leaves()
    exact = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    table = leaves["table"]
    case.block_mask.mask_mod = lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])
    documents = DOCUMENTS
    out = case.call(leaves, score_mod=lambda s, b, h, q, k: s + table[h, q - k + S])
    table, documents = torch.zeros(1, 1), torch.zeros(1)  # noqa: F841
    lists = case.block_mask.q_num_blocks, case.block_mask.full_q_num_blocks
    case.block_mask.q_num_blocks, case.block_mask.full_q_num_blocks = (torch.zeros_like(x) for x in lists)
    case.block_mask.mask_mod = rawmla.noop_mask
    loss_of(out, None, "out").backward()
    loss_of(case.plain(exact)[0], None, "out").backward()
    for name, x in leaves.items():
        assert_near(name, x.grad, exact[name].grad)


def test_numbers_are_those_of_the_forward_call(launches: Launches) -> None:
    case = Case(launches, "softcap")
    leaves = case.all_leaves()
    slope, cap = torch.tensor(3.0, dtype=torch.float64), 2.0

    def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * torch.tanh(s / cap) * slope

    out = case.call(leaves, score_mod=capped)
    slope.fill_(7.0)
    cap = 9.0  # noqa: F841
    out.sum().backward()
    sources = [number.source for number in launches.backward[0][0].numbers]
    assert {2.0, 3.0} <= {*sources} and not {7.0, 9.0} & {*sources}
    assert all(isinstance(x, (int, float)) for x in sources)


@pytest.mark.parametrize("name", ("query", "key", "value", "table", "documents", "q_indices", "q_num_blocks"))
def test_changes_in_place_are_found(launches: Launches, name: str) -> None:
    case = Case(launches, "table", "documents")
    documents = DOCUMENTS.clone()
    case.block_mask.mask_mod = lambda b, h, q, k: (q >= k) & (documents[q] == documents[k])
    leaves = case.all_leaves()
    out = case.call(leaves)
    changed = {**leaves, **vars(case.block_mask), "documents": documents}[name]
    with torch.no_grad():
        changed.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice(launches: Launches) -> None:
    case = Case(launches, "table", "documents")
    leaves = case.all_leaves()
    loss = loss_of(case.call(leaves), None, "out")
    loss.backward(retain_graph=True)
    first = {name: x.grad.clone() for name, x in leaves.items()}
    loss.backward()
    for name, x in leaves.items():
        torch.testing.assert_close(x.grad, 2 * first[name])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_backward_pass_frees_what_was_saved(launches: Launches) -> None:
    case = Case(launches, "table", "documents")
    documents = DOCUMENTS.clone()
    case.block_mask.mask_mod = lambda b, h, q, k, d=documents: (q >= k) & (d[q] == d[k])
    leaves = case.all_leaves()
    indices = case.block_mask.q_indices
    out = case.call(leaves)
    refs = [weakref.ref(x) for x in (documents, indices)]
    out.sum().backward()
    launches.given.clear(), launches.forward.clear(), launches.backward.clear()
    del documents, indices, case, leaves
    gc.collect()
    assert [ref() for ref in refs] == [None] * 2
    assert out.requires_grad


def test_checkpointed(launches: Launches) -> None:
    """The forward is computed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    case = Case(launches, "table", "documents")
    wanted = case.all_leaves()
    case.call(wanted).sum().backward()
    for reentrant in (False, True):
        launches.forward.clear()
        leaves = case.all_leaves()

        def layer(*tensors: Any, names: tuple[str, ...] = tuple(leaves)) -> Any:
            return case.call(dict(zip(names, tensors, strict=True)))

        checkpoint(layer, *leaves.values(), use_reentrant=reentrant).sum().backward()
        assert len(launches.forward) == 2
        for name, x in leaves.items():
            assert torch.equal(x.grad, wanted[name].grad)


def test_one_tensor_for_several_arguments(launches: Launches) -> None:
    case = Case(launches, "none", h_kv=H)
    x = torch.randn(B, H, L, E, generator=DRAW).half()
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out = rawmla.flex_attention(ours, ours, ours)
    loss_of(out, None, "out").backward()
    scores = exact @ exact.mT * E**-0.5
    loss_of(torch.softmax(scores, -1) @ exact, None, "out").backward()
    assert_near("x", ours.grad, exact.grad)
    assert case.score is None


def test_a_parameter_of_a_module(launches: Launches) -> None:
    """A method as a score function, and hooks, as modules have them."""

    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(SCORES["table"].captures["table"].float())  # type: ignore[union-attr]

        def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.table[h, q - k + S]

    case = Case(launches, "table")
    bias, leaves = Bias(), case.all_leaves()
    case.call(leaves, score_mod=bias.score).sum().backward()
    wanted = {**case.all_leaves(), "table": bias.table.detach().clone().requires_grad_()}
    case.call(wanted).sum().backward()
    assert torch.equal(bias.table.grad, wanted["table"].grad)


# ---- what raises


def test_second_derivative(launches: Launches) -> None:
    case = Case(launches, "several", "documents")
    leaves = {name: x for name, x in case.all_leaves().items() if x.is_floating_point()}
    out, lse = case.call({**case.captures, **leaves}, return_lse=True)
    loss = (out.float() ** 2).sum() + lse.nan_to_num(neginf=0).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    assert all(x.requires_grad for x in grads)
    text = "^flex attention has no second derivative: expected .* create_graph=True"
    for one in (grads[0], grads[-1]):
        with pytest.raises(NotImplementedError, match=text):
            one.float().sum().backward(retain_graph=True)


def masked(case: Case, mask_mod: Any) -> Any:
    case.block_mask.mask_mod = mask_mod
    return case.block_mask


NEEDED = torch.ones(H, requires_grad=True)
NUMBER = torch.tensor(1.0, requires_grad=True)
NO_GRAD_HERE = "expected captured tensors that do not require grad, got one of shape"


def eights(name: str, dtype: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {name: case.leaves[name].to(dtype)}


def score(mod: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"score_mod": mod}


def mask(mask_mod: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"block_mask": masked(case, mask_mod)}


REFUSED: dict[str, tuple[Callable[[Case], dict[str, Any]], type[Exception], str]] = {
    "out": (
        lambda case: {"out": torch.zeros(B, H, L, EV).half()},
        ValueError,
        "out: expected None where a gradient is needed",
    ),
    "a key of FP8": (
        eights("key", torch.float8_e5m2),
        ValueError,
        "key: expected the dtype of query where a gradient is needed, got float8_e5m2",
    ),
    "a value of FP8": (
        eights("value", torch.float8_e4m3fn),
        ValueError,
        "value: expected the dtype of query where a gradient is needed, got float8_e4m3fn",
    ),
    "a key of another dtype": (eights("key", torch.bfloat16), TypeError, "key: expected dtype float16"),
    "an array of NumPy": (
        lambda case: {"value": np.zeros((B, H, S, EV), np.float16)},
        ValueError,
        "value: expected an array in CUDA memory",
    ),
    "text without grad": (
        score("score * 2"),
        ValueError,
        "score_mod: expected a CudaMod with grad, since gradients are needed",
    ),
    "text without that of a capture": (
        score(rawmla.CudaMod("score + bias(h)", {"bias": NEEDED}, grad="grad")),
        ValueError,
        "score_mod: expected a CudaMod with capture_grads for bias, which requires grad",
    ),
    "a number of the CPU": (
        score(lambda s, b, h, q, k: s * NUMBER),
        ValueError,
        ".*require grad on the device of query, got a number on the CPU",
    ),
    "a mask that needs one": (
        mask(lambda b, h, q, k: NEEDED[h] > 0),
        ValueError,
        f"mask_mod: {NO_GRAD_HERE}",
    ),
    "text of a mask that needs one": (
        mask(rawmla.CudaMod("x(h) > 0", {"x": NEEDED})),
        ValueError,
        f"mask_mod: {NO_GRAD_HERE}",
    ),
    "a number in a mask": (mask(lambda b, h, q, k: q > NUMBER), ValueError, f"mask_mod: {NO_GRAD_HERE}"),
    "an option": (
        lambda case: {"kernel_options": {"BACKEND": "FLASH"}},
        ValueError,
        "kernel_options: expected",
    ),
    "two kinds of results": (
        lambda case: {"return_lse": True, "return_aux": rawmla.AuxRequest()},
        ValueError,
        "return_lse: expected False",
    ),
}


@pytest.mark.parametrize(("change", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused_before_a_launch(
    launches: Launches, change: Callable[[Case], dict[str, Any]], error: type[Exception], text: str
) -> None:
    case = Case(launches, "none", "documents")
    leaves = case.all_leaves()
    changes = change(case)
    leaves |= {name: changes.pop(name) for name in ("key", "value") if name in changes}
    with pytest.raises(error, match=f"^{text}") as caught:
        case.call(leaves, **changes)
    assert caught.value.__context__ is None, "the text of another error comes first"
    assert not launches.forward


@pytest.mark.parametrize("what", ("mask", "mask number", "score number"))
def test_refused_though_nothing_else_requires_grad(launches: Launches, what: str) -> None:
    """Or the gradient would be missing without a word."""
    case = Case(launches, "none", "documents")
    more: dict[str, Any] = {
        "mask": lambda: {"block_mask": masked(case, lambda b, h, q, k: NEEDED[h] > 0)},
        "mask number": lambda: {"block_mask": masked(case, lambda b, h, q, k: q > NUMBER)},
        "score number": lambda: {"score_mod": lambda s, b, h, q, k: s * NUMBER},
    }[what]()
    with pytest.raises(ValueError, match="(mask|score)_mod.*: expected captured tensors that .*require grad"):
        case.call(case.leaves, **more)
    assert not launches.forward
    launches.mask, launches.score = lambda *reads: lambda b, h, q, k: q >= k, None
    if what != "score number":
        with torch.no_grad():  # as ever
            case.call(case.leaves, **more)


def test_functions_that_have_a_backward_are_named(launches: Launches) -> None:
    """In the error of those that have none."""
    kv = torch.zeros(9, 1, 576, dtype=torch.bfloat16, requires_grad=True)
    rows = torch.zeros(2, 1, 64, dtype=torch.int32)
    with pytest.raises(
        ValueError, match="^kv: expected .* no gradient .* score_mod reads, of flex_attention"
    ):
        rawmla.flash_mla_sparse_fwd(torch.zeros(2, 64, 576, dtype=torch.bfloat16), kv, rows, 0.1)


# ---- fixed order, and programs of torch.compile


@pytest.fixture
def order() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("argument", "switch", "wanted"),
    ((None, False, False), (True, False, True), (None, True, True), (False, True, False)),
)
def test_fixed_order(
    launches: Launches, order: None, argument: bool | None, switch: bool, wanted: bool
) -> None:
    """Wanted by the argument of the forward, or by torch's switch as the backward pass finds it."""
    case = Case(launches)
    out = case.call(case.all_leaves(), deterministic=argument)
    torch.use_deterministic_algorithms(switch, warn_only=True)
    out.float().sum().backward()
    (_, call, _) = launches.backward[0]
    assert call.deterministic is wanted


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", full_unless(lambda name: name != "eager", ("eager", "aot_eager")))
def test_torch_compile(launches: Launches, dynamo: Any, backend: str) -> None:
    """Gradients go through the call, from the graph behind it to the one before it."""
    case = Case(launches, "table", "documents")
    launches.score = lambda scaled: table_of("scaled", scaled)

    def step(query: Any, key: Any, value: Any, table: Any, weight: Any) -> Any:
        def biased(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + scaled[h, q - k + S]

        scaled = table * 1.5
        out, lse = rawmla.flex_attention(
            query * 2, key, value, biased, case.block_mask, enable_gqa=True, return_lse=True
        )
        return (out.float() @ weight).sin().sum() + lse.sum() * 0.1

    def gradients(function: Any) -> dict[str, Any]:
        leaves = case.all_leaves()
        leaves["weight"] = torch.linspace(-1, 1, EV * 3).view(EV, 3).requires_grad_()
        function(*leaves.values()).backward()
        return {name: x.grad for name, x in leaves.items()}

    wanted = gradients(step)
    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        for name, x in gradients(compiled).items():
            torch.testing.assert_close(x, wanted[name], rtol=1e-5, atol=1e-6)
    assert len(launches.backward) == 3
    report = dynamo.explain(step)(*[x.detach() for x in case.all_leaves().values()], torch.ones(EV, 3))
    assert (report.graph_break_count, report.graph_count) == (1, 2)
