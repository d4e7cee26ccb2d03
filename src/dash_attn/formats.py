"""The version of every format that we write: what a later dash-attn wrote is refused by name, and never read wrongly."""

from __future__ import annotations

from typing import Any, NamedTuple


class Format(NamedTuple):
    kind: str  # in the plural, as an error names it
    field: str  # of a JSON object, that has the version
    newest: int = 1  # which is written; older ones are read
    unmarked: bool = False  # whether what lacks the field is of format 1: it was written before 1.0

    @property
    def mark(self) -> dict[str, int]:
        """What an object of this format begins with."""
        return {self.field: self.newest}

    def check(self, value: Any, where: str) -> None:
        """Raise ValueError unless this is an object of a format that is read here."""
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object; got {type(value).__name__}")
        version = value.get(self.field, 1 if self.unmarked else None)
        if type(version) is not int or version < 1:
            raise ValueError(f"{where} must have {self.field!r}, the format of {self.kind}: 1 up to {self.newest}; got {version!r:.60}")
        if version > self.newest:
            raise ValueError(self.unknown(version, where))

    def unknown(self, version: int, where: str) -> str:
        """The error about a format that is not read here."""
        return f"{where} has format {version} of {self.kind}; this version of dash-attn reads formats up to {self.newest}"


CERTIFICATES = Format("certificates", "certificate")
COMPARISONS = Format("comparisons", "diff")  # this and the next two are printed, not read
DIAGNOSES = Format("diagnoses", "doctor")
PLANS = Format("plans", "plan")
LEDGERS = Format("ledgers", "")  # its version is the last byte of the mark that a file begins with
MACHINES = Format("machine files", "machine")
PREDICTIONS = Format("predictions", "predictions", unmarked=True)
PROBES = Format("records of probes", "probe")
RESULTS = Format("benchmark results", "format")
SCHEDULES = Format("schedules", "schedule", unmarked=True)
