"""examples/train.py at a real size on one GPU:
python -m benchmarks.training [--small] [--steps N] [--size N] [--only NAME ...] [--json FILE]

Trains with dash_attn, cuDNN, PyTorch's flash and FlashAttention-4 (where it is installed), with all of PyTorch deterministic and with
nothing deterministic. For each: tokens per second without a ledger, with one, and with one in full detail; and whether two runs agree,
by their weights and by `dash-attn diff`. What a ledger costs by default is little, so it is also told from a run that keeps one at
every second step: neighbours are compared. --small is for a look at the script on any machine.

--ledger-step: one step of a ledger of that model alone. Milliseconds of the host, which prepares the kernels, and of the GPU, which runs
them; and how long the GPU takes to read the same bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import dash_attn
import dash_attn.nn
from dash_attn.ledgers import compare_runs
from dash_attn.tools.bench.candidates import first_line
from dash_attn.tools.bench.report import save
from dash_attn.tools.machine import gpu_environment
from train_example import EXAMPLE, module_of

from . import one_tree
from .peers import first
from .timing import timed

REAL = {"layers": 12, "width": 1024, "heads": 8, "length": 8192, "vocabulary": 32768, "size": 1, "micro_batches": 2, "workers": 4}
SMALL = {"layers": 2, "width": 64, "heads": 2, "length": 128, "vocabulary": 64, "size": 1, "micro_batches": 2}
WARM_UP = 3  # steps that are not timed
LEDGER_STEPS, LEDGER_WARM_UP = 12, 2
AHEAD = 20_000_000  # cycles that the GPU waits, so that the host is ahead of it
LEDGERS = ("none", "default", "detail")  # the last, which is slow, only beside our own attention
Attend = Callable[..., Tensor]


# Their names tell whether all of PyTorch is deterministic.
PEERS = ("PyTorch flash", "PyTorch flash, deterministic", "FlashAttention-4", "FlashAttention-4, deterministic")
VARIANTS = ("dash_attn, deterministic", "cuDNN", *PEERS)


def attention_of(name: str, deterministic: bool) -> Attend:
    """Of a variant; raises where it is not installed."""
    if name.startswith("dash_attn"):
        return dash_attn.flash_attn_func
    if name.startswith("FlashAttention-4"):
        from flash_attn.cute import flash_attn_func

        return lambda q, k, v, *_, **__: first(flash_attn_func(q, k, v, causal=True, deterministic=deterministic))
    kernel = one_tree.sdpa("CUDNN_ATTENTION" if name == "cuDNN" else "FLASH_ATTENTION", is_causal=True)
    return lambda q, k, v, *_, **__: kernel(q, k, v)


def of_every_second_step(*given: Any, **named: Any) -> dash_attn.ledgers.Ledger:
    """A ledger of those with even numbers."""
    ledger, number = dash_attn.ledger(*given, **named), count()
    step = ledger.step
    ledger.step = lambda *its, **more: None if next(number) % 2 else step(*its, **more)  # type: ignore[method-assign]
    return ledger


NO_LEDGER = SimpleNamespace(watch=lambda *_: None, step=lambda *_, **__: None)
# In place of dash_attn.ledger.
LEDGER_OF: dict[str, Callable[..., Any]] = {"none": lambda *_, **__: nullcontext(NO_LEDGER), "every second step": of_every_second_step}


def example() -> ModuleType:
    """Weights are made on the device and no checkpoint is written: both would take longer than the steps."""
    module = module_of(EXAMPLE)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the example sets it in a process of its own
    make_model = module.Gpt

    def on_device(config: Any) -> Any:
        with torch.device(config.device):
            return make_model(config)

    module.Gpt, module.save = on_device, lambda *_: None
    return module


def train(out: Path, settings: dict[str, Any], attend: Attend, deterministic: bool, ledger: str) -> tuple[str, list[float]]:
    """Weights as a hash, and the seconds of each step from WARM_UP on. The example waits for the device when it shows the loss."""
    module, moments = example(), []
    dash_attn.nn.flash_attn_func = attend  # type: ignore[assignment]
    prepare = module.deterministic

    def prepared(config: Any) -> None:
        prepare(config)
        torch.use_deterministic_algorithms(deterministic)

    module.deterministic = prepared
    module.say = lambda text: moments.append(time.perf_counter()) if text.startswith("step ") else None
    if ledger in LEDGER_OF:
        module.dash_attn = SimpleNamespace(ledger=LEDGER_OF[ledger])
    config = module.Config(out=str(out), **settings, checkpoint_every=10**9, detail_from=0 if ledger == "detail" else -1)
    out.mkdir(parents=True, exist_ok=True)
    bits = module.train(config)
    gc.collect()
    torch.cuda.empty_cache()
    return bits, [after - before for before, after in pairwise(moments)][WARM_UP - 1 :]


def neighbours(folder: Path, settings: dict[str, Any], attend: Attend, deterministic: bool) -> dict[str, float]:
    """Milliseconds of the steps with a ledger and without, which take turns."""
    twice = {**settings, "steps": 2 * settings["steps"]}
    _, steps = train(folder, twice, attend, deterministic, "every second step")
    recorded = median(steps[WARM_UP % 2 :: 2])
    others = median(steps[(WARM_UP + 1) % 2 :: 2])
    return {"with_ms": round(1000 * recorded, 2), "without_ms": round(1000 * others, 2), "overhead": round(recorded / others - 1, 4)}


def measure(name: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    deterministic, is_ours = name.endswith(", deterministic"), name.startswith("dash_attn")
    ledgers = LEDGERS if is_ours else LEDGERS[:2]
    try:
        attend = attention_of(name, deterministic)
        found = {ledger: train(folder / ledger, settings, attend, deterministic, ledger) for ledger in ledgers}
        again, _ = train(folder / "again", settings, attend, deterministic, "default")
        in_turns = neighbours(folder / "in turns", settings, attend, deterministic) if is_ours else None
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return {"name": name, "missing": first_line(error)}
    tokens = settings["micro_batches"] * settings["size"] * settings["length"]
    seconds = {ledger: median(steps) for ledger, (_, steps) in found.items()}
    compared = compare_runs(folder / "default", folder / "again")
    first = compared.first
    return {
        "name": name,
        "deterministic": deterministic,
        "step_ms": {ledger: round(1000 * one, 2) for ledger, one in seconds.items()},
        "tokens_per_second": {ledger: round(tokens / one) for ledger, one in seconds.items()},
        "overhead": {ledger: round(seconds[ledger] / seconds["none"] - 1, 4) for ledger in ledgers[1:]},
        "default_ledger_in_turns": in_turns,
        "ledger_bytes_per_step": {name: (folder / name / "rank-0.ledger").stat().st_size // settings["steps"] for name in ledgers[1:]},
        "weights_of_two_runs_equal": found["default"][0] == again,
        "ledger_changes_weights": len({bits for bits, _ in found.values()} | {again}) > 1 if compared.agree else None,
        "diff": {"agree": compared.agree, "step": None if first is None else first.step, "module": first and first.culprit.module},
    }


# ---- one step of a ledger


def ledger_step() -> dict[str, Any]:
    module = example()
    model = module.Gpt(module.Config(out="", **{name: value for name, value in REAL.items() if name != "workers"}, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    given = {"loss": torch.ones(2, device="cuda"), "batch": torch.zeros(2, 8193, dtype=torch.long, device="cuda")}
    tensors = [x for parameter in model.parameters() for x in (parameter.detach(), parameter.grad)]
    with tempfile.TemporaryDirectory() as folder, dash_attn.ledger(folder) as ledger:
        ledger.watch(model, optimizer)
        steps = [timed(lambda: ledger.step(model, optimizer, **given), AHEAD) for _ in range(LEDGER_STEPS)][LEDGER_WARM_UP:]
    read = [timed(lambda: torch._foreach_norm(tensors, 1), AHEAD).gpu for _ in range(LEDGER_STEPS)][LEDGER_WARM_UP:]
    return {
        "tensors": len(tensors),
        "bytes": sum(x.nbytes for x in tensors if x is not None),
        "host_ms": round(median(host for host, _ in steps), 3),
        "gpu_ms": round(median(gpu for _, gpu in steps), 3),
        "reading_ms": round(median(read), 3),
    }


def surroundings() -> dict[str, Any]:
    return gpu_environment() if torch.cuda.is_available() else {"gpu": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--size", type=int, help="sequences per micro-batch: with more, a slow host bounds less")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ledger-step", action="store_true", help="what one step of a ledger costs, and nothing else")
    arguments = parser.parse_args()
    if arguments.ledger_step:
        found = ledger_step()
        print(json.dumps(found))
        if arguments.json:
            save({"environment": gpu_environment(), **found}, arguments.json)
        return
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps must be at least {WARM_UP + 2}, of which {WARM_UP} are not timed; got {arguments.steps}")
    settings = {**(SMALL if arguments.small else REAL), "steps": arguments.steps}
    if arguments.size is not None:
        settings["size"] = arguments.size
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(arguments.only):
            rows.append(measure(name, settings, Path(folder) / str(place)))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                save({"settings": settings, "environment": surroundings(), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
