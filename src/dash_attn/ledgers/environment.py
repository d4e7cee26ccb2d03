"""The head of a ledger: what there is to know of a process that may explain why another one computed something else."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..tools.doctor import doctor

VARIABLES = ("CUBLAS", "CUDA", "CUDNN", "DASH_ATTN", "MKL", "NCCL", "NVIDIA", "OMP", "PYTHONHASHSEED", "PYTORCH", "TORCH", "TRITON")
PACKAGES = ("numpy", "transformers", "accelerate", "triton", "lightning", "deepspeed", "flash_attn")
LAUNCHER = "TORCHELASTIC"  # torchrun's own: names of its files and of the run


def environment() -> dict[str, Any]:
    """Everything here fits in JSON. Nothing is imported and CUDA is not initialised for it."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "argv": list(sys.argv),
        "folder": os.getcwd(),
        "versions": _versions(),
        "platform": platform.platform(),
        "cpu": {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()},
        "gpu": _gpus(),
        "git": _git(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _matters(name)},
        "doctor": {finding.id: finding.found for finding in doctor()},
    }


def _matters(variable: str) -> bool:
    return variable.startswith(VARIABLES) and not variable.startswith(LAUNCHER)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "dash_attn": __version__, "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
    return {**found, **{name: str(version) for name, version in loaded.items() if version}}


def _gpus() -> list[str]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _git() -> str | None:
    """The commit of the folder the process was started in, and whether files differ from it."""
    commit = _ask_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _ask_git("status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changes else commit


def _ask_git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, cwd=Path.cwd(), check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
