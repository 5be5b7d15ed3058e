#!/usr/bin/env python3
"""Write README's figures and docs/performance.md from the record: see bench/pages.py."""

import sys

from bench import pages

if __name__ == "__main__":
    sys.exit(pages.main())
