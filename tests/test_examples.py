"""The programs in examples/ compile, call what exists, and say why they stop on a machine without a GPU.

On a GPU they are run as they stand by tests/gpu.
"""

import ast
import inspect
import py_compile
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest

import rawmla
from kit.gpu import missing_hopper_reason

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = {  # at most
    "cuda_graph": 90,
    "cupy_only": 90,
    "decode_torch": 90,
    "deepseek_v3_transformers": 200,
    "flex_attention": 120,
    "flex_cupy": 90,
    "prefix_prefill": 120,
    "serve_step": 170,
    "sparse_decode_fp8": 90,
    "train_tiny": 200,
    "varlen_prefill": 110,
}

examples = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def needs(path: Path) -> None:
    """Skip where an optional package that the example imports is not installed."""
    pattern = r"^ *(?:import|from) (cupy|ml_dtypes|torch|transformers)\b"
    for name in re.findall(pattern, path.read_text(), re.MULTILINE):
        pytest.importorskip(name)


def resolve(node: ast.expr) -> Any:
    """What an expression `rawmla.name` names, None for any other; AttributeError if that is not there.

    `mla` is rawmla, or its reference, in an example that runs on both.
    """
    if isinstance(node, ast.Name):
        return rawmla if node.id in ("rawmla", "mla") else None
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None else getattr(owner, node.attr)
    return None


def check_names(code: str) -> int:
    """Every name of rawmla exists, and calls bind to the signatures; returns the number of calls."""
    calls = 0
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            resolve(node)
        if not isinstance(node, ast.Call) or not callable(resolve(node.func)):
            continue
        calls += 1
        signature = inspect.signature(resolve(node.func))
        keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        is_whole = len(positional) == len(node.args) and len(keywords) == len(node.keywords)
        if is_whole:
            signature.bind(*positional, **keywords)
        else:
            signature.bind_partial(**keywords)
    return calls


def test_all_are_here() -> None:
    assert {path.stem for path in EXAMPLES} == set(LINES)


@examples
def test_compiles_and_is_short(path: Path, tmp_path: Path) -> None:
    py_compile.compile(str(path), cfile=str(tmp_path / "compiled"), doraise=True)
    code = path.read_text()
    assert 40 <= len(code.splitlines()) <= LINES[path.stem]
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(code)) or "")


@examples
def test_names_and_arguments_exist(path: Path) -> None:
    assert check_names(path.read_text()) >= 4


@pytest.mark.parametrize(
    "code",
    (
        "rawmla.no_such_name",
        "rawmla.reference.warmup()",
        "rawmla.get_mla_metadata(no_such_argument=1)",
        "rawmla.flash_mla_with_kvcache(*arrays, no_such_argument=1)",
        "rawmla.quantize_k_cache(cache)",
    ),
)
def test_mistakes_are_found(code: str) -> None:
    with pytest.raises((AttributeError, TypeError)):
        check_names(code)


@examples
def test_without_a_gpu(path: Path) -> None:
    """One line that says what is missing, and exit status 1."""
    needs(path)
    if missing_hopper_reason() is None:
        pytest.skip("there is a GPU")
    answer = fresh.run((str(path),), ROOT)
    with pytest.raises(rawmla.RawMLAError) as error:
        rawmla.warmup()
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr == f"{error.value}\n"
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "package", "requirement"),
    [
        ("cupy_only", "ml_dtypes", "ml_dtypes"),
        ("deepseek_v3_transformers", "transformers", '"transformers>=5.17"'),
    ],
)
def test_without_a_package(name: str, package: str, requirement: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy" if name == "cupy_only" else "torch")
    (tmp_path / f"{package}.py").write_text(f"raise ImportError(name={package!r})\n")
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        f"runpy.run_path('examples/{name}.py', run_name='__main__')"
    )
    answer = fresh.run(("-c", code), ROOT)
    assert answer.returncode == 1
    assert answer.stderr == f"this example needs {package}: pip install {requirement}\n"


def on_the_reference(name: str, *changes: tuple[str, str]) -> dict[str, Any]:
    """The names of an example whose tensors are on the CPU and whose rawmla is the reference."""
    path = ROOT / "examples" / f"{name}.py"
    needs(path)
    reference = {function: getattr(rawmla.reference, function) for function in rawmla.reference.__all__}

    def nothing(*arguments: Any, **options: Any) -> None: ...

    stand_in = SimpleNamespace(
        **reference,
        reference=rawmla.reference,
        RawMLAError=rawmla.RawMLAError,
        warmup=nothing,
        warmup_call=nothing,
    )
    code = path.read_text()
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    code = code.replace('"cuda"', '"cpu"').replace(".cuda()", "").replace("\nimport rawmla\n", "\n")
    names: dict[str, Any] = {"rawmla": stand_in, "__name__": name}
    exec(compile(code, str(path), "exec"), names)
    return names


@pytest.mark.parametrize("name", ("decode_torch", "sparse_decode_fp8"))
def test_steps_on_the_reference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shapes, dtypes and the order of the steps, with the reference in place of the GPU."""
    on_the_reference(name)["main"]()
    assert capsys.readouterr().out.startswith(f"{name}: ")


SHORT_PROMPTS = {"PROMPTS": [70, 33, 17], "FIRST_CHUNK": [40, 1, 17]}


def test_prefix_prefill_on_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    names = on_the_reference("prefix_prefill")
    names |= SHORT_PROMPTS
    names["main"]()
    out = capsys.readouterr().out
    auto, fp8 = map(float, re.findall(r"cache: every row within ([\d.]+) of its norm", out))
    assert auto < 0.005 < fp8 < 0.1
    assert out.endswith("prefix_prefill: 3 prompts of [70, 33, 17] tokens in two chunks, as in one\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("positions % PAGE", "(positions + 1) % PAGE"),
        ("torch.tensor(ends, dtype", "torch.tensor(lengths, dtype"),
        ("zip((k, v), SCALES,", "zip((k, v), SCALES[::-1],"),
        (".view(len(k), KV_HEADS, D // self.x, self.x)", ".view(len(k), KV_HEADS, self.x, D // self.x).mT"),
    ],
)
def test_prefix_prefill_finds_mistakes(right: str, wrong: str) -> None:
    names = on_the_reference("prefix_prefill", (right, wrong))
    names |= SHORT_PROMPTS
    with pytest.raises(SystemExit, match=r"differs by more than 0\."):
        names["main"]()


def small_varlen_prefill(monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]) -> dict[str, Any]:
    import torch

    names = on_the_reference("varlen_prefill", *changes)
    names |= {"LENGTHS": [40, 1, 0, 9], "CALLS": 1, "REPEATS": 1}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return names


def test_varlen_prefill_on_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    small_varlen_prefill(monkeypatch)["main"]()
    out = capsys.readouterr().out
    assert out.startswith("4 requests of 0 to 40 tokens, 16 heads of 128\n")
    assert len(re.findall(r"^(?:rawmla|torch SDPA), one .* +\d+\.\d{3} +\d+\.\d$", out, re.MULTILINE)) == 2
    assert re.search(r"^varlen_prefill: every row within 0\.00\d\d of its norm", out, re.MULTILINE)


def test_varlen_prefill_finds_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not those of their request show."""
    pytest.importorskip("torch")
    names = small_varlen_prefill(monkeypatch, ("return torch.cat(outs)", "return torch.cat(outs[::-1])"))
    with pytest.raises(SystemExit, match="a row differs from torch's"):
        names["main"]()


def small_flex_attention(monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]) -> dict[str, Any]:
    """The program with plain attention in float64 over torch's lists of blocks."""
    import torch
    from flex_page import Call, create_block_mask, reference

    names = on_the_reference("flex_attention", *changes)
    names |= {"HEADS": 2, "TOKENS": 300, "WINDOW": 64, "LENGTHS": [100, 3, 197], "CALLS": 1, "REPEATS": 1}
    stand_in = names["rawmla"]
    stand_in.and_masks, stand_in.create_block_mask = rawmla.and_masks, create_block_mask
    stand_in.flex_attention = lambda *arguments: reference(Call(*arguments)).bfloat16()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return names


def test_flex_attention_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch.nn.attention.flex_attention")
    small_flex_attention(monkeypatch)["main"]()
    out = capsys.readouterr().out
    rows = re.findall(r"^(.{16}) +(\d+) % +0\.00\d\d +\d+\.\d{3}$", out, re.MULTILINE)
    assert [name.strip() for name, _ in rows] == ["causal", "sliding window", "documents", "ALiBi", "softcap"]
    assert int(rows[1][1]) < int(rows[0][1])  # the block at the bottom left is outside of the window
    assert out.endswith("flex_attention: all cases agree with float32 math\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("masked_fill(~mask_mod(b, h, i, j)", "masked_fill(~mask_mod(b, h, j, i)"),
        ("scores = score_mod(scores, b, h, i, j)", "score_mod(scores, b, h, i, j)"),
        ("* D**-0.5", ""),
    ],
)
def test_flex_attention_finds_mistakes(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the program compares with is not what it calls."""
    pytest.importorskip("torch.nn.attention.flex_attention")
    names = small_flex_attention(monkeypatch, (right, wrong))
    with pytest.raises(SystemExit, match="a row differs by"):
        names["main"]()


def flex_cupy_with_numpy(*changes: tuple[str, str]) -> dict[str, Any]:
    """The program with NumPy in place of CuPy, and with plain attention that knows what its text says."""
    import numpy as np

    def attend(q: Any, k: Any, v: Any, score_mod: Any, mask: Any = None) -> Any:
        document, slopes = mask.captures["document"], score_mod.captures["slopes"]
        back = np.arange(len(document))[:, None] - np.arange(len(document))
        scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) * q.shape[-1] ** -0.5
        scores = np.exp(scores - slopes[:, None, None] * back)
        scores[..., (back < 0) | (document[:, None] != document)] = 0
        return (scores / scores.sum(-1, keepdims=True) @ v.astype(float)).astype(np.float16)

    names = on_the_reference("flex_cupy", ("\nimport cupy\n", "\nimport numpy as cupy\n"), *changes)
    names |= {"LENGTHS": [70, 1, 29], "milliseconds": lambda call: 1.0}
    names["rawmla"].CudaMod = lambda code, captures: SimpleNamespace(code=code, captures=captures)
    names["rawmla"].create_block_mask = lambda mask_mod, *sizes: mask_mod
    names["rawmla"].flex_attention = attend
    return names


def test_flex_cupy_with_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    flex_cupy_with_numpy()["main"]()
    assert re.search(
        r"^flex_cupy: every row within 0\.000\d of its norm", capsys.readouterr().out, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("right", "wrong"), [("(back < 0) | ", ""), ("scores -= slopes", "scores += slopes")]
)
def test_flex_cupy_finds_mistakes(right: str, wrong: str) -> None:
    with pytest.raises(SystemExit, match="a row differs by"):
        flex_cupy_with_numpy((right, wrong))["main"]()


DEEPSEEK_ROWS = r"(?:(?:bf16|FP8 v32) +(?:transformers, bf16|with rawmla) +[\d.]+ +[\d.]+ +\d+ of 271\n){4}"


def test_deepseek_v3_on_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole program, as its switch --cpu runs it."""
    monkeypatch.setattr(sys, "argv", ["example", "--cpu"])
    on_the_reference("deepseek_v3_transformers")["main"]()
    out = capsys.readouterr().out
    assert re.search(DEEPSEEK_ROWS, out), out
    assert out.endswith("as close to float32 as transformers' own bf16, over both caches\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("batch.plan, module.scaling,", "batch.plan, 576**-0.5,"),
        ("self.tokens <= positions[..., None]", "self.tokens < positions[..., None]"),
        ("self.lengths = positions[:, -1] + 1", "self.lengths = positions[:, -1]"),
        ("split([NOPE, V], dim=1)", "split([NOPE, V], dim=1)[::-1]"),
    ],
)
def test_deepseek_v3_finds_mistakes(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is easily wired wrong is further from float32 than the program allows."""
    monkeypatch.setattr(sys, "argv", ["example", "--cpu"])
    names = on_the_reference("deepseek_v3_transformers", (right, wrong))
    names |= {"PROMPTS": [70, 21], "NEW_TOKENS": 3}
    with pytest.raises(SystemExit, match="further from float32"):
        names["main"]()


def small_serve_step(monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]) -> dict[str, Any]:
    """The loop of serve_step with a few short requests, and a graph that is the step itself."""
    import torch

    names = on_the_reference("serve_step", *changes)
    names |= {"PLACES": 4, "BUCKET": 2, "MAX_TOKENS": 512, "CONTEXT": 128, "BLOCKS": 1 + 4 * 8}
    names |= {"NEW_TOKENS": (2, 6), "CHECK_EVERY": 5}

    def capture(step: Any, pool: Any) -> tuple[Any, Any]:
        outs = step()

        def replay() -> None:
            for old, new in zip(outs, step(), strict=True):
                old.copy_(new)

        return SimpleNamespace(replay=replay, pool=lambda: None), outs

    names["capture"] = capture
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["example", "--heads", "2", "--layers", "2", "--steps", "12"])
    return names


def test_serve_step_on_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    small_serve_step(monkeypatch)["main"]()
    out = capsys.readouterr().out
    assert re.findall(r"^(rawmla|torch, matrix products|torch, SDPA) ", out, re.MULTILINE) == [
        "rawmla",
        "torch, matrix products",
        "torch, SDPA",
    ]
    assert "serve_step: torch's results are rawmla's" in out


def test_serve_step_finds_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new token that is not written into the cache shows."""
    pytest.importorskip("torch")
    names = small_serve_step(monkeypatch, ("cache, slots)", "cache, slots - 1)"))
    with pytest.raises(SystemExit, match="differs from rawmla's"):
        names["main"]()


def test_requests_of_serve_step() -> None:
    """Requests join and leave, each with pages of its own that hold all its tokens, and places fill up."""
    pytest.importorskip("torch")
    names = on_the_reference("serve_step")
    server = names["Server"]()
    page, counts, joined = names["PAGE"], [], 0
    for _ in range(400):
        before = server.rows[:, 0].copy()
        server.step()
        active, idle = server.rows[: server.count], server.rows[server.count :]
        assert not idle.any()
        assert (active[:, 1] >= 0).all() and (active[:, 0] > 0).all()
        pages = [row[3:][row[3:] > 0] for row in active]
        taken = [number for row in pages for number in row.tolist()]
        assert len(set(taken)) == len(taken) and not set(taken) & set(server.free)
        assert len(taken) + len(server.free) == names["BLOCKS"] - 1
        for row, own in zip(active, pages, strict=True):
            assert row[0] + row[1] <= len(own) * page <= names["MAX_TOKENS"]
        counts.append(server.count)
        joined += int((before[: server.count] == 0).sum())
    assert max(counts) > names["BUCKET"] * 3 and joined > 64


def small_train_tiny(*changes: tuple[str, str]) -> dict[str, Any]:
    """The program with a smaller model, and plain attention of torch in place of rawmla's."""
    import torch

    def plain(q: Any, k: Any, v: Any, visible: Any) -> tuple[Any, Any]:
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~visible, -torch.inf)
        return torch.softmax(scores, -1).to(v.dtype) @ v, torch.logsumexp(scores, -1)

    def dense(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        assert causal
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()
        out, lse = plain(*[x.transpose(1, 2) for x in (q, k, v)], visible)
        return out.transpose(1, 2), lse

    def flex(q: Any, k: Any, v: Any, block_mask: Any) -> Any:
        axes = [torch.arange(n) for n in (*q.shape[:3], k.shape[2])]
        at = [x.view([-1 if i == d else 1 for d in range(4)]) for i, x in enumerate(axes)]
        return plain(q, k, v, block_mask.mask_mod(*at))[0]

    names = on_the_reference("train_tiny", *changes)
    names |= {"TOKENS": 32, "WIDTH": 32, "HEAD_DIM": 16, "LAYERS": 1, "BATCH": 8, "STEPS": 24, "SHOWN": 6}
    names |= {"LEARNED": 4.0, "BOUND": 0.005, "check_gradients": lambda: None}
    stand_in = names["rawmla"]
    stand_in.flash_attn_func, stand_in.flex_attention = dense, flex
    stand_in.create_block_mask = lambda mask_mod, *sizes: SimpleNamespace(mask_mod=mask_mod)
    stand_in.and_masks = rawmla.and_masks
    return names


def test_train_tiny_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    small_train_tiny()["main"]()
    out = capsys.readouterr().out
    assert (
        len(re.findall(r"^(?:dense|flex), (?:rawmla|torch) +(?:\d\.\d{3} +){4}\d+ s$", out, re.MULTILINE))
        == 4
    )
    assert (
        len(re.findall(r"^(?:dense|flex), (?:rawmla|torch): step \d+, loss \d\.\d{3}$", out, re.MULTILINE))
        == 16
    )
    assert len(re.findall(r"^(?:dense|flex): the curves part by at most 0\.00\d\d", out, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("document[b, q_idx] == document[b, kv_idx]", "document[b, q_idx] >= document[b, kv_idx]"),
        ("document[b, q_idx] == document[b, kv_idx]", "document[0, q_idx] == document[0, kv_idx]"),
        ("rawmla.and_masks(causal, same_document)", "rawmla.and_masks(same_document)"),
    ],
)
def test_train_tiny_finds_mistakes(right: str, wrong: str) -> None:
    """Which documents and tokens are seen shows in the curves."""
    pytest.importorskip("torch")
    names = small_train_tiny((right, wrong))
    with pytest.raises(SystemExit, match="^train_tiny: flex attention ends with a loss of"):
        names["main"]()


def test_batches_of_train_tiny() -> None:
    """Documents fill a row, their second halves repeat their first, and these are what is learned."""
    torch = pytest.importorskip("torch")

    names = on_the_reference("train_tiny")
    draw = torch.Generator().manual_seed(5)
    for documents in (1, 3):
        tokens, document, places, wanted = names["batch"](documents, draw)
        for row in range(names["BATCH"]):
            parts = [tokens[row, document[row] == number] for number in document[row].unique()]
            assert sum(map(len, parts)) == names["TOKENS"] and len(parts) <= documents
            assert torch.equal(places[row], torch.cat([torch.arange(len(part)) for part in parts]))
            expected = []
            for part in parts:
                half = len(part) // 2
                assert len(part) % 2 == 0 and torch.equal(part[:half], part[half:])
                expected += [-1] * (half - 1) + part[half:].tolist() + [-1]
            assert wanted[row].tolist() == expected
