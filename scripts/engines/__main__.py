"""python scripts/engines: see `engines`."""

import sys
from importlib import import_module
from pathlib import Path

COMMANDS = {"run": "drive", "report": "report", "models": "models", "serve": "serve", "oracle": "oracle"}

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import engines

    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        print(f"{engines.__doc__}\ncommands: {', '.join(COMMANDS)}")
        sys.exit(name not in ("", "-h", "--help"))
    sys.exit(import_module(f"engines.{COMMANDS[name]}").main(arguments))
