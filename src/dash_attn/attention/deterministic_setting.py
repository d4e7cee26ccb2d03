"""torch.use_deterministic_algorithms, answered as PyTorch's own operations answer it."""

from __future__ import annotations

import warnings

import torch

from ..call.options import AttentionOptions

UNORDERED = (
    "accumulation='unordered' adds gradients in order of arrival, so they are not reproducible, but torch.use_deterministic_algorithms"
    " is on. Use accumulation='ordered' (the default), or turn that setting off"
)


def alert_if_unordered(options: AttentionOptions) -> None:
    """Raise, or warn with warn_only=True, where sums in order of arrival meet the setting. Ordered calls never alert."""
    if options.ordered or not torch.are_deterministic_algorithms_enabled():
        return
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(UNORDERED)
    warnings.warn(UNORDERED, stacklevel=3)
