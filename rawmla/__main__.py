"""``python -m rawmla``: see `rawmla.cli`."""

import sys

from rawmla.cli import main

if __name__ == "__main__":
    sys.exit(main())
