"""Who wants to hear of calls of attention while they run. With nobody, a call pays for one look at an empty list."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions


class SharedPart(NamedTuple):
    """A call whose sequence several ranks share, as this rank sees it."""

    key: Hashable  # equal for calls that are planned alike
    describe: Callable[[], dict[str, Any]]  # what decides its bits, as JSON has it


Observer = Callable[[Tensor, Tensor, Tensor, AttentionOptions, SequenceOffsets | None, SharedPart | None], None]

observers: list[Observer] = []


def tell_observers(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    offsets: SequenceOffsets | None = None,
    shared: SharedPart | None = None,
) -> None:
    for observer in tuple(observers):
        observer(q, k, v, options, offsets, shared)
