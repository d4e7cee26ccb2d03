"""What a first difference means: which module computed it, in which direction, and from what."""

from __future__ import annotations

from dataclasses import dataclass

from .aligning import Pair
from .format import COUNT, SETTING, Entry

BEFORE, FORWARD, BACKWARD, UPDATE = "before the forward", "forward", "backward", "update"
RECORD = "record this step again with `detail` from a checkpoint to see the module (docs/ledger.md)"


@dataclass(frozen=True)
class Culprit:
    """module: None where the difference is not inside of a module, or no module was recorded; "" is the model itself.

    inputs_agreed: whether what it computed from was the same in both runs; None where that was not recorded.
    """

    direction: str
    module: str | None
    inputs_agreed: bool | None
    why: str


def name_of(module: str) -> str:
    return module or "the model itself"


def culprit(found: list[Pair], place: int, is_start: bool) -> Culprit:
    """Of the first pair that differs. All before it are the same, so what was recorded of them agreed."""
    entry = found[place].entry
    before = [pair.entry for pair in found[:place]]
    if entry.role in (SETTING, COUNT):
        return Culprit(BEFORE if is_start else UPDATE, None, _gradients_agreed(before), _why_optimizer(entry, found[place:]))
    if is_start:
        return Culprit(BEFORE, entry.module or None, None, "the state that a run started or resumed from differs")
    return _in_step(entry, before)


def _in_step(entry: Entry, before: list[Entry]) -> Culprit:
    match entry.phase:
        case "batch":
            return Culprit(BEFORE, None, None, "the data differ, before any module ran")
        case "forward" | "recompute":
            return _of_forward(entry, before)
        case "loss" if any(each.phase == "forward" for each in before):
            return Culprit(FORWARD, None, True, "all modules agree: the loss is computed from their outputs by other code")
        case "loss":
            return Culprit(FORWARD, None, None, RECORD)
        case "backward":
            return _of_backward(entry)
        case "gradient":
            return _of_gradient(entry, before)
        case "weight":
            return Culprit(UPDATE, entry.module, _gradients_agreed(before), "the update of its weights differs")
        case "optimizer":
            return Culprit(UPDATE, entry.module or None, None, "the optimizer's state differs, weights do not yet")
    return Culprit("after the update", None, None, "random numbers were drawn differently, with no effect on this step yet")


def _of_forward(entry: Entry, before: list[Entry]) -> Culprit:
    direction = FORWARD if entry.phase == "forward" else "forward, repeated in the backward"
    module, why = entry.module, "its output differs"
    if entry.role in ("parameter", "buffer"):
        why = f"the {entry.role} changed between the record of the step before and this forward"
    elif entry.role != "output":
        if entry.caller is None:
            return Culprit(BEFORE, entry.module, None, "what the model is given differs, before any module ran")
        module, why = entry.caller, f"its own code computed {name_of(entry.module)}'s input, which differs"
    inputs = ((each.phase, each.module, each.role) == (entry.phase, module, "input") for each in before)
    return Culprit(direction, module, True if any(inputs) else None, why)


def _of_backward(entry: Entry) -> Culprit:
    """A gradient comes from whoever took the tensor; gradients of their outputs arrived earlier, and agree."""
    if entry.takers:
        why = f"the gradient of its input differs; taken by {', '.join(map(name_of, entry.takers))}"
        return Culprit(BACKWARD, entry.takers[0], True, why)
    if entry.caller is None:
        return Culprit(BACKWARD, None, True, "code outside of the model computed the gradient of its output, which differs")
    return Culprit(BACKWARD, entry.caller, True, f"its own code took the output of {name_of(entry.module)}, whose gradient differs")


def _of_gradient(entry: Entry, before: list[Entry]) -> Culprit:
    if any(each.phase == "backward" for each in before):
        return Culprit(BACKWARD, entry.module, True, "the gradient of its parameter differs, gradients between modules agree")
    if not _gradients_agreed(before):
        return Culprit(f"{FORWARD} or {BACKWARD}", None, None, f"already the gradient nearest to the loss differs; {RECORD}")
    why = f"the nearest to the loss of those that differ, or a module between it and the loss; {RECORD}"
    return Culprit(BACKWARD, entry.module, None, why)


def _gradients_agreed(before: list[Entry]) -> bool | None:
    return True if any(each.phase == "gradient" for each in before) else None


def _why_optimizer(entry: Entry, rest: list[Pair]) -> str:
    if entry.role == COUNT:
        return "the optimizer has lost its state, or has that of another step"
    names = [pair.entry.tensor for pair in rest if not pair.same and pair.entry.role == SETTING]
    return f"hyper-parameters of the optimizer differ: {', '.join(names)}"
