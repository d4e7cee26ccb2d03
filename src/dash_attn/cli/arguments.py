"""Command line arguments that describe a problem, a machine and schedules, and what they mean."""

from __future__ import annotations

import argparse
from typing import Any

from ..masks import MASK_FORMS, parse_mask
from ..scheduling.generators import GENERATORS
from ..scheduling.json_fields import MOST
from ..scheduling.problem import Problem
from ..simulation.machines import SHIPPED, load_machine
from ..simulation.simulate import Machine

DEFAULT_TILES = 8
DEFAULT_TILE_Q, DEFAULT_TILE_KV = 64, 128
DEFAULT_WORKERS = 132
MOST_TILES = 2**28  # a million tokens square
COSTS: dict[str, tuple[type, float, str]] = {
    "compute": (float, 1.0, "compute time of a task"),
    "reduce": (float, 0.3, "reduce time of a task"),
    "overlap": (int, 0, "reduces that may go on behind computes"),
    "latency": (float, 0.0, "least time between two reduces of a dQ tile"),
    "startup": (float, 0.0, "time to start a chain"),
}


def add_problem(parser: argparse.ArgumentParser) -> None:
    problem = parser.add_argument_group("problem")
    mask_help = f"{MASK_FORMS}; lengths in tokens with --seqlen, else in KV tiles (default: causal)"
    problem.add_argument("--mask", default="causal", help=mask_help)
    problem.add_argument("--q-tiles", type=int, metavar="N", help=f"Q tiles of a sequence (default: as KV tiles, or {DEFAULT_TILES})")
    problem.add_argument("--kv-tiles", type=int, metavar="N", help="KV tiles of a sequence (default: as Q tiles)")
    problem.add_argument("--seqlen", type=int, metavar="N", help="tokens of a sequence, in place of tile counts")
    problem.add_argument("--kv-seqlen", type=int, metavar="N", help="key tokens, where they differ from --seqlen")
    problem.add_argument("--tile-q", type=int, metavar="N", help=f"query tokens of a tile, with --seqlen (default: {DEFAULT_TILE_Q})")
    problem.add_argument("--tile-kv", type=int, metavar="N", help=f"key tokens of a tile, with --seqlen (default: {DEFAULT_TILE_KV})")
    problem.add_argument("--heads", type=int, default=1, metavar="N", help="KV heads (default: 1)")
    problem.add_argument("--group", type=int, default=1, metavar="N", help="query heads per KV head (default: 1)")
    problem.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default: 1)")


def add_machine(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("machine", "by its constants, in any unit of time, or calibrated, in microseconds")
    machine.add_argument("--workers", type=int, metavar="N", help=f"workers, one per SM (default: {DEFAULT_WORKERS}, or the machine's)")
    for name, (kind, default, meaning) in COSTS.items():
        machine.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "TIME", help=f"{meaning} (default: {default:g})")
    machine_help = f"a file that `dash-attn calibrate` wrote, or {', '.join(SHIPPED)}"
    machine.add_argument("--machine", metavar="FILE", help=machine_help)
    machine.add_argument("--head-dim", type=int, metavar="N", help="whose constants of --machine, and what --measured runs (default: 128)")


def read_problem(arguments: argparse.Namespace) -> Problem:
    problem = _read_problem(arguments)
    if problem.q_tiles * problem.kv_tiles > MOST_TILES:
        size = f"{problem.q_tiles:,} x {problem.kv_tiles:,}"
        raise ValueError(f"at most {MOST_TILES:,} tiles, so that they fit in memory; got {size} (fewer tokens or larger tiles)")
    return problem


def _read_problem(arguments: argparse.Namespace) -> Problem:
    rest = {"heads": arguments.heads, "group": arguments.group, "batch": arguments.batch}
    by_tokens = ("kv_seqlen", "tile_q", "tile_kv")
    if arguments.seqlen is None:
        _refuse(arguments, by_tokens, "goes with --seqlen")
        q_tiles, kv_tiles = arguments.q_tiles, arguments.kv_tiles
        for name, count in (("--q-tiles", q_tiles), ("--kv-tiles", kv_tiles)):  # before one stands in for the other
            if count is not None and count < 1:
                raise ValueError(f"{name} must be a whole number >= 1; got {count}")
        q_tiles = q_tiles if q_tiles is not None else kv_tiles if kv_tiles is not None else DEFAULT_TILES
        return Problem.from_tiles(arguments.mask, q_tiles, q_tiles if kv_tiles is None else kv_tiles, **rest)
    _refuse(arguments, ("q_tiles", "kv_tiles"), "cannot be combined with --seqlen, which decides the tile counts")
    kv_len = arguments.seqlen if arguments.kv_seqlen is None else arguments.kv_seqlen
    tile_q = DEFAULT_TILE_Q if arguments.tile_q is None else arguments.tile_q
    tile_kv = DEFAULT_TILE_KV if arguments.tile_kv is None else arguments.tile_kv
    return Problem(parse_mask(arguments.mask), arguments.seqlen, kv_len, tile_q, tile_kv, **rest)


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {why}")


def apply_calibration(arguments: argparse.Namespace) -> Machine | None:
    """The constants of --machine, if given; tiles and workers that were not given become its own."""
    if arguments.machine is None:
        return None
    _refuse(arguments, tuple(COSTS), "cannot be combined with --machine, which decides all costs")
    calibrated = load_machine(arguments.machine)
    machine, (tile_q, tile_kv) = calibrated.pick(arguments.head_dim)
    if arguments.workers is None:
        arguments.workers = calibrated.workers
    if arguments.seqlen is not None and (arguments.tile_q, arguments.tile_kv) == (None, None):
        arguments.tile_q, arguments.tile_kv = tile_q, tile_kv
    return machine


def read_machine(arguments: argparse.Namespace) -> Machine:
    """Machine costs, calibrated or given. Also settles the workers. Comes before read_problem: tiles may be the machine's."""
    calibrated = apply_calibration(arguments)
    if arguments.workers is None:
        arguments.workers = DEFAULT_WORKERS
    for name in ("workers", "overlap"):
        if (getattr(arguments, name) or 0) > MOST:
            raise ValueError(f"--{name} must be at most {MOST}; got {getattr(arguments, name)}")
    if arguments.workers < 1:
        raise ValueError(f"workers must be a whole number >= 1; got {arguments.workers}")
    given = {name: getattr(arguments, name) for name in COSTS}
    costs: dict[str, Any] = {name: COSTS[name][1] if value is None else value for name, value in given.items()}
    return calibrated or Machine(**costs)


def read_schedules(words: list[str]) -> list[str]:
    """Names from `a,b`, `a b` or repeated flags, each once; `all` stands for every generator."""
    names: list[str] = []
    parts = [part.strip() for word in words for part in word.split(",")]
    for name in filter(None, parts):  # a comma may end a word: `a, b`
        if name not in ("all", "auto", *GENERATORS):
            raise ValueError(f"unknown schedule {name!r}; choose from all, auto, {', '.join(GENERATORS)}")
        names += [n for n in (GENERATORS if name == "all" else (name,)) if n not in names]
    if not names:
        raise ValueError(f"--schedule needs a name; choose from all, auto, {', '.join(GENERATORS)}")
    return names
