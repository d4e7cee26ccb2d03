"""Damaged files: whoever reads one gets what it says, or our error. Never something else, another error, or a wait without end."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks import result_files
from dash_attn import DashAttnError, parse_mask
from dash_attn.ledgers import compare_runs
from dash_attn.scheduling import Problem, Schedule, generate
from dash_attn.simulation.machines import load_machine
from dash_attn.tools.bench.report import tables
from dash_attn.tools.calibrate import pictures
from dash_attn.tools.verify import certificate
from fuzzing.record import RESULTS
from reference import can_finish

OLD = Path(__file__).parents[2] / "tests" / "old_files"
SECONDS = 20  # that a file may take to be read
MOST_TASKS = 500  # of a schedule that is run by the slow reference, too
HUGE = (2**31 - 1, 2**31, 2**63, 10**30, -1, -(2**63), 1e308, -0.0, 0, 1)
OTHERS: tuple[Any, ...] = (None, True, "", "causal", "nan", [], {}, [[[]]], "\u0000", float("nan"), float("inf"))


class Misread(Exception):
    """A file was read as something else."""


class Format(NamedTuple):
    """originals: files, or folders of a ledger. read: raises Misread where it gives something else than the damaged file says."""

    originals: Callable[[Random], Path | str]
    read: Callable[[Path, Path | str], None]
    binary: bool = False


def old(pattern: str) -> Callable[[Random], Path]:
    return lambda random: random.choice(sorted(OLD.glob(pattern)))


def a_schedule(random: Random) -> Path | str:
    """An old file, or a new schedule of a small problem."""
    if random.random() < 0.4:
        return old("schedule-*.json")(random)
    name, mask = random.choice((("alternating", "causal"), ("shift", "full"), ("weave", "window:1,1"), ("auto", "full"), ("spt", "causal")))
    tiles, heads = random.randint(1, 6), random.randint(1, 3)
    return generate(name, Problem.from_tiles(mask, tiles, tiles, heads=heads), 16).to_json()


def read_schedule(path: Path, _: Path | str) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    schedule = Schedule.from_json(text)
    said, found = json.loads(text), json.loads(schedule.to_json())
    for value in (said, found):
        value.setdefault("schedule", 1)  # the format, which the first files do not say
        value["order"].pop("guarantees", None)  # are not believed
        value["placement"].setdefault("heads_in_round", 0)
        value["problem"] = {"head_offset": 0, "group_parts": 1, **value["problem"]}
        if isinstance(value["problem"]["mask"], str):
            value["problem"]["mask"] = str(parse_mask(value["problem"]["mask"]))  # spaces do not count
    expect(same(found, said), "another schedule than the file has")
    if schedule.problem.tasks <= MOST_TASKS:
        expect(can_finish(schedule, schedule.workers), "a schedule that hangs")


def read_machine(path: Path, _: Path | str) -> None:
    found = load_machine(str(path)).to_json()
    said = json.loads(path.read_bytes())
    said.pop("measured", None)
    said["machine"] = found["machine"]  # the format, which was looked at
    said["head_dims"] = {str(int(dim)): entry for dim, entry in said["head_dims"].items()}
    expect(same(found, said), "other constants than the file has")


def read_certificate(path: Path, original: Path | str) -> None:
    """As `dash-attn verify --against` does, after the cases have run again."""
    found = certificate.read(path)
    expect(found == json.loads(path.read_bytes()), "another certificate than the file has")
    certificate.refuse_failed(found, path)
    ours = certificate.read(Path(original))
    same = not certificate.differences(ours, found)
    expect(not same or decides(found, ours) == decides(ours, ours), "equal to another certificate")
    certificate.agreement(found, path)


def decides(found: Any, ours: Any) -> list[Any]:
    """Of the cases of ours: hashes of inputs and results."""
    of_cases = dict(zip(certificate.cases_of(found), found["cases"], strict=True))
    wanted = zip(certificate.cases_of(ours), ours["cases"], strict=True)
    return [(of_cases[case]["inputs_sha256"], [of_cases[case]["sha256"].get(name) for name in one["sha256"]]) for case, one in wanted]


def read_results(path: Path, _: Path | str) -> None:
    found = result_files.read(path)
    expect(found == json.loads(path.read_bytes()), "other results than the file has")
    for _title, _header, cells in (*tables(found), *result_files.more_tables(found)):
        list(cells)


def read_predictions(path: Path, _: Path | str) -> None:
    found = pictures.read(path)
    said = json.loads(path.read_bytes())
    expect(found["rows"] == (said["rows"] if "rows" in said else said["measured"]), "other predictions than the file has")


def read_ledger(path: Path, original: Path | str) -> None:
    found = compare_runs(original, path)
    expect(found.verdict != "agree", "a damaged ledger agrees with the whole one")


FORMATS: dict[str, Format] = {
    "schedule": Format(a_schedule, read_schedule),
    "machine file": Format(old("machine.json"), read_machine),
    "certificate": Format(old("certificate.json"), read_certificate),
    "results": Format(old("results*.json"), read_results),
    "predictions": Format(lambda random: RESULTS / "h200-prediction.json", read_predictions),
    "ledger": Format(old("*ledger"), read_ledger, binary=True),
}


def same(one: Any, other: Any) -> bool:
    """As JSON: true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Misread(otherwise)


def damaged_bytes(data: bytes, random: Random) -> bytes:
    """Bits, bytes or stretches: flipped, lost, twice, zero, or of another place."""
    changed, place = bytearray(data), random.randrange(len(data))
    length = min(len(data) - place, random.choice((1, 2, 8, 100)))
    sort = random.choice(("bit", "bit", "byte", "cut", "cut", "lost", "twice", "zeros", "swapped"))
    if sort == "bit":
        changed[place] ^= 1 << random.randrange(8)
    elif sort == "byte":
        changed[place] = random.randrange(256)
    elif sort == "cut":
        del changed[place:]
    elif sort == "lost":
        del changed[place : place + length]
    elif sort == "twice":
        changed[place:place] = changed[place : place + length]
    elif sort == "zeros":
        changed[place : place + length] = bytes(length)
    else:
        other = random.randrange(len(data))
        changed[place], changed[other] = changed[other], changed[place]
    return bytes(changed)


def damaged_json(value: Any, random: Random) -> Any:
    """One value somewhere inside is another one, lost, or has changed places."""
    place, key = random.choice(list(places(value)) or [([value], 0)])
    if random.random() < 0.15:
        del place[key]
    elif random.random() < 0.4:
        other, place_of_it = random.choice(list(places(value)))
        place[key], other[place_of_it] = other[place_of_it], place[key]
    elif isinstance(place[key], (int, float)) and random.random() < 0.5:
        place[key] = random.choice((place[key] + 1, place[key] - 1, -place[key], 2 * place[key]))
    else:
        place[key] = random.choice(HUGE + OTHERS)
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object inside with every key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def attempt(name: str, seed: int, number: int, folder: Path) -> tuple[str, str]:
    """ "read", "refused" or "failed", and why."""
    random, form = Random(f"{name} {seed}/{number}"), FORMATS[name]
    original = form.originals(random)
    path = damaged_copy(original, random, folder, form.binary)
    if path is None:
        return "read", "no byte has changed"
    try:
        with within(SECONDS):
            form.read(path, original)
    except Misread as error:
        return "failed", str(error)
    except Exception as error:  # of any kind
        ours = type(error) is ValueError or isinstance(error, DashAttnError)
        return ("refused", "") if ours and str(error) else ("failed", f"{type(error).__name__}: {error}")
    return "read", ""


def damaged_copy(original: Path | str, random: Random, folder: Path, binary: bool) -> Path | None:
    """None: it happens to be the same."""
    if isinstance(original, Path) and original.is_dir():
        shutil.rmtree(folder / "ledger", ignore_errors=True)
        shutil.copytree(original, folder / "ledger")
        (file,) = (folder / "ledger").iterdir()
        data, path = file.read_bytes(), folder / "ledger"
    else:
        data, file = original.encode() if isinstance(original, str) else original.read_bytes(), folder / "damaged.json"
        path = file
    if binary or random.random() < 0.4:
        changed = damaged_bytes(data, random)
    else:
        value = json.loads(data)
        for _ in range(random.choice((1, 1, 2))):
            value = damaged_json(value, random)
        changed = json.dumps(value, indent=1).encode()
    file.write_bytes(changed)
    return None if changed == data else path


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Misread(f"not read within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
