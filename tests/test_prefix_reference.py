"""`rawmla.reference.context_attention_fwd` against dense attention over gathered keys and values."""

from typing import Any

import numpy as np
import pytest

from rawmla import reference

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
QUERY_LENGTHS, CONTEXTS = (4, 1, 0, 6, 1, 2), (9, 5, 3, 0, 0, 16)
START_LOC = np.cumsum((1, *QUERY_LENGTHS))
TOKENS = int(START_LOC[-1]) + 2
SEQ_LENS = np.array(QUERY_LENGTHS) + CONTEXTS
H_Q, H_KV, D = 4, 2, 12
CONTEXT = "the older tokens"
ALL = "all tokens"
UNUSED = 2**31 - 1
"""What the block table says of pages that no request has."""


class Batch:
    """Requests with keys and values of their own, some of them in a cache of pages in any order.

    The rest of the cache and the rows of no request are NaN.
    """

    def __init__(
        self, block_size: int = 4, x: int = 4, pack: int = 0, cached: str = CONTEXT, codes: Any = None
    ) -> None:
        rng = np.random.default_rng([block_size, x, pack])
        self.q = np.full((TOKENS, H_Q, D), np.nan)
        self.k, self.v = (np.full((TOKENS, H_KV, D), np.nan) for _ in range(2))
        self.keys, self.values = [], []  # of each request, in the order of positions
        max_blocks = -(-int(SEQ_LENS.max()) // block_size) + 1
        num_blocks = 6 * max_blocks + 2
        free = rng.permutation(num_blocks).tolist()
        poison = np.nan if codes is None else 0x7F
        dtype = np.float64 if codes is None else np.uint8
        self.k_cache = np.full((num_blocks, H_KV, D // x, block_size, x), poison, dtype)
        self.v_cache = np.full((num_blocks, H_KV, D, block_size), poison, dtype)
        self.table = np.full((6, max_blocks), UNUSED, np.int64)
        for r, (query_len, context) in enumerate(zip(QUERY_LENGTHS, CONTEXTS, strict=True)):
            own = slice(START_LOC[r], START_LOC[r + 1])
            self.q[own] = rng.standard_normal((query_len, H_Q, D))
            shape = (context + query_len, H_KV, D)
            if codes is None:
                keys, values = rng.standard_normal((2, *shape))
                stored = (keys, values)
            else:
                stored = tuple(rng.choice(codes, shape) for _ in range(2))
                keys, values = rng.standard_normal((2, *shape))
            self.k[own], self.v[own] = keys[context:], values[context:]
            self.keys.append(keys)
            self.values.append(values)
            for t in range(len(keys) if cached == ALL else context):
                if t % block_size == 0:
                    self.table[r, t // block_size] = free.pop()
                self.put(r, t, stored[0][t], stored[1][t], pack)
            self.keys[-1][:context] = stored[0][:context]
            self.values[-1][:context] = stored[1][:context]

    def put(self, r: int, t: int, key: np.ndarray, value: np.ndarray, pack: int) -> None:
        """Write a token into the cache, element by element as the layout is defined."""
        block_size, x = self.k_cache.shape[3:]
        page, offset = self.table[r, t // block_size], t % block_size
        for h in range(H_KV):
            memory = self.v_cache[page, h].reshape(-1)  # a view
            for c in range(D):
                self.k_cache[page, h, c // x, offset, c % x] = key[h, c]
                if pack:
                    packed = memory.reshape(block_size // pack, D, pack)
                    packed[offset // pack, c, offset % pack] = value[h, c]
                else:
                    self.v_cache[page, h, c, offset] = value[h, c]

    def call(self, o: Any = None, **changes: Any) -> np.ndarray:
        """o of the call, 7 where it was not written."""
        arguments: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "o": np.full((TOKENS, H_Q, D), 7.0) if o is None else o,
            "kv_cache_dtype": "auto",
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "b_loc": self.table,
            "b_start_loc": START_LOC,
            "b_seq_len": SEQ_LENS,
            "max_seq_len": None,
            "max_input_len": 6,
            "k_scale": 1.0,
            "v_scale": 1.0,
            **changes,
        }
        result = reference.context_attention_fwd(**arguments)
        assert result is arguments["o"]
        return result

    def dense(self, right: int | None = 0, window: int = 0, **options: Any) -> np.ndarray:
        """The same by `flash_attn_varlen_func`, whose windows do not count the query's own position."""
        k, v = np.concatenate(self.keys), np.concatenate(self.values)
        out = np.full((TOKENS, H_Q, D), 7.0)
        options |= {"window_size": (window - 1, right), "out": out}
        reference.flash_attn_varlen_func(self.q, k, v, START_LOC, np.cumsum((0, *SEQ_LENS)), 6, 18, **options)
        return out


def check(got: Any, want: np.ndarray) -> None:
    assert np.isfinite(want).all() and (want[:1] == 7).all() and (want[-2:] == 7).all()
    np.testing.assert_allclose(got, want, **TIGHT)


LAYOUTS = (
    (4, 4, 0),
    (1, 12, 0),
    (16, 2, 0),
    (3, 1, 0),
    (7, 6, 0),
    (4, 4, 2),
    (4, 4, 4),
    (16, 4, 8),
    (3, 4, 1),
)
SINKS, SLOPES = np.array([0.3, -1.0, 2.0, np.inf]), np.array([0.5, 0.25, 0.0, 1.0])


@pytest.mark.parametrize(("block_size", "x", "pack"), LAYOUTS)
def test_layouts(block_size: int, x: int, pack: int) -> None:
    batch = Batch(block_size, x, pack)
    check(batch.call(interleaved_v_pack_factor=pack), batch.dense())


@pytest.mark.parametrize(("block_size", "x", "pack"), LAYOUTS)
def test_all_tokens_in_the_cache(block_size: int, x: int, pack: int) -> None:
    batch = Batch(block_size, x, pack, cached=ALL)
    for causal in (True, False):
        got = batch.call(k=None, v=None, interleaved_v_pack_factor=pack, causal=causal)
        check(got, batch.dense(right=0 if causal else None))


@pytest.mark.parametrize("window", (0, 1, 2, 5, 100))
@pytest.mark.parametrize("causal", (True, False))
def test_scores_and_masks(causal: bool, window: int) -> None:
    batch = Batch()
    right = 0 if causal else None
    options: dict[str, Any] = {"causal": causal, "sliding_window": window}
    check(batch.call(**options), batch.dense(right, window))
    check(batch.call(**options, sinks=SINKS), batch.dense(right, window, attn_sink=SINKS))
    check(batch.call(**options, sm_scale=0.4), batch.dense(right, window, softmax_scale=0.4))
    if causal:
        got = batch.call(**options, sinks=SINKS, alibi_slopes=SLOPES)
        check(got, batch.dense(right, window, attn_sink=SINKS, alibi_slopes=SLOPES))


def test_windows_that_are_off() -> None:
    batch = Batch()
    for off in (None, 0, -1):
        np.testing.assert_array_equal(batch.call(sliding_window=off), batch.call())


@pytest.mark.parametrize("cached", (CONTEXT, ALL))
@pytest.mark.parametrize("window", (1, 3, 6))
def test_pages_outside_windows_are_not_looked_at(window: int, cached: str) -> None:
    """Engines use them again: the table names no page there. Older tokens of the first page are NaN."""
    batch = Batch(cached=cached)
    want = batch.dense(window=window)
    own: dict[str, Any] = {"k": None, "v": None} if cached == ALL else {}
    forgotten = 0
    for r, context in enumerate(CONTEXTS):
        first = max(context - window + 1, 0)
        for t in range(first if QUERY_LENGTHS[r] else context):
            batch.put(r, t, np.full((H_KV, D), np.nan), np.full((H_KV, D), np.nan), 0)
        gone = first // 4 if QUERY_LENGTHS[r] else len(batch.table[r])
        batch.table[r, :gone] = UNUSED
        forgotten += gone
    assert forgotten > 6
    check(batch.call(sliding_window=window, **own), want)


def test_skip_decode() -> None:
    batch = Batch()
    want = batch.dense()
    for r in (1, 4):
        want[START_LOC[r]] = 7
    check(batch.call(skip_decode=True), want)


@pytest.mark.parametrize("cached", (CONTEXT, ALL))
def test_less_than_its_queries(cached: str) -> None:
    """b_seq_len below query_len: nothing is older. In the cache there are no tokens from b_seq_len on."""
    batch = Batch(cached=ALL)
    for r in (1, 2, 4, 5):
        batch.table[r] = UNUSED
    seq_lens, start_loc = np.array([0, 0, 0, 4, 0, 0]), np.array([1, 1, 1, 1, 7, 7, 7])
    batch.q[1:7] = np.random.default_rng(3).standard_normal((6, H_Q, D))
    batch.table[3, 1:] = UNUSED
    keys, values = batch.keys[3], batch.values[3]
    if cached == ALL:
        got = batch.call(k=None, v=None, b_start_loc=start_loc, b_seq_len=seq_lens)
        keys, values = (np.where(np.arange(6)[:, None, None] < 4, x, np.nan) for x in (keys, values))
        seen = 4
    else:
        batch.k[1:7], batch.v[1:7] = keys, values
        got = batch.call(b_start_loc=start_loc, b_seq_len=seq_lens)
        seen = 6
    for j in range(6):
        stop = min(j + 1, seen)
        want, _ = reference.flash_attn_func(
            batch.q[None, 1 + j : 2 + j], keys[None, :stop], values[None, :stop]
        )
        np.testing.assert_allclose(got[1 + j], want[0, 0], **TIGHT)


E4M3 = [code for code in range(256) if code & 0x7F != 0x7F and abs(int(code & 0x7F)) < 0x48]
E5M2 = [code for code in range(256) if code & 0x7F < 0x44]


@pytest.mark.parametrize("name", ("fp8", "fp8_e4m3", "fp8_e5m2"))
@pytest.mark.parametrize("cached", (CONTEXT, ALL))
def test_quantised_caches(cached: str, name: str) -> None:
    """A byte is its float8 number times a scale, for the tokens that are read from the cache."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = ml_dtypes.float8_e5m2 if name == "fp8_e5m2" else ml_dtypes.float8_e4m3fn
    batch = Batch(16, 4, 8, cached=cached, codes=np.array(E5M2 if name == "fp8_e5m2" else E4M3, np.uint8))
    options: dict[str, Any] = {"k": None, "v": None} if cached == ALL else {}
    k_scale, v_scale = 0.25, 3.0
    for r, seq_len in enumerate(SEQ_LENS):
        for t in range(seq_len if cached == ALL else CONTEXTS[r]):
            page, offset = batch.table[r, t // 16], t % 16
            k = batch.k_cache[page, :, :, offset].reshape(H_KV, D).view(kind)
            v = batch.v_cache[page].reshape(H_KV, 2, D, 8)[:, offset // 8, :, offset % 8].copy().view(kind)
            batch.keys[r][t], batch.values[r][t] = k.astype(np.float64) * 0.25, v.astype(np.float64) * 3
    options |= {"kv_cache_dtype": name, "interleaved_v_pack_factor": 8, "sinks": SINKS, "sliding_window": 9}
    want = batch.dense(window=9, attn_sink=SINKS)
    check(batch.call(**options, k_scale=k_scale, v_scale=v_scale), want)
    scales = {"k_scale": np.array([0.25], np.float32), "v_scale": np.array(3.0, np.float32)}
    check(batch.call(**options, **scales), want)
    for other in (np.int8, kind):
        caches = {"k_cache": batch.k_cache.view(other), "v_cache": batch.v_cache.view(other)}
        check(batch.call(**options, **scales, **caches), want)


def test_decoding_e5m2() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e5m2).astype(np.float32)
    np.testing.assert_array_equal(reference.decode_e5m2(codes), want)


@pytest.mark.parametrize("scale", (0.03, 0.001, 7.0))
def test_quantised_output(scale: float) -> None:
    """The nearest e4m3 number to out / scale, with 0.001 past its range."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    batch = Batch()
    rows = slice(1, START_LOC[-1])
    want = np.clip(batch.dense() / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert (abs(want[rows].astype(float)).max() == 448) == (scale == 0.001)
    for dtype in (np.uint8, np.int8, ml_dtypes.float8_e4m3fn):
        for given in (scale, np.array([scale])):
            o = np.full((TOKENS, H_Q, D), 9).astype(dtype)
            before = o.copy()
            got = batch.call(o, fp8_out_scale=given)
            np.testing.assert_array_equal(got[rows].view(np.uint8), want[rows].view(np.uint8))
            rest = np.r_[0, START_LOC[-1] : TOKENS]
            np.testing.assert_array_equal(got[rest], before[rest])


@pytest.mark.parametrize("padding", (0, 2))
def test_tables_of_addresses(padding: int) -> None:
    """Entries above 0 are where a block of k_cache begins; 0 is block 0, as in any table."""
    batch = Batch()
    parent = np.full((len(batch.k_cache), H_KV + padding, *batch.k_cache.shape[2:]), np.nan)
    k_cache = parent[:, :H_KV]
    k_cache[...] = batch.k_cache
    listed = batch.table != UNUSED
    addresses = np.where(listed, k_cache.ctypes.data + batch.table * parent.strides[0], batch.table)
    addresses[batch.table == 0] = 0
    want = batch.dense()
    check(batch.call(k_cache=k_cache, b_loc=addresses, is_block_table_ptr=True), want)
    with pytest.raises(IndexError, match="^b_loc: expected blocks of k_cache, which has"):
        batch.call(k_cache=k_cache, b_loc=addresses + 8, is_block_table_ptr=True)
    torch = pytest.importorskip("torch")
    caches = {"k_cache": torch.from_numpy(k_cache), "v_cache": torch.from_numpy(batch.v_cache)}
    arrays = {name: torch.from_numpy(getattr(batch, name)) for name in ("q", "k", "v")}
    tensors = {name: x.half() for name, x in {**caches, **arrays}.items()}
    shift = tensors["k_cache"].data_ptr()
    stride = tensors["k_cache"].stride(0) * 2
    table = torch.from_numpy(np.where(listed & (batch.table > 0), shift + batch.table * stride, batch.table))
    by_number = call_on_torch(batch, tensors, torch.from_numpy(batch.table))
    assert torch.equal(call_on_torch(batch, tensors, table, is_block_table_ptr=True), by_number)


def call_on_torch(
    batch: Batch, tensors: dict[str, Any], table: Any, dtype: Any = None, **changes: Any
) -> Any:
    """o, of q's dtype or another, of a call with tensors only."""
    import torch

    return batch.call(
        torch.full((TOKENS, H_Q, D), 7.0).to(dtype or tensors["q"].dtype),
        **tensors,
        b_loc=table,
        b_start_loc=torch.from_numpy(START_LOC).int(),
        b_seq_len=torch.from_numpy(SEQ_LENS).int(),
        **changes,
    )


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("name", ("auto", "fp8_e4m3", "fp8_e5m2"))
def test_torch_tensors(name: str, dtype: str) -> None:
    """Results are those of NumPy, rounded to q's dtype or to e4m3."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    codes = {"auto": None, "fp8_e4m3": np.array(E4M3, np.uint8), "fp8_e5m2": np.array(E5M2, np.uint8)}[name]
    batch = Batch(codes=codes)
    tensors = {x: torch.from_numpy(getattr(batch, x)) for x in ("q", "k", "v", "k_cache", "v_cache")}
    for argument, x in tensors.items():
        if x.dtype == torch.float64:
            tensors[argument] = x.to(kind)
            setattr(batch, argument, tensors[argument].double().numpy())
    want = batch.call(kv_cache_dtype=name, sinks=SINKS)
    table = torch.from_numpy(batch.table)
    if name != "auto":
        float8 = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
        tensors |= {x: tensors[x].view(float8) for x in ("k_cache", "v_cache")}
    options: dict[str, Any] = {"kv_cache_dtype": name, "sinks": torch.from_numpy(SINKS)}
    got = call_on_torch(batch, tensors, table, **options)
    assert got.dtype == kind and torch.equal(got, torch.from_numpy(want).to(kind))
    options |= {
        "k_scale": torch.tensor(1.0),
        "v_scale": torch.tensor([1.0]),
        "fp8_out_scale": torch.tensor([0.5]),
    }
    got = call_on_torch(batch, tensors, table, torch.float8_e4m3fn, **options)
    rows = slice(1, int(START_LOC[-1]))
    np.testing.assert_array_equal(
        got.view(torch.uint8)[rows].numpy(), reference.encode_e4m3(want[rows] / 0.5)
    )
