"""A certificate: what was verified, where, with which outcome, and hashes to compare with other machines. Made, read, shown, compared."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ...backends import resolve
from ...call.kv_cache import DECODE_EQUALS_TRAINING
from ...formats import CERTIFICATES
from ...invariance.record import records
from ...scheduling.engine import Progress
from ...scheduling.json_fields import read_json_file, shortened
from ..machine import device_facts, version_facts
from .cases import INPUT_GENERATOR, SEED, Case, Results, sha256
from .guarantees import CaseTest, Status, comparisons, worst
from .surroundings import fresh_results
from .ways import check_ranks

COMPARED: dict[str, type] = {"case": dict, "guarantees": list, "explain": dict, "inputs_sha256": str, "sha256": dict}  # of each case
PARTS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
DECIDES_BITS = ("backend", "schedule", "order_hash", "backward_tiles", "forward_tiles", "kernels")
SCOPE = (
    "dash_attn.flash_attn_func, forward and backward, of the cases listed, on this device; flash_attn_with_kvcache where"
    f" {DECODE_EQUALS_TRAINING} is listed; nothing else of a training step"
)
SCOPE_OF_RANKS = "; ranks that share a sequence were played by one process, so messages between processes were not tested"
Certificate = dict[str, Any]


def verify(
    cases: Sequence[Case],
    device: str,
    runs: int,
    fresh: bool = True,
    progress: Progress | None = None,
    ranks: Sequence[int] = (),
    backend: str = "auto",
) -> Certificate:
    """Test every case and write down the outcome. `ranks`: numbers of ranks that shall share each sequence."""
    resolve(backend, torch.device(device))  # raises where the backend does not run there
    check_ranks(cases, device, ranks, backend)
    elsewhere = fresh_results(cases, device, backend) if fresh else {}
    total = len(cases) * comparisons(device, runs, len(elsewhere), ranks)
    done = count(1)
    tick = None if progress is None else lambda: progress(min(next(done), total), total)
    entries = [
        _entry(CaseTest(case, device, runs, tick, ranks, backend), {what: results[number] for what, results in elsewhere.items()})
        for number, case in enumerate(cases)
    ]
    return {
        **CERTIFICATES.mark,
        "status": worst(_statuses(entries)),
        "scope": f"{SCOPE}{SCOPE_OF_RANKS if ranks else ''}",
        "runs": runs,
        "ranks": list(ranks),
        "inputs": {"generator": INPUT_GENERATOR, "seed": SEED},
        "device": device_facts(device),
        "versions": version_facts(device, backend),
        "invariance": records(),  # which products of whole models were probed on this machine, beside attention
        "cases": entries,
    }


def _entry(test: CaseTest, fresh: dict[str, Results]) -> dict[str, Any]:
    return {
        "case": asdict(test.case),
        "guarantees": [asdict(outcome) for outcome in test.outcomes(fresh)],
        "explain": json.loads(json.dumps(asdict(test.explain()))),  # tuples become lists, as in a file
        "inputs_sha256": sha256(test.inputs),
        "sha256": {name: sha256([x]) for name, x in test.reference.named.items()},
    }


def read(path: Path) -> Certificate:
    """A certificate from a file, complete enough to be compared with."""
    found: Certificate = read_json_file(path, "certificate")
    CERTIFICATES.check(found, str(path))
    try:
        _check_parts(found, "it", {"device": dict, "versions": dict, "cases": list})
        for entry in found["cases"]:
            _check_parts(entry, "a case", COMPARED)
            for outcome in entry["guarantees"]:
                _check_parts(outcome, "an outcome", {"guarantee": str, "status": str, "detail": str})
        cases_of(found)
    except ValueError as error:
        raise ValueError(f"{path} is not a complete certificate: {error}") from None
    return found


def _check_parts(value: Any, what: str, parts: dict[str, type]) -> None:
    for key, kind in parts.items():
        if not isinstance(value, dict) or value.get(key) in (None, [], ""):
            raise ValueError(f"{what} lacks {key}")
        if not isinstance(value[key], kind):
            raise ValueError(f"{key} must be {PARTS[kind]}; got {shortened(value[key])}")


def cases_of(certificate: Certificate) -> tuple[Case, ...]:
    try:
        return tuple(Case(**entry["case"]) for entry in certificate["cases"])
    except TypeError as error:
        raise ValueError(f"the certificate has a case that cannot be read: {error}") from None


def status_of(certificate: Certificate) -> Status:
    """The worst outcome that is written down, whatever the certificate says of itself."""
    return worst([*_statuses(certificate["cases"]), certificate.get("status")])


def _statuses(entries: list[dict[str, Any]]) -> list[str]:
    return [outcome["status"] for entry in entries for outcome in entry["guarantees"]]


def troubles(certificate: Certificate) -> list[str]:
    """A line for every outcome that is no pass."""
    return [
        f"case {i}, {outcome['guarantee']}: {outcome['status']}: {outcome['detail']}"
        for i, entry in enumerate(certificate["cases"], start=1)
        for outcome in entry["guarantees"]
        if outcome["status"] != "pass"
    ]


def table(certificate: Certificate) -> str:
    """Promises down, cases across; below, what each case is and why something failed."""
    entries = certificate["cases"]
    device = certificate["device"]
    lines = [f"{device['name']} ({device['type']}), torch {certificate['versions']['torch']}, {certificate['runs']} runs of each case", ""]
    found = [{outcome["guarantee"]: outcome["status"] for outcome in entry["guarantees"]} for entry in entries]
    names = list(dict.fromkeys(name for statuses in found for name in statuses))  # not every schedule promises everything
    width = max(map(len, names))
    lines.append(" " * width + "".join(f"  {f'case {i}':12}" for i in range(1, len(entries) + 1)).rstrip())
    for name in names:
        lines.append((name.ljust(width) + "".join(f"  {statuses.get(name, '-'):12}" for statuses in found)).rstrip())
    lines.append("")
    for i, entry in enumerate(entries, start=1):
        explained, dq = entry["explain"], entry["sha256"]["dq"]
        lines.append(f"case {i}: {Case(**entry['case'])}; {explained['schedule']}, order {explained['order_hash'][:12]}, dQ {dq[:12]}")
    bad = troubles(certificate)
    return "\n".join([*lines, *([""] if bad else []), *bad, "", f"result: {certificate['status']}"])


def refuse_failed(certificate: Certificate, path: Path) -> None:
    """Raise if the other machine did not keep its promises: its bits are those of one run, and agreeing with them means nothing."""
    if status_of(certificate) == "fail":
        why = (troubles(certificate) or [f"its status is {certificate.get('status')!r}"])[0]
        raise ValueError(f"{path} says that the promises were not kept ({why}); only a certificate that passed can be compared with")


def agreement(theirs: Certificate, path: Path) -> str:
    """What equal bits show. An inconclusive certificate could not tell orders apart, so neither can a comparison with it."""
    if status_of(theirs) == "pass":
        return f"Agrees with {path}"
    return f"Same bits as {path}, which shows nothing, because it is inconclusive ({troubles(theirs)[0]})"


def differences(ours: Certificate, theirs: Certificate) -> list[str]:
    """A line for everything that differs in what decides the bits, or in the bits; none if they agree."""
    known = dict(zip(cases_of(theirs), theirs["cases"], strict=True))
    lines: list[str] = []
    for case, entry in zip(cases_of(ours), ours["cases"], strict=True):
        if case not in known:
            lines.append(f"{case}: not in the other certificate")
        else:
            lines += [f"{case}: {line}" for line in _entry_differences(entry, known[case])]
    if lines:
        changed = [line for part in ("device", "versions") for line in _compare(part, ours[part], theirs[part])]
        lines += [f"for information, {line}" for line in changed]
    return lines


def _entry_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Causes before effects."""
    if ours["inputs_sha256"] != theirs["inputs_sha256"]:
        yield "the inputs differ, so results cannot be compared"
    for key in DECIDES_BITS:
        yield from _compare(key, ours["explain"].get(key), theirs["explain"].get(key))
    for name, digest in ours["sha256"].items():
        yield from _compare(f"bits of {name}", digest, theirs["sha256"].get(name))


def _compare(what: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from _compare(f"{what} {key}", ours.get(key), theirs.get(key))
    elif ours != theirs:
        yield f"{what} here {_short(ours)}, there {_short(theirs)}"


def _short(value: Any) -> str:
    """Twelve digits of a hash are enough to tell two apart."""
    text = "nothing" if value is None else str(value)
    return text[:12] if len(text) == 64 else text
