"""Calibrated machine constants, in microseconds: what the simulator needs to predict the backward kernel's time.

Those of an H200 come with the package: fitted to 45 measured schedules a head dim, benchmarks/results/h200-prediction.json
has the errors. `dash-attn calibrate` writes those of another machine to a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .problem import whole_number
from .simulate import Machine

FORMAT = 1
UNIT = "us"

# By head dim. A task is a tile of 64 queries (head dim 128) or 128 queries (head dim 64) by 128 keys.
H200 = {
    128: Machine(compute=1.93, reduce=0.58, overlap=2, latency=2.9, startup=3.85),
    64: Machine(compute=2.15, reduce=0.65, overlap=2, latency=2.58, startup=3.23),
}


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
        return {"machine": FORMAT, "name": self.name, "backend": self.backend, "unit": UNIT, "workers": self.workers, "head_dims": dims}

    @classmethod
    def from_json(cls, value: Any) -> Calibrated:
        try:
            if value["machine"] != FORMAT or value["unit"] != UNIT:
                raise ValueError(f"format {value['machine']} in {value['unit']}; expected format {FORMAT} in {UNIT}")
            dims = {int(dim): dict(entry) for dim, entry in value["head_dims"].items()}
            tiles = {dim: (int(entry["tiles"][0]), int(entry.pop("tiles")[1])) for dim, entry in dims.items()}
            return cls(value["name"], value["backend"], value["workers"], {dim: Machine(**entry) for dim, entry in dims.items()}, tiles)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"not the constants of a machine: {type(error).__name__} {error}") from error


SHIPPED = {"h200": Calibrated("NVIDIA H200", "hopper", 132, H200, {128: (64, 128), 64: (128, 128)})}


def load_machine(word: str) -> Calibrated:
    """A machine that comes with the package, by name, or a file that `dash-attn calibrate` wrote."""
    if word.lower() in SHIPPED:
        return SHIPPED[word.lower()]
    path = Path(word)
    if not path.is_file():
        raise ValueError(f"unknown machine {word!r}: name a file that `dash-attn calibrate` wrote, or one of {', '.join(SHIPPED)}")
    try:
        return Calibrated.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} is no machine file: it is not JSON") from None
    except ValueError as error:
        raise ValueError(f"{path} is no machine file: {error}") from error
