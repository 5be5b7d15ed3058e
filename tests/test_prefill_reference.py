"""`rawmla.reference.flash_mla_sparse_fwd`, and that on the device, against formulas written in other ways."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from kit import SparseCase, SparseInputs, make_sparse_inputs
from rawmla import reference

SHAPE: dict[str, Any] = {"b": 7, "h_q": 5, "s_k": 40, "topk": 33, "page_block_size": 1, "shared": True}
CASES = (
    SparseCase(**SHAPE, layout="bf16", d_qk=576),
    SparseCase(**SHAPE, layout="bf16", d_qk=512, sink=True, lengths="random", empty_rows=0.3, sharp=True),
    SparseCase(**SHAPE, layout="bf16", lengths=(0, -4, 100, 33, 32, 1, 2), block_gap=1, index_gap=3),
    SparseCase(**{**SHAPE, "page_block_size": 7}, layout="v32", sink=True, empty_rows=0.3),
    SparseCase(**{**SHAPE, "page_block_size": 7}, layout="model1", lengths="random", block_gap=1),
)


def on_numpy(inputs: Any) -> Any:
    """Inputs of torch CPU tensors as NumPy arrays, bf16 and fp16 as float64."""
    moved = {}
    for field in fields(inputs):
        array = getattr(inputs, field.name)
        if hasattr(array, "element_size"):
            moved[field.name] = array.double().numpy() if array.element_size() == 2 else array.numpy()
    return replace(inputs, **moved)


def kv_of(inputs: SparseInputs) -> Any:
    """The kv of a prefill call: rows, or the paged cache."""
    return inputs.k_cache[:, 0] if inputs.case.layout == "bf16" else inputs.k_cache


def prefill(inputs: SparseInputs, scale: float = 0.1, **kwargs: Any) -> tuple[np.ndarray, ...]:
    """The reference on a case's inputs."""
    return reference.flash_mla_sparse_fwd(
        inputs.q[:, 0],
        kv_of(inputs),
        inputs.indices,
        scale,
        **{
            "attn_sink": inputs.attn_sink,
            "topk_length": inputs.topk_length,
            "is_fp8_kvcache": inputs.case.layout != "bf16",
            **kwargs,
        },
    )


def by_powers_of_two(inputs: SparseInputs, scale: float) -> tuple[np.ndarray, ...]:
    """The definition in base 2, as it stands in the documentation; keys gathered one by one."""
    case = inputs.case
    rows = inputs.k_cache
    if case.layout != "bf16":
        rows = reference.dequantize_k_cache(rows, case.layout)
    rows = rows.reshape(-1, case.width).astype(np.float64)
    out = np.zeros((case.b, case.h_q, 512))
    max_logits, lse = np.full((case.b, case.h_q), -np.inf), np.full((case.b, case.h_q), np.inf)
    for i in range(case.b):
        counted = case.topk if inputs.topk_length is None else int(inputs.topk_length[i])
        chosen = [
            index for index in inputs.indices[i, 0].tolist()[: max(counted, 0)] if 0 <= index < len(rows)
        ]
        for h in range(case.h_q if chosen else 0):
            p = [
                scale * np.log2(np.e) * float(rows[t] @ inputs.q[i, 0, h].astype(np.float64)) for t in chosen
            ]
            max_logits[i, h] = max(p)
            lse[i, h] = max(p) + np.log2(sum(2.0 ** (x - max(p)) for x in p))
            out[i, h] = sum(2.0 ** (x - lse[i, h]) * rows[t, :512] for x, t in zip(p, chosen, strict=True))
            if inputs.attn_sink is not None:
                sink = float(inputs.attn_sink[h])
                natural = lse[i, h] * np.log(2.0)
                out[i, h] *= 0.0 if sink == np.inf else 1.0 / (1.0 + np.exp(sink - natural))
    return out, max_logits, lse


@pytest.mark.parametrize("scale", (0.04, 0.3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_powers_of_two(case: SparseCase, scale: float) -> None:
    inputs = make_sparse_inputs(case, "numpy")
    got, want = prefill(inputs, scale), by_powers_of_two(inputs, scale)
    assert all(x.dtype == np.float64 for x in got) and np.isfinite(got[0]).all() and got[0].any()
    np.testing.assert_allclose(got[0], want[0], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_is_decoding_with_a_request_per_token(case: SparseCase) -> None:
    inputs = make_sparse_inputs(case, "numpy")
    out, max_logits, lse = prefill(inputs, log_base="e")
    want_out, want_lse = reference.flash_mla_with_kvcache(
        inputs.q, inputs.k_cache, None, None, softmax_scale=0.1, **inputs.keywords()
    )
    np.testing.assert_allclose(out, want_out[:, 0], rtol=1e-12)
    np.testing.assert_allclose(lse, want_lse[:, :, 0], rtol=1e-12)
    some = np.isfinite(lse)
    assert (max_logits[some] <= lse[some] + 1e-12).all() and np.isneginf(max_logits[~some]).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bases_differ_by_a_factor(case: SparseCase) -> None:
    inputs = make_sparse_inputs(case, "numpy")
    two, natural = prefill(inputs), prefill(inputs, log_base="e")
    np.testing.assert_array_equal(two[0], natural[0])
    for one, other in zip(two[1:], natural[1:], strict=True):
        np.testing.assert_allclose(one * np.log(2.0), other, rtol=1e-14)


def test_nothing_selected() -> None:
    inputs = make_sparse_inputs(CASES[1], "numpy")
    inputs.indices[...] = -1
    out, max_logits, lse = prefill(inputs)
    assert not out.any() and np.isneginf(max_logits).all() and np.isposinf(lse).all()


def test_out_receives_the_result() -> None:
    inputs = make_sparse_inputs(CASES[0], "numpy")
    out = np.full((7, 5, 512), np.nan)
    np.testing.assert_array_equal(prefill(inputs, out=out)[0], out)


def test_bad_arguments() -> None:
    inputs = make_sparse_inputs(CASES[0], "numpy")
    q, kv = inputs.q[:, 0], kv_of(inputs)
    good = {"q": q, "kv": kv, "indices": inputs.indices, "sm_scale": 0.1}
    bad: list[tuple[str, Any, type[Exception], str]] = [
        ("d_v", 576, ValueError, "d_v: expected 512, got 576"),
        ("log_base", "10", ValueError, "log_base: expected '2' or 'e', got '10'"),
        ("sm_scale", None, TypeError, "sm_scale: expected a float, got None"),
        ("q", inputs.q, ValueError, r"q: expected shape \[s_q, h_q, 576 or 512\], got \[7, 1, 5, 576\]"),
        ("kv", inputs.k_cache, ValueError, r"kv: expected shape \[s_kv, 1, 576\], got"),
        ("kv", kv.view(np.uint16), TypeError, "kv: expected dtype bfloat16, got u"),
        ("indices", inputs.indices[1:], ValueError, r"indices: expected shape \[7, 1, topk\], got"),
        ("topk_length", np.zeros(3, np.int32), ValueError, r"topk_length: expected shape \[7\], got"),
        ("topk_length", np.zeros(7), TypeError, "topk_length: expected dtype int32, got float64"),
        ("attn_sink", np.zeros(4), ValueError, r"attn_sink: expected shape \[5\], got"),
    ]
    for name, value, error, text in bad:
        with pytest.raises(error, match="^" + text):
            reference.flash_mla_sparse_fwd(**{**good, name: value})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_torch_tensors(case: SparseCase) -> None:
    """Results are those of NumPy, rounded to the dtypes that the GPU function returns."""
    torch = pytest.importorskip("torch")
    given = make_sparse_inputs(case, "torch", "cpu")
    got, wanted = prefill(given), prefill(on_numpy(given))
    for one, want, dtype in zip(got, wanted, (torch.bfloat16, torch.float32, torch.float32), strict=True):
        assert one.dtype == dtype and torch.equal(one, torch.from_numpy(want).to(dtype))
    out = torch.zeros_like(got[0])
    assert prefill(given, out=out)[0] is out and torch.equal(out, got[0])


def test_tokens_never_depend_on_each_other() -> None:
    inputs = make_sparse_inputs(CASES[1], "numpy")
    for one, same in zip(prefill(inputs), prefill(inputs, enable_batch_invariant=True), strict=True):
        np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize("chunk_elements", (1 << 28, 2 * 33 * 600))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_reference_on_the_device(
    case: SparseCase, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from kit import torch_reference

    monkeypatch.setattr(torch_reference, "CHUNK_ELEMENTS", chunk_elements)
    inputs = make_sparse_inputs(case, "torch", "cpu")
    got = torch_reference.sparse_prefill(inputs, 0.1)
    for one, want in zip(got, prefill(on_numpy(inputs)), strict=True):
        np.testing.assert_allclose(one.numpy(), want, rtol=1e-10, atol=1e-14)


def test_shared_tokens() -> None:
    """Every request selects from the same tokens, and whatever none of them selects is poison."""
    case = replace(CASES[0], b=50, s_k=20, topk=30, empty_rows=0.5)
    inputs = make_sparse_inputs(case, "numpy")
    assert inputs.k_cache.shape == (20 + 2 + 1, 1, 1, 576)
    valid = inputs.indices[(inputs.indices >= 0) & (inputs.indices < 23)]
    named = np.zeros(23, dtype=bool)
    named[valid] = True
    assert named.sum() == 20 and not named[0]
    finite = np.isfinite(inputs.k_cache[:, 0, 0].astype(np.float32))
    np.testing.assert_array_equal(finite.all(axis=1), named)
    assert not finite[~named].any()
    assert case.id == "bf16576-b50-sq1-h5-sk20-top30-page1-shared-empty_rows0.5"
