"""Measurements of this source tree, beside other libraries and other checkouts: run from its root, as `python -m benchmarks.compare`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "helpers"))  # references, and players of caches and ranks, which tests have as well
