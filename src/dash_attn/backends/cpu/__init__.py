"""Attention on the CPU: the reference for what a GPU kernel computes, and in which order."""

from __future__ import annotations

from .passes import backward, explain, forward, order_in_words

__all__ = ["backward", "explain", "forward", "order_in_words"]
