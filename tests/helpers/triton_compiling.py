"""The launches of calls on GPUs that are not here, and compiling them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from subprocess import run
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from dash_attn import Causal, Mask, Prefix, TileMap
from dash_attn.backends.triton import passes
from dash_attn.backends.triton.explain import _launches
from dash_attn.backends.triton.launch import Launch
from dash_attn.backends.triton.support import triton_version
from dash_attn.call.call import Call
from dash_attn.call.offsets import SequenceOffsets
from dash_attn.call.options import AttentionOptions
from dash_attn.libraries import numbers
from dash_attn.masks import TilePattern

KIB = 1024
# Bytes of shared memory that a block of threads can have. docs.nvidia.com, CUDA programming guide, compute capabilities; AMD: LDS.
SHARED_MEMORY = {
    **{"8.0": 163 * KIB, "8.6": 99 * KIB, "8.9": 99 * KIB, "9.0": 227 * KIB, "10.0": 227 * KIB, "12.0": 99 * KIB},
    "gfx942": 64 * KIB,
}
MASKS: dict[str, Mask] = {
    **{"band": Causal(), "rows": Prefix(100), "blocks": TileMap(np.eye(4, dtype=bool), 128, 128)},
    "bits": TilePattern(np.arange(64, dtype=np.uint8).reshape(8, 8) % 3),
}


@dataclass(frozen=True)
class Compiled:
    """A call on an architecture."""

    architecture: str
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    kind: str = "band"
    group: int = 1
    softcap: float = 0.0

    def __str__(self) -> str:
        return f"{self.architecture}-{self.dims[0]}-{self.dims[1]}-{str(self.dtype)[6:]}-{self.kind}-{self.group}-{self.softcap:g}"

    def launches(self) -> dict[str, Launch]:
        packed = {"offsets": passes.offsets_launch(self.passes)} if self.kind == "packed" else {}
        return {**_launches(self.passes), **packed}

    @cached_property
    def passes(self) -> passes.Passes:
        q, k, v = (torch.empty(2, 512, heads, dim, dtype=self.dtype, device="meta") for heads, dim in self._shapes())
        call = Call(q, k, v, self._options(MASKS.get(self.kind, Causal())))
        if self.kind == "packed":
            ends = torch.empty(4, dtype=torch.int32, device="meta")
            call = Call(q[0], k[0], v[0], call.options, SequenceOffsets(ends, ends, 512, 512))
        with patch.object(passes, "architecture_of", return_value=self.architecture):
            return passes.Passes(call)

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        return (2 * self.group, self.dims[0]), (2, self.dims[0]), (2, self.dims[1])

    def _options(self, mask: Mask) -> AttentionOptions:
        return AttentionOptions(mask, 0.1, self.softcap)


def target_of(architecture: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.replace(".", "")), 32)


def said_by_ptxas(compiled: Any, architecture: str) -> str:
    """Registers, spills, and whether products wait for each other."""
    from triton import knobs

    tools, newer = knobs.nvidia, numbers(triton_version()) >= (3, 9)  # which has left the older one for Hopper, too
    name = "sm_" + architecture.replace(".", "") + ("a" if architecture >= "9.0" else "")
    command = [(tools.ptxas_blackwell if newer else tools.ptxas).path, "-v", f"--gpu-name={name}", "--fmad=false", "-o", os.devnull]
    with NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        return run([*command, file.name], capture_output=True, text=True, check=True).stderr


class PretendedDriver:
    """Says that a GPU of an architecture is here, so that a kernel can be called up to its launch."""

    def __init__(self, architecture: str) -> None:
        self.target = target_of(architecture)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
