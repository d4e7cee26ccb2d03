"""What decides the bits of a call on the CPU: the plan's order. Times are never predicted: nobody trains on this backend."""

from dataclasses import replace

from ...call import planning
from ...call.call import Call
from ...call.explain import Explanation
from ...call.parts import each_planned_alone
from ...scheduling.order import reported
from .passes import backward_plan
from .tiles import TILE_KV, TILE_Q


def order_in_words(call: Call) -> str:
    return planning.order_in_words(call, backward_plan)


def explain(call: Call, predict_time: bool = True) -> Explanation:
    """Chains rest in memory between the legs of their walks where they are too many to be resident together: no number is too few."""
    tiles, note = (TILE_Q, TILE_KV), "the CPU backend is for reference, its time is not modelled"
    fields = {"backward_tiles": tiles, "forward_tiles": tiles, "prediction_note": note}
    described = planning.explanation_of([backward_plan(one) for one in each_planned_alone(call)], "cpu", call, **fields)
    return replace(described, gang=1, guarantees=reported(described.guarantees, 1))
