"""The programs in examples/ say why they stop on a machine without a GPU, and run on the reference.

On a GPU they are run as they stand by tests/gpu. mypy sees calls that do not fit rawmla's signatures.
"""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
from pytest import CaptureFixture, MonkeyPatch

import rawmla
from kit.gpu import missing_hopper_reason

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 200

examples = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def needs(path: Path) -> None:
    """Skip where an optional package that the example imports is not installed."""
    pattern = r"^ *(?:import|from) (cupy|ml_dtypes|torch|transformers)\b"
    for name in re.findall(pattern, path.read_text(), re.MULTILINE):
        pytest.importorskip(name)


@examples
def test_is_short_and_says_how_to_run_it(path: Path) -> None:
    code = path.read_text()
    assert len(code.splitlines()) <= MAX_LINES
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(code)) or "")


@examples
def test_without_a_gpu(path: Path) -> None:
    """One line that says what is missing, and exit status 1."""
    needs(path)
    if missing_hopper_reason() is None:
        pytest.skip("there is a GPU")
    answer = fresh.run((str(path),), ROOT)
    with pytest.raises(rawmla.RawMLAError) as error:
        rawmla.warmup()
    assert (answer.returncode, answer.stdout, answer.stderr) == (1, "", f"{error.value}\n")
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "package", "requirement"),
    [
        ("cupy_only", "ml_dtypes", "ml_dtypes"),
        ("deepseek_v3_transformers", "transformers", '"transformers>=5.17"'),
        ("any_transformers_model", "transformers", '"transformers>=5.24"'),
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
    said = f"this example needs {package}: pip install {requirement}\n"
    assert (answer.returncode, answer.stderr) == (1, said)


def on_the_reference(name: str, *changes: tuple[str, str]) -> dict[str, Any]:
    """The names of an example whose tensors are on the CPU and whose rawmla is the reference."""
    path = ROOT / "examples" / f"{name}.py"
    needs(path)
    names = {name: getattr(rawmla.reference, name) for name in rawmla.reference.__all__}
    names |= {"reference": rawmla.reference, "RawMLAError": rawmla.RawMLAError}
    names |= dict.fromkeys(("warmup", "warmup_call"), lambda *arguments, **options: None)
    code = path.read_text()
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    code = code.replace('"cuda"', '"cpu"').replace(".cuda()", "").replace("\nimport rawmla\n", "\n")
    program: dict[str, Any] = {"rawmla": SimpleNamespace(**names), "__name__": name}
    exec(compile(code, str(path), "exec"), program)
    return program


SMALL: dict[str, dict[str, Any]] = {
    "decode_torch": {},
    "sparse_decode_fp8": {},
    "prefix_prefill": {"PROMPTS": [70, 33, 17], "FIRST_CHUNK": [40, 1, 17]},
    "paged_decoding": {"HEADS": 4, "KV_HEADS": 2, "PROMPTS": [40, 1, 17], "STEPS": 3},
    "varlen_prefill": {"LENGTHS": [40, 1, 0, 9], "CALLS": 1, "REPEATS": 1},
    "deepseek_v3_transformers": {},
    "serve_step": {
        **{"PLACES": 4, "BUCKET": 2, "MAX_TOKENS": 512, "CONTEXT": 128, "BLOCKS": 1 + 4 * 8},
        **{"NEW_TOKENS": (2, 6), "CHECK_EVERY": 5},
    },
}
"""Constants of the programs that run on the reference."""
ARGUMENTS = {
    "deepseek_v3_transformers": ["--cpu"],
    "serve_step": ["--heads", "2", "--layers", "2", "--steps", "12"],
}
LAST_LINES = {
    "prefix_prefill": r"3 prompts of \[70, 33, 17\] tokens in two chunks, as in one$",
    "paged_decoding": r"3 replays for 3 requests, every row within 0\.00\d\d of its norm$",
    "varlen_prefill": r"every row within 0\.00\d\d of its norm",
    "deepseek_v3_transformers": "as close to float32 as transformers' own bf16, over both caches$",
    "serve_step": "torch's results are rawmla's",
}


def run_small(monkeypatch: MonkeyPatch, name: str, *changes: tuple[str, str]) -> None:
    """Run a small form of a program; a graph is the step itself."""
    torch = pytest.importorskip("torch")
    names = on_the_reference(name, *changes)

    def capture(step: Any, pool: Any) -> tuple[Any, Any]:
        outs = step()

        def replay() -> None:
            for old, new in zip(outs, step(), strict=True):
                old.copy_(new)

        return SimpleNamespace(replay=replay, pool=lambda: None), outs

    names |= {"capture": capture, **SMALL[name]}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["example", *ARGUMENTS.get(name, ())])
    names["main"]()


@pytest.mark.parametrize("name", SMALL)
def test_on_the_reference(name: str, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """The whole program, with the reference in place of the GPU, says that its results are right."""
    run_small(monkeypatch, name)
    assert re.search(rf"^{name}: .*{LAST_LINES.get(name, '')}", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("prefix_prefill", "positions % PAGE", "(positions + 1) % PAGE", r"differs by more than 0\."),
        ("paged_decoding", "lengths += 1", "lengths += 2", r"differs by .*, more than 0\."),
        ("varlen_prefill", "torch.cat(outs)", "torch.cat(outs[::-1])", "a row differs from torch's"),
        ("deepseek_v3_transformers", "<= positions[", "< positions[", "further from float32"),
        ("serve_step", "cache, slots)", "cache, slots - 1)", "differs from rawmla's"),
    ],
)
def test_mistakes_in_programs_are_found(
    name: str, right: str, wrong: str, said: str, monkeypatch: MonkeyPatch
) -> None:
    """What is easily wired wrong ends the program."""
    with pytest.raises(SystemExit, match=said):
        run_small(monkeypatch, name, (right, wrong))


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
