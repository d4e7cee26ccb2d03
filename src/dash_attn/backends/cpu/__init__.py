"""Attention on the CPU: the reference for what a GPU kernel computes, and in which order."""

from __future__ import annotations

from .passes import backward, backward_plan, explain, forward, order_in_words

__all__ = ["backward", "backward_plan", "explain", "forward", "order_in_words"]
