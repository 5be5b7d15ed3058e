"""`rawmla.transformers`: tiny random models attend by rawmla as by transformers' own attention.

Without a GPU the functions of rawmla are replaced by torch twins, in float32, so that results differ by
rounding alone. With one, the functions themselves run, in bfloat16.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
from pytest import MonkeyPatch

import rawmla

pytest.importorskip("torch")
pytest.importorskip("transformers", "5.24", reason='needs transformers: pip install "transformers>=5.24"')

import torch  # noqa: E402
import transformers as hf  # noqa: E402
import transformers_twins as twins  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.models.mistral.modeling_mistral import eager_attention_forward  # noqa: E402
from transformers_models import (  # noqa: E402
    CONFIGS,
    DEVICE,
    DTYPE,
    GAP,
    GROUPED,
    HAS_GPU,
    PADDINGS,
    SMALL,
    WITHOUT_WINDOW,
    check_close,
    losses,
    make,
    other_attention,
    padding,
    tokens,
)

from rawmla.api import dense  # noqa: E402
from rawmla.api.kvcache import flash_attn_with_kvcache  # noqa: E402
from rawmla.transformers.attention import FUNCTIONS, attend  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = {"atol": 0.1 if HAS_GPU else 1e-4, "rtol": 0}
LOSS_TOLERANCE = 0.1 if HAS_GPU else 1e-3

causal_models = pytest.mark.parametrize("name", CONFIGS)
# A window counts visible tokens; eager attention counts hidden ones too.
PADDED = [(name, pad) for name in CONFIGS for pad in PADDINGS if pad != "holes" or name in WITHOUT_WINDOW]
padded_models = pytest.mark.parametrize(("name", "pad"), PADDED)


@pytest.fixture(autouse=True)
def functions(monkeypatch: MonkeyPatch) -> Iterator[None]:
    """Replace rawmla's functions by twins where there is no GPU, and forget calls and warnings."""
    for name in () if HAS_GPU else FUNCTIONS:
        monkeypatch.setattr(rawmla, name, getattr(twins, name))
    rawmla.transformers.register()
    twins.CALLS.clear()
    yield
    torch._dynamo.reset()


@padded_models
def test_logits(name: str, pad: str) -> None:
    mask = padding(pad)
    check_close(make(CONFIGS[name]()), {"input_ids": tokens(), "attention_mask": mask}, mask)
    used = {"none": "flash_attn_func", "holes": "flash_attn_varlen_func"}
    assert HAS_GPU or set(twins.CALLS) == {used.get(pad, "flash_attn_with_kvcache")}


@pytest.mark.parametrize("pad", PADDINGS)
def test_without_causality(pad: str) -> None:
    mask = padding(pad)
    check_close(
        make(hf.BertConfig(**SMALL), hf.AutoModel), {"input_ids": tokens(), "attention_mask": mask}, mask
    )
    if pad != "holes":  # a window of both sides
        config = hf.ModernBertConfig(**SMALL, local_attention=6, global_attn_every_n_layers=2)
        check_close(make(config, hf.AutoModel), {"input_ids": tokens(), "attention_mask": mask}, mask)
    sizes = {
        **SMALL,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "d_model": 64,
        "init_std": 0.2,
    }
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    inputs = {"input_ids": tokens(), "attention_mask": mask, "decoder_input_ids": tokens()[:, 2:]}
    check_close(make(hf.BartConfig(**sizes), hf.AutoModelForSeq2SeqLM), inputs)


def test_vision() -> None:
    image = torch.randn(2, 3, 16, 16, device=DEVICE, dtype=DTYPE)
    model = make(hf.ViTConfig(**SMALL, image_size=16, patch_size=4), hf.AutoModel)
    check_close(model, {"pixel_values": image})


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
    want = generate(model, other_attention(name), ids, mask, cache)
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
    for name, make_mask, new, starts, ends in (
        ("llama", masking_utils.create_causal_mask, 11, [4, 0, 1], [11] * 3),
        ("llama", masking_utils.create_causal_mask, 1, [4, 0, 1], [12] * 3),
        ("mistral", masking_utils.create_sliding_window_causal_mask, 1, [0] * 3, [5] * 3),
    ):
        model = make(CONFIGS[name]())
        cache, mask = hf.StaticCache(model.config, max_cache_len=32), padding("left")
        if new == 1:
            with torch.no_grad():
                model(tokens(), attention_mask=mask, cache=cache)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        with monkeypatch.context() as context:
            for name in ("item", "tolist", "__bool__", "__int__", "nonzero"):
                context.setattr(torch.Tensor, name, lambda *given: pytest.fail("reads the device"))
            lengths = make_mask(model.config, torch.zeros(3, new, 64, device=DEVICE), mask, cache)
        assert lengths.flatten(1).tolist() == [starts, ends]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens"])
def test_packed_documents(name: str, given: str) -> None:
    """Documents in one row have the logits that they have alone."""
    model, lengths = make(CONFIGS[name]()), [7, 1, 16]
    for rows in (1,) if name == "gpt_oss" else (1, 2):  # it makes its masks without positions
        ids = tokens(rows, 24)
        places = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1).to(DEVICE)
        inputs = {"input_ids": ids, "position_ids": places, "use_cache": False}
        if given == "cu_seq_lens":
            ends = torch.tensor(lengths * rows, device=DEVICE).cumsum(0).to(torch.int32)
            starts = torch.nn.functional.pad(ends, (1, 0))
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), 16)
        with torch.inference_mode():
            got = model(**inputs).logits
            alone = [model(part).logits for part in ids.split(lengths, 1)]
        torch.testing.assert_close(got, torch.cat(alone, 1), **TOLERANCE)
        if given == "position_ids" and rows == 1:  # other positions in the same tensor
            places.copy_(torch.arange(24))
            torch.testing.assert_close(model(**inputs).logits, model(ids).logits, **TOLERANCE)


@padded_models
def test_training(name: str, pad: str) -> None:
    """Ten steps have the losses of sdpa."""
    model, mask = make(CONFIGS[name]()), padding(pad)
    want, got = losses(model, other_attention(name), mask), losses(model, "rawmla", mask)
    assert got == pytest.approx(want, abs=LOSS_TOLERANCE)
    assert HAS_GPU or "flash_attn_with_kvcache" not in twins.CALLS


@causal_models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prompts_in_two_parts(name: str, cache: str) -> None:
    """The second part sees the first one through a cache, also where gradients are enabled."""
    model, ids, mask = make(CONFIGS[name]()), tokens(), padding("left")
    for grad in (False, True) if cache == "dynamic" else (False,):
        kept = hf.DynamicCache(config=model.config)
        if cache == "static":
            kept = hf.StaticCache(model.config, max_cache_len=16)
        with torch.set_grad_enabled(grad):
            want = model(ids, attention_mask=mask, use_cache=False).logits
            model(ids[:, :7], attention_mask=mask[:, :7], cache=kept)
            got = model(ids[:, 7:], attention_mask=mask, cache=kept).logits
        torch.testing.assert_close(got, want[:, 7:], **TOLERANCE)


@pytest.mark.parametrize("pad", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_compiled_training(name: str, pad: str, monkeypatch: MonkeyPatch) -> None:
    """Without a GPU, rawmla's operators are the reference."""
    for function in FUNCTIONS[:2]:
        monkeypatch.setattr(rawmla, function, getattr(dense, function))
    model, mask = make(CONFIGS[name]()).bfloat16(), padding(pad)
    want = losses(model, other_attention(name), mask)
    got = losses(model, "rawmla", mask, lambda m: torch.compile(m, backend="aot_eager", fullgraph=True))
    assert got == pytest.approx(want, abs=0.1)


@pytest.mark.skipif(HAS_GPU, reason="a failed assertion on a GPU ends the process")
def test_compiled_models_refuse_what_they_cannot_see() -> None:
    model = torch.compile(make(CONFIGS["llama"]()), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="hidden keys between visible ones"):
        model(tokens(), attention_mask=padding("holes"), use_cache=False)
    for rows in (1, 2):
        places = torch.tensor([[0, 1, 2, 0, 1]] * rows)
        with pytest.raises(RuntimeError, match="pass cu_seq_lens_q"):
            model(tokens(rows, 5), position_ids=places, use_cache=False)


def test_compiled_decoding(monkeypatch: MonkeyPatch) -> None:
    """A decoding step over a static cache is one graph, which serves all steps."""
    model, ids = make(CONFIGS["llama"]()).bfloat16(), tokens(3, 20)
    mask = torch.nn.functional.pad(padding("left"), (0, 9), value=1)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counter, fullgraph=True)
    cache = hf.StaticCache(model.config, max_cache_len=32)
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        model(ids[:, :11], attention_mask=mask[:, :11], cache=cache)
        monkeypatch.setattr(rawmla, "flash_attn_with_kvcache", flash_attn_with_kvcache)
        for end in range(12, 21):
            given = model.prepare_inputs_for_generation(
                ids[:, :end], attention_mask=mask[:, :end], cache=cache, next_sequence_length=1
            )
            logits = step(**given).logits[:, -1]
            torch.testing.assert_close(logits, want[:, end - 1], atol=0.1, rtol=0)
    assert counter.frame_count == 1


def raising(text: str) -> Any:
    return pytest.raises(ValueError, match=text)


BLOOM = hf.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
AIMV2 = hf.Aimv2TextConfig(**{**SMALL, "eos_token_id": 2})


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (BLOOM, hf.AutoModelForCausalLM, "BloomConfig attend by functions of their own"),
        (AIMV2, hf.Aimv2TextModel, "Aimv2TextConfig have masks that their layers do not know"),
    ],
)
def test_models_that_attend_otherwise(config: Any, kind: Any, reason: str) -> None:
    """A mask of None would be no causality to them."""
    kind = kind if hasattr(kind, "from_config") else SimpleNamespace(from_config=kind._from_config)
    model = make(config, kind)
    with raising(f"attn_implementation: models of {reason}"):
        model(tokens(), attention_mask=padding("left"))
    bidirectional = hf.GemmaConfig(**GROUPED, head_dim=16)
    bidirectional.use_bidirectional_attention = True
    bidirectional._attn_implementation = "rawmla"
    embeds = torch.zeros(3, 11, 64, device=DEVICE, dtype=DTYPE)
    given = {"config": bidirectional, "inputs_embeds": embeds, "attention_mask": None}
    with raising("GemmaConfig have a causal mask here and layers without causality"):
        masking_utils.create_causal_mask(**given, cache=None)
    masking_utils.create_bidirectional_mask(**given)


def test_no_window_in_a_model_that_may_have_one() -> None:
    model = make(hf.MistralConfig(**GROUPED, sliding_window=None))
    module = model.model.layers[0].self_attn
    module.is_causal = False
    q, k, v = [torch.randn(3, heads, 11, 16, device=DEVICE, dtype=DTYPE) for heads in (4, 2, 2)]
    want, got = [
        function(module, q, k, v, None, scaling=0.25)[0].float()
        for function in (eager_attention_forward, attend)
    ]
    torch.testing.assert_close(got, want, atol=0.05 if HAS_GPU else 1e-5, rtol=0)


@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize("queries", [2, 11])
def test_windows_of_both_sides(pad: str, queries: int) -> None:
    """As wide as the model's configuration says, and for fewer queries than keys."""
    model = make(CONFIGS["mistral"]())
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    config, mask, wide = model.config, padding(pad), torch.zeros(3, 11, 64, device=DEVICE, dtype=DTYPE)
    q, k, v = [
        torch.randn(3, h, n, 16, device=DEVICE, dtype=DTYPE) for h, n in ((4, queries), (2, 11), (2, 11))
    ]
    results, visible = [], torch.ones(3, 11, dtype=torch.bool) if mask is None else mask.bool().cpu()
    for name in ("eager", "rawmla"):
        config._attn_implementation = name
        made = masking_utils.create_bidirectional_sliding_window_mask(
            config=config, inputs_embeds=wide, attention_mask=mask
        )
        if name == "eager" and made is not None:
            made = made[:, :, -queries:]
        function = eager_attention_forward if name == "eager" else attend
        results.append(
            function(model.model.layers[0].self_attn, q, k, v, made, scaling=0.25, sliding_window=5)[0]
        )
    want, got = [x.float().cpu()[visible[:, -queries:]] for x in results]
    torch.testing.assert_close(got, want, atol=0.05 if HAS_GPU else 1e-5, rtol=0)


def test_refusals() -> None:
    """What rawmla cannot serve is named, with the remedy."""
    model, ids = make(CONFIGS["llama"]()), tokens()
    with raising(
        r"attention_mask: .* got shape \[3, 1, 11, 11\] of torch.bool; use attn_implementation='sdpa'"
    ):
        model(ids, attention_mask=torch.ones(3, 1, 11, 11, dtype=torch.bool, device=DEVICE).tril())
    wide = make(hf.LlamaConfig(**GROUPED, head_dim=264))
    with raising("query: rawmla attends heads of up to 256 columns, got 264"):
        wide(ids)
    embeds = torch.zeros(3, 11, 64, device=DEVICE, dtype=DTYPE)
    given = {"config": model.config, "inputs_embeds": embeds, "attention_mask": None, "cache": None}
    with raising("a mask function of the model's or user's"):
        masking_utils.create_causal_mask(**given, or_mask_function=lambda b, h, q, k: q < 3)
    image = torch.tensor([-1] * 4 + [0] * 3 + [-1] * 4, device=DEVICE).expand(3, -1)
    with raising("tokens of an image or block see later tokens"):
        masking_utils.create_causal_mask(**given, block_sequence_ids=image)
    model.config.attention_chunk_size = 8
    with raising("no attention in chunks of 8 tokens, got 11 keys"):
        masking_utils.create_chunked_causal_mask(**given)
    bias = {"attention_mask": None, "position_bias": torch.zeros(1)}
    q = torch.zeros(3, 4, 11, 16, device=DEVICE, dtype=DTYPE)
    with raising("position_bias: rawmla takes none"):
        attend(torch.nn.Linear(1, 1), q, q, q, **bias)
    config = hf.ModernBertConfig(**SMALL, local_attention=6, global_attn_every_n_layers=2)
    with raising("hidden keys between visible ones in a window without causality"):
        check_close(make(config, hf.AutoModel), {"input_ids": ids, "attention_mask": padding("holes")})


def test_dropout_is_warned_of_once(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("rawmla.transformers.attention._warned", set())
    model = make(hf.LlamaConfig(**GROUPED, attention_dropout=0.1)).train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = [model(tokens()).logits for _ in range(2)]
    assert [str(one.message) for one in caught if "dropout" in str(one.message)] == [
        "dropout: rawmla has none, so attention_dropout counts as 0"
    ]
    assert torch.equal(first, second)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens(), use_cache=False).logits, first)


def test_float32_of_norms_is_cast() -> None:
    """Norms in float32, as PEFT has them, or autocast: rawmla gets the dtype of the weights."""
    model = make(CONFIGS["qwen3"]()).to(torch.bfloat16)
    want = model(tokens()).logits.detach()
    for layer in model.model.layers:
        layer.self_attn.q_norm.float(), layer.self_attn.k_norm.float()
    torch.testing.assert_close(model(tokens()).logits.detach(), want, atol=0.2, rtol=0)
    model.float()
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(model(tokens()).logits.detach(), want, atol=0.2, rtol=0)


def test_float32_without_linear_layers() -> None:
    """rawmla's own error says what to do. Its twins take float32."""
    model = make(hf.GPT2Config(vocab_size=97, n_embd=64, n_layer=1, n_head=4)).float()
    with pytest.raises(TypeError, match="^q: .*float32") if HAS_GPU else nullcontext():
        model(tokens())


def test_checkpointing_keeps_gradients() -> None:
    model, gradients = make(CONFIGS["mistral"]()).train(), []
    places = torch.cat([torch.arange(5), torch.arange(6)])[None].expand(3, -1).to(DEVICE)
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(tokens(), position_ids=places, labels=tokens(), use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    assert torch.allclose(gradients[0], gradients[1]) and torch.allclose(gradients[0], gradients[2])


@pytest.mark.skipif(HAS_GPU, reason="tests/gpu runs the program as it stands")
def test_the_example(capsys: pytest.CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(rawmla, "warmup", lambda *names, **options: None)
    code = (ROOT / "examples" / "any_transformers_model.py").read_text().replace('"cuda"', '"cpu"')
    program: dict[str, Any] = {"__name__": "example"}
    exec(code, program)
    program |= {"PROMPTS": [11, 5, 1], "NEW_TOKENS": 6, "HEAD_DIM": 16, "LAYERS": 2}
    program["main"]()
    assert capsys.readouterr().out.endswith("any_transformers_model: the tokens agree, 18 of 18\n")
    with pytest.raises(SystemExit, match="request 0 differs at token 0, by "):
        monkeypatch.setattr(rawmla, "flash_attn_with_kvcache", lambda q, k, v, **given: (-q, None))
        program["main"]()


def test_imports(tmp_path: Path) -> None:
    """Nothing imports transformers before register, which says what to install where it is missing."""
    code = "import sys, rawmla.transformers; print({'torch', 'transformers'} & set(sys.modules))"
    program = [sys.executable, "-c", code]
    assert subprocess.run(program, cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"
    (tmp_path / "transformers.py").write_text("raise ImportError('none here')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rawmla; rawmla.transformers.register()"
    said = "MissingDependencyError: rawmla.transformers needs transformers (none here): pip install "
    assert said in fresh.run(("-c", code), ROOT).stderr
