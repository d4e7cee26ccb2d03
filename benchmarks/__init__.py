"""Measurements of this source tree, beside other libraries and other checkouts: run from its root, as `python -m benchmarks.compare`."""
