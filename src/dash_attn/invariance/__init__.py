"""Whole models whose rows depend on themselves alone: a token that was sampled has the logits of the training forward, bit by bit.

Attention of dash_attn keeps that promise by itself. Here are the rest of a model's sums: products, means and norms. Inside `enable()`
PyTorch's functions for them give a row the same bits however many rows come with it.
"""

from .check import Report, check
from .enabling import disable, enable
from .sequences import per_sequence
from .tokens import SeededTokens, log_probs, sample

__all__ = ["Report", "SeededTokens", "check", "disable", "enable", "log_probs", "per_sequence", "sample"]
