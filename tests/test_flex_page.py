"""The examples of docs/flex.md without a GPU: steps on the CPU, masks, the kernels that they need."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_probe import assert_in_kernel
from flex_page import (
    CUPY_EXAMPLES,
    EXAMPLES,
    GRADIENTS,
    PAGE,
    SETUP,
    TRACED,
    Call,
    create_block_mask,
    reference,
    run,
)

import rawmla
from rawmla import jit
from rawmla.flex import mods
from rawmla.flex.functions import header_of
from rawmla.jit import KernelSpec
from rawmla.kernels.block_mask import states_spec
from rawmla.kernels.mha_forward_variants import flex_spec, tile_in_blocks

torch = pytest.importorskip("torch")
from calls.constants import DQ, FIRST_CAPTURE, installed  # noqa: E402

from rawmla.flex.trace import trace  # noqa: E402

TOKENS = 300  # no multiple of a block


def on_the_cpu(name: str, dtype: Any = None) -> tuple[dict[str, Any], Call]:
    """Run an example with block masks by torch, and without attention."""
    return run(name, lambda *arguments, **keywords: None, create_block_mask, "cpu", TOKENS, dtype)


def compile_kernels(compiled: Callable[[KernelSpec], Any], *functions: Any) -> None:
    """Compile the kernels of a score and a mask function, whose arrays are contiguous, by `compiled`."""
    score, mask = [
        function
        and function._replace(
            captures=tuple(c._replace(array=None, layout="kSmallRows") for c in function.captures)
        )
        for function in functions
    ]
    compiled(flex_spec("bfloat16", 64, 64, tile_in_blocks(64, 64).keys, False, header_of(score, mask)))
    if mask is not None:
        compiled(states_spec(header_of(None, mask)))


def only_syntax(spec: KernelSpec) -> None:
    assert_in_kernel(spec, [])


def test_every_block_is_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert sorted(blocks) == sorted(
        [SETUP, TRACED, *EXAMPLES.values(), *CUPY_EXAMPLES.values(), *GRADIENTS.values()]
    )
    assert len(EXAMPLES) == 10 and set(CUPY_EXAMPLES) <= set(EXAMPLES)


def test_pages_hold_the_same_attention() -> None:
    torch.manual_seed(0)
    _, paged = on_the_cpu("paged", torch.float16)
    torch.manual_seed(0)
    _, plain = on_the_cpu("ALiBi", torch.float16)
    assert torch.equal(paged.query, plain.query)
    assert paged.key.shape[0] == 1 and paged.key.dtype == torch.float16
    torch.testing.assert_close(reference(paged), reference(plain))


@pytest.mark.parametrize("name", EXAMPLES)
def test_functions_become_kernels(name: str) -> None:
    """One of them becomes machine code; tests/gpu/test_flex_examples.py runs all."""
    _, call = on_the_cpu(name)
    score = None if call.score_mod is None else trace(call.score_mod, "score_mod")
    mask = None if call.block_mask is None else trace(call.block_mask.mask_mod, "mask_mod")
    assert score is not None or mask is not None
    compile_kernels(jit.build if name == "softcap" else only_syntax, score, mask)


@pytest.mark.parametrize("name", CUPY_EXAMPLES)
def test_cuda_text_becomes_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NumPy's arrays in place of CuPy's."""
    monkeypatch.setattr(mods, "inspect", lambda x, name: SimpleNamespace(dtype=str(x.dtype), shape=x.shape))
    monkeypatch.setattr(mods, "is_array", lambda x: isinstance(x, np.ndarray))
    given: dict[str, Any] = {}

    def create(mask_mod: Any, *sizes: Any) -> str:
        given["mask"] = rawmla.CudaMod(mask_mod) if isinstance(mask_mod, str) else mask_mod
        return "mask"

    def attend(q: Any, k: Any, v: Any, score_mod: Any = None, block_mask: Any = None) -> None:
        given["score"] = score_mod

    stand_in = SimpleNamespace(CudaMod=rawmla.CudaMod, create_block_mask=create, flex_attention=attend)
    names = {"rawmla": stand_in, "cupy": np, "H": 8, "L": TOKENS, "q": None, "k": None, "v": None}
    code = CUPY_EXAMPLES[name].replace("import cupy\n", "")
    exec(compile(code, "docs/flex.md", "exec"), names)
    assert given["score"] is not None or given["mask"].captures
    compile_kernels(only_syntax, *[None if given[x] is None else given[x].mod() for x in ("score", "mask")])


def test_gradients() -> None:
    """The page's step of training; numbers are tested elsewhere."""
    (name,) = GRADIENTS
    with installed() as launches:
        names, _ = run(name, rawmla.flex_attention, create_block_mask, "cpu", TOKENS, None)
    assert launches.forward and len(launches.backward) == 1
    assert bool((names["q"].grad == DQ).all()) and bool((names["table"].grad == FIRST_CAPTURE).all())


def test_shown_results() -> None:
    """The text of a function, and the picture of a mask, that the page shows."""
    names, _ = on_the_cpu("causal")
    text = trace(names["causal"], "mask_mod").text
    picture = str(create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512))
    for shown in (text, picture):
        assert "\n".join(f"    {line}" for line in shown.splitlines()) in PAGE
