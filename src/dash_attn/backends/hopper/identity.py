"""What decides the bits of a call on this backend: the plan's order and the machine code of four kernels."""

from __future__ import annotations

from torch import Tensor

from ...explanation import Explanation
from ...machines import H200
from ...options import AttentionOptions
from ...planning import explanation_of, predict
from .backward import KV_ROWS, Q_ROWS, backward_kernels, backward_plan, workspace_sizes
from .driver import device_index
from .forward import CONSUMER_ROWS, forward_kernel, forward_problem
from .support import DTYPES, check_call
from .tables import mask_on_device


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    check_call(q, k, v, options)
    plan, ahead = backward_plan(q, k, options), forward_problem(q, k, options)
    prediction = predict(plan, options, H200.get(q.shape[-1]), "an H200") if predict_time else {"prediction_note": "not asked for"}
    return explanation_of(
        plan,
        "hopper",
        (q, k, v),
        options,
        backward_tiles=(Q_ROWS[q.shape[-1]], KV_ROWS),
        forward_tiles=(ahead.tile_q, ahead.tile_kv),
        workspace_bytes=4 * sum(workspace_sizes(plan.problem, q.shape[-1])),
        kernels={} if q.is_meta else _kernel_hashes(q, k, options, ahead.tile_q // CONSUMER_ROWS),
        **prediction,
    )


def _kernel_hashes(q: Tensor, k: Tensor, options: AttentionOptions, consumers: int) -> dict[str, str]:
    """Compiles what is not compiled yet: the hash is of the machine code, not of the source."""
    device, dtype, dim = device_index(q.device), DTYPES[q.dtype], q.shape[-1]
    kind = mask_on_device(options.mask, q.shape[1], k.shape[1], q.device).kind
    behind = backward_kernels(device, dtype, dim, options.ordered, kind)
    loaded = {
        "forward": forward_kernel(device, dtype, dim, consumers, kind),
        "preprocess": behind.preprocess,
        "backward": behind.attention,
        "postprocess": behind.postprocess,
    }
    return {name: kernel.kernel.sha256 for name, kernel in loaded.items()}
