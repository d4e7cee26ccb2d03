"""Sums over the micro-batches of a step that do not depend on the number of ranks."""
