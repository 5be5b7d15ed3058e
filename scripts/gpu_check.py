#!/usr/bin/env python3
"""Run benchmark, tests and sanitizers into the record: see bench/check.py."""

import sys

from bench import check

if __name__ == "__main__":
    sys.exit(check.main())
