"""What differs between two certificates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .certificate import Certificate, cases_of, status_of, troubles

DECIDES_BITS = ("backend", "schedule", "order_hash", "backward_tiles", "forward_tiles", "kernels")
ABSENT = "nothing"


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
        lines += [f"for information, {line}" for line in _environment(ours, theirs)]
    return lines


def _entry_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Causes before effects."""
    if ours["inputs_sha256"] != theirs["inputs_sha256"]:
        yield "the inputs differ, so results cannot be compared"
    for key in DECIDES_BITS:
        yield from _compare(key, ours["explain"].get(key), theirs["explain"].get(key))
    for name, digest in ours["sha256"].items():
        yield from _compare(f"bits of {name}", digest, theirs["sha256"].get(name))


def _environment(ours: Certificate, theirs: Certificate) -> Iterator[str]:
    for part in ("device", "versions"):
        for key, value in ours[part].items():
            yield from _compare(f"{part} {key}", value, theirs[part].get(key))


def _compare(what: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from _compare(f"{what} {key}", ours.get(key), theirs.get(key))
    elif ours != theirs:
        yield f"{what} here {_short(ours)}, there {_short(theirs)}"


def _short(value: Any) -> str:
    """Twelve digits of a hash are enough to tell two apart."""
    text = ABSENT if value is None else str(value)
    return text[:12] if len(text) == 64 else text
