"""`dash-attn verify`: does this machine keep the promises? Prints a table or a certificate."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..masks import MASK_FORMS
from ..scheduling.schedule import Schedule
from .device import BACKENDS, choose_served
from .files import check_files, write_text
from .parser import numbers, whole
from .table import LONG_WORK, progress_bar

if TYPE_CHECKING:
    from ..tools.verify.cases import Case
    from ..tools.verify.certificate import Certificate

RUNS = {"cpu": 4, "cuda": 50}
SHAPE = ("seqlen", "heads", "kv_heads", "head_dim", "batch", "mask", "dtype", "schedule")
HELP = "test on this machine that bits do not change; write a certificate"
TEXT = """Runs attention again and again and compares every bit: repeated, interleaved differently, under load, in other batches,
through a cache token by token, in fresh processes that compile everything again. Memory is poisoned before every run.
Exit code 0: all bits agree, and those of the controls differ; 1: they do not."""
EXAMPLES = """examples:
  dash-attn verify --output here.json
  dash-attn verify --against here.json
  dash-attn verify --seqlen 1024 --mask window:256,0 --runs 100
  dash-attn verify --ranks 1,2,4 --output here.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_shape(parser.add_argument_group("shape", "any of these replaces the default cases with one case"))
    runs_help = f"runs of each case (default: {RUNS['cpu']} on the CPU, {RUNS['cuda']} on a GPU)"
    parser.add_argument("--runs", type=whole(2), metavar="N", help=runs_help)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU that a backend serves, else cpu")
    backend_help = "which kernels to test (default: auto, as calls choose it)"
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help=backend_help)
    ranks_help = (
        "also share each sequence between this many ranks, all played by one process: the bits must be those of one rank."
        " The default cases are then lengthened to whole chunks"
    )
    parser.add_argument("--ranks", type=_ranks, default=(), metavar="N,N,...", help=ranks_help)
    parser.add_argument("--no-fresh", dest="fresh", action="store_false", help="do not compare with fresh processes")
    parser.add_argument("--json", action="store_true", help="print the certificate instead of the table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the certificate to a file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with this certificate; its cases are the default")


def _add_shape(group: Any) -> None:
    for name in ("seqlen", "heads", "kv-heads", "head-dim", "batch"):
        group.add_argument(f"--{name}", type=whole(), metavar="N")
    group.add_argument("--mask", help=f"{MASK_FORMS}; lengths in tokens")
    group.add_argument("--dtype", help="fp64, fp32, bf16 or fp16 (GPU: bf16, fp16; fp32 with backend triton)")
    group.add_argument(
        "--schedule", metavar="NAME|FILE", help="auto, a name that `dash-attn plan` lists, or a .json file that `plan --save` wrote"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..tools.verify.certificate import differences, read, refuse_failed, status_of, table, verify

    check_files(arguments, "output", read="against")
    theirs = read(arguments.against) if arguments.against else None
    if theirs is not None:
        refuse_failed(theirs, arguments.against)
    device = choose_served(arguments.device)
    if device == "cpu" and arguments.backend in ("hopper", "triton"):
        raise ValueError(f"--backend {arguments.backend} needs a GPU, and this would run on the CPU (--device)")
    runs = RUNS[device] if arguments.runs is None else arguments.runs
    cases = _choose_cases(arguments, device, theirs)
    with progress_bar("verifying", LONG_WORK) as progress:  # always long enough to be worth a bar
        certificate = verify(cases, device, runs, arguments.fresh, progress, arguments.ranks, arguments.backend)
    differing = differences(certificate, theirs) if theirs else []
    text = json.dumps(certificate, indent=2)
    if arguments.output:
        write_text(arguments.output, text)
    print(text if arguments.json else table(certificate))
    if theirs:
        _print_comparison(differing, theirs, arguments)
    passed = certificate["status"] == "pass" and (theirs is None or status_of(theirs) == "pass")
    return 0 if passed and not differing else 1


def _print_comparison(differing: list[str], theirs: Certificate, arguments: argparse.Namespace) -> None:
    """Beside the certificate on stdout, it goes to stderr."""
    from ..tools.verify.certificate import agreement

    agrees = [agreement(theirs, arguments.against)]
    lines = [f"Differs from {arguments.against}:", *(f"  {line}" for line in differing)] if differing else agrees
    print("\n".join(lines), file=sys.stderr if arguments.json else sys.stdout)


def _ranks(text: str) -> tuple[int, ...]:
    found = tuple(sorted(set(numbers(text))))
    if not 1 < found[-1] < 1000:
        raise argparse.ArgumentTypeError(f"must have a number from 2 to 999, like 1,2,4: one rank alone shares nothing; got {text!r}")
    return found


def _choose_cases(arguments: argparse.Namespace, device: str, theirs: Certificate | None) -> tuple[Case, ...]:
    from ..tools.verify.cases import cases_to_share, default_case, default_cases
    from ..tools.verify.certificate import cases_of

    given = {name: getattr(arguments, name) for name in SHAPE if getattr(arguments, name) is not None}
    if given:
        base = default_case(device)
        if "heads" in given and "kv_heads" not in given:
            given["kv_heads"] = given["heads"]  # no grouping unless it is asked for
        if "schedule" in given:
            given["schedule"] = _read_schedule(given["schedule"])
        return (replace(base, **given),)
    if theirs:
        return cases_of(theirs)
    return cases_to_share(device, arguments.ranks) if arguments.ranks else default_cases(device)


def _read_schedule(name: str) -> str:
    """A name as it is; of a file its text."""
    if not name.endswith(".json"):
        return name
    try:
        text = Path(name).read_text(encoding="utf-8")
        Schedule.from_json(text)
    except OSError as error:
        raise ValueError(f"--schedule: cannot read {name}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--schedule: {name} is not a schedule, as `dash-attn plan --save` writes it: {error}") from None
    return text
