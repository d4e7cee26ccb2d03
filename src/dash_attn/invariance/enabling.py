"""The door: PyTorch's functions for sums of rows are ours while it is open, and its settings are those that the sums need."""

from contextlib import AbstractContextManager

from torch.overrides import get_overridable_functions

from ..door import Door
from . import norms, products
from .switches import SWITCHES

DOOR = Door("invariance")


def enable() -> AbstractContextManager[object]:
    """From now on a row's result in the forward of a model depends on that row alone: until `disable()`, or with this as a context manager
    inside its block. The same holds for the gradient with respect to a product's input; gradients of weights are summed as usual.

    Functions of PyTorch are replaced, for the whole process: enter and leave blocks on one thread. Settings are restored at the end, also
    after errors. Compiled programs run eagerly inside, because inductor splits sums by size. A product or a norm for which this cannot be
    promised raises; `check` names what else a model's code calls.
    """
    get_overridable_functions()  # PyTorch makes this list once: made from now on, it would have our functions in it for good
    changes = [*products.changes(), *norms.changes()]
    for change, original in changes:
        if change.found() not in (change.ours, original):
            raise RuntimeError(f"dash_attn.invariance would undo what replaced PyTorch's {change.name}: {change.found()!r}")
    return DOOR.open(*SWITCHES.changes(first=not DOOR.is_open), *(change for change, _ in changes))


def disable() -> None:
    """Restores PyTorch's functions and settings, however often `enable()` was called."""
    DOOR.close()
