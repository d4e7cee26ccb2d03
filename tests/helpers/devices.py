"""One test for two devices: on the CPU always, on a Hopper GPU under the marker `gpu`. Importing it needs no GPU.

`MISSING` says what a device does not serve yet; tests that need it are skipped there. It is written down, not asked of
the backend, because support that got lost would then look like a skip; tests/attention/test_capabilities.py keeps it honest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Full, Mask
from dash_attn.execution.interleaving import interleaving
from inputs import Inputs, make_inputs

# Take a name out when the feature has landed. "value head dim" is 128 of 192, the others are "other value head dims".
MISSING: dict[str, set[str]] = {
    "cpu": set(),
    "cuda": set(),
}

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def require(device: str, *features: str) -> None:
    """Skip the test where a feature has not landed."""
    missing = MISSING[device] & set(features)
    if missing:
        pytest.skip(f"not on {device} yet: {', '.join(sorted(missing))} (tests/helpers/devices.py)")


def dim_features(dim: int, v_dim: int = 0) -> set[str]:
    """What a head dim needs; v_dim=0 means the same."""
    needed = set() if dim in (64, 128) else {f"head dim {dim}"} if dim in (96, 192, 256) else {"padded head dims"}
    if v_dim in (0, dim):
        return needed
    return needed | {"value head dim" if (dim, v_dim) == (192, 128) else "other value head dims"}


@dataclass(frozen=True)
class Case:
    """One attention problem. `heads` are (query heads, KV heads); v_dim=0 means the head dim of q and k."""

    lengths: tuple[int, int]
    mask: Mask = Full()  # noqa: RUF009 (a mask is a value)
    heads: tuple[int, int] = (4, 2)
    dim: int = 128
    v_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    batch: int = 2
    softcap: float = 0.0

    def __str__(self) -> str:
        dims = f"d{self.dim}" + (f"v{self.v_dim}" if self.v_dim else "")
        cap = f"-cap{self.softcap:g}" if self.softcap else ""
        heads = "{}of{}".format(*self.heads)
        return f"{self.lengths[0]}x{self.lengths[1]}-{self.mask}-{heads}-{dims}-{str(self.dtype)[6:]}{cap}"

    @property
    def features(self) -> set[str]:
        return dim_features(self.dim, self.v_dim) | ({"softcap"} if self.softcap else set())

    def inputs(self, device: str, seed: int = 0) -> Inputs:
        return make_inputs(device, self.lengths, self.heads, (self.dim, self.v_dim), self.dtype, self.batch, seed)


def on_devices(cpu: Iterable[Any], cuda: Iterable[Any]) -> list[Any]:
    """Parameters (device, case): each device has its own choice of cases."""
    on_cpu = [pytest.param("cpu", case, id=f"cpu-{case}") for case in cpu]
    return on_cpu + [pytest.param("cuda", case, id=f"cuda-{case}", marks=pytest.mark.gpu) for case in cuda]


@contextmanager
def disturbed(device: str, run: int) -> Iterator[None]:
    """Other timing in every run: another interleaving on the CPU, matrix products on a side stream of the GPU."""
    if device == "cpu":
        with interleaving(run, threads=run % 4 == 3):
            yield
        return
    stream, a, product = _noise()
    with torch.cuda.stream(stream):
        for _ in range(1 + run % 3):
            torch.mm(a, a, out=product)
    yield


@cache
def _noise() -> tuple[torch.cuda.Stream, Tensor, Tensor]:
    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    product = torch.empty_like(a)
    torch.cuda.synchronize()
    return torch.cuda.Stream(), a, product
