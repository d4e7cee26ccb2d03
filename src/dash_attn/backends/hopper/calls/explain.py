"""What decides the bits of a call on this backend: the plan's order and the machine code of its kernels. The calls' own setups tell."""

from dataclasses import replace
from typing import Any

from ....call import planning
from ....call.call import Call
from ....call.explain import CacheExplanation, Explanation, explanation_of_cache
from ....call.kv_cache import CacheCall
from ....call.parts import each_planned_alone, runs_whole
from ....masks import PatternPerHead
from ....scheduling.order import reported
from ....scheduling.plan import Plan
from ....simulation.machines import H200
from ...run import as_packed
from ..driver.compile import Kernel
from ..driver.launch import device_index
from ..support import DTYPES
from ..tiles import decode_tiles
from .backward_setup import BackwardSetup, backward_setup
from .decode import APPEND, Work, check_cache_call
from .few_queries import as_cache
from .forward import ForwardSetup, are_few, forward_setup
from .kernel_names import KernelName
from .rank_backward import BackwardInLegs


def backward_plan(call: Call) -> Plan:
    """What the backward of dense tensors walks. Raises where that cannot be the schedule that was given."""
    setup = backward_setup(call)
    assert setup.plan is not None
    return setup.plan


def order_in_words(call: Call) -> str:
    return planning.order_in_words(call, backward_plan)


def explain(call: Call, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    if isinstance(call.options.mask, PatternPerHead):
        return _explain_heads(call)
    if not runs_whole(call):
        return _explain_packed(call)
    ahead, behind = forward_setup(call), backward_setup(call)
    assert behind.plan is not None
    if behind.legs is not None:
        return _explain_legs(call, ahead, behind, behind.plan)
    plan, machine = behind.plan, H200.get(behind.layout.dim)
    time = planning.predict(plan, call, machine, "an H200") if predict_time else {"prediction_note": "not asked for"}
    described = planning.explanation_of([plan], "hopper", call, **_fields(call, ahead, behind), **time)
    return replace(described, guarantees=reported(described.guarantees, 1)) if behind.any_workers else described


def _explain_legs(call: Call, ahead: ForwardSetup, behind: BackwardSetup, plan: Plan) -> Explanation:
    """Too few SMs for whole chains. No chain has to be resident together with others."""
    in_legs = BackwardInLegs(behind, call.q.device)
    note = f"{plan.workers} SMs are too few for {behind.gang} chains at once; they walk in legs, whose time is not modelled"
    fields = {**_fields(call, ahead, behind, in_legs), "prediction_note": note}
    described = planning.explanation_of([plan], "hopper", call, **fields)
    tables = sum(table.nbytes for table in in_legs.tables.tables.values())
    return replace(described, gang=1, guarantees=reported(described.guarantees, 1), plan_bytes=tables)


def _explain_heads(call: Call) -> Explanation:
    """Heads of one pattern run together, the others apart. Sizes are those of the largest workspace."""
    found = [explain(one, predict_time=False) for one in each_planned_alone(call)]
    largest, kernels = max(found, key=lambda one: one.workspace_bytes or 0), _kernels_of_all(found)
    return replace(
        largest,
        call=planning.describe_call(call),
        schedule=" and ".join(dict.fromkeys(one.schedule for one in found)),
        guarantees=tuple(name for name in largest.guarantees if all(name in one.guarantees for one in found)),
        order_hash=planning.hash_of(*(one.order_hash for one in found)),
        gang=max(one.gang for one in found),
        plan_bytes=sum(one.plan_bytes for one in found),
        kernels={name: digest for name, (digest, _) in kernels.items()},
        kernel_origins={name: origin for name, (_, origin) in kernels.items()},
        prediction_note="heads of several patterns run one after the other",
    )


def _kernels_of_all(found: list[Explanation]) -> dict[str, tuple[str, str]]:
    """Hashes and origins. Patterns with and without partial tiles run other kernels of one name: the second gets a number."""
    kernels: dict[str, tuple[str, str]] = {}
    for one in found:
        for name, digest in one.kernels.items():
            both = digest, one.kernel_origins[name]
            if both not in kernels.values():
                kernels[f"{name} 2" if name in kernels else name] = both
    return kernels


def _explain_packed(call: Call) -> Explanation:
    """Documents and packed sequences. Each has the order that it has alone."""
    packed = as_packed(call) if call.offsets is None else call
    ahead, behind = forward_setup(packed), backward_setup(packed)
    plans = [backward_plan(one) for one in each_planned_alone(call)]
    what = "packed sequences" if call.offsets is not None else "documents"
    note = f"{what} are planned on the device, one by one"
    described = planning.explanation_of(plans, "hopper", call, **_fields(call, ahead, behind), prediction_note=note)
    gang = behind.gang  # what the call needs, which has room for longer documents
    return replace(described, plan_bytes=0, gang=gang, guarantees=reported(described.guarantees, gang))


def _fields(call: Call, ahead: ForwardSetup, behind: BackwardSetup, in_legs: BackwardInLegs | None = None) -> dict[str, Any]:
    """What this backend adds to an explanation. Kernels are in the order of their launches."""
    kernels = (in_legs or behind).kernels()
    loaded = _load(
        None if call.q.is_meta else behind.layout.device,
        forward=_forward_kernel(call, ahead),
        modifiers=kernels.modifier_notes,
        preprocess=kernels.preprocess,
        backward=kernels.attention,
        ending=kernels.ending,
        postprocess=kernels.postprocess,
    )
    return {
        "backward_tiles": (behind.tiles.q_rows, behind.tiles.kv_rows),
        "forward_tiles": ahead.tile,
        "workspace_bytes": behind.workspace.bytes if in_legs is None else in_legs.workspace_bytes,
        "kernels": {name: kernel.sha256 for name, kernel in loaded.items()},
        "kernel_origins": {name: kernel.origin for name, kernel in loaded.items()},
    }


def _forward_kernel(call: Call, ahead: ForwardSetup) -> KernelName:
    layout, options = ahead.layout, ahead.options
    if not are_few(layout, options):
        return ahead.kernel()
    run = call if layout.packed == (call.offsets is not None) else as_packed(call)
    return Work.of(as_cache(run, layout, None)).kernel(layout.dtype, bool(options.softcap))


def _load(device: int | None, **kernels: KernelName | None) -> dict[str, Kernel]:
    """Compiles what is not compiled yet: hashes are of the machine code, not of the source. device: None loads nothing."""
    if device is None:
        return {}
    return {name: kernel.load(device).kernel for name, kernel in kernels.items() if kernel is not None}


def explain_cache(call: CacheCall) -> CacheExplanation:
    check_cache_call(call)
    work = Work.of(call)
    decode = work.kernel(DTYPES[call.q.dtype], bool(call.options.softcap))
    index = None if call.q.is_meta else device_index(call.q.device)
    loaded = _load(index, decode=decode, append=APPEND if call.new else None)
    return explanation_of_cache(
        call,
        "hopper",
        kv_rows=decode_tiles(work.dim).kv_rows,
        units=work.units,
        served_by=f"each by a cluster of {work.ctas_of_unit} CTAs" if work.columns else "each by one CTA",
        kernels={name: kernel.sha256 for name, kernel in loaded.items()},
    )
