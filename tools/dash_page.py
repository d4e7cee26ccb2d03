"""The page docs/dash.md: what DASH claims beside what the committed files and the simulator say. Its text is dash_page.md.

Speeds come from benchmarks/paper.py. A new file in benchmarks/results changes the page by `make pages`; nothing is edited by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from math import isclose
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from benchmarks.paper import (
    BASE,
    CHAINED,
    CODE,
    FA3,
    FIGURES,
    FOLDER,
    GRID,
    HOST,
    LENGTHS,
    MISSING,
    OUR_KERNEL,
    SHIFTS,
    Grid,
    Run,
    load,
    panel,
    panels,
)
from benchmarks.result_files import is_schedule
from dash_attn.masks import parse_mask
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.generators import choice_of_auto
from dash_attn.simulation import Timeline, simulate
from dash_attn.simulation.machines import H200, SHIPPED
from dash_attn.tools.bench.candidates import OURS
from dash_attn.tools.bench.shape import Shape
from dash_attn.tools.calibrate.pictures import thousands
from dash_attn.viewing.words import figures_of, percent
from page_parts import table

TEXT = Path(__file__).with_name("dash_page.md")
TILES, HEADS, COMPUTE, REDUCE = 64, 16, 1.0, 0.3  # of the problem in the paper's model; there is a worker for each KV tile
Formula = tuple[str, Callable[[int, int, float, float], float]]  # of n x n tiles and m heads
ASCENDING: Formula = ("m n (c + r) + (n - 1) r", lambda n, m, c, r: m * n * (c + r) + (n - 1) * r)
SHIFT: Formula = ("m n (c + r)", lambda n, m, c, r: m * n * (c + r))
SYMMETRIC: Formula = ("m (n + 1) (c + r) / 2", lambda n, m, c, r: m * (n + 1) * (c + r) / 2)
DESCENDING: Formula = (f"{SYMMETRIC[0]} + (n - 1) r", lambda n, m, c, r: m * (n + 1) * (c + r) / 2 + (n - 1) * r)
# By mask and schedule. None: of this one we have no formula.
MAKESPANS: dict[str, dict[str, Formula | None]] = {
    "causal": {"ascending": ASCENDING, "descending": DESCENDING, "symmetric_shift": SYMMETRIC, "alternating": None},
    "full": {"ascending": ASCENDING, "shift": SHIFT, "shift_blocks": None},
}
TODAY = {"causal": "spt", "full": "ascending"}  # the order of FlashAttention-3's deterministic mode
SEQLEN = 4096  # of what is simulated with the constants of an H200
LONG = 2048  # from here on no host was the limit
PERSISTENT = "descending, persistent"
MARKS = {
    CHAINED: "two processes, through cuDNN, which both timed. Such a figure is rough: our default has one, too (*default, like these*),\n"
    "  and from 2k on it is off by up to {error} from the direct one.",
    HOST.strip(): "the host was the limit, not the GPU. In that run FlashAttention-3 was called without PyTorch, and ours through it.",
    MISSING: "not measured.",
}


def page(grid: Grid | None = None) -> str:
    grid = load() if grid is None else grid
    tables = {"speeds": speeds(grid), "model": model(), "machine": machine(grid), "sources": sources(grid)}
    fields = tables | {"marks": marks(grid, tables["speeds"])} | of_losses(grid) | of_gains(grid) | of_their_code(grid.code)
    fields |= of_causal_masks(grid) | of_long_runs(grid) | of_our_runs(grid) | of_simulator()
    return Template(TEXT.read_text(encoding="utf-8")).substitute(fields)


# ---- words


def span(values: Iterable[float], form: str = ".2f") -> str:
    """`0.97 to 1.08`."""
    found = sorted({format(value, form) for value in values}, key=float)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def place(shape: Shape) -> str:
    return f"{shape.mask}, head dim {shape.head_dim}, {thousands(shape.seqlen)}"


class Best(NamedTuple):
    """The highest of some ratios, and whose it is."""

    ratio: float
    kernel: str
    shape: Shape

    @classmethod
    def of(cls, run: Run, kernels: Iterable[str], shapes: Iterable[Shape]) -> Best:
        found = [cls(ratio, kernel, shape) for kernel in kernels for shape in shapes if (ratio := run.ratio(shape, kernel))]
        return max(found, key=lambda one: one.ratio)

    @property
    def where(self) -> str:
        return place(self.shape) if self.kernel == OURS else f"{self.kernel}: {place(self.shape)}"


def schedules(run: Run) -> list[str]:
    """The authors', without the order that they began with, and without the kernel as published, whose gradients are wrong."""
    names = dict.fromkeys(name for times in run.times.values() for name in times)
    return [name for name in names if name.split(",")[0] in ("descending", "shift")]


# ---- figures of the text


def of_losses(grid: Grid) -> dict[str, str]:
    """What determinism costs FlashAttention-3."""
    code = grid.code
    before = {shape: ratio for shape in code.times if (ratio := code.ratio(shape, "ascending", FA3))}
    worst = min(before, key=before.__getitem__)
    return {
        "loss_today": span(losses_today(grid), ".0f") + " %",
        "loss_before": f"{100 * (1 - before[worst]):.0f} %",
        "loss_before_where": place(worst),
    }


def losses_today(grid: Grid) -> list[float]:
    """In percent."""
    return [100 * (1 - 1 / ratio) for ratio in grid.direct_runs[0].ratios(FA3)]


def of_gains(grid: Grid) -> dict[str, str]:
    figures, code, first = grid.figures, grid.code, grid.direct_runs[0]
    published, theirs = (Best.of(run, schedules(run), run.times) for run in (figures, code))
    ours = Best.of(first, [OURS], [shape for shape in first.times if shape.seqlen >= LONG])
    on_full = [Best.of(run, schedules(run), [shape for shape in run.times if shape.mask == "full"]) for run in (figures, code)]
    return {
        "figures_best": f"{published.ratio:.2f}",
        "figures_best_where": published.where,
        "figures_full_best": f"{on_full[0].ratio:.2f}",
        "code_best": f"{theirs.ratio:.2f}",
        "code_best_where": theirs.where,
        "code_full_best": f"{on_full[1].ratio:.2f}",
        "code_there": f"{Best.of(code, schedules(code), [published.shape]).ratio:.2f}",
        "code_there_ascending": f"{code.ratio(published.shape, published.kernel, 'ascending'):.2f}",
        "default_best": f"{ours.ratio:.2f}",
        "default_best_where": ours.where,
        "default_span": span(long_ratios(first)),
    }


def of_their_code(code: Run) -> dict[str, str]:
    """What the checks of gradients found."""
    errors = {name: max(check["worst_relative_error"].values()) for name, check in code.about["checks"].items()}
    wrong = errors.pop("as published")
    return {"wrong_error": f"{wrong:.0f}", "right_error": f"{max(errors.values()):g}"}


def of_causal_masks(grid: Grid) -> dict[str, str]:
    figures, code, ours = grid.figures, grid.code, grid.of_schedules
    small: dict[str, Any] = {"mask": "causal", "head_dim": 64}
    others = [name for name in schedules(figures) if name != PERSISTENT]
    found = {
        "figures_small": [ratio for name in others for ratio in figures.ratios(name, **small)],
        "figures_persistent": figures.ratios(PERSISTENT, **small),
        "code_small": [ratio for name in others for ratio in code.ratios(name, **small)],
        "code_persistent": code.ratios(PERSISTENT, **small),
        "default_small": long_ratios(grid.direct_runs[0], **small),
        "today_over_ascending": [1 / ratio for ratio in code.ratios("ascending", mask="causal")],
    }
    for head_dim in (128, 64):
        wanted = {"mask": "causal", "head_dim": head_dim}
        found[f"code_descending_{head_dim}"] = code.ratios("descending", "ascending", **wanted)
        found[f"our_descending_{head_dim}"] = ours.ratios(f"{OURS}: descending", f"{OURS}: ascending", **wanted)
    return {name: span(values) for name, values in found.items()}


def long_ratios(run: Run, **wanted: Any) -> list[float]:
    return [ratio for length in LENGTHS if length >= LONG for ratio in run.ratios(OURS, seqlen=length, **wanted)]


def of_long_runs(grid: Grid) -> dict[str, str]:
    """At the longest sequence: short runs, and TFLOP/s of the sustained one."""
    speeds: dict[str, dict[str, float]] = {}
    for row in json.loads((FOLDER / "results/h200-paper-sustained.json").read_text(encoding="utf-8"))["rows"]:
        if row["pass"] == "backward" and "sustained" in row:
            speeds.setdefault(json.dumps(row["shape"]), {})[row["candidate"]] = row["sustained"]["tflops"]
    sustained = [found[OURS] / found[BASE] for found in speeds.values() if {OURS, BASE} <= found.keys()]
    short = " and ".join(span(run.ratios(OURS, seqlen=LENGTHS[-1])) for run in grid.direct_runs)
    return {"default_16k": short, "sustained": span(sustained)}


def of_our_runs(grid: Grid) -> dict[str, str]:
    run = grid.of_schedules
    times = [[ms[0] for name, ms in found.items() if name == OURS or is_schedule(name)] for found in run.times.values()]
    return {
        "measured_file": run.path.name,
        "spread": f"{max(max(some) / min(some) for some in times):.1f}",
        "older_default": older_default(run),
    }


def older_default(run: Run) -> str:
    """A sentence, where our default of that run was another one than today's."""
    longest: dict[tuple[str, str], int] = {}
    for shape, name in run.chosen.items():
        if choice_of_auto(problem_of(shape)).__name__ != name:
            longest[name, shape.mask] = max(shape.seqlen, longest.get((name, shape.mask), 0))
    said = ", ".join(f"`{name}` on {mask} masks up to {thousands(length)}" for (name, mask), length in longest.items())
    return f"\n`{run.path.name}` is older than that choice. In it, the default was {said}." if said else ""


def of_simulator() -> dict[str, str]:
    causal, full = ({name: simulated(mask, name) for name in names} for mask, names in MAKESPANS.items())
    costs = {f"{name}_{dim}": f"{getattr(machine, name):g}" for dim, machine in H200.items() for name in ("latency", "compute")}
    return {
        "stalled_ascending": percent(causal["ascending"].stalled),
        "stalled_descending": percent(causal["descending"].stalled),
        "turns_ascending": str(turns(causal["ascending"])),
        "gap_shift": percent(full["shift"].gap),
        "gap_symmetric": percent(causal["symmetric_shift"].gap),
        **costs,
    }


# ---- tables


def speeds(grid: Grid) -> str:
    header, parts = ["where", "schedule", *map(thousands, LENGTHS)], []
    for mask, head_dim in panels():
        lines = [line.texts for line in grid.lines(mask, head_dim)]
        parts.append("\n".join([f"### {mask.capitalize()}, head dim {head_dim}", "", *table(header, lines)]))
    return "\n\n".join(parts)


def marks(grid: Grid, tables: str) -> str:
    """What those that occur mean."""
    used = {
        CHAINED: CHAINED in tables,
        HOST.strip(): f"{HOST} |" in tables,
        MISSING: f"| {MISSING} |" in tables,
    }
    return "\n".join(
        f"- `{mark}`: {text}".replace("{error}", f"{100 * chain_error(grid):.0f} %") for mark, text in MARKS.items() if used[mark]
    )


def chain_error(grid: Grid) -> float:
    """The largest error of a figure that went through cuDNN, where there is a direct one."""
    shapes = [shape for key in panels() for shape in panel(*key) if shape.seqlen >= LONG]
    pairs = [(grid.chained(OURS, shape), grid.direct(OURS, shape)) for shape in shapes]
    return max(abs(chained.value / direct.value - 1) for chained, direct in pairs if chained and direct)


@cache
def simulated(mask: str, name: str) -> Timeline:
    """In the paper's model."""
    return simulate(generate(name, Problem.from_tiles(mask, TILES, TILES, heads=HEADS), TILES))


def turns(timeline: Timeline) -> int:
    return Counter(hop.cause for hop in timeline.critical_path)["turn"]


def model() -> str:
    header = ["mask", "schedule", "makespan", "lower bound", "gap", "stalled", "hand-overs on the critical path", "makespan in general"]
    lines = []
    for mask, names in MAKESPANS.items():
        for name, formula in names.items():
            run = simulated(mask, name)
            assert formula is None or isclose(formula[1](TILES, HEADS, COMPUTE, REDUCE), run.makespan)
            shown = [figures_of(run)[what] for what in header[2:6]]
            lines.append([mask, f"`{name}`", *shown, str(turns(run)), formula[0] if formula else ""])
    return "\n".join(table(header, lines))


def problem_of(shape: Shape) -> Problem:
    """In the tiles of our kernel."""
    _, tiles = SHIPPED["h200"].pick(shape.head_dim)
    return Problem(parse_mask(shape.mask), shape.seqlen, shape.seqlen, *tiles, heads=shape.kv_heads, batch=shape.batch)


@cache
def on_h200(shape: Shape) -> dict[str, Timeline]:
    """With its constants, by schedule."""
    names = dict.fromkeys((TODAY[shape.mask], "ascending", "descending", *SHIFTS[shape.mask]))
    return {name: simulate(generate(name, problem_of(shape), SHIPPED["h200"].workers), H200[shape.head_dim]) for name in names}


def machine(grid: Grid) -> str:
    """Predicted and measured speeds of our kernel, relative to the order that FlashAttention-3 has today."""
    run, lines = grid.of_schedules, []
    for mask, head_dim in panels():
        (shape,) = (shape for shape in panel(mask, head_dim) if shape.seqlen == SEQLEN)
        found = on_h200(shape)
        for name, timeline in found.items():
            predicted = found[TODAY[mask]].makespan / timeline.makespan
            seen = run.ratio(shape, run.kernel_of(shape, name), f"{OURS}: {TODAY[mask]}")
            shown = [figures_of(timeline)["slack"], f"{predicted:.2f}", f"{seen:.2f}" if seen else MISSING]
            lines.append([f"{mask}, {head_dim}", f"`{name}`", *shown])
    return "\n".join(table(["mask, head dim", "schedule", "slack", "predicted", "measured"], lines))


def sources(grid: Grid) -> str:
    what = {FIGURES: "H800, authors' figures: their plotting script", CODE: "H200, authors' code"}
    lines = []
    for run in (grid.figures, grid.code, *grid.ours):
        where = run.about["environment"]
        packages = {"PyTorch": where.get("torch"), "cuDNN": where.get("cudnn"), **where.get("packages", {})}
        versions = [f"{name} {version}" for name, version in packages.items() if version]
        ours = [f"ours at {where['commit'][:7]}"] if "commit" in where else []
        shown = what.get(run.path.name, OUR_KERNEL)
        lines.append([f"`{run.path.parent.name}/{run.path.name}`", shown, ", ".join([where["gpu"], *versions, *ours]), command_of(run)])
    return "\n".join(table(["file in `benchmarks/`", "rows", "on", "command"], lines))


def command_of(run: Run) -> str:
    """Nothing for files that are not of the suite."""
    if run.path.name in (FIGURES, CODE, GRID):
        return ""
    lengths = sorted({shape.seqlen for shape in run.times})
    chosen = [] if lengths == list(LENGTHS) else ["--seqlens", ",".join(map(str, lengths))]
    timed = any(is_schedule(name) for times in run.times.values() for name in times)
    return f"`{' '.join(['python -m benchmarks.suite paper', *(['--schedules'] if timed else []), *chosen])}`"
