"""`dash-attn explore`: a local page on which schedules can be looked at. viewing/explore has the page and its server."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from ..errors import ScheduleError
from ..masks import MASK_FORMS
from ..scheduling.generators import GENERATORS, IDEAS
from ..scheduling.problem import Problem
from ..scheduling.ranks.sharding import SHARDINGS
from ..simulation.cluster import EXECUTIONS, MODELS
from ..simulation.machines import SHIPPED
from ..viewing.explore.runs import check_size, check_units, encoded, recorded, shared_run, simulated
from ..viewing.explore.server import Answering, PageServer, Watch, saved_page, served_page
from ..viewing.task_times import MICROSECONDS
from ..viewing.words import FIGURES
from .arguments import add_question, flag_of, read_machine, read_problem, read_schedules
from .cluster import plan_ranks
from .files import check_files, write_text
from .mask_files import is_file, read_mask_file
from .parser import Parser, whole
from .plan import PlannedRun, plan
from .table import progress_bar, watched_by

HELP = "look at schedules, or at where two runs part, on a local page"
TEXT = (
    "Serves a page that shows schedules, to this machine only. It takes the arguments of `dash-attn plan`."
    " With --ledgers it shows where two training runs part."
)
EXAMPLES = """examples:
  dash-attn explore
  dash-attn explore --seqlen 4096 --heads 8 --schedule ascending,auto --machine h200
  dash-attn explore --seqlen 1024 --heads 4 --schedule auto --measured
  dash-attn explore --ranks 4 --seqlen 32768 --heads 8 --save ranks.html
  dash-attn explore --ledgers runs/a runs/b
"""
SCHEDULES_HELP = f"one or two names, separated by spaces or commas, or auto (default): {', '.join(GENERATORS)}"
MOST_SCHEDULES = 2
MOST_TILES = 2**24  # of a problem, before anything is counted
MOST_RANKS = 128  # their units grow with the square
MOST_CELLS = 20_000_000  # modules times steps of two runs: about 100 MB in a browser
# What a page begins with if nothing is said: the picture of the README.
START = {
    **{"mask": "causal", "q-tiles": "8", "kv-tiles": "8", "heads": "4", "workers": "8"},
    **{"compute": "3", "reduce": "1", "schedule": "ascending,alternating"},
}
MEASURING = Lock()  # two measurements at once would measure each other
Options = Mapping[str, Any]  # names of arguments, without dashes in front, to text; True for a flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_question(parser, SCHEDULES_HELP)
    ledgers_help = "show where two runs part, by their ledgers, instead of schedules"
    parser.add_argument("--ledgers", nargs=2, metavar=("A", "B"), help=ledgers_help)
    port_help = "where to listen on 127.0.0.1 (default: any free port)"
    parser.add_argument("--port", type=whole(0, 2**16 - 1), default=0, metavar="N", help=port_help)
    parser.add_argument("--open", action="store_true", help="also open the page in a browser")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write one self-contained page instead of serving it")


def run(arguments: argparse.Namespace) -> int:
    check_files(arguments, "save")
    make_page, answering = _page_of_ledgers(arguments) if arguments.ledgers is not None else _page_of_schedules(arguments)
    if arguments.save is None:
        return _serve(arguments, make_page, answering)
    write_text(arguments.save, make_page())
    return 0


def _page_of_schedules(arguments: argparse.Namespace) -> tuple[Callable[[], str], Answering]:
    """What makes the page, and who answers it."""
    read_mask_file(arguments)
    options = options_of(arguments)
    if arguments.save is not None:
        return lambda: saved_page(answer(options, options)), lambda asked, watch: answer(asked)
    asked = read_question(options, options)  # what cannot be read is said by the command, not on the page
    read_mask_file(asked)
    _schedules(asked)
    if not asked.measured:
        read_machine(asked)
    read_problem(asked)
    page = served_page(start_of_form(options))
    return lambda: page, lambda asked, watch: answer(asked, options, watch)


def _page_of_ledgers(arguments: argparse.Namespace) -> tuple[Callable[[], str], None]:
    """A page that asks nothing. It is read anew each time, because a run may go on."""
    if given := given_options(arguments):
        raise ValueError(f"--ledgers shows two runs; it does not go with {flag_of(next(iter(given)))}")
    ledgers_answer(*arguments.ledgers)  # what cannot be compared is said here
    return lambda: saved_page(ledgers_answer(*arguments.ledgers)), None


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


def start_of_form(options: Options) -> dict[str, Any]:
    """What the form offers and begins with."""
    machine = options.get("machine")
    machines = [*SHIPPED, *([machine] if machine is not None and machine.lower() not in SHIPPED else [])]
    choices = {"schedule": ["auto", *GENERATORS], "machine": machines, "sharding": SHARDINGS, "execution": EXECUTIONS, "model": MODELS}
    help_of = {flag_of(action.dest)[2:]: action.help for action in _parser()._actions}
    return {"options": dict(options), "choices": choices, "masks": MASK_FORMS, "help": help_of, "schedules": IDEAS}


def _parser() -> Parser:
    """Of what a page asks."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_question(parser, SCHEDULES_HELP)
    return parser


def _usual() -> dict[str, Any]:
    """All that a page may ask for, and what it means not to."""
    return vars(_parser().parse_args([]))


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: given for name, usual in _usual().items() if (given := getattr(arguments, name)) != usual}


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were given; START where none was."""
    given = given_options(arguments)
    if not given:
        return dict(START)
    if "schedule" in given:
        given["schedule"] = ",".join(read_schedules(given["schedule"]))
    return {name.replace("_", "-"): value if value is True else f"{value}" for name, value in given.items()}


def read_question(options: Options, start: Options = MappingProxyType({})) -> argparse.Namespace:
    """The arguments that options stand for. `start`: those that the command was started with, whose files a page may name."""
    known = [name.replace("_", "-") for name in _usual()]
    words = []
    for name, value in options.items():
        if not isinstance(value, (str, bool)) or name not in known:
            raise ValueError(f"options are {', '.join(known)}, as text; got {name!r}: {value!r}")
        words += ([f"--{name}"] if value else []) if isinstance(value, bool) else [f"--{name}={value}"]
    machine, mask = options.get("machine"), options.get("mask")
    if machine not in (None, start.get("machine")) and str(machine).lower() not in SHIPPED:
        raise ValueError(f"a page has the machines {', '.join(SHIPPED)}, and the one that the command was started with; got {machine!r}")
    if is_file(str(mask)) and mask != start.get("mask"):
        raise ValueError(f"a page has masks by name, and the file that the command was started with; got {mask!r}")
    return _parser().parse_args(words)


def answer(options: Options, start: Options = MappingProxyType({}), watch: Watch | None = None) -> dict[str, Any]:
    """All that a page shows. Raises ValueError for what cannot be shown. `watch`: who is told of long work."""
    arguments = read_question(options, start)
    with _alone(arguments.measured), watched_by(watch):
        found = _one_rank(arguments) if arguments.ranks is None else _several_ranks(arguments)
    words = [f"--{name}" if value is True else f"--{name} {shlex.quote(value)}" for name, value in options.items() if value is not False]
    named = {name for run in found["runs"] for name in (*dict(run["figures"]), run["schedule"])}
    meanings = {name: words for name, words in {**FIGURES, **IDEAS}.items() if name in named}
    return {"format": 1, "options": dict(options), "command": " ".join(["dash-attn plan", *words]), "meanings": meanings, **found}


@contextmanager
def _alone(measures: bool) -> Iterator[None]:
    """Of all pages at most one measures. The others are told so, and go on."""
    if measures and not MEASURING.acquire(blocking=False):
        raise ValueError("another measurement is running; ask again when it has ended")
    try:
        yield
    finally:
        if measures:
            MEASURING.release()


def _several_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.ranks > MOST_RANKS:
        raise ValueError(f"a page shows at most {MOST_RANKS} ranks; got {arguments.ranks:,}")
    planned = plan_ranks(arguments, check_units)
    return {"title": planned.title, "refused": [], "runs": [shared_run(run) for run in planned.runs]}


def _schedules(arguments: argparse.Namespace) -> list[str]:
    names = read_schedules(arguments.schedule or ["auto"])
    if len(names) > MOST_SCHEDULES:
        raise ValueError(f"a page shows one or two schedules; got {len(names)}: {', '.join(names)}")
    return names


def _check_tiles(problem: Problem) -> None:
    if problem.q_tiles * problem.kv_tiles > MOST_TILES:
        raise ValueError(f"a page shows problems of at most {MOST_TILES:,} tiles; got {problem.q_tiles:,} x {problem.kv_tiles:,}")
    check_size(problem.tasks)


def _one_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    planned = plan(arguments, _schedules(arguments), _check_tiles)
    if not planned.runs:
        raise ScheduleError("\n".join(why for _, why in planned.refused))
    runs = []
    with progress_bar("preparing the charts", planned.problem.tasks) as progress:
        for number, run in enumerate(planned.runs):
            if progress is not None:
                progress(number, len(planned.runs))
            runs += _charts_of(run)
    title, device = planned.title, planned.device
    if device is not None:
        title = [title[0], f"{title[1]} (constants read off these runs, unless given)", f"measured on {device.name} ({device.backend})"]
    if arguments.machine is not None:
        runs = [{**run, "unit": MICROSECONDS} for run in runs]  # in which machines are calibrated
    return {"title": title, "refused": planned.refused, "runs": runs}


def _charts_of(run: PlannedRun) -> list[dict[str, Any]]:
    """What was measured stands below what was simulated, both in microseconds."""
    name, timeline, measured = run
    model = simulated(timeline, name)
    if measured is None:
        return [model]
    times = {"makespan": timeline.makespan, "lower bound": timeline.lower_bound}
    figures = [[figure, f"{times[figure]:,.1f} us" if figure in times else value] for figure, value in model["figures"]]
    model |= {"name": f"{model['name']}, simulated", "unit": measured.time_label, "figures": figures}
    return [model, recorded(timeline.schedule, measured)]


def ledgers_answer(a: str | Path, b: str | Path) -> dict[str, Any]:
    """What a page shows of two runs: where they part, step by step and module by module. Raises LedgerError, a ValueError."""
    from ..ledgers.comparing import DIRECTIONS, compare_runs, spread
    from .diff import as_json, rows_of, verdict

    found = compare_runs(a, b)
    seen = spread(a, b, None if found.first is None else found.first.rank)
    if len(seen.modules) * len(seen.steps) > MOST_CELLS:
        raise ValueError(f"a page shows at most {MOST_CELLS:,} modules times steps; got {len(seen.modules):,} x {len(seen.steps):,}")
    steps, cells = len(seen.steps), len(seen.modules) * len(seen.steps)
    return {
        "format": 1,
        "kind": "ledgers",
        "title": [f"A: {a}", f"B: {b}"],
        "command": f"dash-attn diff {a} {b}",
        "verdict": verdict(found),
        "rows": [] if found.first is None else rows_of(found.first),
        "comparison": {**as_json(found), "notes": [*found.lacking, *found.notes]},
        "rank": seen.rank,
        "directions": list(DIRECTIONS),
        "modules": list(seen.modules),
        "steps": encoded(seen.steps),
        "compared": [encoded(each.ravel()) for each in seen.compared],
        "differing": [encoded(each.ravel()) for each in seen.differing],
        "apart": [[way * cells + module * steps + step, *sizes] for (way, module, step), sizes in seen.apart.items()],
    }
