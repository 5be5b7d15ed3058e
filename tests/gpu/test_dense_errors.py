"""Refused calls: nothing is launched, nothing is written, the next call works."""

from collections.abc import Callable
from typing import Any

import pytest
from gpu_support import assert_same_bits, decode, torch

import rawmla
from rawmla.testing import DenseCase, make_dense_inputs

Arguments = dict[str, Any]


def _replaced(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    def apply(arguments: Arguments) -> None:
        arguments[name] = change(arguments[name])

    return apply


BAD_CALLS: dict[str, tuple[type[Exception], str, Callable[[Arguments], None]]] = {
    "q on the CPU": (ValueError, "q", _replaced("q", lambda x: x.cpu())),
    "k_cache on the CPU": (ValueError, "k_cache", _replaced("k_cache", lambda x: x.cpu())),
    "lengths on the CPU": (ValueError, "cache_seqlens", _replaced("cache_seqlens", lambda x: x.cpu())),
    "q not an array": (TypeError, "q", _replaced("q", lambda x: [1.0])),
    "q float32": (TypeError, "q", _replaced("q", lambda x: x.float())),
    "k_cache of another dtype": (TypeError, "k_cache", _replaced("k_cache", lambda x: x.half())),
    "block_table int64": (TypeError, "block_table", _replaced("block_table", lambda x: x.long())),
    "lengths int64": (TypeError, "cache_seqlens", _replaced("cache_seqlens", lambda x: x.long())),
    "q of 3 dimensions": (ValueError, "q", _replaced("q", lambda x: x[0])),
    "q with a strided last dimension": (ValueError, "q", _replaced("q", lambda x: x.mT.contiguous().mT)),
    "d_qk 320": (ValueError, "q", _replaced("q", lambda x: x[..., :320])),
    "k_cache of another d_qk": (ValueError, "k_cache", _replaced("k_cache", lambda x: x[..., :512])),
    "page of 48 tokens": (ValueError, "k_cache", _replaced("k_cache", lambda x: x[:, :48])),
    "k_cache with odd strides": (
        ValueError,
        "k_cache",
        _replaced("k_cache", lambda x: torch.nn.functional.pad(x, (0, 1))[..., :576]),
    ),
    "one table row too few": (ValueError, "block_table", _replaced("block_table", lambda x: x[:-1])),
    "one length too few": (ValueError, "cache_seqlens", _replaced("cache_seqlens", lambda x: x[:-1])),
    "head_dim_v 256": (ValueError, "head_dim_v", _replaced("head_dim_v", lambda x: 256)),
    "scale 0": (ValueError, "softmax_scale", _replaced("softmax_scale", lambda x: 0.0)),
    "scale NaN": (ValueError, "softmax_scale", _replaced("softmax_scale", lambda x: float("nan"))),
    "out of another dtype": (TypeError, "out", _replaced("out", lambda x: x.float())),
    "out of another shape": (ValueError, "out", _replaced("out", lambda x: x[:, :1])),
    "plan of 7 columns": (
        ValueError,
        "tile_scheduler_metadata",
        _replaced("tile_scheduler_metadata", lambda x: x[:, :7].contiguous()),
    ),
    "plan of int64": (
        TypeError,
        "tile_scheduler_metadata",
        _replaced("tile_scheduler_metadata", lambda x: x.long()),
    ),
    "num_splits missing": (ValueError, "num_splits", _replaced("num_splits", lambda x: None)),
    "num_splits too short": (ValueError, "num_splits", _replaced("num_splits", lambda x: x[:-1])),
    "topk_length without indices": (
        ValueError,
        "topk_length",
        _replaced("topk_length", lambda x: torch.zeros(3, dtype=torch.int32, device="cuda")),
    ),
    "indices with causal": (
        ValueError,
        "causal",
        _replaced("indices", lambda x: torch.zeros(3, 2, 64, dtype=torch.int32, device="cuda")),
    ),
    "FP8 without indices": (
        NotImplementedError,
        "is_fp8_kvcache",
        _replaced("is_fp8_kvcache", lambda x: True),
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_refused_call_leaves_nothing_behind(name: str) -> None:
    kind, argument, change = BAD_CALLS[name]
    inputs = make_dense_inputs(DenseCase(b=3, s_q=2, h_q=16, s_k=300, varlen=True, causal=True))
    want_out, want_lse = decode(inputs)
    metadata, num_splits = rawmla.get_mla_metadata(inputs.cache_seqlens, 32, 1)
    canary = torch.full((3, 2, 16, 512), -7.0, dtype=torch.bfloat16, device="cuda")
    arguments: Arguments = {
        "q": inputs.q,
        "k_cache": inputs.k_cache,
        "block_table": inputs.block_table,
        "cache_seqlens": inputs.cache_seqlens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        "softmax_scale": None,
        "causal": True,
        "is_fp8_kvcache": False,
        "indices": None,
        "topk_length": None,
        "out": canary,
    }
    good = dict(arguments)
    change(arguments)
    torch.cuda.synchronize()
    memory = torch.cuda.memory_allocated()
    with pytest.raises(kind, match=f"^{argument}"):
        rawmla.flash_mla_with_kvcache(**arguments)
    assert torch.cuda.memory_allocated() == memory
    assert torch.cuda.current_stream().query(), "a refused call left work running"
    assert bool((canary == -7.0).all())
    out, lse = rawmla.flash_mla_with_kvcache(**good)
    torch.cuda.synchronize()
    assert_same_bits("out of the next call", out, want_out)
    assert_same_bits("lse of the next call", lse, want_lse)


def test_refused_call_leaves_an_empty_plan_empty() -> None:
    inputs = make_dense_inputs(DenseCase(b=3, h_q=16, s_k=300))
    metadata, _ = rawmla.get_mla_metadata()
    with pytest.raises(ValueError, match="cache_seqlens"):
        rawmla.flash_mla_with_kvcache(
            inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens[:2], 512, metadata
        )
    assert not metadata.have_initialized
    assert (
        metadata.config is None and metadata.tile_scheduler_metadata is None and metadata.num_splits is None
    )
