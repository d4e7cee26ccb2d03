"""What probes have found on this kind of machine, on disk beside compiled kernels: a file per GPU model, driver and library versions."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..backends.hopper.driver.compile import cache_folder
from ..formats import PROBES

DRIVER = Path("/proc/driver/nvidia/version")
LIBRARIES = Path("/proc/self/maps")
VARIABLES: tuple[str, ...] = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
VARIABLES += ("NVIDIA_TF32_OVERRIDE", "DISABLE_ADDMM_CUDA_LT")


class Record:
    """Verdicts by what was tried."""

    def __init__(self, surroundings: dict[str, Any]) -> None:
        self.surroundings = surroundings
        name = hashlib.sha256(json.dumps(surroundings, sort_keys=True).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"invariance-{name}.json"
        self.verdicts: dict[str, Any] = self._read()

    def get(self, tried: str) -> Any:
        return self.verdicts.get(tried)

    def put(self, tried: str, verdict: Any) -> None:
        """Another process may have added some."""
        self.verdicts = {**self._read(), **self.verdicts, tried: verdict}
        text = json.dumps({"surroundings": self.surroundings, "verdicts": self.verdicts}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, self.path)

    def _read(self) -> dict[str, Any]:
        """Nothing where there is no file, or one that cannot be read: then all is tried again."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return dict(found["verdicts"]) if found["surroundings"] == self.surroundings else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


@cache
def record_of(device: torch.device) -> Record:
    return Record(surroundings(device))


def surroundings(device: torch.device) -> dict[str, Any]:
    """All that may choose other kernels. The version of the probe is one of them, so another one proves again."""
    found: dict[str, Any] = {**PROBES.mark, "torch": torch.__version__, "cuda": torch.version.cuda, "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "sms": properties.multi_processor_count, "cublas": cublas_version(), "driver": driver_version()}
        found |= {name: os.environ.get(name) for name in VARIABLES}
    return found


def cublas_version() -> int | None:
    """Of the library that this process has loaded."""
    try:
        found = re.search(r"\S*libcublasLt\.so\S*", LIBRARIES.read_text())
    except OSError:
        return None
    if found is None:
        return None
    version = ctypes.CDLL(found[0]).cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return int(version())


def driver_version() -> str | None:
    """Of NVIDIA's driver, without asking it."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
    except OSError:
        return None
    return found[0] if found else None


def records() -> list[dict[str, Any]]:
    """All of this version on this disk, for `dash-attn doctor` and certificates. CUDA is not initialised for it."""
    found = []
    for path in sorted(cache_folder().glob("invariance-*.json")):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            if read["surroundings"][PROBES.field] == PROBES.newest:
                found.append(read)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def in_words() -> str:
    """What was proved here, in a line."""
    for_gpus = [found for found in records() if found["surroundings"].get("gpu")]
    if not for_gpus:
        return "invariance: no product has been probed on a GPU here"
    return "; ".join(f"invariance on {found['surroundings']['gpu']}: {_counted(found['verdicts'])}" for found in for_gpus)


def _counted(verdicts: dict[str, Any]) -> str:
    products = [verdict for verdict in verdicts.values() if isinstance(verdict, list)]
    norms = [verdict for verdict in verdicts.values() if not isinstance(verdict, list)]
    blocks = sum(1 for _, block, *_ in products if block), len(norms) - sum(norms)
    return "; ".join(
        f"{len(found)} kinds of {kind} proved, {count} of them in blocks"
        for kind, found, count in zip(("products", "norms"), (products, norms), blocks, strict=True)
    )
