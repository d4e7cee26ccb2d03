"""Command line arguments that ask for schedules of a problem, on a machine or on several ranks, and what they mean."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import did_you_mean
from ..masks import FULL, MASK_FORMS, parse_mask
from ..scheduling.generators import GENERATORS, SCHEDULES
from ..scheduling.problem import Problem
from ..scheduling.ranks.sharding import SHARDINGS
from ..simulation.cluster import EXECUTIONS, MODELS, MOST_TASKS_OF_TILES
from ..simulation.machines import SHIPPED, load_machine
from ..simulation.simulate import MOST_TASKS, Machine
from .device import add_device
from .mask_files import MaskFile
from .parser import number, positive, whole

DEFAULT_TILES = 8
DEFAULT_TILE_Q, DEFAULT_TILE_KV = 64, 128
DEFAULT_WORKERS = 132
DEFAULT_HEAD_DIM = 128
MOST_TILES = 2**28  # a million tokens square
SIZES = {
    "q-tiles": f"Q tiles of a sequence (default: as many as KV tiles, or {DEFAULT_TILES})",
    "kv-tiles": "KV tiles of a sequence (default: as many as Q tiles)",
    "seqlen": "tokens of a sequence, instead of tile counts",
    "kv-seqlen": "key tokens, if their number differs from --seqlen",
    "tile-q": f"query tokens of a tile, with --seqlen (default: {DEFAULT_TILE_Q})",
    "tile-kv": f"key tokens of a tile, with --seqlen (default: {DEFAULT_TILE_KV})",
}
COUNTS = {"heads": "KV heads", "group": "query heads per KV head", "batch": "sequences"}
COSTS: dict[str, tuple[Callable[[str], float], float, str]] = {
    "compute": (number, 1.0, "compute time of a task"),
    "reduce": (number, 0.3, "reduce time of a task"),
    "overlap": (whole(0), 0, "reduces that may run in the background"),
    "latency": (number, 0.0, "minimum time between two reduces of a dQ tile"),
    "startup": (number, 0.0, "time to start a chain"),
}
WITH_RANKS: dict[str, Any] = {"sharding": "zigzag", "hop_latency": 10.0, "bandwidth": 400.0}  # what is taken if nothing is said
ONLY_WITH_RANKS = (*WITH_RANKS, "heads_together", "execution", "model")


def add_question(parser: argparse.ArgumentParser, schedules: str) -> None:
    """All that `plan`, `explore` and the page of `explore` may be asked. `schedules`: what --schedule takes, in words."""
    _add_problem(parser.add_argument_group("problem"))
    _add_machine(parser.add_argument_group("machine", "by its constants, in any unit of time, or calibrated, in microseconds"))
    about = "one sequence shared by several ranks (context parallelism); times in microseconds, by default of an H200"
    _add_ranks(parser.add_argument_group("cluster", about))
    parser.add_argument("--schedule", nargs="+", action="extend", metavar="NAME", help=schedules)
    measured_help = "also run the schedules and show the measured times: on a Hopper GPU, or on the CPU in threads"
    parser.add_argument("--measured", action="store_true", help=measured_help)
    add_device(parser)


def _add_problem(group: Any) -> None:
    of_file = "or FILE.npy, a boolean matrix of tokens, or of tiles if their number is given"
    mask_help = f"{MASK_FORMS}; lengths in tokens with --seqlen, else in KV tiles; {of_file} (default: causal)"
    group.add_argument("--mask", default="causal", help=mask_help)
    for name, meaning in SIZES.items():
        group.add_argument(f"--{name}", type=whole(), metavar="N", help=meaning)
    for name, meaning in COUNTS.items():
        group.add_argument(f"--{name}", type=whole(), default=1, metavar="N", help=f"{meaning} (default: 1)")


def _add_machine(group: Any) -> None:
    group.add_argument("--workers", type=whole(), metavar="N", help=f"workers, one per SM (default: {DEFAULT_WORKERS}, or the machine's)")
    for name, (read, default, meaning) in COSTS.items():
        group.add_argument(f"--{name}", type=read, metavar="TIME" if read is number else "N", help=f"{meaning} (default: {default:g})")
    group.add_argument("--machine", metavar="FILE", help=f"a file that `dash-attn calibrate` wrote, or {', '.join(SHIPPED)}")
    head_dim_help = "selects constants of --machine, and what --measured runs (default: 128)"
    group.add_argument("--head-dim", type=whole(), metavar="N", help=head_dim_help)


def _add_ranks(group: Any) -> None:
    group.add_argument("--ranks", type=whole(), metavar="P", help="number of ranks that share the sequence")
    group.add_argument("--sharding", choices=SHARDINGS, help=f"who has which rows (default: {WITH_RANKS['sharding']})")
    hop_help = f"microseconds from rank to rank, without the transfer (default: {WITH_RANKS['hop_latency']:g})"
    group.add_argument("--hop-latency", type=number, metavar="N", help=hop_help)
    bandwidth_help = f"GB per second that a rank can send (default: {WITH_RANKS['bandwidth']:g})"
    group.add_argument("--bandwidth", type=positive, metavar="N", help=bandwidth_help)
    group.add_argument("--execution", choices=EXECUTIONS, help="how a rank runs its units (default: show both)")
    together_help = "heads of one kind that a unit has side by side (default: as many as fill the workers)"
    group.add_argument("--heads-together", type=whole(), metavar="N", help=together_help)
    model_help = f"every task, or units as blocks of work (default: tiles up to {MOST_TASKS_OF_TILES:,} tasks, else chunks)"
    group.add_argument("--model", choices=MODELS, help=model_help)


def flag_of(name: str) -> str:
    return "--from" if name == "source" else f"--{name.replace('_', '-')}"  # `from` is a word of Python


def refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Raise if any of these was given. An argument that a command does not have was not."""
    for name in names:
        given = getattr(arguments, name, None)
        if given is not None and given is not False and given != "auto":
            raise ValueError(f"{flag_of(name)} {why}")


def either(given: Any, default: Any) -> Any:
    return default if given is None else given


def read_problem(arguments: argparse.Namespace) -> Problem:
    problem = _read_problem(arguments)
    if problem.q_tiles * problem.kv_tiles > MOST_TILES:
        size = f"{problem.q_tiles:,} x {problem.kv_tiles:,}"
        raise ValueError(f"at most {MOST_TILES:,} tiles, so that they fit in memory; got {size} (fewer or larger tiles)")
    return problem


def check_tasks(problem: Problem) -> None:
    """Refuse before the work what is too large to simulate, and say what would fit."""
    coarse = _with_larger_tiles(problem, 8)  # a map that is made quickly; where it keeps a whole tile, all 64 in it are kept
    copies = problem.heads * problem.group * problem.batch
    if 64 * int(np.count_nonzero(coarse.tile_map == FULL)) * copies <= MOST_TASKS and problem.tasks <= MOST_TASKS:
        return
    smaller = _with_larger_tiles(problem, 2)
    while smaller.tasks > MOST_TASKS and smaller.q_tiles * smaller.kv_tiles > 1:
        smaller = _with_larger_tiles(smaller, 2)
    fits = f": --tile-q {smaller.tile_q} --tile-kv {smaller.tile_kv} with --seqlen, or {smaller.q_tiles} x {smaller.kv_tiles} tiles"
    raise ValueError(
        f"more than {MOST_TASKS:,} tasks are too many to simulate."
        f" Take fewer tokens or heads, or larger tiles{fits if smaller.tasks <= MOST_TASKS else ''}"
    )


def _with_larger_tiles(problem: Problem, factor: int) -> Problem:
    return replace(problem, tile_q=factor * problem.tile_q, tile_kv=factor * problem.tile_kv)


def _read_problem(arguments: argparse.Namespace) -> Problem:
    rest = {name: getattr(arguments, name) for name in COUNTS}
    mask, of_file = arguments.mask, isinstance(arguments.mask, MaskFile)
    if arguments.seqlen is None:
        refuse(arguments, ("kv_seqlen", "tile_q", "tile_kv"), "goes with --seqlen")
        q_tiles = either(arguments.q_tiles, either(arguments.kv_tiles, DEFAULT_TILES))
        return Problem.from_tiles(mask.matrix if of_file else mask, q_tiles, either(arguments.kv_tiles, q_tiles), **rest)
    refuse(arguments, ("q_tiles", "kv_tiles"), "cannot be combined with --seqlen, which decides the tile counts")
    tiles = either(arguments.tile_q, DEFAULT_TILE_Q), either(arguments.tile_kv, DEFAULT_TILE_KV)
    mask = mask.mask.pattern if of_file else parse_mask(mask)
    return Problem(mask, arguments.seqlen, either(arguments.kv_seqlen, arguments.seqlen), *tiles, **rest)


def read_machine(arguments: argparse.Namespace) -> Machine:
    """Machine costs, calibrated or given. Also settles the workers. Comes before read_problem: tiles may be the machine's."""
    calibrated = _apply_calibration(arguments)
    arguments.workers = either(arguments.workers, DEFAULT_WORKERS)
    costs: dict[str, Any] = {name: either(getattr(arguments, name), default) for name, (_, default, _) in COSTS.items()}
    return calibrated or Machine(**costs)


def _apply_calibration(arguments: argparse.Namespace) -> Machine | None:
    """The constants of --machine, if given; tiles and workers that were not given become its own."""
    if arguments.machine is None:
        return None
    refuse(arguments, tuple(COSTS), "cannot be combined with --machine, which decides all costs")
    calibrated = load_machine(arguments.machine)
    machine, tiles = calibrated.pick(arguments.head_dim)
    arguments.workers = either(arguments.workers, calibrated.workers)
    if arguments.seqlen is not None and (arguments.tile_q, arguments.tile_kv) == (None, None):
        arguments.tile_q, arguments.tile_kv = tiles
    return machine


def read_schedules(words: list[str]) -> list[str]:
    """Names from `a,b`, `a b` or repeated flags, each once; `all` stands for every generator."""
    names: list[str] = []
    parts = [part.strip() for word in words for part in word.split(",")]
    for name in filter(None, parts):  # a comma may end a word: `a, b`
        if name not in ("all", *SCHEDULES):
            choices = ("all", *SCHEDULES)
            raise ValueError(f"unknown schedule {name!r}; choose from {', '.join(choices)}{did_you_mean(name, choices)}")
        names += [n for n in (GENERATORS if name == "all" else (name,)) if n not in names]
    if not names:
        raise ValueError(f"--schedule needs a name; choose from all, {', '.join(SCHEDULES)}")
    return names
