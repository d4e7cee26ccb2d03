"""Where a command works: on the CPU or on a GPU, and on which. Schedules are watched on a Hopper GPU, or in threads of the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from .parser import whole

if TYPE_CHECKING:
    from ..tools.calibrate.measured import Device

GPU_BACKENDS = ("auto", "hopper", "triton")
BACKENDS = (*GPU_BACKENDS, "cpu")  # as in call/options.py, which takes a second to import


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a Hopper GPU if there is one, else cpu")
    parser.add_argument("--threads", type=whole(), metavar="N", help="worker threads on the CPU (default: one per processor)")


def choose(arguments: argparse.Namespace) -> Device:
    """The device to measure on; an error if it is not there."""
    from ..tools.calibrate.measured import cpu_device, hopper_device

    if choose_device(arguments.device) == "cpu":
        return cpu_device(arguments.threads)
    if arguments.threads is not None:
        raise ValueError("--threads goes with --device cpu; a GPU has as many workers as SMs")
    return hopper_device()


def choose_device(wanted: str) -> str:
    """A Hopper GPU, where schedules and unordered sums run as they do on the CPU; unless told otherwise."""
    from ..backends.gpus import is_hopper

    return _chosen(wanted, is_hopper, "9.0 (H100, H200, GH200)")


def choose_served(wanted: str) -> str:
    """The GPU if a backend serves it, unless told otherwise."""
    return _chosen(wanted, lambda: gpu_trouble() is None, "8.0 or later")


def _chosen(wanted: str, serves: Callable[[], bool], capability: str) -> str:
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: PyTorch finds no GPU here; a GPU of compute capability {capability} is needed")
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() and serves() else "cpu"


def gpu_trouble(backend: str = "auto") -> str | None:
    """Why our kernels cannot run on the current GPU; None if they can."""
    import torch

    from ..backends import resolve

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        if resolve(backend, device) == "hopper":
            from ..backends.hopper.support import sm_count

            sm_count(device.index)
        else:
            from ..backends.triton.support import architecture_of

            architecture_of(device)
    except ValueError as error:
        return str(error)
    return None
