"""The calls of engines in tests/contracts/flash_attn: their views in memory, values for them, and what they
should give.

tests/contracts/record_flash_attn.py writes the files. A view has the recorded shape, strides and storage
offset in a parent of poison of the recorded size. Works on any device.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from contract_calls import CONTRACTS, Recorded
from contract_calls import recorded as recorded_in
from gpu_support import POISON_BYTE, assert_poison

from kit.generators import GARBAGE_PAGE
from kit.mha import flash_attn_func, problems_of_lse, problems_of_out
from rawmla.compat import vllm_flash_attn
from rawmla.engines import sglang
from rawmla.engines.plug_in import or_original

PASSED_ON = "what the engine's own function returns"
NAMES = {  # of SGLang's arguments, by vLLM's
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "block_table": "page_table",
    "s_aux": "sinks",
}


def recorded() -> list[Recorded]:
    """All calls of all files."""
    return recorded_in(CONTRACTS / "flash_attn")


def id_of(record: Recorded) -> str:
    """For pytest."""
    lse = ", lse" if record.arguments.get("return_softmax_lse") else ""
    cache = ", no cache" if record.arguments.get("cu_seqlens_k") else ""
    return f"{record.engine} {record.versions[-1]}: {record.case}{cache}{lse}"


def is_passed_on(record: Recorded) -> bool:
    """Whether the engine's own function computes the call."""
    return record.case in (
        "Llama, FP8 cache, decode and prefill",
        "Llama, prefill, pages of one token",
        "Llama, deterministic, pages of one token",
    )


def function_of(record: Recorded) -> Any:
    """rawmla's function by the engine's name, around one that returns `PASSED_ON`."""

    def original(*args: Any, **kwargs: Any) -> str:
        return PASSED_ON

    if record.engine == "sglang":
        return partial(sglang._flash_attn_with_kvcache, original)
    return or_original(vllm_flash_attn.flash_attn_varlen_func, original)


class Call:
    """A recorded call with memory of its own; `fill` gives it new values in place."""

    def __init__(self, record: Recorded, device: str) -> None:
        import torch

        self.record = record
        self.device = device
        self.function = function_of(record)
        self.parents: dict[str, Any] = {}
        self.arguments = {name: self._placed(name, value) for name, value in record.arguments.items()}
        self.random = torch.Generator(device=device)
        self.fill(0)

    def _placed(self, name: str, value: Any) -> Any:
        """A tensor where a view was recorded, within poison."""
        import torch

        if not isinstance(value, dict):
            return value
        dtype = getattr(torch, value["dtype"])
        parent = torch.full(
            (value["elements"] * dtype.itemsize,), POISON_BYTE, dtype=torch.uint8, device=self.device
        )
        self.parents[name] = parent
        return parent.view(dtype).as_strided(value["shape"], value["strides"], value["offset"])

    def given(self, name: str) -> Any:
        """An argument by vLLM's name; None if it was not passed."""
        if self.record.engine == "sglang":
            name = NAMES.get(name, name)
        return self.arguments.get(name)

    # ---- values

    def fill(self, seed: int) -> None:
        """New values everywhere, at the same addresses; what no request has is NaN."""
        self.random.manual_seed(seed)
        q, k, v, table = [self.given(name) for name in ("q", "k", "v", "block_table")]
        self.parents["q"].fill_(POISON_BYTE)
        _put(q, self._normal(q.shape))
        if self.given("out") is not None:
            self.parents["out"].fill_(POISON_BYTE)
        self._divide(self.given("cu_seqlens_q"), len(q), int(self.given("max_seqlen_q")))
        self.parents[self._own("k")].fill_(POISON_BYTE)
        self.parents[self._own("v")].fill_(POISON_BYTE)
        if table is None:
            self._divide(self.given("cu_seqlens_k"), len(k), int(self.given("max_seqlen_k")))
            _put(k, self._normal(k.shape))
            _put(v, self._normal(v.shape))
        else:
            self._fill_pages(k, v, table)
        sink, slopes = self.given("s_aux"), self.given("alibi_slopes")
        if sink is not None:
            sink.copy_(self._normal(sink.shape))
            sink[-1] = -inf
        if slopes is not None:
            slopes.copy_(self._normal(slopes.shape).abs())
        for number, name in enumerate(("q_descale", "k_descale", "v_descale")):
            if self.given(name) is not None:
                self.parents[name].view(self.given(name).dtype).fill_(0.5 + 0.25 * (number + seed))

    def _own(self, name: str) -> str:
        return NAMES[name] if self.record.engine == "sglang" else name

    def _normal(self, shape: Any) -> Any:
        import torch

        return torch.randn(tuple(shape), generator=self.random, device=self.device)

    def _integers(self, low: int, high: int, count: int) -> list[int]:
        import torch

        drawn = torch.randint(low, high, (count,), generator=self.random, device=self.device)
        return drawn.tolist()

    def _divide(self, starts: Any, total: int, most: int) -> None:
        """First tokens of requests of any length; the first request is as long as it may be."""
        import torch

        ends, left = [0], total
        for request, length in enumerate(self._integers(0, most + 1, len(starts) - 1)):
            length = min(left, most if request == 0 else length)
            ends.append(ends[-1] + length)
            left -= length
        starts.copy_(torch.tensor(ends, dtype=torch.int32))

    def _fill_pages(self, k: Any, v: Any, table: Any) -> None:
        """Tokens of requests of any number; the first request has all, the last of several none."""
        import torch

        lengths, page = self.given("seqused_k"), k.shape[1]
        requests, columns = table.shape
        drawn = self._integers(0, columns * page + 1, requests)
        drawn[-1], drawn[0] = 0, columns * page
        lengths.copy_(torch.tensor(drawn, dtype=torch.int32))
        blocks = self._integers(0, len(k), requests * columns)
        table.copy_(torch.tensor(blocks, dtype=torch.int32).view(requests, columns))
        for request, length in enumerate(drawn):
            token = torch.arange(length, device=self.device)
            places = table[request, token // page].long(), token % page
            for cache in (k, v):
                values = self._normal((length, *cache.shape[2:])).to(cache.dtype)
                as_bytes(cache)[places] = as_bytes(values)
            table[request, -(-length // page) :] = GARBAGE_PAGE

    # ---- the call

    def run(self) -> Any:
        """The call, its arguments by position and by name as recorded."""
        values = list(self.arguments.values())[: self.record.positional]
        named = dict(list(self.arguments.items())[self.record.positional :])
        return self.function(*values, **named)

    # ---- what it should give

    def check(self, got: Any) -> None:
        """Compare results of every request with the reference; other rows of a given out are not written."""
        import torch

        with_lse = bool(self.given("return_softmax_lse"))
        out, lse = got if with_lse else (got, None)
        q, v, given = self.given("q"), self.given("v"), self.given("out")
        assert out.shape == (*q.shape[:2], v.shape[-1]) and out.is_contiguous()
        assert given is None or out.data_ptr() == given.data_ptr()
        if with_lse:
            assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
        starts = self.given("cu_seqlens_q").tolist()
        for request in range(len(starts) - 1):
            rows = slice(starts[request], starts[request + 1])
            if rows.start == rows.stop:
                continue
            want, want_lse = self._wanted(request, q[rows])
            softcap = bool(self.given("softcap"))
            name = str(out.dtype).removeprefix("torch.")
            problems = problems_of_out(out[rows], want, name, 4.0 if softcap else 1.0)
            if lse is not None:
                problems += problems_of_lse("lse", lse[:, rows], want_lse, approximate=softcap)
            assert not problems, f"{id_of(self.record)}, request {request}: {'; '.join(problems)}"
        if given is not None:
            assert_poison("out after the last request", given[starts[-1] :])

    def _wanted(self, request: int, queries: Any) -> tuple[Any, Any]:
        """out `[s_q, h_q, d_v]` and lse `[h_q, s_q]` in float64, with the sink in lse as vLLM has it."""
        import torch

        keys, values = (self._tokens(name, request).double() for name in ("k", "v"))
        queries = queries.double()
        if self.given("k").element_size() == 1:
            for factor in ("q_descale", "k_descale"):
                if self.given(factor) is not None:
                    queries = queries * self.given(factor)[request, 0].double()
            values = values * self.given("v_descale")[request, 0].double()
        slopes, sink = self.given("alibi_slopes"), self.given("s_aux")
        out, lse = flash_attn_func(
            queries[None],
            keys[None],
            values[None],
            self.given("softmax_scale"),
            bool(self.given("causal")),
            tuple(self.given("window_size") or (-1, -1)),
            float(self.given("softcap") or 0),
            slopes,
            sink,
        )
        if sink is not None:
            lse = torch.logaddexp(lse, sink.double()[:, None])
        return out[0], lse[0]

    def _tokens(self, name: str, request: int) -> Any:
        """The keys or values of a request."""
        import torch

        array, table = self.given(name), self.given("block_table")
        if table is None:
            first, end = self.given("cu_seqlens_k")[request : request + 2].tolist()
            return array[first:end]
        token = torch.arange(int(self.given("seqused_k")[request]), device=self.device)
        page = array.shape[1]
        found = as_bytes(array)[table[request, token // page].long(), token % page]
        return found.view(array.dtype)


def as_bytes(x: Any) -> Any:
    """An FP8 array as bytes, which can be indexed on a CPU too; others as they are."""
    import torch

    return x.view(torch.uint8) if x.element_size() == 1 else x


def _put(array: Any, values: Any) -> None:
    as_bytes(array).copy_(as_bytes(values.to(array.dtype)))


LONGER_REQUESTS = ("Llama, decode and prefill", "Llama, batch invariance")


def of_longer_requests(case: str, device: str) -> Call:
    """A call whose requests are longer than its max_seqlen_q, as in graphs for prompts of vLLM 0.20 to 0.30,
    which capture them as if every request had one token.
    """
    call = Call(next(record for record in recorded() if record.case == case), device)
    call.arguments["max_seqlen_q"] = 1
    return call
