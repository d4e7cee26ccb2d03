"""Asks the code what it can do. The CPU backend runs each question, forward and backward, on small tensors.

GPU backends are asked through `explain` with tensors on the meta device, which makes every check that a call
makes and needs no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from dash_attn import ScheduleError, explain, flash_attn_func, flash_attn_varlen_func
from dash_attn.backends.hopper.support import sm_count
from dash_attn.backends.triton import support as triton_support

LENGTH = 512  # four KV tiles: enough for masks to differ by tiles
BASE_DTYPE = {"cpu": torch.float32, "hopper": torch.bfloat16, "triton": torch.bfloat16}
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
REFUSALS = (ValueError, NotImplementedError, ScheduleError)  # other errors are mistakes of ours and are not caught


@dataclass(frozen=True)
class Question:
    """One call. `heads` are query and KV heads, `lengths` queries and keys, `dims` those of q and k, and of v.

    An option that is a tensor is given as a function of the device.
    """

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 2)
    lengths: tuple[int, int] = (LENGTH, LENGTH)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype | None = None

    def tensors(self, backend: str) -> tuple[torch.Tensor, ...]:
        (q_len, kv_len), (q_heads, kv_heads), (dim, v_dim) = self.lengths, self.heads, self.dims
        shapes = ((q_len, q_heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim))
        device, dtype = "cpu" if backend == "cpu" else "meta", self.dtype or BASE_DTYPE[backend]
        return tuple(torch.zeros(1, *shape, device=device, dtype=dtype) for shape in shapes)


def refusal(backend: str, question: Question, run: bool = True) -> str | None:
    """The error a call gets; None if the backend serves it. `run=False`: explain the call on every backend."""
    q, k, v = question.tensors(backend)
    options = {name: value(q.device) if callable(value) else value for name, value in question.options.items()}
    try:
        if backend == "cpu" and run:
            _run(q, k, v, options)
        else:
            explain(flash_attn_func, q, k, v, backend=backend, predict_time=False, **options)
    except REFUSALS as error:
        return str(error)
    return None


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> None:
    result = flash_attn_func(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), **options)
    out = result[0] if isinstance(result, tuple) else result
    out.sum().backward()


def refusal_of_packed(backend: str, question: Question) -> str | None:
    """The error a packed batch of one sequence gets."""
    q, k, v = (tensor[0] for tensor in question.tensors(backend))
    ends = torch.tensor([0, LENGTH], dtype=torch.int32)
    packed = ends, ends, LENGTH, LENGTH
    try:
        if backend == "cpu":
            flash_attn_varlen_func(q.requires_grad_(), k, v, *packed, **question.options).sum().backward()
        else:
            explain(flash_attn_varlen_func, q, k, v, *packed, backend=backend, predict_time=False, **question.options)
    except REFUSALS as error:
        return str(error)
    return None


def capabilities(backend: str) -> list[str]:
    """Compute capabilities of GPUs that a backend takes."""
    taken = []
    for major, minor in CAPABILITIES:
        properties = SimpleNamespace(name="GPU", major=major, minor=minor, multi_processor_count=1)
        with patch("torch.cuda.get_device_properties", return_value=properties), patch.object(triton_support, "check_triton"):
            try:  # past their caches
                sm_count.__wrapped__(0) if backend == "hopper" else triton_support.architecture_of.__wrapped__(torch.device("cuda"))
            except REFUSALS:
                continue
        taken.append(f"{major}.{minor}")
    return taken
