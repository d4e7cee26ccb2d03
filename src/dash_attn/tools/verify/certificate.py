"""A certificate: what was verified, where, with which outcome, and hashes to compare with other machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...backends import resolve
from ...call.kv_cache import DECODE_EQUALS_TRAINING
from ...scheduling.engine import Progress
from ...scheduling.json_fields import read_json_file, shortened
from ..machine import device_facts, version_facts
from .bits import hashes, sha256
from .cases import INPUT_GENERATOR, SEED, Case
from .fresh import fresh_results
from .guarantees import CaseTest, Outcome, Status, comparisons, overall, worst
from .ranks import check_ranks

FORMAT = 1
COMPARED: dict[str, type] = {"case": dict, "guarantees": list, "explain": dict, "inputs_sha256": str, "sha256": dict}  # of each case
PARTS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
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
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(min(done, total), total)

    entries, outcomes = [], []
    for number, case in enumerate(cases):
        test = CaseTest(case, device, runs, tick, ranks, backend)
        found = list(test.outcomes({what: results[number] for what, results in elsewhere.items()}))
        outcomes += found
        entries.append(_entry(test, found))
    return {
        "certificate": FORMAT,
        "status": overall(outcomes),
        "scope": f"{SCOPE}{SCOPE_OF_RANKS if ranks else ''}",
        "runs": runs,
        "ranks": list(ranks),
        "inputs": {"generator": INPUT_GENERATOR, "seed": SEED},
        "device": device_facts(device),
        "versions": version_facts(device, backend),
        "cases": entries,
    }


def _entry(test: CaseTest, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "case": asdict(test.case),
        "guarantees": [asdict(outcome) for outcome in outcomes],
        "explain": json.loads(json.dumps(asdict(test.explain()))),  # tuples become lists, as in a file
        "inputs_sha256": sha256(test.inputs),
        "sha256": hashes(test.reference),
    }


def read(path: Path) -> Certificate:
    """A certificate from a file, complete enough to be compared with."""
    found = read_json_file(path, "certificate")
    if not isinstance(found, dict) or found.get("certificate") != FORMAT:
        raise ValueError(f"{path} is not a certificate of format {FORMAT}, as `dash-attn verify --output` writes it")
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
    written = [outcome["status"] for entry in certificate["cases"] for outcome in entry["guarantees"]]
    return worst([*written, certificate.get("status")])


def troubles(certificate: Certificate) -> list[str]:
    """A line for every outcome that is no pass."""
    return [
        f"case {i}, {outcome['guarantee']}: {outcome['status']}: {outcome['detail']}"
        for i, entry in enumerate(certificate["cases"], start=1)
        for outcome in entry["guarantees"]
        if outcome["status"] != "pass"
    ]
