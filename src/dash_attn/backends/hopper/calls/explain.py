"""What decides the bits of a call on this backend: the plan's order and the machine code of its kernels. The calls' own setups tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ....call.documents import laid_end_to_end, of_a_document, runs_packed
from ....call.explanation import Explanation
from ....call.mask_per_head import Together, together
from ....call.options import AttentionOptions
from ....call.planning import describe_call, explanation_of, explanation_of_several, hash_of, plan_in_words, predict
from ....masks import Documents, PatternPerHead
from ....scheduling.order import reported
from ....scheduling.plan import Plan
from ....simulation.machines import H200
from ...document_offsets import offsets_of
from ..driver.cubin_files import Kernel
from .backward_setup import BackwardSetup, DenseBackwardSetup, dense_setup, packed_setup
from .few_workers import LegSetup
from .forward_setup import ForwardSetup, dense_forward_setup, packed_forward_setup
from .kernel_names import KernelName


def backward_plan(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Plan:
    """The plan that a backward of these (batched) tensors walks."""
    return dense_setup(q, k, v, options).plan


def order_in_words(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    if runs_packed(options):
        return "planned document by document"
    if isinstance(options.mask, PatternPerHead):
        return "planned head by head"
    return plan_in_words(backward_plan(q, k, v, options))


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    if runs_packed(options):
        return _explain_documents(q, k, v, options)
    if isinstance(options.mask, PatternPerHead):
        return _explain_heads(q, k, v, options)
    ahead, behind = dense_forward_setup(q, k, v, options), dense_setup(q, k, v, options)
    if behind.legs is not None:
        return _explain_legs(q, k, v, ahead, behind)
    plan, machine = behind.plan, H200.get(behind.layout.dim)
    time = predict(plan, options, machine, "an H200") if predict_time else {"prediction_note": "not asked for"}
    described = explanation_of(plan, "hopper", (q, k, v), options, **_fields(q, ahead, behind), **time)
    return replace(described, guarantees=reported(described.guarantees, 1)) if behind.any_workers else described


def _explain_legs(q: Tensor, k: Tensor, v: Tensor, ahead: ForwardSetup, behind: DenseBackwardSetup) -> Explanation:
    """Too few SMs for whole chains. No chain has to be resident together with others."""
    in_legs, options = LegSetup(behind), behind.options
    note = f"{behind.plan.workers} SMs are too few for {behind.gang} chains at once; they walk in legs, whose time is not modelled"
    fields = {**_fields(q, ahead, behind, in_legs), "prediction_note": note}
    described = explanation_of(behind.plan, "hopper", (q, k, v), options, **fields)
    return replace(described, gang=1, guarantees=reported(described.guarantees, 1), plan_bytes=in_legs.tables_bytes)


def _explain_heads(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Explanation:
    """Heads of one pattern run together, the others apart. Sizes are those of the largest workspace."""
    found = [_explain_together(one, q, k, v) for one in together(q, k, options)]
    largest, kernels = max(found, key=lambda one: one.workspace_bytes or 0), _kernels_of_all(found)
    return replace(
        largest,
        call=describe_call(q, k, v, options),
        schedule=" and ".join(dict.fromkeys(one.schedule for one in found)),
        guarantees=tuple(name for name in largest.guarantees if all(name in one.guarantees for one in found)),
        order_hash=hash_of(*(one.order_hash for one in found)),
        gang=max(one.gang for one in found),
        plan_bytes=sum(one.plan_bytes for one in found),
        kernels={name: digest for name, (digest, _) in kernels.items()},
        kernel_origins={name: origin for name, (_, origin) in kernels.items()},
        prediction_note="heads of several patterns run one after the other",
    )


def _explain_together(one: Together, q: Tensor, k: Tensor, v: Tensor) -> Explanation:
    (queries,), (keys, values) = one.queries(q), one.keys(k, v)
    return explain(queries, keys, values, one.options, predict_time=False)


def _kernels_of_all(found: list[Explanation]) -> dict[str, tuple[str, str]]:
    """Hashes and origins. Patterns with and without partial tiles run other kernels of one name: the second gets a number."""
    kernels: dict[str, tuple[str, str]] = {}
    for one in found:
        for name, digest in one.kernels.items():
            both = digest, one.kernel_origins[name]
            if both not in kernels.values():
                kernels[f"{name} 2" if name in kernels else name] = both
    return kernels


def _explain_documents(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Explanation:
    """Each document has the order that it has alone."""
    assert isinstance(options.mask, Documents)
    alone, offsets, (flat_q, flat_k, flat_v) = of_a_document(options), offsets_of(q, options), map(laid_end_to_end, (q, k, v))
    ahead = packed_forward_setup(flat_q, flat_k, flat_v, alone, offsets)
    behind = packed_setup(flat_q, flat_k, flat_v, alone, offsets)
    plans = [backward_plan(q[:1, :length], k[:1, :length], v[:1, :length], alone) for length in options.mask.lengths]
    note = "documents are planned on the device, one by one"
    fields = _fields(q, ahead, behind)
    described = explanation_of_several(plans, "hopper", (q, k, v), options, **fields, prediction_note=note)
    gang = behind.gang  # what the call needs, which has room for longer documents
    return replace(described, plan_bytes=0, gang=gang, guarantees=reported(described.guarantees, gang))


def _fields(q: Tensor, ahead: ForwardSetup, behind: BackwardSetup, in_legs: LegSetup | None = None) -> dict[str, Any]:
    """What this backend adds to an explanation."""
    names = {"forward": ahead.kernel(), **(_kernels(behind) if in_legs is None else _kernels_of_legs(in_legs))}
    loaded = {} if q.is_meta else _load(names, behind.layout.device)
    return {
        "backward_tiles": (behind.tiles.q_rows, behind.tiles.kv_rows),
        "forward_tiles": (ahead.q_rows, ahead.kv_rows),
        "workspace_bytes": behind.workspace.bytes if in_legs is None else in_legs.workspace_bytes,
        "kernels": {name: kernel.sha256 for name, kernel in loaded.items()},
        "kernel_origins": {name: kernel.origin for name, kernel in loaded.items()},
    }


def _kernels(behind: BackwardSetup) -> dict[str, KernelName]:
    kernels = behind.kernels()
    first = {} if kernels.modifier_notes is None else {"modifiers": kernels.modifier_notes}
    return {**first, "preprocess": kernels.preprocess, "backward": kernels.attention, "postprocess": kernels.postprocess}


def _kernels_of_legs(in_legs: LegSetup) -> dict[str, KernelName]:
    kernels = in_legs.kernels()
    return {
        "preprocess": kernels.preprocess,
        "backward": kernels.attention,
        "ending": kernels.ending,
        "postprocess": kernels.postprocess,
    }


def _load(kernels: dict[str, KernelName], device: int) -> dict[str, Kernel]:
    """Compiles what is not compiled yet: hashes are of the machine code, not of the source."""
    return {name: kernel.load(device).kernel for name, kernel in kernels.items()}
