"""Python programs in processes of their own, without the seconds that importing torch takes.

A process that has imported torch, and nothing of rawmla, forks for each program. A test of what is imported,
or of how Python starts, needs a process that is started from the beginning.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_SERVER = """
import atexit, gc, importlib, json, os, runpy, signal, sys, threading, types
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what imports may print
exec(sys.argv[1])
gc.freeze()  # a child that goes through it all copies its pages
outside = os.environ.get("PYTHONPATH", "").split(os.pathsep)
rest = [folder for folder in sys.path[1:] if folder not in outside]
for line in sys.stdin:
    given = json.loads(line)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
else:
    sys.exit()
signal.alarm(given["timeout"])
for file, name in ((0, os.devnull), (1, given["stdout"]), (2, given["stderr"])):
    os.dup2(os.open(name, os.O_RDWR), file)
os.chdir(given["cwd"])
os.environ.clear()
os.environ.update(given["env"])
program, *arguments = given["arguments"]
first, arguments = ("", arguments[1:]) if program == "-c" else (os.path.dirname(program), arguments)
sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *rest]
sys.argv[:] = [program, *arguments]
importlib.invalidate_caches()
status = 0
try:
    if program == "-c":
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(given["arguments"][1], "<string>", "exec"), vars(main))
    else:
        runpy.run_path(program, run_name="__main__")
except SystemExit as end:
    status = end.code or 0
    if not isinstance(status, int):
        status = print(status, file=sys.stderr) or 1
except BaseException:
    sys.excepthook(*sys.exc_info())
    status = 1
for thread in threading.enumerate():
    if thread is not threading.main_thread() and not thread.daemon:
        thread.join()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status & 255)  # Python would take a second to clear torch away
"""


IMPORTS = "from contextlib import suppress\nwith suppress(ImportError): import torch"


@cache
def _server(imports: str) -> subprocess.Popen[str]:
    """The process that forks. It ends when its input does, at the latest with this process."""
    command = [sys.executable, "-c", _SERVER, imports]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def run(
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] = os.environ,
    timeout: int = 120,
    imports: str = IMPORTS,
) -> subprocess.CompletedProcess[str]:
    """Run `python -c text` or `python script.py` with arguments, as `subprocess.run` does, output captured.

    After `timeout` seconds SIGALRM ends the program, and `returncode` is -SIGALRM. `imports` runs once, for
    all programs that name it.
    """
    server = _server(imports)
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as error:
        files = {"stdout": out.name, "stderr": error.name}
        given = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "timeout": timeout, **files}
        server.stdin.write(json.dumps(given) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"{imports} failed: see standard error"
        return subprocess.CompletedProcess(arguments, int(answer), out.read(), error.read())
