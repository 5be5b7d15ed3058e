#!/usr/bin/env python3
"""Write README's measured section and docs/performance.md from docs/gpu-record.json.

README gets a table by operation between its two markers, docs/performance.md every case. A record that was
changed after its runs is refused.
"""

import argparse
import sys

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from bench import pages

    sys.exit(pages.main())
