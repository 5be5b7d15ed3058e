#!/usr/bin/env python3
"""Write README's measured section and docs/performance.md from docs/gpu-record.json: see bench/pages.py."""

import sys

from bench import pages

if __name__ == "__main__":
    sys.exit(pages.main())
