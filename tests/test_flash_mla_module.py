"""The module `flash_mla`: how programs get it, what it refuses, what it says of itself. Without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
from calls.fakes import (
    FakeArray,
    World,
    dense_arguments,
    make_world,
    prefill_arguments,
    sparse_arguments,
)
from test_engines import set_version

import rawmla
from rawmla import compat
from rawmla.compat import flash_mla, sgl_kernel, usage
from rawmla.compat.flash_mla import flash_mla_interface
from rawmla.compat.tables import whole_rows

ROOT = Path(__file__).resolve().parents[1]
OVERHEAD_US = 2.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(monkeypatch)


def run(
    code: str, cwd: Path, *path: Path, arguments: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process that finds `path` and then rawmla; with `arguments`, instead of code, a fresh interpreter."""
    folders = os.pathsep.join(map(str, (*path, ROOT)))
    names = {"RAWMLA_LOG", "RAWMLA_FLASH_MLA_API"}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    environment = {**kept, "PYTHONPATH": folders, **environment}
    if not arguments:
        return fresh.run(("-c", code), cwd, environment)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def succeeds(code: str, cwd: Path, *path: Path, **environment: str) -> str:
    answer = run(code, cwd, *path, **environment)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with a flash_mla that is not ours."""
    package = tmp_path / "site" / "flash_mla"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("whose = 'theirs'\n")
    (package / "extra.py").write_text("whose = 'theirs'\n")
    return tmp_path / "site"


class TestInstall:
    def test_fresh_process(self, tmp_path: Path) -> None:
        code = """
import importlib, importlib.util, pickle, sys
import rawmla
module = rawmla.install_flash_mla()
assert rawmla.install_flash_mla() is module is sys.modules["flash_mla"]
import flash_mla, flash_mla.cuda
import flash_mla.flash_mla_interface as interface
from flash_mla import flash_mla_with_kvcache, fused_norm_rope_attn_rope_cast
names = ["flash_mla", *(f"flash_mla.{n}" for n in ("flash_mla_interface", "cuda",
                                                   "fused_norm_rope_attn_rope_cast"))]
for name in names:
    assert importlib.util.find_spec(name).name == name == sys.modules[name].__name__, name
    assert importlib.import_module(name) is sys.modules[name]
assert flash_mla.fused_norm_rope_attn_rope_cast is sys.modules[names[-1]] is fused_norm_rope_attn_rope_cast
assert list(flash_mla.__path__)
assert interface.FlashMLASchedMeta is rawmla.FlashMLASchedMeta
assert set(flash_mla.__all__) <= set(dir(flash_mla))
plan, nothing = flash_mla.get_mla_metadata(1, 2, 3, anything=4)
assert pickle.loads(pickle.dumps(plan)) is not plan and nothing is None
assert rawmla.compat.status()["flash_mla"] == flash_mla.__file__
torch = sys.modules.get("torch")
print(torch is None or not torch.cuda.is_initialized())
rawmla.uninstall_flash_mla()
rawmla.uninstall_flash_mla()
assert not any(name.startswith("flash_mla") for name in sys.modules)
assert importlib.util.find_spec("flash_mla") is None
assert rawmla.compat.status()["flash_mla"] is None
"""
        assert succeeds(code, tmp_path) == "True\n"

    @pytest.mark.parametrize("imported", (False, True))
    def test_foreign_module(self, tmp_path: Path, foreign: Path, imported: bool) -> None:
        code = f"""
import sys, rawmla
if {imported}:
    import flash_mla.extra
    before = dict(sys.modules)
try:
    rawmla.install_flash_mla()
except RuntimeError as error:
    print(error)
assert ("flash_mla" in sys.modules) is {imported}
rawmla.install_flash_mla(replace=True)
import flash_mla
assert flash_mla.has_legacy() and "flash_mla.extra" not in sys.modules
assert rawmla.install_flash_mla() is flash_mla
rawmla.uninstall_flash_mla()
if {imported}:
    assert sys.modules["flash_mla"] is before["flash_mla"]
    assert sys.modules["flash_mla.extra"] is before["flash_mla.extra"]
import flash_mla
print(flash_mla.whose)
"""
        error, whose = succeeds(code, tmp_path, foreign).splitlines()
        assert error.startswith("replace: expected True, because another flash_mla is ")
        assert str(foreign) in error and "install_flash_mla(replace=True)" in error
        assert whose == "theirs"

    def test_operators_and_generations(self, tmp_path: Path, foreign: Path) -> None:
        """A refused installation changes nothing, though it had replaced operators of a first namespace.
        Another one replaces operators once, and an uninstallation restores all.
        """
        pytest.importorskip("torch")
        code = """
import sys, flash_mla, torch, rawmla
from rawmla.compat import ops, status
both = ("_flashmla_C", "flash_mla_legacy")
libraries = {name: torch.library.Library(name, "DEF") for name in both}
for name, library in libraries.items():
    for operator in ops.NAMESPACES[name].values():
        library.define(operator.schema)
for arguments in ({"api": "new"}, {"ops": ("_flashmla_C", "nobody"), "api": "tensors"}):
    try:
        rawmla.install_flash_mla(replace=True, **arguments)
    except ValueError as error:
        print(error)
    assert status()["ops"] == [] and status()["api"] == "object"
    assert sys.modules["flash_mla"] is flash_mla and flash_mla.whose == "theirs"
patch, patched = ops.patch, []
ops.patch = lambda name: patched.append(name) or patch(name)
is_patched = lambda: torch._C._dispatch_has_kernel_for_dispatch_key("_flashmla_C::sparse_decode_fwd", "CUDA")
for names in (both[:1], both):
    module = rawmla.install_flash_mla(replace=True, ops=names)
    assert status()["ops"] == [*names] and is_patched()
assert patched == [*both] and module.get_mla_metadata(None, 128, 1)[1] is None
for api in ("tensors", "object", "tensors"):
    assert rawmla.install_flash_mla(api=api) is module and status()["api"] == api
assert isinstance(module.get_mla_metadata()[0], rawmla.FlashMLASchedMeta)
rawmla.uninstall_flash_mla()
assert status()["ops"] == [] and status()["api"] == "object" and not is_patched()
"""
        api, ops = succeeds(code, tmp_path, foreign).splitlines()
        assert api == "api: expected 'object' or 'tensors', got 'new'"
        assert ops.startswith("namespace: expected one of '_flashmla_C', ") and ops.endswith("got 'nobody'")


SCRIPT = """
import multiprocessing, sys
sys.modules["torch"] = None  # importing it takes seconds, in either process
import flash_mla

def child(queue):
    import flash_mla
    queue.put((flash_mla.__file__, flash_mla.flash_mla_interface.flash_mla_cuda.__name__))

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=child, args=(queue,))
    process.start()
    from rawmla.compat.flash_mla.flash_mla_interface import get_api
    print([sys.argv, flash_mla.__file__, queue.get(timeout=60), get_api()])
    process.join()
    sys.exit(7)
"""


class TestCommand:
    def test_script_and_spawned_child(self, tmp_path: Path, foreign: Path) -> None:
        """Ours comes before a flash_mla on the path, in the program and in what it spawns."""
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        command = ("-m", "rawmla", "flash-mla", "--api", "tensors", "--", str(script), "--api", "--", "x")
        answer = run("", tmp_path, foreign, arguments=command)
        assert answer.returncode == 7, answer.stderr
        file = str(compat.SITE / "flash_mla" / "__init__.py")
        argv = [str(script), "--api", "--", "x"]
        assert answer.stdout == f"{[argv, file, (file, 'rawmla.compat.flash_mla.cuda'), 'tensors']}\n"

    def test_path(self, tmp_path: Path, foreign: Path) -> None:
        answer = run("", tmp_path, arguments=("-m", "rawmla", "flash-mla", "--path"))
        folder = answer.stdout.rstrip("\n")
        assert Path(folder) == compat.SITE and answer.returncode == 0
        code = "import flash_mla; print(flash_mla.has_legacy())"
        assert succeeds(code, tmp_path, Path(folder), foreign) == "True\n"


def test_two_distributions(tmp_path: Path) -> None:
    """rawmla-flash-mla and sgl-flash-mla own the same folder, and pip does not say so."""
    for name, version in (("rawmla_flash_mla", "0.1.0"), ("sgl_flash_mla", "1.0.0")):
        set_version(tmp_path / "both", name, version)
    code = "import rawmla.compat.flash_mla"
    answer = run(code, tmp_path, tmp_path / "both")
    assert "rawmla-flash-mla and sgl-flash-mla are both installed" in answer.stderr
    assert "installed" not in run(code, tmp_path).stderr


def test_the_distribution(tmp_path: Path) -> None:
    """rawmla/compat/site builds it: the package `flash_mla` and nothing else."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    command = ("-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(compat.SITE))
    answer = run("", tmp_path, arguments=command)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    import zipfile

    (wheel,) = tmp_path.glob("rawmla_flash_mla-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if ".dist-info/" not in name}
    assert modules == {f"flash_mla/{file.name}" for file in (compat.SITE / "flash_mla").glob("*.py")}
    (metadata,) = [name for name in names if name.endswith("METADATA")]
    assert "Requires-Dist: rawmla" in zipfile.ZipFile(wheel).read(metadata).decode().splitlines()


RECORDS = "{}: expected records of 656 bytes .* got {} bytes .*; .*(584|656)-byte"
SCALE = FakeArray((1,), "float32")


def as_fp8(q: FakeArray) -> FakeArray:
    return q.but(dtype="float8_e4m3fn")


def of_width(width: int) -> Callable[[FakeArray], FakeArray]:
    return lambda cache: cache.but(shape=(*cache.shape[:3], width))


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("model1", {"k_cache": of_width(528)}, NotImplementedError, RECORDS.format("k_cache", 528)),
    ("model1", {"extra_k_cache": of_width(288)}, NotImplementedError, RECORDS.format("extra_k_cache", 288)),
    ("v32", {"kv_format": "V4"}, ValueError, "kv_format: .* 656 bytes, as k_cache has, got 'V4', whose"),
    ("v32", {"kv_format": "V5"}, ValueError, "kv_format: expected None or one of 'V32'"),
    ("dense", {"descale_q": SCALE}, ValueError, "descale_q: expected None without an FP8 q"),
    ("dense", {"is_fp8_kvcache": True}, NotImplementedError, "is_fp8_kvcache=True"),
    ("dense", {"q": as_fp8}, NotImplementedError, "q: .* bfloat16 cache"),
    ("dense", {"q": as_fp8, "descale_k": SCALE}, NotImplementedError, "descale_k: .* bfloat16 cache"),
    ("dense", {"use_legacy": 1}, TypeError, "use_legacy: expected "),
    ("dense", {"use_legacy": "yes"}, TypeError, "use_legacy: expected "),
]
"""The kind of a good call of decoding; new arguments, or functions that change them; the error."""


class TestRefusals:
    """What FlashMLA computes somewhere and rawmla does not: never another result, always a named argument."""

    @pytest.mark.parametrize(("kind", "changes", "error", "text"), REFUSED)
    def test_decoding(
        self, world: World, kind: str, changes: dict[str, Any], error: type[Exception], text: str
    ) -> None:
        arguments = dense_arguments() if kind == "dense" else sparse_arguments(kind, extra=kind == "model1")
        arguments |= {"tile_scheduler_metadata": None, "num_splits": None}
        arguments |= {name: x(arguments[name]) if callable(x) else x for name, x in changes.items()}
        with pytest.raises(error, match=f"^{text}"):
            flash_mla.flash_mla_with_kvcache(**arguments)
        assert world.untouched

    def test_other_functions(self, world: World) -> None:
        for bad in (1, None, "yes"):
            with pytest.raises(TypeError, match="^use_legacy: expected "):
                flash_mla.flash_mla_sparse_fwd(FakeArray((1,)), None, None, 1.0, use_legacy=bad)
        with pytest.raises(NotImplementedError, match="^is_fp8_kvcache=True"):
            flash_mla.get_mla_decoding_metadata(FakeArray((3,)), 16, 2, is_fp8_kvcache=True)
        assert world.untouched

    def test_bare_tensors(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their row order is that of the older generation, which has to be asked for."""
        with pytest.raises(ValueError, match="^tile_scheduler_metadata: .*api='tensors'"):
            flash_mla.flash_mla_with_kvcache(**dense_arguments())
        assert world.untouched
        monkeypatch.setattr(flash_mla_interface, "_takes_tensors", True)
        flash_mla.flash_mla_with_kvcache(**dense_arguments())
        (call,) = world.decodes
        assert not call.object_layout and call.sched_meta == 0x5000


class TestPlans:
    def test_hoisted_plan(self, world: World) -> None:
        """The arrays of get_mla_decoding_metadata have the rows of an object, and are used as they are."""
        arguments = dense_arguments()
        tiles, splits = flash_mla.get_mla_decoding_metadata(
            arguments["cache_seqlens"], 16, 2, use_legacy=True
        )
        (planned,) = world.plans
        assert planned["object_layout"] is True and planned["sched_meta"] == tiles.ptr
        plan = rawmla.FlashMLASchedMeta(tile_scheduler_metadata=tiles, num_splits=splits)
        arguments.update(tile_scheduler_metadata=plan, num_splits=None)
        flash_mla.flash_mla_with_kvcache(**arguments)
        flash_mla.flash_mla_with_kvcache(**arguments)
        assert len(world.plans) == 1 and plan.have_initialized and plan.config is not None
        assert [(x.sched_meta, x.num_splits, x.object_layout) for x in world.decodes] == [
            (tiles.ptr, splits.ptr, True)
        ] * 2

    def test_sgl_kernel_tensors(self, world: World) -> None:
        """sgl_kernel passes bare tensors on in an object: the order of its get_mla_metadata."""
        arguments = dense_arguments()
        tiles, splits = sgl_kernel.get_mla_metadata(arguments["cache_seqlens"], 16, 2)
        arguments.update(tile_scheduler_metadata=tiles, num_splits=splits)
        sgl_kernel.flash_mla_with_kvcache(**arguments)
        assert world.plans[0]["object_layout"] is True and world.decodes[0].object_layout is True
        with pytest.raises(TypeError, match="^num_q_tokens_per_head_k, num_heads_k: expected two ints"):
            sgl_kernel.get_mla_metadata(arguments["cache_seqlens"])


class TestStatus:
    def test_counts(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        for used in usage.USED.values():
            monkeypatch.setattr(used, "calls", 0)
        assert compat.status()["functions"] == {}
        arguments = dense_arguments() | {"tile_scheduler_metadata": rawmla.FlashMLASchedMeta()}
        arguments["num_splits"] = None
        flash_mla.flash_mla_with_kvcache(**arguments)
        flash_mla.flash_mla_with_kvcache(**arguments, use_legacy=True)
        with pytest.raises(TypeError):
            flash_mla.flash_mla_with_kvcache(**arguments | {"q": None})
        prefill = prefill_arguments()
        del prefill["is_fp8_kvcache"]
        flash_mla.flash_mla_sparse_fwd(**prefill)
        got = compat.status()
        assert got["functions"] == {
            "flash_mla_with_kvcache": {
                "calls": 2,
                "called_as": "sgl-flash-mla",
                "shapes": [arguments["q"].shape, arguments["k_cache"].shape],
            },
            "flash_mla_sparse_fwd": {
                "calls": 1,
                "called_as": "FlashMLA with plan objects",
                "shapes": [prefill["q"].shape, prefill["kv"].shape],
            },
        }
        assert got["ops"] == [] and got["api"] == "object" and isinstance(got["kernels"], list)

    def test_log(self, tmp_path: Path) -> None:
        """A line for the installation, and one for the first call of each process; none unless asked for."""
        code = """
import os, rawmla
rawmla.install_flash_mla()
from types import SimpleNamespace
from rawmla.compat.usage import USED
q, cache = SimpleNamespace(shape=(1, 2)), SimpleNamespace(shape=(3,))
def note():
    for _ in range(3):
        USED["flash_mla_with_kvcache"].note("FlashMLA with plan objects", q, cache)
note()
child = os.fork()
if not child:
    note()
    os._exit(rawmla.compat.status()["functions"]["flash_mla_with_kvcache"]["calls"])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""
        answer = run(code, tmp_path, RAWMLA_LOG="1")
        assert answer.returncode == 0, answer.stderr
        installed, first, second = answer.stderr.splitlines()
        assert "flash_mla is rawmla in this process (api='object')" in installed
        assert "flash_mla_with_kvcache is computed by rawmla: called as of FlashMLA with plan" in first
        assert "shapes [1, 2] and [3]" in first and "rawmla [" in first
        assert first.split("]: ")[1] == second.split("]: ")[1] and first != second
        silent = run(code, tmp_path)
        assert silent.stderr == silent.stdout == "" and silent.returncode == 0


def test_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call through the module against the core itself, which is a stub here."""

    def core(*arguments: Any, **options: Any) -> tuple[Any, ...]:
        return arguments[:2]

    q = SimpleNamespace(shape=(1, 2, 3, 4), dtype="bfloat16")
    given = (q, q, None, None, 512, rawmla.FlashMLASchedMeta(), None, 0.1, True)
    monkeypatch.setattr(flash_mla_interface, "decode", SimpleNamespace(flash_mla_with_kvcache=core))
    ours, alone = (
        min(timeit.repeat(lambda function=function: function(*given), number=2000, repeat=15))
        for function in (flash_mla.flash_mla_with_kvcache, core)
    )
    overhead = (ours - alone) / 2000 * 1e6
    assert overhead < OVERHEAD_US, f"{overhead:.2f} us"


class TestWidthOfTables:
    """FlashMLA knows how far rows of a table are apart, and no width; SGLang's captured graphs rely on it."""

    def test_columns(self) -> None:
        torch = pytest.importorskip("torch")
        table = torch.arange(64 * 73, dtype=torch.int32).view(64, 73)
        views = {
            "first columns": (table[:5, :1], table[:5]),
            "last row": (table[63:, :2], table[63:]),
            "one request": (table[:1, :1], table[:1]),
            "last columns": (table[:2, 70:], table.as_strided((2, 73), (73, 1), 70)),
            "as far as the memory goes": (table[62:, 70:], table[62:, 70:]),
            "other rows": (table[1::2, :3], table[1:].as_strided((32, 73), (146, 1))),
        }
        for name, (view, whole) in views.items():
            assert torch.equal(whole_rows(view), whole), name
            assert whole_rows(view).data_ptr() == view.data_ptr(), name
        without_memory = torch.empty((4, 0), dtype=torch.int32)
        for given in (table, table[:, ::2], table.T, table[0], table[:0, :3], without_memory):
            assert whole_rows(given) is given
        for other in (table.numpy()[:, :3], None, 3):
            assert whole_rows(other) is other

    def test_longer_requests_than_a_view_has_columns_for(self, emulator: Any) -> None:
        torch = pytest.importorskip("torch")
        random = torch.Generator().manual_seed(3)
        q = torch.randn((2, 1, 16, 576), generator=random).bfloat16()
        k_cache = torch.randn((5, 64, 1, 576), generator=random).mul(0.1).bfloat16()
        table = torch.tensor([[4, 1, 3], [2, 0, -1]], dtype=torch.int32)
        lengths = torch.tensor([130, 70], dtype=torch.int32)
        want = rawmla.flash_mla_with_kvcache(q, k_cache, table, lengths, 512, rawmla.FlashMLASchedMeta())
        view = table[:, :1]
        rows, splits = sgl_kernel.get_mla_metadata(lengths, 16, 1)
        tiles = {"tile_scheduler_metadata": rows, "num_splits": splits}
        operator = flash_mla.cuda.dense_decode_fwd(
            q, k_cache, 512, lengths, view, 576**-0.5, False, None, None
        )
        for got in (
            flash_mla_interface.flash_mla_with_kvcache(q, k_cache, view, lengths, 512, None),
            sgl_kernel.flash_mla_with_kvcache(q, k_cache, view, lengths, 512, **tiles),
            operator[:2],
        ):
            assert all(map(torch.equal, got, want))

    def test_in_torch_compile(self) -> None:
        """Such a view breaks the graph, so that no column is left out silently."""
        torch = pytest.importorskip("torch")

        def width(table: Any) -> Any:
            return whole_rows(table) + 0

        table = torch.arange(6, dtype=torch.int32).view(2, 3)
        assert torch.equal(torch.compile(width, backend="eager")(table[:, :1]), table)
        whole = torch.compile(width, backend="eager", fullgraph=True)
        assert torch.equal(whole(table), table)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(table[:, :2])
