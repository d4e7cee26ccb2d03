"""The paper's grid, relative to FlashAttention-3's deterministic backward: the authors' figures, their code, our kernel. Needs no GPU.

python -m benchmarks.paper --plot dash.png

It reads committed files. Those of `python -m benchmarks.suite paper --schedules` count as soon as they are in benchmarks/results:
the newest that has timed two kernels in one process says how they compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dash_attn.cli.table import Report, print_report
from dash_attn.tools.bench.candidates import CUDNN, OURS, UNORDERED, is_ours
from dash_attn.tools.bench.report import shape_of, unique
from dash_attn.tools.bench.shape import Shape
from dash_attn.tools.calibrate.pictures import thousands, write
from dash_attn.viewing.style import INK

from .pictures import DASHED, HIGHLIGHT, PALE, PEERS, Lines
from .result_files import Ratio, is_schedule, read
from .suites import SUITES

FOLDER = Path(__file__).parent
FIGURES, CODE, GRID = (f"{name}.json" for name in ("authors-figures-h800", "authors-code-h200", "flash-attention-3-h200"))
FA3, BASE = "FlashAttention-3", "FlashAttention-3 deterministic"
SHAPES = SUITES["paper"].shapes()
LENGTHS = sorted({shape.seqlen for shape in SHAPES})
# By mask: DASH's own schedule, in our kernel, and what we made of it.
SHIFTS = {"causal": ("symmetric_shift", "alternating"), "full": ("shift", "shift_blocks", "alternating")}
CHAINED, HOST, MISSING = "~", " h", "-"
OUR_KERNEL = "H200, our kernel"
Times = dict[Shape, dict[str, list[float]]]


class Figure(NamedTuple):
    """A speed relative to BASE. Its mark says if it went through cuDNN, or if the host was the limit."""

    value: float
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.mark}{self.value:.2f}" if self.mark == CHAINED else f"{self.value:.2f}{self.mark}"


class Run(NamedTuple):
    """A file: what it says of itself, and of each shape the milliseconds of each kernel in each of its processes.

    `chosen`: the schedule of our default, where it is known.
    """

    path: Path
    about: dict[str, Any]
    times: Times
    chosen: dict[Shape, str]

    def ratio(self, shape: Shape, kernel: str, other: str = BASE) -> float | None:
        """Of speeds, inside each process."""
        found = self.times.get(shape, {})
        return Ratio.of(found[kernel], found[other]).median if kernel in found and other in found else None

    def kernel_of(self, shape: Shape, schedule: str) -> str:
        """What timed our schedule: itself, or our default where that chose it."""
        named = f"{OURS}: {schedule}"
        return OURS if named not in self.times.get(shape, ()) and self.chosen.get(shape) == schedule else named

    def figure(self, shape: Shape, kernel: str) -> Figure | None:
        found = self.ratio(shape, kernel)
        late = is_ours(kernel) and shape.seqlen in self.about.get("host_bound_seqlens", ())
        return None if found is None else Figure(found, HOST if late else "")

    def ratios(self, kernel: str, other: str = BASE, **wanted: Any) -> list[float]:
        """Of all shapes that have both, and these fields."""
        shapes = [shape for shape in self.times if all(getattr(shape, name) == value for name, value in wanted.items())]
        return [found for shape in shapes if (found := self.ratio(shape, kernel, other)) is not None]


class Line(NamedTuple):
    """Of a table: where it was measured, what, and its cells, of one figure or of several."""

    where: str
    what: str
    cells: list[list[Figure | None]]

    @property
    def texts(self) -> list[str]:
        return [self.where, self.what, *("; ".join(str(found or MISSING) for found in cell) for cell in self.cells)]


class Grid(NamedTuple):
    """All that is known. `ours`: runs that have our kernel, those of the suite first, the newest of them before the others."""

    figures: Run
    code: Run
    ours: list[Run]

    @property
    def direct_runs(self) -> list[Run]:
        """Those that timed FlashAttention-3 as well; one of the whole grid before one of a few shapes."""
        found = [(len(run.ratios(OURS)), run) for run in self.ours]
        return [run for count, run in sorted(found, key=lambda pair: -pair[0]) if count]

    def direct(self, kernel: str, shape: Shape) -> Figure | None:
        """From the first run that timed both in one process."""
        return next((found for run in self.direct_runs if (found := run.figure(shape, kernel))), None)

    @property
    def of_schedules(self) -> Run:
        """The newest run of our schedules."""
        return next(run for run in self.ours if any(is_schedule(name) for times in run.times.values() for name in times))

    def chained(self, kernel: str, shape: Shape) -> Figure | None:
        """From two runs, which both timed cuDNN: that of our schedules, and one of FlashAttention-3."""
        first = self.of_schedules.ratio(shape, kernel, CUDNN)
        second = next((found for run in self.ours if (found := run.ratio(shape, CUDNN))), None)
        return Figure(first * second, CHAINED) if first and second else None

    def of_schedule(self, name: str, shape: Shape) -> Figure | None:
        return self.direct(f"{OURS}: {name}", shape) or self.chained(self.of_schedules.kernel_of(shape, name), shape)

    def lines(self, mask: str, head_dim: int) -> list[Line]:
        shapes = panel(mask, head_dim)
        return [*self._theirs(shapes), *self._of_schedules(shapes, ("ascending", "descending", *SHIFTS[mask])), *self._others(shapes)]

    def _theirs(self, shapes: list[Shape]) -> list[Line]:
        both = [[name, f"{name}, persistent"] for name in ("descending", "shift")]
        named = [("H800, authors' figures", self.figures, both), ("H200, authors' code", self.code, [["ascending"], *both])]
        return [Line(where, "; ".join(names), _cells(run, shapes, names)) for where, run, lines in named for names in lines]

    def _of_schedules(self, shapes: list[Shape], names: Sequence[str]) -> list[Line]:
        """With our default in the same way, where one of them went through cuDNN."""
        found = [Line(OUR_KERNEL, f"`{name}`", [[self.of_schedule(name, shape)] for shape in shapes]) for name in names]
        marks = {figure.mark for line in found for (figure,) in line.cells if figure}
        alike = [Line(OUR_KERNEL, "default, like these", [[self.chained(OURS, shape)] for shape in shapes])]
        return [*found, *(alike if CHAINED in marks else [])]

    def _others(self, shapes: list[Shape]) -> list[Line]:
        """Our default, first of the run that has most shapes; and who need not be deterministic."""
        default = [Line(OUR_KERNEL, "default", [[self.direct(OURS, shape)] for shape in shapes])]
        for run in self.direct_runs[1:]:
            default.append(Line(OUR_KERNEL, f"default, in `{run.path.name}`", [[run.figure(shape, OURS)] for shape in shapes]))
        others = {UNORDERED: (OUR_KERNEL, "unordered"), FA3: ("H200", f"{FA3}, not deterministic")}
        return [*default, *(Line(*named, [[self.direct(kernel, shape)] for shape in shapes]) for kernel, named in others.items())]


def _cells(run: Run, shapes: list[Shape], names: list[str]) -> list[list[Figure | None]]:
    found = [[run.ratio(shape, name) for name in names] for shape in shapes]
    return [[Figure(ratio) for ratio in cell if ratio] or [None] for cell in found]


def panel(mask: str, head_dim: int) -> list[Shape]:
    return [shape for shape in SHAPES if (shape.mask, shape.head_dim) == (mask, head_dim)]


def panels() -> list[tuple[str, int]]:
    """Masks and head dims, as tables and pictures have them."""
    return unique((shape.mask, shape.head_dim) for shape in sorted(SHAPES, key=lambda shape: -shape.head_dim))


# ---- files


def load(folder: Path = FOLDER) -> Grid:
    suites = [of_suite(path) for path in folder.glob("results/*-paper*.json")]
    newest_first = sorted((run for run in suites if run.times), key=lambda run: str(run.about["environment"]["date"]), reverse=True)
    figures, code, grid = (of_comparison(folder / "comparisons" / name) for name in (FIGURES, CODE, GRID))
    return Grid(figures, code, [*newest_first, grid])


def of_suite(path: Path) -> Run:
    """Backwards; those of sustained runs are of another kind."""
    results = read(path)
    rows = [row for row in results.pop("rows") if row["pass"] == "backward" and row["status"] == "ok" and "sustained" not in row]
    times: Times = {}
    for row in rows:
        times.setdefault(shape_of(row), {})[row["candidate"]] = row.get("process_ms") or [row["median_ms"]]
    chosen = {shape_of(row): row["identity"]["schedule"] for row in rows if row["candidate"] == OURS and row.get("identity")}
    return Run(path, results, times, chosen)


def of_comparison(path: Path) -> Run:
    about = json.loads(path.read_text(encoding="utf-8"))
    rows = {(row["mask"], row["head_dim"], row["seqlen"]): row["ms"] for row in about.pop("rows")}
    found = {shape: rows.get((shape.mask, shape.head_dim, shape.seqlen), {}) for shape in SHAPES}
    return Run(path, about, {shape: {name: [ms] for name, ms in times.items()} for shape, times in found.items() if times}, {})


# ---- the picture

THEIR_BEST, THEIR_CODE, ASCENDING = "authors' figures, their best (H800)", "authors' code, its best", "authors' code, ascending"
DEFAULT, NOT_DETERMINISTIC = f"{OURS}, default", f"{FA3}, not deterministic"
LOOKS: dict[str, dict[str, Any]] = {
    DEFAULT: {"color": HIGHLIGHT, "linewidth": 3.6, "markersize": 9, "marker": "o", "zorder": 6},
    THEIR_CODE: {"color": PEERS[0], "marker": "s", "zorder": 5},
    THEIR_BEST: {"color": PEERS[3], "marker": "D", "zorder": 4},
    ASCENDING: {"color": PEERS[2], "marker": "v", "zorder": 3},
    NOT_DETERMINISTIC: {"color": PALE, "linestyle": DASHED, "marker": "o", "zorder": 3},
}
TITLE = f"DASH beside {BASE}: full masks gain on an H200 as on H800, causal ones only over its former order, ascending"
NOTE = "Backward, bf16, higher is faster. On an H200, unless it says H800"
LEFT_OUT = ". Ours is left out where the host was its limit"


def drawn(grid: Grid) -> dict[str, dict[Shape, float]]:
    """By the label of a line."""
    names = [name for name in grid.figures.times[SHAPES[0]] if name != BASE]
    found: dict[str, dict[Shape, float | None]] = {
        DEFAULT: {shape: _of_gpu(grid.direct(OURS, shape)) for shape in SHAPES},
        THEIR_CODE: {shape: _best(grid.code, shape, names) for shape in SHAPES},
        THEIR_BEST: {shape: _best(grid.figures, shape, names) for shape in SHAPES},
        ASCENDING: {shape: grid.code.ratio(shape, "ascending") for shape in SHAPES},
        NOT_DETERMINISTIC: {shape: _of_gpu(grid.direct(FA3, shape)) for shape in SHAPES},
    }
    return {label: {shape: value for shape, value in line.items() if value is not None} for label, line in found.items()}


def _best(run: Run, shape: Shape, names: list[str]) -> float | None:
    return max((found for name in names if (found := run.ratio(shape, name))), default=None)


def _of_gpu(figure: Figure | None) -> float | None:
    """None where the host was the limit: a picture has no room to say so."""
    return None if figure is None or figure.mark == HOST else figure.value


def picture(grid: Grid) -> Any:
    found = drawn(grid)
    in_panels = [shape for key in panels() for shape in panel(*key)]
    rows = [
        {"shape": shape.to_json(), "candidate": label, "relative": line[shape]}
        for shape in in_panels
        for label, line in found.items()
        if shape in line
    ]
    styles = {label: {"linewidth": 2.0, "markersize": 6, "label": label, **look} for label, look in LOOKS.items()}
    baseline = {"color": INK, "linewidth": 1.6, "zorder": 2, "label": f"{BASE} = 1"}
    note = NOTE + (LEFT_OUT if len(found[DEFAULT]) < len(found[THEIR_BEST]) else "")
    lines = Lines(rows, "relative", styles, baseline, columns=3)
    figure, axes, _ = lines.drawn((TITLE, note), [*styles, str(baseline["label"])], sharey="all")
    for place in axes[:, 0]:
        place.set_ylabel("relative speed")
    return figure


# ---- the command


def main(words: Sequence[str] | None = None) -> int:
    style: Any = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="benchmarks.paper", **style)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the picture, as .png or .svg")
    arguments, grid = parser.parse_args(words), load()
    for mask, head_dim in panels():
        lines = [tuple(line.texts) for line in grid.lines(mask, head_dim)]
        columns = ["", "", *map(thousands, LENGTHS)]
        print_report(Report(f"\n{mask}, head dim {head_dim}, relative to {BASE}", columns, lines, [False] * len(lines)))
    if arguments.plot:
        write(arguments.plot, partial(picture, grid))
        print(f"picture: {arguments.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
