"""`dash-attn demo`: two runs part and `diff` names the layer, two others agree; and what an order costs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..scheduling.problem import Problem
from ..simulation.simulate import Machine
from .arguments import read_schedules
from .device import choose_device
from .files import check_folder, check_picture
from .parser import whole
from .plan import report_of, simulate_all
from .table import print_report

if TYPE_CHECKING:
    from ..ledgers.comparing import Comparison
    from ..viewing.agreement import Agreement

HELP = "see reproducible training at work, without a GPU, in under a minute"
TEXT = "Trains a small transformer twice with and twice without ordered gradients, then compares schedules."
STEPS = 6
UNORDERED = 2  # the layer that diff has to find
COMPARED = ("ascending", "alternating")
WORKERS = 8
MACHINE = Machine(compute=3, reduce=1)
PICTURE, PICTURE_OF_RUNS = "gantt-causal.png", "runs-part.png"
SHOWN = re.compile(r"blocks\.\d+\.(attention|mlp)|head")  # modules in the picture of runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where pictures go (default: demo-output)")
    parser.add_argument("--steps", type=whole(), default=STEPS, metavar="N", help=f"training steps (default: {STEPS})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train (default: auto)")


def run(arguments: argparse.Namespace) -> int:
    check_folder("--output", arguments.output)
    for picture in (PICTURE, PICTURE_OF_RUNS) if arguments.output.is_dir() else ():
        check_picture("--output", arguments.output / picture)
    agrees = _show_training(arguments.steps, arguments.device, arguments.output)
    _show_schedules(arguments.output)
    return 0 if agrees else 1


def _show_training(steps: int, wanted: str, output: Path) -> bool:
    """Whether the ordered runs agree."""
    from ..viewing.agreement import draw_agreement
    from . import training

    device = choose_device(wanted)
    print("1. THE SAME TRAINING RUN, TWICE\n")
    weights = sum(weight.numel() for weight in training.Transformer(None).parameters())
    size = f"A transformer of {training.LAYERS} layers and {weights:,} weights"
    print(f"{size} learns from {training.LENGTH}-token sequences: same seed, same data, same code.")
    print("The two runs differ only in which attention tile happens to finish first.")
    if device == "cuda":
        import torch

        print(f"This {torch.cuda.get_device_name()} decides that anew every time.")
    else:
        print("A GPU decides that anew every time; here, on the CPU, each run draws it from a seed of its own.")
    print(f'\nThe attention of one layer, number {UNORDERED}, adds gradients as they arrive (accumulation="unordered"):\n')
    parted = _train_twice("unordered", UNORDERED, steps, device, output)
    if parted.agree:
        print("\nThis time the runs agree. Nothing promises it: run the demo again.")
    elif device == "cuda":
        print("\nNo seed decides who comes first: neither run could ever be repeated.")
    print("\nAll layers add in a planned order (the default):\n")
    agreed = _train_twice("ordered", None, steps, device, output)
    verdict = "Every bit of every tensor agrees in every step." if agreed.agree else "FAILED: ordered runs must agree."
    print(f"\n{verdict}\n")
    titles = f"layer {UNORDERED} adds as tiles arrive", "all layers add in a planned order"
    panels = [_panel(output, titles[0], "unordered", parted), _panel(output, titles[1], "ordered", agreed)]
    draw_agreement(panels, output / PICTURE_OF_RUNS)
    print(f"Module by module and step by step: open {output / PICTURE_OF_RUNS}\n")
    return agreed.agree


def _panel(output: Path, title: str, name: str, found: Comparison) -> Agreement:
    import numpy as np

    from ..ledgers.comparing import spread
    from ..viewing.agreement import Agreement

    seen = spread(output / f"{name}-a", output / f"{name}-b")
    rows = [place for place, module in enumerate(seen.modules) if SHOWN.fullmatch(module)]
    state = np.where(seen.differing > 0, 2, np.where(seen.compared > 0, 1, 0))[:2, rows]  # [forward or backward, module, step]
    states = np.moveaxis(state, 0, 2).reshape(len(rows), -1)
    modules = [seen.modules[place] for place in rows]
    if found.first is None:
        return Agreement(title, f"every bit agrees: {found.tensors:,} tensors", modules, seen.steps, states)
    step, judged = found.first.step, found.first.culprit
    verdict = f"they part in step {step}, {judged.direction}, in {judged.module}"
    column = 2 * seen.steps.index(step) + (judged.direction == "backward")
    first = (modules.index(judged.module), column) if judged.module in modules else None
    return Agreement(title, verdict, modules, seen.steps, states, first)


def _train_twice(name: str, unordered: int | None, steps: int, device: str, output: Path) -> Comparison:
    """Train twice, show the losses, and what `dash-attn diff` says of the two ledgers."""
    from ..ledgers.comparing import compare_runs
    from . import diff, training

    folders = [output / f"{name}-{run}" for run in "ab"]
    losses = [training.train(unordered, steps, seed, device, folder) for seed, folder in enumerate(folders, start=1)]
    found = compare_runs(*folders)
    print("  step   loss, run A   loss, run B   all tensors")
    for step, (a, b) in enumerate(zip(*losses, strict=True)):
        print(f"  {step:4d}   {a:11.8f}   {b:11.8f}   {'DIFFERENT' if step in found.steps_that_differ else 'same'}")
    print(f"\n$ dash-attn diff {' '.join(map(str, folders))}")
    diff.show(found)
    return found


def _show_schedules(output: Path) -> None:
    problem = Problem.from_tiles("causal", 8, 8, heads=4)
    print("2. WHAT AN ORDER COSTS\n")
    print("Tiles that must add in turn may have to wait for each other. How long depends on the schedule. In model time,")
    print("for the backward pass of one small problem:\n")
    planned = simulate_all(read_schedules(["all"]), problem, MACHINE, WORKERS, "causal")
    print_report(report_of(planned))
    print("\nMakespan is when the last worker ends; no schedule can beat the lower bound. Stalled is worker time lost to waiting.")
    print("Slack is how many steps pass between two chains on a tile; the chains of a gang must be on the GPU together.")
    chosen = [run.timeline for name in COMPARED for run in planned.runs if run.name == name]
    slow, fast = (timeline.makespan for timeline in chosen)
    print(f"All of these are deterministic. {COMPARED[1]}, which dash-attn picks here, takes {fast / slow:.0%} of {COMPARED[0]}'s time.")
    from ..viewing.gantt import gantt

    gantt(chosen, output / PICTURE)
    print("\n3. A PICTURE OF IT\n")
    print(f"{' and '.join(COMPARED)}, worker by worker: open {output / PICTURE}")
