"""Attention of some rows by its definition in float64: what timed results are checked against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cases import Arrays, Case, worst_error

ALL = slice(None)


def _wide(x: Any, heads: int) -> Any:
    """Keys or values in float64, repeated for each of these query heads."""
    return x.double().repeat_interleave(heads // x.shape[1], dim=1)


@dataclass
class Request:
    """One request: q `[n, h_q, d]`, k and v `[m, h_kv, d]`, of which the last query stands at the last key.

    `seen` takes the positions of queries `[n, 1]` and of keys `[m]`, and returns which keys a query attends.
    `score` changes scores `[h_q, n, m]`, given the same positions. `sink` `[h_q]` is a further score without
    a value. `results`: out and its gradient `[n, h_q, d_v]`, and lse `[h_q, n]`.
    """

    q: Any
    k: Any
    v: Any
    seen: Callable[[Any, Any], Any]
    score: Callable[[Any, Any, Any], Any] = lambda scores, own, keys: scores
    sink: Any = None
    results: tuple[Any, ...] = ()

    def _positions(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        every = torch.arange(len(self.k), device=self.q.device)
        return every[len(self.k) - len(self.q) :][rows, None], every[columns]

    def _products(self, rows: Any, columns: Any) -> Any:
        """Scaled products `[h_q, n, m]` of some queries and keys."""
        q = self.q[rows].double()
        return torch.einsum("nhd,mhd->hnm", q, _wide(self.k[columns], q.shape[1])) * q.shape[-1] ** -0.5

    def _total(self, lse: Any) -> Any:
        """The logarithm of the sums that probabilities are divided by, `[h_q, n, 1]`."""
        return (lse if self.sink is None else torch.logaddexp(lse, self.sink.double()[:, None]))[..., None]

    def attend(self, rows: Any) -> tuple[Any, Any, Any]:
        """Return out `[n, h_q, d_v]`, and lse and the largest score `[h_q, n]` of some queries."""
        places = self._positions(rows, ALL)
        scores = self.score(self._products(rows, ALL), *places)
        scores = scores.masked_fill(~self.seen(*places), float("-inf"))
        lse = scores.logsumexp(-1)
        v = _wide(self.v, self.q.shape[1])
        out = torch.einsum("hnm,mhd->nhd", (scores - self._total(lse)).exp(), v)
        return out, lse, scores.amax(-1)

    def backpropagate(self, rows: Any, columns: Any, captured: Any = None) -> tuple[Any, Any, Any, Any]:
        """Return what some queries and keys add to dq, dk, dv and to the gradient of `captured`."""
        out, dout = (x[rows].double() for x in self.results[:2])
        places, products = self._positions(rows, columns), self._products(rows, columns).requires_grad_()
        with torch.enable_grad():
            scores = self.score(products, *places)
        total = self._total(self.results[2][:, rows].double())
        p = torch.where(self.seen(*places), (scores.detach() - total).exp(), 0.0)
        heads, kv_heads = self.q.shape[1], self.k.shape[1]
        by_p = torch.einsum("nhd,mhd->hnm", dout, _wide(self.v[columns], heads))
        by_p -= (dout * out).sum(-1).T[..., None]
        wanted = [products] if captured is None else [products, captured]
        by_product, *by_captured = torch.autograd.grad(scores, wanted, p * by_p)
        by_product = by_product * self.q.shape[-1] ** -0.5
        dq = torch.einsum("hnm,mhd->nhd", by_product, _wide(self.k[columns], heads))
        dk, dv = (
            torch.einsum("hnm,nhd->mhd", one, x.double()).unflatten(1, (kv_heads, -1)).sum(2)
            for one, x in ((by_product, self.q[rows]), (p, dout))
        )
        return dq, dk, dv, by_captured[0] if by_captured else None


@dataclass(eq=False)
class AttentionCase(Case):
    """A case of b requests. Some tokens of the first and the last one are checked."""

    b: int

    def request(self, inputs: Arrays, number: int) -> Request:
        """A request of the inputs."""
        raise NotImplementedError

    def of_request(self, array: Any, number: int, keys: bool = False) -> Any:
        """A request's tokens of an array, `[tokens, heads, d]`; `keys`: the array is of keys."""
        raise NotImplementedError

    @torch.no_grad()
    def check(self, inputs: Arrays, out: Any, further: Any = None, bound: float = 0.01) -> float:
        """Error of the first, a middle and the last query token. `further`: what has lse and max_scores, of
        which 0.001 are allowed.
        """
        found: list[Any] = []
        for number in {0, self.b - 1}:
            request = self.request(inputs, number)
            tokens = sorted({0, len(request.q) // 2, len(request.q) - 1})
            want, *wanted = request.attend(tokens)
            names = (f"token {token} of request {number}" for token in tokens)
            found += zip(names, self.of_request(out, number)[tokens], want, strict=True)
            for name, one in zip(("lse", "max_scores"), wanted if further else (), strict=False):
                error = float((getattr(further, name)[number, :, tokens].double() - one).abs().max())
                assert error < 0.001, f"{self.id}: {name} of request {number} has an error of {error}"
        return worst_error(self, found, bound)

    def check_gradients(self, inputs: Arrays, gradients: Any) -> float:
        """Error of dq of a middle and the last query token (with one visible key dq is 0), and of dk and dv
        of the keys that the first, a middle and the last one stand at.
        """
        found: list[Any] = []
        for number in {0, self.b - 1}:
            request = self.request(inputs, number)
            queries, first = len(request.q), len(request.k) - len(request.q)
            rows = sorted({queries // 2, queries - 1})
            columns = sorted({first, first + queries // 2, first + queries - 1})
            wanted = request.backpropagate(rows, ALL)[0], *request.backpropagate(ALL, columns)[1:3]
            places = zip(("dq", "dk", "dv"), gradients, (rows, columns, columns), wanted, strict=False)
            for name, array, tokens, want in places:
                names = (f"{name} of token {token} of request {number}" for token in tokens)
                got = self.of_request(array, number, keys=name != "dq")[tokens]
                found += zip(names, got, want, strict=True)
        return worst_error(self, found)
