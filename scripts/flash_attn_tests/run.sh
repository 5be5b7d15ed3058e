#!/usr/bin/env bash
# FlashAttention's own test files, unchanged, on rawmla's drop-in:
#
#   UPSTREAM=CHECKOUT bash scripts/flash_attn_tests/run.sh tests|hopper [OPTIONS OF PYTEST]
#
# CHECKOUT is flash-attention at 0251105a; `tests` are of FlashAttention-2, `hopper` of FlashAttention-3. They need
# einops and expecttest. upstream_cases.py takes a sample of their cases (--sample 200: each value of each parameter;
# 0: all), leaves out what rawmla does not have, and counts it. Where torch finds no GPU the cases run on the emulated
# device: add --tokens 210 --work 30000, which bound lengths and their product.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$root:$root/tests:$root/scripts/flash_attn_tests${PYTHONPATH:+:$PYTHONPATH}"
PYTHONPATH="$(python3 -m rawmla flash-attn --path):$PYTHONPATH"
export PYTHONPATH
# The tests of FlashAttention-3 would import upstream's module from their own folder. In a copy they find the drop-in.
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
find "$UPSTREAM/$1" -maxdepth 1 \( -name 'test_*.py' -o -name padding.py \) -exec cp {} "$folder" \;
cd "$folder"
shift
python3 -m pytest -p no:cacheprovider -p upstream_cases -q -rfs --repeats 20 test_flash_attn.py "$@"
