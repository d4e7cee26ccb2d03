"""Calibrated machine constants, in microseconds: what the simulator needs to predict the backward kernel's time.

Those of an H200 come with the package: fitted to 45 measured schedules per head dim; benchmarks/results/h200-prediction.json
has the errors. `dash-attn calibrate` writes those of another machine to a file.

A cluster is ranks on such machines, what lies between them, and how wide what they send is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import did_you_mean
from ..formats import MACHINES
from ..scheduling.json_fields import as_number, as_object, as_text, as_whole, as_wholes, read_fields, read_json_file, shortened
from ..scheduling.problem import Problem, whole_number
from .simulate import Machine

UNIT = "us"

# By head dim. A task is a tile of 64 queries (head dim 128) or 128 queries (head dim 64) by 128 keys.
H200 = {
    128: Machine(compute=1.93, reduce=0.58, overlap=2, latency=2.9, startup=3.85),
    64: Machine(compute=2.15, reduce=0.65, overlap=2, latency=2.58, startup=3.23),
}
STATE_BYTES = 4  # float32, as in registers
BYTES_PER_US = 1000.0  # of one GB/s


@dataclass(frozen=True)
class Calibrated:
    """A backend on one machine. By head dim: its constants, and the rows of a Q tile and of a KV tile they are for."""

    name: str
    backend: str
    workers: int
    constants: Mapping[int, Machine]
    tiles: Mapping[int, tuple[int, int]]

    def __post_init__(self) -> None:
        whole_number("workers", self.workers)
        if not self.constants or set(self.constants) != set(self.tiles):
            raise ValueError(f"constants and tiles must be of the same head dims; got {list(self.constants)} and {list(self.tiles)}")

    def pick(self, head_dim: int | None) -> tuple[Machine, tuple[int, int]]:
        """Constants and tiles of a head dim; of the largest one if it does not matter."""
        chosen = max(self.constants) if head_dim is None else head_dim
        if chosen not in self.constants:
            raise ValueError(f"{self.name} was calibrated for head dims {', '.join(map(str, sorted(self.constants)))}; got {chosen}")
        return self.constants[chosen], self.tiles[chosen]

    def to_json(self) -> dict[str, Any]:
        dims = {str(dim): {**asdict(machine), "tiles": list(self.tiles[dim])} for dim, machine in self.constants.items()}
        about = {"name": self.name, "backend": self.backend, "unit": UNIT, "workers": self.workers}
        return {**MACHINES.mark, **about, "head_dims": dims}

    @classmethod
    def from_json(cls, value: Any) -> Calibrated:
        """Raises ValueError for whatever is wrong with it."""
        found = as_object(value, "the constants of a machine")
        MACHINES.check(found, "it")
        if found.get("unit") != UNIT:
            raise ValueError(f"its times are in {shortened(found.get('unit'))}; expected {UNIT}")
        names = ("machine", "name", "backend", "unit", "workers", "head_dims")
        read = read_fields(found, "the constants of a machine", names, ("measured",))  # `measured`: what they were fitted to
        entries = as_object(read["head_dims"], "head_dims")
        dims = {_head_dim(word): _constants(entry, f"head_dims.{word}") for word, entry in entries.items()}
        constants, tiles = ({dim: found[i] for dim, found in dims.items()} for i in range(2))
        who = as_text(read["name"], "name"), as_text(read["backend"], "backend"), as_whole(read["workers"], "workers", least=1)
        return cls(*who, constants, tiles)  # type: ignore[arg-type]


def _head_dim(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and 0 < len(word) < 6 and int(word) > 0):
        raise ValueError(f"a head dim must be a whole number >= 1; got {shortened(word)}")
    return int(word)


def _constants(value: Any, where: str) -> tuple[Machine, tuple[int, int]]:
    """The constants of a head dim, and its tiles."""
    read = read_fields(value, where, ("compute", "reduce", "overlap", "latency", "startup", "tiles"))
    rows = as_wholes(read["tiles"], f"{where}.tiles")
    if len(rows) != 2 or min(rows) < 1:
        raise ValueError(f"{where}.tiles must be the rows of a Q tile and of a KV tile; got {rows}")
    times = {name: as_number(cost, f"{where}.{name}") for name, cost in read.items() if name not in ("tiles", "overlap")}
    return Machine(**times, overlap=as_whole(read["overlap"], f"{where}.overlap")), (rows[0], rows[1])


SHIPPED = {"h200": Calibrated("NVIDIA H200", "hopper", 132, H200, {128: (64, 128), 64: (128, 128)})}


def load_machine(word: str) -> Calibrated:
    """A machine that comes with the package, by name, or a file that `dash-attn calibrate` wrote."""
    if word.lower() in SHIPPED:
        return SHIPPED[word.lower()]
    path = Path(word)
    if not path.is_file():
        choices = f"name a file that `dash-attn calibrate` wrote, or one of {', '.join(SHIPPED)}"
        raise ValueError(f"unknown machine {word!r}: {choices}{did_you_mean(word, SHIPPED)}")
    value = read_json_file(path, "machine file")
    try:
        return Calibrated.from_json(value)
    except ValueError as error:
        raise ValueError(f"{path} is not a machine file: {error}") from error


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
