"""The kernels of README's call on a Hopper GPU, asked for without one."""

from __future__ import annotations

import torch

from dash_attn.backends.hopper.calls.backward_setup import backward_setup
from dash_attn.backends.hopper.calls.forward import forward_setup
from dash_attn.backends.hopper.calls.kernel_names import KernelName
from dash_attn.call.call import Call
from dash_attn.call.options import Choices, options_for

Q, KV = (2, 1024, 8, 64), (2, 1024, 2, 64)


def readme_kernels() -> list[KernelName]:
    q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in (Q, KV, KV))
    call = Call(q, k, v, options_for(Choices(causal=True), 64))
    behind = backward_setup(call).kernels()
    return [forward_setup(call).kernel(), behind.preprocess, behind.attention, behind.postprocess]
