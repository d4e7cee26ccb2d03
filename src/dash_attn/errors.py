"""Every kind of error that is dash-attn's own. `except DashAttnError` catches them all; each is also a built-in error."""

from collections.abc import Iterable


class DashAttnError(Exception):
    """The base of all. Ordinary wrong arguments raise plain ValueError and TypeError."""


class Unsupported(DashAttnError, ValueError):
    """A backend cannot do what was asked deterministically, or not on this machine."""


class ScheduleError(DashAttnError, ValueError):
    """A schedule that is incomplete, ambiguous or can hang."""


class LedgerError(DashAttnError, ValueError):
    """A ledger that cannot be written or read, with the reason."""


class ExecutionError(DashAttnError, RuntimeError):
    """A plan that breaks the rules: a turn that is wrong, taken twice or missing."""


class RecordError(DashAttnError, RuntimeError):
    """Recorded task times do not fit the plan."""


class CompileError(DashAttnError, RuntimeError):
    """NVRTC refused a kernel (the message has its log), or the file of a kernel is damaged."""


class LostRank(DashAttnError, RuntimeError):
    """Another rank did not answer, or has ended."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of an error about a word that nobody knows: the one that was probably meant, if any is close."""
    from difflib import get_close_matches

    typed, known = str(word).lower(), list(known)
    close = get_close_matches(typed, known, n=1, cutoff=0.76)  # h100 is not h200, nor gpu cpu
    close += [name for name in known if sorted(name) == sorted(typed)]  # a short word whose letters changed places
    return f"; did you mean {close[0]}?" if close else ""
