"""Where a benchmark ran: GPU, driver, clocks, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...backends import resolve

SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def environment(backend: str = "auto") -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        **driver_facts(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **compilers(backend),
        "python": platform.python_version(),
        "dash_attn": __version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def compilers(backend: str) -> dict[str, str | None]:
    """What makes the machine code of a backend on the current GPU."""
    if resolve(backend, torch.device("cuda", torch.cuda.current_device())) == "triton":
        from ...backends.triton.support import triton_version

        return {"triton": triton_version()}
    from ...backends.hopper.driver.compile import compiler_at_hand
    from ...backends.hopper.driver.shipped import shipped_compiler

    return {"nvrtc": compiler_at_hand(), "packed_nvrtc": shipped_compiler()}  # of the kernels that came with the package


def short_name(gpu: str) -> str:
    """`NVIDIA H100 80GB HBM3` is h100."""
    found = re.search(r"\b([A-Z]+\d+[A-Z]*)\b", gpu)
    return (found.group(1) if found else re.sub(r"\W+", "-", gpu).strip("-")).lower()


def driver_facts() -> dict[str, str]:
    """What nvidia-smi says, where there is one."""
    said = _output(["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader", f"--id={torch.cuda.current_device()}"])
    values = [value.strip() for value in (said or "").split(",")]
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}


def commit() -> str | None:
    """The commit of the source tree this package runs from, with a + if files have changed since."""
    if "DASH_ATTN_COMMIT" in os.environ:  # of a copy of the sources, whose history is not theirs
        return os.environ["DASH_ATTN_COMMIT"]
    folder = str(Path(__file__).parent)
    head = _output(["git", "-C", folder, "rev-parse", "HEAD"])
    if not head:
        return None
    return head.strip() + ("+" if _output(["git", "-C", folder, "status", "--porcelain", "--untracked-files=no"]) else "")


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
