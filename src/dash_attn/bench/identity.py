"""What decides our bits, for the record: the order of the plan and the machine code of the kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..masks import Causal, Full
from ..options import AttentionOptions
from .candidates import Tensors
from .suites import Shape


def identity(shape: Shape, tensors: Tensors, schedule: str, accumulation: str) -> dict[str, Any]:
    """Order hash, plan and kernel hashes of a call; empty off the GPU."""
    q, k = tensors[:2]
    if q.device.type != "cuda":
        return {}
    options = AttentionOptions(Causal() if shape.causal else Full(), shape.head_dim**-0.5, 0.0, schedule, accumulation)
    backward = import_module("dash_attn.backends.hopper.backward")
    plan = backward.backward_plan(q, k, options)
    return {
        "order_hash": plan.order_hash,
        "schedule": plan.schedule_name,
        "gang": plan.gang,
        "workers": plan.workers,
        "kernels": _kernel_hashes(q, k, options),
    }


def _kernel_hashes(q: Any, k: Any, options: AttentionOptions) -> dict[str, str]:
    backward, forward = (import_module(f"dash_attn.backends.hopper.{name}") for name in ("backward", "forward"))
    support, tables = (import_module(f"dash_attn.backends.hopper.{name}") for name in ("support", "tables"))
    dtype, dim, device = support.DTYPES[q.dtype], q.shape[-1], q.device.index
    kind = tables.mask_on_device(options.mask, q.shape[1], k.shape[1], q.device).kind
    consumers = forward.forward_problem(q, k, options).tile_q // forward.CONSUMER_ROWS
    kernels = backward.backward_kernels(device, dtype, dim, options.ordered, kind)
    loaded = {
        "forward": forward.forward_kernel(device, dtype, dim, consumers, kind),
        "preprocess": kernels.preprocess,
        "backward": kernels.attention,
        "postprocess": kernels.postprocess,
    }
    return {name: kernel.kernel.sha256[:16] for name, kernel in loaded.items()}
