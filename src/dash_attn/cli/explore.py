"""`dash-attn explore`: a local page on which schedules can be looked at. viewing/explore has the page and its server."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..masks import MASK_FORMS
from ..scheduling.generators import GENERATORS
from ..scheduling.ranks.sharding import SHARDINGS
from ..scheduling.validate import ScheduleError
from ..simulation.cluster import EXECUTIONS, MODELS
from ..simulation.machines import SHIPPED
from ..viewing.explore.page import saved_page, served_page
from ..viewing.explore.ranks import shared_run
from ..viewing.explore.runs import check_size, recorded, simulated
from ..viewing.explore.server import Answering, PageServer
from ..viewing.words import describe_machine, describe_problem
from .arguments import COSTS, add_machine, add_problem, read_machine, read_problem, read_schedules
from .cluster import DEFAULTS, add_cluster, plan_cluster, refuse_without_ranks, title_of_cluster
from .devices import add_device
from .explore_ledgers import ledgers_answer
from .files import check_file
from .plan import refuse_ignored, simulate_all

EXAMPLES = """examples:
  dash-attn explore
  dash-attn explore --seqlen 4096 --heads 8 --schedule ascending,auto --machine h200
  dash-attn explore --seqlen 1024 --heads 4 --schedule auto --measured
  dash-attn explore --ranks 4 --seqlen 32768 --heads 8 --save ranks.html
  dash-attn explore --ledgers runs/a runs/b
"""
MOST_SCHEDULES = 2
MOST_TILES = 2**24  # of a problem, before anything is counted
NUMBERS = ("q_tiles", "kv_tiles", "seqlen", "kv_seqlen", "tile_q", "tile_kv", "heads", "group", "batch", "workers", *COSTS, "head_dim")
OF_CLUSTERS = ("ranks", *DEFAULTS, "model")
ASKED = ("mask", "schedule", "machine", *NUMBERS, *OF_CLUSTERS, "measured", "device", "threads")  # what a page may ask for
# What a page begins with if nothing is said: the picture of the README.
START = {
    **{"mask": "causal", "q-tiles": "8", "kv-tiles": "8", "heads": "4", "workers": "8"},
    **{"compute": "3", "reduce": "1", "schedule": "ascending,alternating"},
}
Options = Mapping[str, Any]  # names of arguments, without dashes in front, to text; True for a flag


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "explore",
        help="look at schedules, or at where two runs part, on a local page",
        description="Serves a page to this machine on which schedules can be looked at. It takes the arguments of `dash-attn plan`."
        " With --ledgers it shows where two training runs part.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_question(parser)
    ledgers_help = "show where two runs part, by their ledgers, in place of schedules"
    parser.add_argument("--ledgers", nargs=2, metavar=("A", "B"), help=ledgers_help)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="where to listen on 127.0.0.1 (default: any free port)")
    parser.add_argument("--open", action="store_true", help="also open the page in a browser")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write one self-contained page in place of serving it")
    parser.set_defaults(run=run)


def _add_question(parser: argparse.ArgumentParser) -> None:
    """What both the command and its page take."""
    add_problem(parser)
    add_machine(parser)
    add_cluster(parser)
    schedule_help = f"one or two names, separated by spaces or commas, or auto (default): {', '.join(GENERATORS)}"
    parser.add_argument("--schedule", nargs="+", action="extend", metavar="NAME", help=schedule_help)
    measured_help = "also run the schedules and show what was recorded: on a Hopper GPU, or on the CPU in threads"
    parser.add_argument("--measured", action="store_true", help=measured_help)
    add_device(parser)


def run(arguments: argparse.Namespace) -> int:
    check_file("--save", arguments.save)
    if not 0 <= arguments.port < 2**16:
        raise ValueError(f"--port must be a number from 0 to 65535; got {arguments.port}")
    if arguments.ledgers is not None:
        return _show_ledgers(arguments)
    options, machine = options_of(arguments), arguments.machine
    if arguments.save is not None:
        return _save(arguments.save, saved_page(answer(options, machine)))
    _check(read_question(options, machine))
    page = served_page(start_of_form(options, machine))
    return _serve(arguments, lambda: page, lambda asked: answer(asked, machine))


def _show_ledgers(arguments: argparse.Namespace) -> int:
    if given := given_options(arguments):
        raise ValueError(f"--ledgers shows two runs; it does not go with --{next(iter(given)).replace('_', '-')}")
    make = partial(ledgers_answer, *arguments.ledgers)
    page = saved_page(make())  # what cannot be compared is said here
    if arguments.save is not None:
        return _save(arguments.save, page)
    return _serve(arguments, lambda: saved_page(make()), None)  # read anew: a run may go on


def _save(path: Path, page: str) -> int:
    path.write_text(page, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
    return 0


def _serve(arguments: argparse.Namespace, make_page: Callable[[], str], answering: Answering | None) -> int:
    try:
        server = PageServer(make_page, answering, arguments.port)
    except OSError as error:
        raise ValueError(f"--port {arguments.port}: cannot listen there: {error.strerror} (0 takes any free port)") from None
    with server:
        print(f"Open {server.url} (Ctrl+C ends it)", flush=True)
        if arguments.open:
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """What cannot be read is said by the command, not on the page."""
    _schedules(arguments)
    if not arguments.measured:
        read_machine(arguments)
    read_problem(arguments)


def start_of_form(options: Options, machine: str | None = None) -> dict[str, Any]:
    """What the form offers and begins with."""
    machines = [*SHIPPED, *([machine] if machine is not None and machine.lower() not in SHIPPED else [])]
    choices = {"schedule": ["auto", *GENERATORS], "machine": machines, "sharding": SHARDINGS, "execution": EXECUTIONS, "model": MODELS}
    return {"options": dict(options), "choices": choices, "masks": MASK_FORMS}


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    usual = vars(_Parser().parse_args([]))
    return {name: getattr(arguments, name) for name in ASKED if getattr(arguments, name) != usual[name]}


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were given; START where none was."""
    given = given_options(arguments)
    if not given:
        return dict(START)
    if "schedule" in given:
        given["schedule"] = ",".join(read_schedules(given["schedule"]))
    return {name.replace("_", "-"): value if value is True else f"{value}" for name, value in given.items()}


def read_question(options: Options, machine: str | None = None) -> argparse.Namespace:
    """The arguments that options stand for. `machine`: a file that a page may name, because the command was started with it."""
    words = []
    for name, value in options.items():
        if not isinstance(value, (str, bool)) or name.replace("-", "_") not in ASKED:
            raise ValueError(f"options are {', '.join(name.replace('_', '-') for name in ASKED)}, as text; got {name!r}: {value!r}")
        words += ([f"--{name}"] if value else []) if isinstance(value, bool) else [f"--{name}={value}"]
    asked = options.get("machine")
    if asked is not None and asked != machine and str(asked).lower() not in SHIPPED:
        raise ValueError(f"a page has the machines {', '.join(SHIPPED)}, and the one that the command was started with; got {asked!r}")
    return _Parser().parse_args(words)


class _Parser(argparse.ArgumentParser):
    """Of what a page asks. Raises where that of the command would end the process."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        _add_question(self)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def answer(options: Options, machine: str | None = None) -> dict[str, Any]:
    """All that a page shows. Raises ValueError for what cannot be shown."""
    arguments = read_question(options, machine)
    if arguments.ranks is not None:
        found = _shared_runs(arguments)
    else:
        refuse_without_ranks(arguments)
        found = _measured_runs(arguments) if arguments.measured else _simulated_runs(arguments)
    return {"format": 1, "options": dict(options), "command": _command(options), **found}


def _command(options: Options) -> str:
    words = [f"--{name}" if value is True else f"--{name} {shlex.quote(value)}" for name, value in options.items() if value is not False]
    return " ".join(["dash-attn plan", *words])


def _schedules(arguments: argparse.Namespace) -> list[str]:
    names = read_schedules(arguments.schedule or ["auto"])
    if len(names) > MOST_SCHEDULES:
        raise ValueError(f"a page shows one or two schedules; got {len(names)}: {', '.join(names)}")
    return names


def _check_tiles(problem: Any) -> None:
    if problem.q_tiles * problem.kv_tiles > MOST_TILES:
        raise ValueError(f"a page shows problems of at most {MOST_TILES:,} tiles; got {problem.q_tiles:,} x {problem.kv_tiles:,}")
    check_size(problem.tasks)


def _simulated_runs(arguments: argparse.Namespace) -> dict[str, Any]:
    refuse_ignored(arguments)
    names, machine, problem = _schedules(arguments), read_machine(arguments), read_problem(arguments)
    _check_tiles(problem)
    runs, refused = simulate_all(names, problem, machine, arguments.workers)
    _need_one(runs, refused)
    title = [describe_problem(problem, arguments.mask), describe_machine(machine, arguments.workers)]
    return {"title": title, "refused": refused, "runs": [simulated(timeline, name) for name, timeline in runs]}


def _need_one(runs: list[Any], refused: list[tuple[str, str]]) -> None:
    if not runs:
        raise ScheduleError("\n".join(why for _, why in refused))


def _measured_runs(arguments: argparse.Namespace) -> dict[str, Any]:
    from .measured import measure_all, read_measured

    names = _schedules(arguments)
    device, problem = read_measured(arguments)
    _check_tiles(problem)
    pairs, machine, refused = measure_all(names, arguments, device, problem)
    _need_one(pairs, refused)
    runs = []
    for pair in pairs:
        model = simulated(pair.timeline, pair.name)
        runs += [{**model, "name": f"{model['name']}, simulated", "unit": pair.measured.time_label}]
        runs.append(recorded(pair.timeline.schedule, pair.measured))
    machine_words = f"{describe_machine(machine, arguments.workers)} (constants read off these runs, unless given)"
    title = [describe_problem(problem, arguments.mask), machine_words, f"measured on {device.name} ({device.backend})"]
    return {"title": title, "refused": refused, "runs": runs}


def _shared_runs(arguments: argparse.Namespace) -> dict[str, Any]:
    for name in ("threads", "measured"):
        if getattr(arguments, name):
            raise ValueError(f"--{name} does not go with --ranks, which is a simulation")
    if arguments.seqlen is None:
        raise ValueError("--ranks needs --seqlen: rows are dealt to ranks, and bytes are counted, in tokens")
    planned = plan_cluster(arguments)
    title = title_of_cluster(arguments, planned).splitlines()
    return {"title": title, "refused": [], "runs": [shared_run(run) for run in planned.runs]}
