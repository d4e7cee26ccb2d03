"""Tables beyond those of `dash-attn bench`: relative speeds over processes, sustained runs, boolean matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dash_attn.cli import bench
from dash_attn.tools.bench.candidates import OURS
from dash_attn.tools.bench.report import Cells, Results, Row, Table, shape_of, tables, unique
from dash_attn.tools.bench.shape import PASSES, Shape

from .matrices import Matrix
from .result_files import relative_table

COSTS = {"mask": "BooleanMask", "forward": "first forward", "backward": "first backward", "elements": "elements alone"}


def print_report(results: Results) -> None:
    bench.show(results, (*tables(results), *more_tables(results)))


def more_tables(results: Results) -> Iterator[Table]:
    rows = results["rows"]
    for direction in unique(row["pass"] for row in rows):
        if "processes" in results:
            title = f"{direction}: {OURS} relative to each, median (lowest-highest) of {results['processes']} processes"
            yield title, *relative_table(results, direction)
        sustained = [row for row in rows if row["pass"] == direction and "sustained" in row]
        for shape in unique(shape_of(row) for row in sustained):
            mine = [row for row in sustained if shape_of(row) == shape]
            title = f"{direction}, sustained for {mine[0]['sustained']['seconds']:g} s: {shape}"
            yield title, ["", "TFLOP/s", "W", "SM MHz", "J per step"], [sustained_cells(row) for row in mine]
    for title, (header, cells) in {
        "boolean matrices: TFLOP/s of their tiles relative to those of a full mask": tile_rates(results),
        "a new boolean mask, once: ms of the host beyond those of one that is known": planning_costs(results),
    }.items():
        if cells:
            yield title, header, cells


def sustained_cells(row: Row) -> list[str]:
    run = row["sustained"]
    return [row["candidate"], f"{run['tflops']:.0f}", f"{run['watts']:.0f}", f"{run['sm_mhz']:.0f}", f"{run['joules']:.3g}"]


def tile_rates(results: Results) -> tuple[list[str], Cells]:
    """TFLOP/s of kept tiles over those of all tiles, by pass."""
    speeds = {(shape_of(row), row["pass"]): row["tflops"] for row in _ours(results) if row["status"] == "ok"}
    rates: dict[Shape, dict[str, str]] = {}
    for (shape, direction), speed in speeds.items():
        full = speeds.get((replace(shape, mask="full"), direction))
        if isinstance(shape.attended, Matrix) and full:
            rates.setdefault(shape, {})[direction] = f"{speed / full:.2f}"
    return ["", *PASSES], [[str(shape), *(of.get(name, "-") for name in PASSES)] for shape, of in rates.items()]


def planning_costs(results: Results) -> tuple[list[str], Cells]:
    """Milliseconds."""
    found = {str(shape_of(row)): row["identity"]["planning_ms"] for row in _ours(results) if "planning_ms" in row.get("identity", {})}
    return ["", *COSTS.values()], [[name, *(f"{costs[key]:.1f}" for key in COSTS)] for name, costs in found.items()]


def _ours(results: Results) -> list[Row]:
    return [row for row in results["rows"] if row["candidate"] == OURS]
