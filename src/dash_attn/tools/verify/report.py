"""A certificate as a short table."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .certificate import Certificate, troubles


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
    lines += ["", *(_describe(i, entry) for i, entry in enumerate(entries, start=1)), *_troubles(certificate)]
    return "\n".join([*lines, "", f"result: {certificate['status']}"])


def _describe(number: int, entry: dict[str, Any]) -> str:
    explained = entry["explain"]
    order, dq = explained["order_hash"][:12], entry["sha256"]["dq"][:12]
    return f"case {number}: {Case(**entry['case'])}; {explained['schedule']}, order {order}, dQ {dq}"


def _troubles(certificate: Certificate) -> list[str]:
    bad = troubles(certificate)
    return ["", *bad] if bad else []
