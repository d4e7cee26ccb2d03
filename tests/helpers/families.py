"""The kinds of attention a training program may ask for, each as inputs and one call: what the repeat tests run over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dash_attn import Causal, Documents, Mask, Window, flash_attn_func, flash_attn_varlen_func
from devices import make_inputs, require
from gpu_helpers import ragged_map
from packed_batches import places

# Length, batch and heads: several chains add to every dQ tile, and on a GPU every SM works.
SIZES = {"cpu": (640, 1, 2), "cuda": (2048, 2, 8)}


@dataclass(frozen=True)
class Family:
    """`lengths` is the length of all sequences of a dense batch, or the length of each of a packed one."""

    mask: Mask
    lengths: tuple[int, ...] | int
    batch: int
    heads: tuple[int, int]
    dim: int = 128
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    has_sinks: bool = False

    def inputs(self, device: str, seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v and dO, and the sinks where there are any."""
        length = sum(self.lengths) if isinstance(self.lengths, tuple) else self.lengths
        tensors = make_inputs(device, (length, length), self.heads, (self.dim, 0), batch=self.batch, seed=seed)
        if isinstance(self.lengths, tuple):
            return tuple(x[0] for x in tensors)
        if self.has_sinks:
            source = torch.Generator(device).manual_seed(seed)
            return *tensors, torch.randn(self.heads[0], generator=source, device=device)
        return tensors

    def attention(self, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """Output and LSE as a function of q, k, v and the sinks where there are any."""
        chosen = {**self.options, **options, "mask": self.mask, "return_lse": True}

        def dense(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Any:
            return flash_attn_func(q, k, v, **chosen, **({"sinks": sinks[0]} if sinks else {}))

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
            assert isinstance(self.lengths, tuple)
            ends, longest = _places_on(self.lengths, q.device), max(self.lengths)
            return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, **chosen)

        return packed if isinstance(self.lengths, tuple) else dense

    def run(self, inputs: tuple[Tensor, ...], **options: Any) -> dict[str, Tensor]:
        """Output, LSE and the gradients of everything that has one."""
        q, k, v, dout, *sinks = inputs
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *sinks)]
        out, lse = self.attention(**options)(*leaves)
        return {"out": out.detach(), "lse": lse, **named_gradients(torch.autograd.grad(out, leaves, dout))}


def named_gradients(gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("dq", "dk", "dv", "dsinks"), gradients, strict=False))


_ends: dict[tuple[Any, ...], Tensor] = {}


def _places_on(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: a graph cannot copy from the host."""
    key = (lengths, device)
    if key not in _ends:
        _ends[key] = places(list(lengths), device)
    return _ends[key]


NAMES = ("causal", "window", "varlen", "grouped-query", "head dim 256", "softcap", "sink", "documents", "tile map")
NEEDS = {"varlen": "varlen", "head dim 256": "head dim 256", "softcap": "softcap", "sink": "sinks"}


def family(name: str, device: str) -> Family:
    """One of NAMES in the size of a device; skips the test where it has not landed."""
    if name in NEEDS:
        require(device, NEEDS[name])
    n, batch, h = SIZES[device]
    return {
        "causal": Family(Causal(), n, batch, (h, h)),
        "window": Family(Window(n // 2, 0), n, batch, (h, h)),
        "varlen": Family(Causal(), (n // 2 + 37, 1, n, n // 4), 1, (h, h)),
        "grouped-query": Family(Causal(), n, batch, (2 * h, h // 2)),
        "head dim 256": Family(Causal(), n, batch, (h, h), 256),
        "softcap": Family(Causal(), n, batch, (h, h), options=MappingProxyType({"softcap": 2.0})),
        "sink": Family(Causal(), n, batch, (h, h), has_sinks=True),
        "documents": Family(Documents((n - 85, 37, 48)), n, batch, (h, h)),  # one of many tiles, whose sums have orders that differ
        "tile map": Family(ragged_map(n, n), n, batch, (h, h)),
    }[name]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str = "") -> None:
    """Compare as integers; name the result that differs and how much of it."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        a, b = (x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]) for x in (value, expected[name]))
        assert a.shape == b.shape, f"{what} {name}: {tuple(a.shape)} against {tuple(b.shape)}"
        assert torch.equal(a, b), f"{what} {name}: {int((a != b).sum())} of {a.numel()} elements differ"
