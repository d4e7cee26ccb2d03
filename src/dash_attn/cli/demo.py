"""`dash-attn demo`: what goes wrong without an order, that an order mends it, and what the order costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..scheduling.problem import Problem
from ..simulation.simulate import Machine
from .arguments import read_schedules
from .files import check_folder, check_picture
from .plan import auto_order_name, plan_header, print_refused, simulate_all
from .table import print_table

if TYPE_CHECKING:
    from .training import Step

STEPS = 8
COMPARED = ("ascending", "alternating")
WORKERS = 8
MACHINE = Machine(compute=3, reduce=1)
PICTURE = "gantt-causal.png"


def add_command(commands: Any) -> None:
    text = "Trains a small transformer twice with and twice without ordered gradients, then compares schedules."
    parser = commands.add_parser("demo", help="see reproducible training at work, without a GPU, in under a minute", description=text)
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where pictures go (default: demo-output)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"training steps (default: {STEPS})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default: auto)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise ValueError(f"--steps must be at least 1; got {arguments.steps}")
    check_folder("--output", arguments.output)
    check_picture("--output", arguments.output / PICTURE if arguments.output.is_dir() else None)
    agrees = _show_training(arguments.steps, arguments.device)
    _show_schedules(arguments.output)
    return 0 if agrees else 1


def _show_training(steps: int, wanted: str) -> bool:
    """Whether the ordered runs agree."""
    from . import training

    device = _choose_device(wanted)
    print("1. THE SAME TRAINING RUN, TWICE\n")
    print(
        f"A transformer of {training.LAYERS} layers and {training.weight_count():,} weights learns from {training.LENGTH}-token sequences:"
    )
    print("same seed, same data, same code. The two runs differ only in which attention tile happens to finish first.")
    print(_how_arrival_varies(device))
    print('\nGradients added as they arrive, accumulation="unordered":\n')
    chaotic = [training.train("unordered", steps, seed, device) for seed in (1, 2)]
    parted = _print_comparison(chaotic[0][0], chaotic[1][0])
    if parted is None:
        print("\nThis time the runs agree. Nothing promises it: run the demo again.")
    else:
        difference = (chaotic[0][1] - chaotic[1][1]).abs().max().item()
        print(f"\nThe runs part at step {parted}; at the end some weight differs by {difference:.1e}.")
        print("On a GPU no seed decides who comes first: neither run could ever be repeated.")
    print('\nGradients added in a planned order, accumulation="ordered" (the default):\n')
    ordered = [training.train("ordered", steps, seed, device) for seed in (1, 2)]
    parted = _print_comparison(ordered[0][0], ordered[1][0])
    verdict = "Every bit of every weight agrees after every step."
    print(f"\n{verdict if parted is None else f'FAILED: the runs part at step {parted}; ordered runs must agree.'}\n")
    return parted is None


def _how_arrival_varies(device: str) -> str:
    if device == "cuda":
        import torch

        return f"This {torch.cuda.get_device_name()} decides that anew every time."
    return "A GPU decides that anew every time; here, on the CPU, each run draws it from a seed of its own."


def _choose_device(wanted: str) -> str:
    """The GPU if there is one that our kernels serve, unless told otherwise."""
    import torch

    if wanted != "auto":
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch finds no GPU here")
        return wanted
    return "cuda" if torch.cuda.is_available() and _has_hopper_backend() else "cpu"


def _has_hopper_backend() -> bool:
    import torch

    from ..backends import import_backend

    if torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        return hasattr(import_backend("hopper"), "backward")
    except (ImportError, RuntimeError, ValueError, NotImplementedError):
        return False


def _print_comparison(first: list[Step], second: list[Step]) -> int | None:
    """Print two histories side by side; the first step (from 1) at which they differ, or None."""
    print("  step   loss, run A   loss, run B   weights, run A   weights, run B")
    parted = None
    for number, (a, b) in enumerate(zip(first, second, strict=True), start=1):
        same = a == b
        parted = number if parted is None and not same else parted
        print(f"  {number:4d}   {a.loss:11.8f}   {b.loss:11.8f}   {a.weights:>14}   {b.weights:>14}   {'same' if same else 'DIFFERENT'}")
    return parted


def _show_schedules(output: Path) -> None:
    problem = Problem.from_tiles("causal", 8, 8, heads=4)
    print("2. WHAT AN ORDER COSTS\n")
    print("Tiles that must add in turn may have to wait for each other. How long depends on the schedule. In model time,")
    print("for the backward pass of one small problem:\n")
    runs, refused = simulate_all(read_schedules(["all"]), problem, MACHINE, WORKERS)
    print_table(plan_header(problem, MACHINE, WORKERS, "causal"), runs, auto_order_name(problem, WORKERS))
    print_refused(refused)
    print("\nMakespan is when the last worker ends; no schedule can beat the lower bound. Stalled is worker time lost to waiting.")
    print("Slack is how many steps pass between two chains on a tile; the chains of a gang must be on the GPU together.")
    slow, fast = (dict(runs)[name].makespan for name in COMPARED)
    print(f"All of these are deterministic. {COMPARED[1]}, which dash-attn picks here, takes {fast / slow:.0%} of {COMPARED[0]}'s time.")
    chosen = [timeline for name, timeline in runs if name in COMPARED]
    output.mkdir(parents=True, exist_ok=True)
    path = output / PICTURE
    from ..viewing.gantt import gantt

    gantt(chosen, path)
    print("\n3. A PICTURE OF IT\n")
    print(f"{' and '.join(COMPARED)}, worker by worker: open {path}")
