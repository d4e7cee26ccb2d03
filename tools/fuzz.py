"""Random calls of every attention function against the slow definition in double precision, in parts that go on where they stopped.

python tools/fuzz.py --part 1 --minutes 20            (seed 1, from where part 1 stopped; at most 20 minutes, on a GPU 9)
python tools/fuzz.py --device cuda --part 1 --minutes 9
python tools/fuzz.py --device cpu --seed 1 --only 17  (one call again)
python tools/fuzz.py --plant "swapped turns"          (how many calls find a planted fault)
python tools/fuzz.py faults                           (all of them)
python tools/fuzz.py files --part 1 --minutes 5       (damaged files: schedules, machine files, certificates, results, ledgers)
python tools/fuzz.py training --steps 1000            (twice, once killed and resumed; ledgers and weights must agree)
python tools/fuzz.py soak --device cuda --minutes 9     (on a GPU: families of calls, repeated under load with dirty memory)

Each part is added to benchmarks/results/evidence-DEVICE.json, of which `make pages` makes docs/evidence.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/helpers"), str(ROOT / "src"), str(ROOT)]

from fuzzing import damage, record, soak, training  # noqa: E402
from fuzzing.faults import FAULTS, planted  # noqa: E402
from fuzzing.record import Part, Recorder, new_part, until  # noqa: E402
from fuzzing.trying import Outcome, attempt  # noqa: E402

MOST_MINUTES = {"cpu": 20.0, "cuda": 9.0}
MOST_FAILURES = 20  # of a part: where a kernel has lost the CUDA context, all calls fail


def count(part: Part, outcome: Outcome, again: str) -> None:
    """What came of a call of a part."""
    of_function = part["functions"].setdefault(outcome.function, {"agreed": 0, "refused": 0, "failed": 0})
    of_function["failed" if outcome.failure else "refused" if outcome.refusal else "agreed"] += 1
    part["calls"] += 1
    if outcome.refusal:
        part["refusals"][outcome.refusal] = part["refusals"].get(outcome.refusal, 0) + 1
    if outcome.failure:
        part["failures"].append(f"{outcome.failure}: {again}")
        print(f"{again}  # {outcome.function}: {outcome.failure} | {outcome.words}", flush=True)


def run_calls(device: str, seed: int, minutes: float, calls: int | None, path: Path | None) -> int:
    """A part: so many calls, or as many as there is time for. How many failed."""
    number = first = record.next_number(path, device, seed)
    part = new_part("calls", device, seed=seed, first=first) | {"calls": 0, "functions": {}, "refusals": {}, "failures": []}
    recorder, time_left = Recorder(path, part), until(minutes)
    while time_left() and (calls is None or number < first + calls) and len(part["failures"]) < MOST_FAILURES:
        count(part, attempt(seed, number, device), reproduction(device, seed, number))
        recorder.keep()
        number += 1
    recorder.keep(at_once=True)
    print(f"seed {seed}, calls {first} to {number - 1}: {len(part['failures'])} failed, {sum(part['refusals'].values())} refused")
    return len(part["failures"])


def reproduction(device: str, seed: int, number: int) -> str:
    return f"python tools/fuzz.py --device {device} --seed {seed} --only {number}"


def run_one(device: str, seed: int, number: int) -> int:
    outcome = attempt(seed, number, device)
    said = outcome.failure or (f"refused: {outcome.refusal}" if outcome.refusal else "agrees")
    print(f"{outcome.function}: {said}\n{outcome.words}")
    return bool(outcome.failure)


def calls_until_found(name: str) -> int | None:
    """None: not within the limit of this fault."""
    with planted(name):
        return next((number + 1 for number in range(FAULTS[name][-1]) if attempt(0, number, "cpu").failure), None)


def run_faults(names: Sequence[str], path: Path | None) -> int:
    recorder = Recorder(path, new_part("faults", "cpu", found={}, limits={name: FAULTS[name][-1] for name in names}))
    found = recorder.part["found"] = {name: calls_until_found(name) for name in names}
    for name, count in found.items():
        print(f"{name}: {'NOT FOUND' if count is None else f'found by call {count}'} (of {FAULTS[name][-1]} allowed)")
    recorder.keep(at_once=True)
    return sum(count is None for count in found.values())


def run_files(seed: int, minutes: float, most: int | None, path: Path | None) -> int:
    """Damaged files of each format in turn. How many failed."""
    time_left, number = until(minutes), 0
    part = new_part("files", "cpu", seed=seed, files=0, formats={name: {"refused": 0, "read": 0, "failed": 0} for name in damage.FORMATS})
    recorder, failed = Recorder(path, part), 0
    with TemporaryDirectory(prefix="dash-attn-fuzz-") as folder:
        while time_left() and (most is None or number < most):
            for name, counts in part["formats"].items():
                outcome, why = damage.attempt(name, seed, number, Path(folder))
                counts[outcome] += 1
                part["files"] += 1
                if outcome == "failed":
                    failed += 1
                    print(f"{name}, seed {seed}, number {number}: {why}", flush=True)
            number += 1
            recorder.keep()
    recorder.keep(at_once=True)
    print(f"{part['files']} damaged files: {failed} failed")
    return min(1, failed)


def run_training(steps: int, device: str, path: Path | None) -> int:
    recorder = Recorder(path, new_part("training", device))
    found = training.twice(steps, device)
    recorder.part |= found
    recorder.keep(at_once=True)
    good = training.agrees(found, steps)
    print(
        f"{found['steps']} of {steps} steps, killed at {found['killed_at']}: {found['verdict']}, weights {' and '.join(found['weights'])}"
    )
    return 0 if good else 1


def run_soak(device: str, minutes: float, repeats: int, path: Path) -> int:
    recorder = Recorder(path, new_part("soak", device, repeats=repeats))
    return min(1, soak.run(recorder, record.read(path), device, until(minutes)))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", nargs="?", default="calls", choices=("calls", "faults", "files", "training", "soak"))
    made.add_argument("--device", default="cpu", choices=tuple(MOST_MINUTES))
    made.add_argument("--part", type=int, metavar="K", help="which part: its number is the seed")
    made.add_argument("--seed", type=int, default=0, help="of single calls (default: 0)")
    made.add_argument("--only", type=int, metavar="N", help="this call alone")
    made.add_argument("--calls", type=int, metavar="N", help="at most so many")
    made.add_argument("--repeats", type=int, default=1000, help="of each test of a soak (default: 1000)")
    made.add_argument("--steps", type=int, default=1000, help="of the training (default: 1000)")
    made.add_argument("--minutes", type=float, help="at most so long (default: 20, on a GPU 9, which is also the most)")
    made.add_argument("--plant", choices=tuple(FAULTS), metavar="NAME", help=f"a fault: {', '.join(FAULTS)}")
    made.add_argument("--output", type=Path, metavar="FILE", help="of parts (default: benchmarks/results/evidence-DEVICE.json)")
    return made


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    device, most = arguments.device, MOST_MINUTES[arguments.device]
    minutes = most if arguments.minutes is None else arguments.minutes
    if not 0 < minutes <= most:
        raise SystemExit(f"--minutes must be above 0 and at most {most:g} on {device}; got {minutes:g}")
    record.one_thread()
    if device == "cuda":  # has not started yet
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # nn.Linear asks for it where memory is filled
    path = arguments.output or record.file_of(device)
    if arguments.only is not None:
        return run_one(device, arguments.seed, arguments.only)
    if arguments.plant is not None:
        return run_faults([arguments.plant], None)
    if arguments.what == "faults":
        return run_faults(list(FAULTS), path)
    if arguments.what == "soak":
        return run_soak(device, minutes, arguments.repeats, path)
    if arguments.what == "training":
        return run_training(arguments.steps, device, path)
    seed = arguments.seed if arguments.part is None else arguments.part
    kept = None if arguments.part is None else path
    if arguments.what == "files":
        return run_files(seed, minutes, arguments.calls, kept)
    return min(1, run_calls(device, seed, minutes, arguments.calls, kept))


if __name__ == "__main__":
    sys.exit(main())
