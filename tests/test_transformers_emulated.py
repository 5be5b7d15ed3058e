"""Models of transformers attend by rawmla's own kernels, on the emulated device."""

from __future__ import annotations

import os
from pathlib import Path

import fresh
import pytest

import rawmla

pytest.importorskip("torch")
pytest.importorskip("transformers", "5.24", reason='needs transformers: pip install "transformers>=5.24"')

import torch  # noqa: E402
import transformers as hf  # noqa: E402
from emulator import Emulator  # noqa: E402
from transformers_models import CONFIGS, HAS_GPU, PADDINGS, check_close, make, padding, tokens  # noqa: E402

emulated = pytest.mark.skipif(HAS_GPU, reason="test_transformers.py runs the kernels on the GPU")
models = pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])


@emulated
@models
def test_logits(name: str, emulator: Emulator) -> None:
    rawmla.transformers.register()
    for pad in PADDINGS if name == "llama" else ("none", "left", "right"):
        mask = padding(pad)
        model = make(CONFIGS[name]()).bfloat16()
        check_close(model, {"input_ids": tokens(), "attention_mask": mask}, mask)


@emulated
@models
@pytest.mark.parametrize("is_static", [False, True])
def test_caches(name: str, is_static: bool, emulator: Emulator) -> None:
    """Steps over a cache have the logits of a pass without one."""
    rawmla.transformers.register()
    model, ids, mask = make(CONFIGS[name]()).bfloat16(), tokens(), padding("left")
    assert mask is not None
    cache = hf.DynamicCache(config=model.config)
    if is_static:
        cache = hf.StaticCache(model.config, max_cache_len=16)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, use_cache=False).logits
        model(ids[:, :8], attention_mask=mask[:, :8], cache=cache)
        for end in (9, 10, 11):
            step = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], cache=cache).logits
            torch.testing.assert_close(step[:, 0], want[:, end - 1], atol=0.15, rtol=0)


DROP_IN = """
import contextlib, sys, torch, rawmla
from pathlib import Path
torch.cuda.is_available = lambda: True  # what transformers looks at, where the device is emulated
rawmla.install_flash_attn()
import transformers as hf
from emulator import Emulator
from transformers_models import CONFIGS, HAS_GPU, make, padding, tokens
rawmla.transformers.register()
model, ids, mask = make(CONFIGS["llama"]()).bfloat16(), tokens(), padding("left")
logits = []
with contextlib.nullcontext() if HAS_GPU else Emulator(Path(sys.argv[1])).installed(), torch.no_grad():
    for name in ("eager", "flash_attention_2"):
        model.set_attn_implementation(name)
        cache = hf.DynamicCache(config=model.config)
        model(ids[:, :8], attention_mask=mask[:, :8], cache=cache)
        logits.append(model(ids[:, 8:9], attention_mask=mask[:, :9], cache=cache).logits)
torch.testing.assert_close(*logits, atol=0.15, rtol=0)
"""


def test_the_drop_in_over_padded_caches(tmp_path: Path, emulator_folder: Path) -> None:
    """transformers packs and pads the tokens of a step by functions of flash_attn.bert_padding."""
    script = tmp_path / "drop_in.py"
    script.write_text(DROP_IN)
    tests = Path(__file__).parent
    path = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    done = fresh.run((str(script), str(emulator_folder)), tmp_path, {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
