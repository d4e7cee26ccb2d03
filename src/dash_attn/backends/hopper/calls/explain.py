"""What decides the bits of a call on this backend: the plan's order and the machine code of its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ....call.documents import laid_end_to_end, of_a_document, runs_packed
from ....call.explanation import Explanation
from ....call.options import AttentionOptions
from ....call.planning import explanation_of, explanation_of_documents, hash_of, plan_in_words, predict
from ....masks import Documents
from ....scheduling.order import WORKER_INVARIANT, promises, worker_invariance
from ....scheduling.plan import Plan
from ....simulation.machines import H200
from ..tiles import backward_tiles, forward_tiles
from .backward import backward_kernels, backward_plan, workspace_of
from .documents import offsets_of
from .forward import CONSUMER_ROWS, forward_kernel, forward_problem, packed_consumers
from .groups import bytes_of_copies, parts_between, split
from .layout import Layout
from .packed import largest_gang
from .tables import mask_on_device


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    if runs_packed(options):
        return _explain_documents(q, k, v, options)
    many_k, many_v, of_parts = split(q, k, v, options, shapes_only=True)
    layout = Layout.of((q, many_k, many_v), of_parts)
    plan, consumers = backward_plan(q, many_k, many_v, of_parts), forward_problem(q, k, v, options).tile_q // CONSUMER_ROWS
    time = predict(plan, options, H200.get(layout.dim), "an H200") if predict_time else {"prediction_note": "not asked for"}
    described = explanation_of(plan, "hopper", (q, k, v), options, **_fields(plan, (q, k, v), options, layout, consumers), **time)
    parts = parts_between(q, k)
    return described if parts == 1 else replace(described, order_hash=hash_of(plan.order_hash, f"{parts} parts"))


def order_in_words(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    if runs_packed(options):
        return "planned document by document"
    many_k, many_v, of_parts = split(q, k, v, options, shapes_only=True)
    parts = parts_between(q, k)
    return plan_in_words(backward_plan(q, many_k, many_v, of_parts)) + (f", groups of query heads in {parts} parts" if parts > 1 else "")


def _explain_documents(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Explanation:
    """Each document has the order that it has alone."""
    assert isinstance(options.mask, Documents)
    many_k, many_v, alone = split(q, k, v, of_a_document(options), shapes_only=True)
    plans = [backward_plan(q[:1, :length], many_k[:1, :length], many_v[:1, :length], alone) for length in options.mask.lengths]
    packed = Layout.of(tuple(laid_end_to_end(x) for x in (q, many_k, many_v)), alone, offsets_of(q, options))
    note = "documents are planned on the device, one by one"
    described = explanation_of_documents(
        plans, "hopper", (q, k, v), options, **_fields(plans[0], (q, k, v), options, packed, packed_consumers(packed)), prediction_note=note
    )
    order = hash_of(*(plan.order_hash for plan in plans), f"{parts_between(q, k)} parts")
    gang = largest_gang(packed, backward_tiles(packed.dim), alone.mask)  # what the call needs, which has room for longer documents
    reported = [worker_invariance(gang) if promises([said], WORKER_INVARIANT) else said for said in described.guarantees]
    return replace(described, order_hash=order, plan_bytes=0, gang=gang, guarantees=tuple(reported))


def _fields(
    plan: Plan, tensors: tuple[Tensor, Tensor, Tensor], options: AttentionOptions, layout: Layout, consumers: int
) -> dict[str, Any]:
    """What this backend adds to an explanation. `layout`: with a KV head for every part of a group; packed where that runs."""
    q, k, v = tensors
    return {
        "backward_tiles": (plan.problem.tile_q, plan.problem.tile_kv),
        "forward_tiles": (CONSUMER_ROWS * consumers, forward_tiles(layout.dim, consumers).kv_rows),
        "workspace_bytes": workspace_of(layout).bytes + bytes_of_copies(k, v, parts_between(q, k)),
        "kernels": {} if q.is_meta else _kernel_hashes(q, layout, options, consumers),
    }


def _kernel_hashes(q: Tensor, layout: Layout, options: AttentionOptions, consumers: int) -> dict[str, str]:
    """Compiles what is not compiled yet: the hash is of the machine code, not of the source."""
    kind = "Packed" if layout.packed else mask_on_device(options.mask, layout.q_len, layout.kv_len, q.device).kind
    cap = bool(options.softcap)
    behind = backward_kernels(layout.device, layout.dtype, layout.dim, options.ordered, cap, kind)
    loaded = {
        "forward": forward_kernel(layout.device, layout.dtype, layout.dim, consumers, cap, kind),
        "preprocess": behind.preprocess,
        "backward": behind.attention,
        "postprocess": behind.postprocess,
    }
    return {name: kernel.kernel.sha256 for name, kernel in loaded.items()}
