"""What decides the bits of a call on this backend: the plan's order and the machine code of its kernels."""

from __future__ import annotations

from torch import Tensor

from ...explanation import Explanation
from ...machines import H200
from ...options import AttentionOptions
from ...planning import explanation_of, predict
from .backward import backward_kernels, backward_plan, workspace_of
from .forward import CONSUMER_ROWS, forward_kernel, forward_problem
from .layout import Layout
from .tables import mask_on_device


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    layout = Layout.of((q, k, v), options)
    plan, ahead = backward_plan(q, k, v, options), forward_problem(q, k, v, options)
    return explanation_of(
        plan,
        "hopper",
        (q, k, v),
        options,
        backward_tiles=(plan.problem.tile_q, plan.problem.tile_kv),
        forward_tiles=(ahead.tile_q, ahead.tile_kv),
        workspace_bytes=workspace_of(layout).bytes,
        kernels={} if q.is_meta else _kernel_hashes(q, layout, options, ahead.tile_q // CONSUMER_ROWS),
        **(predict(plan, options, H200.get(layout.dim), "an H200") if predict_time else {"prediction_note": "not asked for"}),
    )


def _kernel_hashes(q: Tensor, layout: Layout, options: AttentionOptions, consumers: int) -> dict[str, str]:
    """Compiles what is not compiled yet: the hash is of the machine code, not of the source."""
    kind = mask_on_device(options.mask, layout.q_len, layout.kv_len, q.device).kind
    cap = bool(options.softcap)
    behind = backward_kernels(layout.device, layout.dtype, layout.dim, options.ordered, cap, kind)
    loaded = {
        "forward": forward_kernel(layout.device, layout.dtype, layout.dim, consumers, cap, kind),
        "preprocess": behind.preprocess,
        "backward": behind.attention,
        "postprocess": behind.postprocess,
    }
    return {name: kernel.kernel.sha256 for name, kernel in loaded.items()}
