#!/usr/bin/env python3
"""Write README's measured section and docs/performance.md from docs/gpu-record.json.

README gets a table by operation between its two markers, docs/performance.md every case. Times of other
libraries come from docs/peers-h200.json. Without a record both say that nothing has been measured yet. A
record that was changed after its runs is refused.
"""

import argparse
import sys
from collections.abc import Sequence

from bench import ROOT, record


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is 1 when --check finds a page out of date, and 2 where the record is not
    as its runs wrote it.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; status 1 when a page is out of date"
    )
    options = parser.parse_args(arguments)
    from bench import pages

    try:
        parts = record.merged([record.read(record.RECORD)]) if record.RECORD.exists() else []
    except record.RecordError as error:
        print(f"update_figures.py: {error}", file=sys.stderr)
        return 2
    found = pages.written(parts)
    if options.check:
        return 0 if all(path.exists() and path.read_text() == text for path, text in found.items()) else 1
    for path, text in found.items():
        record.write_whole(path, text)
    if parts and parts[0]["source_sha256"] != record.source_hash(ROOT):
        print("note: the record was made from other sources than these")
    return 0


if __name__ == "__main__":
    sys.exit(main())
