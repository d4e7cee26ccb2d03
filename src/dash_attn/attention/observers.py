"""Who wants to hear of calls of attention while they run. With nobody, a call pays for one look at an empty list."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions

Observer = Callable[[Tensor, Tensor, Tensor, AttentionOptions, SequenceOffsets | None], None]

observers: list[Observer] = []


def tell_observers(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, offsets: SequenceOffsets | None) -> None:
    for observer in tuple(observers):
        observer(q, k, v, options, offsets)
