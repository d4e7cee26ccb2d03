"""Who wants to hear of calls of attention while they run. With nobody, a call pays for one look at an empty list."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ..call.call import Call


class SharedPart(NamedTuple):
    """A call whose sequence several ranks share, as this rank sees it."""

    key: Hashable  # equal for calls that are planned alike
    describe: Callable[[], dict[str, Any]]  # what decides its bits, as JSON has it


Observer = Callable[[Call, SharedPart | None], None]

observers: list[Observer] = []


def tell_observers(call: Call, shared: SharedPart | None = None) -> None:
    for observer in tuple(observers):
        observer(call, shared)
