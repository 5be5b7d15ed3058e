"""`rawmla.transformers`: tiny random models attend by rawmla as by transformers' own attention.

Without a GPU the functions of rawmla are replaced by torch twins, in float32, so that results differ by
rounding alone. With one, the functions themselves run, in bfloat16.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
from pytest import MonkeyPatch

import rawmla
from kit.gpu import missing_hopper_reason

pytest.importorskip("torch")
pytest.importorskip("transformers", "5.24", reason='needs transformers: pip install "transformers>=5.24"')

import torch  # noqa: E402
import transformers as hf  # noqa: E402
import transformers_twins as twins  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
HAS_GPU = missing_hopper_reason() is None
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float32)
GAP = 0.1 if HAS_GPU else 0.0
"""Logits of two tokens may differ by this much where one attention takes the one and another the other."""

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "initializer_range": 0.2, "pad_token_id": 0}
GROUPED = {**SMALL, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}  # all: rounding would choose others
KINDS = ["full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 5, "head_dim": 16, "layer_types": KINDS}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=32),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED, **WINDOWS, attn_logit_softcapping=5.0),
    "gpt_oss": lambda: hf.GptOssConfig(**GROUPED, **WINDOWS, **EXPERTS),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, **EXPERTS),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=5),
}
WITHOUT_SDPA = ("gemma2", "gpt_oss")

causal_models = pytest.mark.parametrize("name", CONFIGS)
PADDINGS = {"none": None, "left": [(4, 11), (0, 11), (1, 11)], "right": [(0, 7), (0, 11), (0, 10)]}


@pytest.fixture(autouse=True)
def functions(monkeypatch: MonkeyPatch) -> Iterator[None]:
    """Replace rawmla's functions by twins where there is no GPU, and forget calls and warnings."""
    for name in () if HAS_GPU else ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(rawmla, name, getattr(twins, name), raising=False)
    rawmla.transformers.register()
    twins.CALLS.clear()
    yield
    torch._dynamo.reset()


def make(config: Any, kind: Any = hf.AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    make = kind.from_config if hasattr(kind, "from_config") else kind
    model = make(config).to(DEVICE, DTYPE).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_()
    return model


def tokens(b: int = 3, s: int = 11) -> torch.Tensor:
    return torch.randint(1, 97, (b, s), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def padding(name: str) -> torch.Tensor | None:
    """A mask of 3 x 11 tokens."""
    if PADDINGS.get(name, 0) is None:
        return None
    mask = torch.zeros(3, 11, dtype=torch.int64)
    for row, (start, end) in enumerate(PADDINGS.get(name, PADDINGS["left"])):
        mask[row, start:end] = 1
    if name == "holes":
        mask[0, 6:8] = mask[2, 4] = 0
    return mask.to(DEVICE)


def check_close(model: Any, inputs: dict[str, Any], mask: torch.Tensor | None = None, exact: Any = None) -> None:
    """Hold results against eager attention in float32: the error is at most twice that of eager attention."""
    exact = copy.deepcopy(model).float() if exact is None else exact
    exact.set_attn_implementation("eager")
    results = {}
    for name, one in (("want", exact), ("eager", model), ("rawmla", model)):
        one.set_attn_implementation("eager" if name == "want" else name)
        with torch.no_grad():
            result = one(**inputs)
        result = result[0].float()
        results[name] = result if mask is None else result[mask.bool()]
    error, own = [float((results[name] - results["want"]).abs().max()) for name in ("rawmla", "eager")]
    assert results["want"].std() > 0.3
    assert error <= 2 * own + 1e-4


@causal_models
@pytest.mark.parametrize("pad", [*PADDINGS, "holes"])
def test_logits(name: str, pad: str) -> None:
    model, mask = make(CONFIGS[name]()), padding(pad)
    if pad == "holes" and "sliding_window" in CONFIGS[name]().to_diff_dict():
        pytest.skip("a window counts visible tokens, as FlashAttention's does; eager counts hidden ones")
    check_close(model, {"input_ids": tokens(), "attention_mask": mask}, mask)
    if not HAS_GPU:
        used = {"none": "flash_attn_func", "holes": "flash_attn_varlen_func", "right": "flash_attn_with_kvcache"}
        assert set(twins.CALLS) == {used.get(pad, "flash_attn_with_kvcache")}


@pytest.mark.parametrize("pad", [*PADDINGS, "holes"])
def test_without_causality(pad: str) -> None:
    mask = padding(pad)
    check_close(make(hf.BertConfig(**SMALL), hf.AutoModel), {"input_ids": tokens(), "attention_mask": mask}, mask)
    if pad != "holes":  # a window of both sides
        config = hf.ModernBertConfig(**SMALL, local_attention=6, global_attn_every_n_layers=2)
        check_close(make(config, hf.AutoModel), {"input_ids": tokens(), "attention_mask": mask}, mask)
    sizes = {**SMALL, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 64, "init_std": 0.2}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    inputs = {"input_ids": tokens(), "attention_mask": mask, "decoder_input_ids": tokens()[:, 2:]}
    check_close(make(hf.BartConfig(**sizes), hf.AutoModelForSeq2SeqLM), inputs)


def test_vision() -> None:
    sizes = {**SMALL, "image_size": 16, "patch_size": 4}
    image = torch.randn(2, 3, 16, 16, device=DEVICE, dtype=DTYPE)
    model = make(hf.ViTConfig(**sizes), hf.AutoModel)
    exact = copy.deepcopy(model).float()
    exact.register_forward_pre_hook(lambda *given: {"pixel_values": image.float()}, with_kwargs=False) if 0 else None
    model.set_attn_implementation("rawmla")
    with torch.no_grad():
        got = model(pixel_values=image)[0]
        exact.set_attn_implementation("eager")
        want = exact(pixel_values=image.float())[0]
    torch.testing.assert_close(got.float(), want, atol=0.1 if HAS_GPU else 1e-4, rtol=0)


def generate(model: Any, attention: str, ids: torch.Tensor, mask: torch.Tensor | None, cache: str) -> Any:
    model.set_attn_implementation(attention)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, cache_implementation=cache,
        return_dict_in_generate=True, output_logits=True, disable_compile=True,
    )  # fmt: skip


@causal_models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pad", ["none", "left"])
def test_generate(name: str, cache: str, pad: str) -> None:
    """The tokens are sdpa's."""
    model, ids, mask = make(CONFIGS[name]()), tokens(), padding(pad)
    want = generate(model, "eager" if name in WITHOUT_SDPA else "sdpa", ids, mask, cache)
    got = generate(model, "rawmla", ids, mask, cache)
    for row in range(len(ids)):
        for step, logits in enumerate(want.logits):
            one, other = got.sequences[row, 11 + step], want.sequences[row, 11 + step]
            assert logits[row, other] - logits[row, one] <= GAP
            if one != other:
                break
    if not HAS_GPU:
        assert "flash_attn_varlen_func" not in twins.CALLS and "flash_attn_with_kvcache" in twins.CALLS


def test_padding_on_the_right_is_a_hole_of_later_steps() -> None:
    model, ids, mask = make(CONFIGS["llama"]()), tokens(), padding("right")
    want, got = [generate(model, attention, ids, mask, "dynamic") for attention in ("sdpa", "rawmla")]
    if not HAS_GPU:
        assert torch.equal(got.sequences, want.sequences)
        with pytest.raises(RuntimeError, match="hidden keys between visible ones"):
            generate(model, "rawmla", ids, mask, "static")


def test_static_caches_read_nothing_from_the_device(monkeypatch: MonkeyPatch) -> None:
    from transformers.masking_utils import create_causal_mask

    model, ids = make(CONFIGS["llama"]()), tokens()
    model.set_attn_implementation("rawmla")
    cache = hf.StaticCache(model.config, max_cache_len=32)
    with torch.no_grad():
        model(ids, attention_mask=padding("left"), past_key_values=cache)
    for name in ("item", "tolist", "__bool__", "__int__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *given: pytest.fail("reads the device"))
    mask = torch.nn.functional.pad(padding("left"), (0, 1), value=1)
    embeds = torch.zeros(3, 1, 64, device=DEVICE)
    lengths = create_causal_mask(model.config, embeds, mask, cache)
    monkeypatch.undo()
    assert lengths.flatten(1).tolist() == [[4, 0, 1], [12, 12, 12]]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens"])
def test_packed_documents(name: str, given: str) -> None:
    """Documents in one row have the logits that they have alone."""
    model, ids, lengths = make(CONFIGS[name]()), tokens(1, 24), [7, 1, 16]
    places = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    inputs = {"input_ids": ids, "position_ids": places, "use_cache": False}
    if given == "cu_seq_lens":
        starts = torch.tensor([0, 7, 8, 24], dtype=torch.int32, device=DEVICE)
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 16, "max_length_k": 16}
    model.set_attn_implementation("rawmla")
    with torch.no_grad():
        got = model(**inputs).logits
        alone = [model(part).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(got, torch.cat(alone, 1), atol=0.1 if HAS_GPU else 1e-4, rtol=0)


def losses(model: Any, attention: str, mask: torch.Tensor | None, step: Any = None) -> list[float]:
    """The losses of ten steps of training."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation(attention)
    call = model if step is None else step(model)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), tokens()
    labels: torch.Tensor = ids
    if mask is not None:  # a token after padding is predicted by padding, whose attention is not defined
        labels = ids.masked_fill((mask & torch.nn.functional.pad(mask, (1, 0))[:, :-1]) == 0, -100)
    result = []
    for _ in range(10):
        loss = call(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.append(float(loss.detach()))
    assert result[-1] < 0.9 * result[0]
    return result


@causal_models
@pytest.mark.parametrize("pad", [*PADDINGS, "holes"])
def test_training(name: str, pad: str) -> None:
    """Ten steps have the losses of sdpa."""
    if pad == "holes" and "sliding_window" in CONFIGS[name]().to_diff_dict():
        pytest.skip("a window counts visible tokens, as FlashAttention's does; sdpa counts hidden ones")
    model, mask = make(CONFIGS[name]()), padding(pad)
    want = losses(model, "eager" if name in WITHOUT_SDPA else "sdpa", mask)
    got = losses(model, "rawmla", mask)
    assert got == pytest.approx(want, abs=0.05 if HAS_GPU else 1e-3)
    assert HAS_GPU or "flash_attn_with_kvcache" not in twins.CALLS


@pytest.mark.parametrize("pad", ["none", "left"])
def test_compiled_training(pad: str) -> None:
    model, mask = make(CONFIGS["llama"]()), padding(pad)
    want = losses(model, "sdpa", mask)
    got = losses(model, "rawmla", mask, lambda m: torch.compile(m, backend="aot_eager", fullgraph=True))
    assert got == pytest.approx(want, abs=0.05 if HAS_GPU else 1e-3)


def test_compiled_decoding() -> None:
    """A decoding step over a static cache is one graph, which serves all steps."""
    model, ids, mask = make(CONFIGS["llama"]()), tokens(), padding("left")
    want = generate(model, "sdpa", ids, mask, "static").sequences
    model.set_attn_implementation("rawmla")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    cache = hf.StaticCache(model.config, max_cache_len=32)
    with torch.no_grad():
        newest = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1:].argmax(-1)
        for i in range(9):
            ids, mask = torch.cat([ids, newest], 1), torch.nn.functional.pad(mask, (0, 1), value=1)
            given = model.prepare_inputs_for_generation(
                ids, attention_mask=mask, past_key_values=cache, next_sequence_length=1
            )
            newest = step(**given).logits[:, -1:].argmax(-1)
    assert counter.frame_count == 1
    assert HAS_GPU or torch.equal(ids, want)
