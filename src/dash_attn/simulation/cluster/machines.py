"""What a cluster is: the ranks, what lies between them, and how wide what they send is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...scheduling.problem import Problem, whole_number
from ..machines import H200
from ..simulate import Machine

STATE_BYTES = 4  # float32, as in registers
BYTES_PER_US = 1000.0  # of one GB/s


@dataclass(frozen=True)
class Widths:
    """Numbers of a row of a head, and the bytes of each of them in queries, keys, values and outputs."""

    dim_qk: int = 128
    dim_v: int = 128
    element: int = 2  # bfloat16 or float16

    def __post_init__(self) -> None:
        for name in ("dim_qk", "dim_v", "element"):
            whole_number(name, getattr(self, name))

    def keys(self, rows: int) -> int:
        """Bytes of K and V of one head."""
        return rows * (self.dim_qk + self.dim_v) * self.element

    def states(self, problem: Problem, tiles: int) -> int:
        """Bytes of the states of so many KV tiles. The last tile of a sequence travels whole, as it is in registers."""
        return tiles * problem.tile_kv * (self.dim_qk + self.dim_v) * STATE_BYTES


@dataclass(frozen=True)
class Cluster:
    """Equal ranks. How many there are is the sharding's to say. Constants of `machine` are microseconds.

    hop_latency_us: from the end of a unit until its states are on the next rank, beside the transfer itself.
    bandwidth_GBs: what a rank can send, in 10^9 bytes per second. What it sends goes one after the other.
    """

    machine: Machine = H200[128]
    workers: int = 132  # SMs of a rank
    hop_latency_us: float = 10.0
    bandwidth_GBs: float = 400.0
    widths: Widths = field(default_factory=Widths)

    def __post_init__(self) -> None:
        whole_number("workers", self.workers)
        if not (self.hop_latency_us >= 0 and math.isfinite(self.hop_latency_us)):
            raise ValueError(f"hop_latency_us must be a finite number >= 0; got {self.hop_latency_us!r}")
        if not self.bandwidth_GBs > 0:
            raise ValueError(f"bandwidth_GBs must be a number > 0; got {self.bandwidth_GBs!r}")

    def transfer_us(self, size: int) -> float:
        """How long so many bytes keep a link busy."""
        return size / (self.bandwidth_GBs * BYTES_PER_US)
