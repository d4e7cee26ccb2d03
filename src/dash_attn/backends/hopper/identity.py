"""What decides the bits of a call on this backend: the plan's order and the machine code of its kernels."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from torch import Tensor

from ...explanation import Explanation
from ...machines import H200
from ...masks import Documents
from ...options import AttentionOptions
from ...planning import explanation_of, plan_in_words, predict
from .backward import backward_kernels, backward_plan, workspace_of
from .documents import of_a_document, packing_of, runs_packed
from .forward import CONSUMER_ROWS, forward_kernel, forward_problem, packed_consumers
from .groups import bytes_of_copies, without_data
from .layout import Layout
from .shapes import forward_tiles
from .tables import mask_on_device

ORDER_DIGITS = 16  # as Plan.order_hash


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    if runs_packed(options):
        return _explain_documents(q, k, v, options)
    many_k, many_v, of_parts = without_data(q, k, v, options)
    layout = Layout.of((q, many_k, many_v), of_parts)
    plan, ahead = backward_plan(q, many_k, many_v, of_parts), forward_problem(q, k, v, options)
    described = explanation_of(
        plan,
        "hopper",
        (q, k, v),
        options,
        backward_tiles=(plan.problem.tile_q, plan.problem.tile_kv),
        forward_tiles=(ahead.tile_q, ahead.tile_kv),
        workspace_bytes=workspace_of(layout).bytes + bytes_of_copies(k, v, many_k, many_v),
        kernels={} if q.is_meta else _kernel_hashes(q, layout, options, ahead.tile_q // CONSUMER_ROWS),
        **(predict(plan, options, H200.get(layout.dim), "an H200") if predict_time else {"prediction_note": "not asked for"}),
    )
    parts = many_k.shape[-2] // k.shape[-2]
    return described if parts == 1 else replace(described, order_hash=_hash_of(plan.order_hash, f"{parts} parts"))


def order_in_words(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    if runs_packed(options):
        return "planned document by document"
    many_k, many_v, of_parts = without_data(q, k, v, options)
    split = "" if many_k is k else f", groups of query heads in {many_k.shape[-2] // k.shape[-2]} parts"
    return plan_in_words(backward_plan(q, many_k, many_v, of_parts)) + split


def _explain_documents(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Explanation:
    """Each document has the order that it has alone."""
    assert isinstance(options.mask, Documents)
    many_k, many_v, alone = without_data(q, k, v, of_a_document(options))
    plans = [backward_plan(q[:1, :length], many_k[:1, :length], many_v[:1, :length], alone) for length in options.mask.lengths]
    longest = max(plans, key=lambda plan: plan.problem.q_len)
    packed = Layout.of(tuple(x.flatten(0, 1) for x in (q, many_k, many_v)), alone, packing_of(q, options))
    consumers = packed_consumers(packed)
    described = explanation_of(
        longest,
        "hopper",
        (q, k, v),
        options,
        backward_tiles=(longest.problem.tile_q, longest.problem.tile_kv),
        forward_tiles=(CONSUMER_ROWS * consumers, forward_tiles(packed.dim, consumers).kv_rows),
        workspace_bytes=workspace_of(packed).bytes + bytes_of_copies(k, v, many_k, many_v),
        kernels={} if q.is_meta else _kernel_hashes(q, packed, alone, consumers),
        prediction_note="documents are planned on the device, one by one",
    )
    names = dict.fromkeys(plan.schedule_name for plan in plans)
    order = _hash_of(*(plan.order_hash for plan in plans), f"{many_k.shape[-2] // k.shape[-2]} parts")
    return replace(described, schedule=" and ".join(names), order_hash=order, plan_bytes=0)


def _hash_of(*parts: str) -> str:
    return sha256(" ".join(parts).encode()).hexdigest()[:ORDER_DIGITS]


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
