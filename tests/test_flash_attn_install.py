"""How programs get `flash_attn` and its kin from rawmla, and what they find out about them. Without a GPU."""

from __future__ import annotations

import json
import os
import runpy
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from test_flash_mla_module import run, succeeds

import rawmla
from rawmla import cli
from rawmla.compat.flash_attn import install

pytest.importorskip("torch")

ASK = '''
import importlib.metadata as metadata, importlib.util, sys
def is_there(module, distribution):
    """transformers' checks, without the one for a GPU."""
    owners = metadata.packages_distributions().get(module, ())
    is_named = distribution in [name.replace("_", "-") for name in owners]
    exists = importlib.util.find_spec(module) is not None
    return exists and is_named and metadata.version(distribution) > "2.3.3"
NAMES = ("flash_attn", "flash-attn"), ("flash_attn_interface", "flash-attn-3"), ("flash_attn", "flash-attn-4")
answers = lambda: [is_there(*names) for names in NAMES]
'''


def test_this_process_and_its_children(tmp_path: Path) -> None:
    code = f"""{ASK}
import os, rawmla
before = list(sys.path)
assert answers() == [False] * 3
rawmla.install_flash_attn()
rawmla.install_flash_attn((2, 3))
assert answers() == [True, True, False] and len(sys.path) == len(before) + 2
assert metadata.version("flash_attn") == metadata.version("flash-attn") == "2.8.3"
import flash_attn, flash_attn_2_cuda, flash_attn_3.flash_attn_interface, flash_attn_config
import flash_attn_interface, flash_attn.flash_attn_interface as interface
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary
assert flash_attn.flash_attn_func is interface.flash_attn_func and interface._flash_attn_forward
assert not interface.USE_TRITON_ROCM and interface.flash_attn_gpu.fwd is flash_attn_2_cuda.fwd
assert interface._get_block_size_n("cuda", 64, False, True) == 128
assert flash_attn.__version__ == "2.8.3" and flash_attn.__rawmla__ == rawmla.__version__
assert flash_attn_3.flash_attn_func is flash_attn_interface.flash_attn_func is not interface.flash_attn_func
for name in ("losses.cross_entropy", "ops.triton.cross_entropy", "ops.rms_norm", "modules", "models", "cute"):
    try:
        print("imported", importlib.import_module("flash_attn." + name))
    except ImportError:
        pass
import torch.nn.attention
assert not torch.cuda.is_initialized() and hasattr(torch.ops.flash_attn_3, "bwd")
if hasattr(torch.nn.attention, "activate_flash_attention_impl"):
    torch.nn.attention.activate_flash_attention_impl("FA3")
assert {{"flash_attn", "flash_attn_2_cuda", "flash_attn_3"}} < set(rawmla.compat.status()["flash_attn"])
child = os.fork()
if not child:
    os._exit(0 if answers() == [True, True, False] else 1)
assert os.waitpid(child, 0)[1] == 0
rawmla.install_flash_attn(4)
assert answers() == [True] * 3
import flash_attn.cute.interface
assert flash_attn.cute.flash_attn_func is not flash_attn.flash_attn_func
rawmla.uninstall_flash_attn()
assert sys.path == before and answers() == [False] * 3
assert not [name for name in sys.modules if name.startswith("flash_attn")]
"""
    assert succeeds(code, tmp_path) == ""


@pytest.mark.parametrize("imported", (False, True))
def test_foreign_module(tmp_path: Path, imported: bool) -> None:
    """It has a module that rawmla does not have."""
    package = tmp_path / "site" / "flash_attn"
    package.mkdir(parents=True)
    for name in ("__init__", "losses", "bert_padding"):
        (package / f"{name}.py").write_text("whose = 'theirs'\n")
    code = f"""
import sys, rawmla
if {imported}:
    import flash_attn.losses
    theirs = flash_attn
try:
    rawmla.install_flash_attn()
except RuntimeError as error:
    print(error)
rawmla.install_flash_attn(replace=True)
import flash_attn.bert_padding, importlib.util
assert flash_attn.__rawmla__ and not hasattr(flash_attn.bert_padding, "whose")
assert importlib.util.find_spec("flash_attn.losses") is None
rawmla.uninstall_flash_attn()
import flash_attn
print(flash_attn.whose, {imported} and flash_attn is theirs)
"""
    error, whose = succeeds(code, tmp_path, package.parent).splitlines()
    assert error.startswith("replace: expected True, because another flash_attn is ")
    assert str(package) in error and "install_flash_attn(replace=True)" in error
    assert whose == f"theirs {imported}"


def test_check_of_another_build(tmp_path: Path) -> None:
    """The versions of other builds have suffixes."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    info = tmp_path / "flash_attn-2.3.0+cu12torch2.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.3.0+cu12torch2.8\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    code = "from rawmla import cli; cli.main(['flash-attn', '--fa', '3', '--check'])"
    answer = succeeds(code, tmp_path, tmp_path).splitlines()[0]
    assert answer.startswith("is_flash_attn_2_available: no, flash-attn 2.3.0+cu12torch2.8 is too old (")


def test_another_package_with_our_flash_attention_4(tmp_path: Path) -> None:
    """It finds `flash_attn.cute` here until `uninstall_flash_attn`."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    code = """
import flash_attn, importlib, rawmla
before = list(flash_attn.__path__)
rawmla.install_flash_attn(4)
assert importlib.import_module("flash_attn.cute").__rawmla__
rawmla.uninstall_flash_attn()
assert flash_attn.__path__ == before
try:
    importlib.import_module("flash_attn.cute")
except ImportError as error:
    print(error)
"""
    assert succeeds(code, tmp_path, tmp_path).startswith("No module named 'flash_attn.cute'")


def test_generations_one_after_the_other(tmp_path: Path) -> None:
    """Generation 4 alone makes a package flash_attn without a file."""
    code = """
import importlib.util, rawmla
rawmla.install_flash_attn(4)
import flash_attn.cute
rawmla.install_flash_attn((2, 3))
import flash_attn
print(flash_attn.__rawmla__ == rawmla.__version__)
rawmla.uninstall_flash_attn()
print(importlib.util.find_spec("flash_attn"))
rawmla.install_flash_attn(4)
import flash_attn.cute
rawmla.uninstall_flash_attn()
print(importlib.util.find_spec("flash_attn"))
"""
    assert succeeds(code, tmp_path).split() == ["True", "None", "None"]


def test_names_in_another_package(tmp_path: Path) -> None:
    """`from flash_attn import cute` and a folder of ours that comes later in sys.path."""
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    for folder in (cute, cute.parent):
        (folder / "__init__.py").write_text("whose = 'theirs'\n")
    code = """
import sys, rawmla
from rawmla.compat.flash_attn.install import folders
sys.path += folders((2,))
from flash_attn import cute as theirs
rawmla.install_flash_attn(4, replace=True)
from flash_attn import cute
rawmla.uninstall_flash_attn()
from flash_attn import cute as again
before = list(sys.path)
rawmla.install_flash_attn(2, replace=True)
import flash_attn
print(hasattr(cute, "__rawmla__"), again is theirs, hasattr(flash_attn, "__rawmla__"))
rawmla.uninstall_flash_attn()
import flash_attn
print(flash_attn.whose, sys.path == before)
"""
    assert succeeds(code, tmp_path, tmp_path).split() == ["True", "True", "True", "theirs", "True"]


def test_beside_the_wheel_of_flash_attention_4(tmp_path: Path) -> None:
    """That wheel has a folder without an __init__.py. It stays whose it is, unless ours is asked for."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("whose = 'theirs'\n")
    code = """
import rawmla
rawmla.install_flash_attn()
import flash_attn.cute
print(flash_attn.__rawmla__ == rawmla.__version__, flash_attn.cute.whose)
rawmla.install_flash_attn((2, 4))
"""
    answer = run(code, tmp_path, tmp_path)
    assert answer.stdout == "True theirs\n" and "another flash_attn.cute is imported from" in answer.stderr


def test_after_transformers(tmp_path: Path) -> None:
    """transformers looks for distributions once: at its import, in newer versions when it has to know."""
    code = """
import functools, sys, types, rawmla
sys.modules["transformers.utils.import_utils"] = module = types.ModuleType("import_utils")
def install(versions, **options):
    try:
        rawmla.install_flash_attn(versions, **options)
        print("installed")
    except (RuntimeError, ValueError) as error:
        print(error)
module.PACKAGE_DISTRIBUTION_MAPPING = {"flash_attn": ["flash_attn"]}
install(2)
install((2, 3))
del module.PACKAGE_DISTRIBUTION_MAPPING
module._package_distribution_mapping = functools.cache(lambda: {})
module.is_flash_attn_2_available = functools.cache(lambda: False)
install((2, 3))
module.is_flash_attn_2_available()
install((3, 2))
module._package_distribution_mapping()
install(3)
install((5,))
install(2, dropout="yes")
"""
    first, late, second, *later, five, dropout = succeeds(code, tmp_path).splitlines()
    assert first == second == "installed" and len(later) == 2
    for error, name in zip((late, *later), ("flash-attn-3", "flash-attn", "flash-attn-3"), strict=True):
        assert "before transformers is imported" in error and f"there is no {name};" in error
    assert five == "versions: expected some of 2, 3 and 4, got (5,)"
    assert dropout == "dropout: expected 'error' or 'ignore', got 'yes'"


def test_command(tmp_path: Path) -> None:
    """A program, its arguments, and the processes that it spawns."""
    script = tmp_path / "script.py"
    script.write_text(
        f"{ASK}\n"
        "import os, subprocess\n"
        "print(sys.argv[1:], answers(), os.environ['RAWMLA_FLASH_ATTN_DROPOUT'], flush=True)\n"
        "code = 'import flash_attn_interface as x; print(x.__rawmla__)'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    command = (*"-m rawmla flash-attn --fa 3 --dropout ignore --".split(), str(script), "--fa", "--")
    answer = run("", tmp_path, arguments=command)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"['--fa', '--'] [False, True, False] ignore\n{rawmla.__version__}\n"


def test_path_and_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["flash-attn", "--path"]) == 0
    assert capsys.readouterr().out.strip() == os.pathsep.join(install.folders((2, 3)))
    (tmp_path / "transformers.py").write_text(
        "class utils:\n    is_flash_attn_3_available = lambda: False\n__version__ = '5.24.0'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    owners = {"flash_attn": ["flash_attn"], "flash_attn_interface": ["flash_attn_3"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners)
    with mock.patch.dict(sys.modules):
        sys.modules.pop("transformers", None)
        assert cli.main(["flash-attn", "--check"]) == 0
    two, three, four, real = capsys.readouterr().out.splitlines()
    assert two.startswith("is_flash_attn_2_available: ") and "fa2/flash_attn/__init__.py" in two
    assert "yes" in three or "no, torch.cuda.is_available() is False (flash_attn_interface is" in three
    assert four.startswith("is_flash_attn_4_available: no, it is of flash-attn, not of flash-attn-4 (")
    assert real == "transformers 5.24.0, is_flash_attn_3_available(): False"


def test_wheels_and_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flash-attn", "--fa", "2,4", "--wheel", str(tmp_path)]) == 0
    two, four = capsys.readouterr().out.splitlines()
    archive = zipfile.ZipFile(two)
    rows = archive.read("flash_attn-2.8.3.dist-info/RECORD").decode().splitlines()
    assert [row.split(",")[0] for row in rows] == archive.namelist() and rows[-1].endswith("RECORD,,")
    assert b"Do Not Upload" in archive.read("flash_attn-2.8.3.dist-info/METADATA")
    assert not any(name.startswith("flash_attn/__init__") for name in zipfile.ZipFile(four).namelist())
    assert cli.main(["flash-attn", "--kernels", str(tmp_path)]) == 0
    local = dict(entry.split("=") for entry in capsys.readouterr().out.strip().split(":"))
    folder = Path(local["kernels-community/vllm-flash-attn3"])
    assert json.loads((folder / "metadata.json").read_text())["name"] == folder.name == "vllm-flash-attn3"
    module = runpy.run_path(str(folder / "__init__.py"))
    assert module["flash_attn_varlen_func"].__module__ == "rawmla.compat.flash_attn.fa3"
    assert module["flash_attn_interface"]._flash_attn_forward  # diffusers looks for it
