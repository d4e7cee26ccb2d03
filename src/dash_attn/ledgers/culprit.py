"""What a first difference means: which module computed it, in which direction, and from what."""

from __future__ import annotations

from dataclasses import dataclass

from .aligning import Pair
from .entries import COUNT, SETTING, Entry

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
    """Of the first pair that differs. All before it are the same."""
    entry, before = found[place].entry, found[:place]
    if entry.role in (SETTING, COUNT):
        agreed = True if any(pair.entry.phase == "gradient" for pair in before) else None
        return Culprit(BEFORE if is_start else UPDATE, None, agreed, _why_optimizer(entry, found[place:]))
    if is_start:
        return Culprit(BEFORE, entry.module or None, None, "the state that a run started or resumed from differs")
    judge = {
        "batch": _of_batch,
        "forward": _of_forward,
        "recompute": _of_forward,
        "loss": _of_loss,
        "backward": _of_backward,
        "gradient": _of_gradient,
        "weight": _of_weight,
        "optimizer": _of_optimizer,
        "rng": _of_generator,
    }
    return judge[entry.phase](entry, before)


def _of_batch(entry: Entry, before: list[Pair]) -> Culprit:
    return Culprit(BEFORE, None, None, "the data differ, before any module ran")


def _of_forward(entry: Entry, before: list[Pair]) -> Culprit:
    direction = FORWARD if entry.phase == "forward" else "forward, repeated in the backward"
    if entry.role in ("parameter", "buffer"):
        why = f"the {entry.role} changed between the record of the step before and this forward"
        return Culprit(direction, entry.module, _inputs_agreed(entry.module, entry, before), why)
    if entry.role == "output":
        return Culprit(direction, entry.module, _inputs_agreed(entry.module, entry, before), "its output differs")
    if entry.caller is None:
        return Culprit(BEFORE, entry.module, None, "what the model is given differs, before any module ran")
    why = f"its own code computed {name_of(entry.module)}'s input, which differs"
    return Culprit(direction, entry.caller, _inputs_agreed(entry.caller, entry, before), why)


def _inputs_agreed(module: str, entry: Entry, before: list[Pair]) -> bool | None:
    """All before are the same, so what was recorded agreed."""
    return True if any(_is_input(pair.entry, module, entry.phase) for pair in before) else None


def _is_input(entry: Entry, module: str, phase: str) -> bool:
    return (entry.phase, entry.module, entry.role) == (phase, module, "input")


def _of_loss(entry: Entry, before: list[Pair]) -> Culprit:
    if any(pair.entry.phase == "forward" for pair in before):
        return Culprit(FORWARD, None, True, "all modules agree: the loss is computed from their outputs by other code")
    return Culprit(FORWARD, None, None, RECORD)


def _of_backward(entry: Entry, before: list[Pair]) -> Culprit:
    """A gradient comes from whoever took the tensor; gradients of their outputs arrived earlier, and agree."""
    if entry.takers:
        why = f"the gradient of its input differs; taken by {', '.join(map(name_of, entry.takers))}"
        return Culprit(BACKWARD, entry.takers[0], True, why)
    if entry.caller is None:
        return Culprit(BACKWARD, None, True, "code outside of the model computed the gradient of its output, which differs")
    return Culprit(BACKWARD, entry.caller, True, f"its own code took the output of {name_of(entry.module)}, whose gradient differs")


def _of_gradient(entry: Entry, before: list[Pair]) -> Culprit:
    if any(pair.entry.phase == "backward" for pair in before):
        return Culprit(BACKWARD, entry.module, True, "the gradient of its parameter differs, gradients between modules agree")
    if not any(pair.entry.phase == "gradient" for pair in before):
        return Culprit(f"{FORWARD} or {BACKWARD}", None, None, f"already the gradient nearest to the loss differs; {RECORD}")
    why = f"the nearest to the loss of those that differ, or a module between it and the loss; {RECORD}"
    return Culprit(BACKWARD, entry.module, None, why)


def _of_weight(entry: Entry, before: list[Pair]) -> Culprit:
    agreed = True if any(pair.entry.phase == "gradient" for pair in before) else None
    return Culprit(UPDATE, entry.module, agreed, "the update of its weights differs")


def _why_optimizer(entry: Entry, rest: list[Pair]) -> str:
    if entry.role == COUNT:
        return "the optimizer has lost its state, or has that of another step"
    names = [pair.entry.tensor for pair in rest if not pair.same and pair.entry.role == SETTING]
    return f"hyper-parameters of the optimizer differ: {', '.join(names)}"


def _of_optimizer(entry: Entry, before: list[Pair]) -> Culprit:
    return Culprit(UPDATE, entry.module or None, None, "the optimizer's state differs, weights do not yet")


def _of_generator(entry: Entry, before: list[Pair]) -> Culprit:
    return Culprit("after the update", None, None, "random numbers were drawn differently, with no effect on this step yet")
