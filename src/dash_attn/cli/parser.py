"""How commands read words. What is wrong is said in one line, which names the flag and what was typed."""

import argparse
from collections.abc import Callable
from math import inf, nan
from typing import Any, NoReturn

from ..errors import did_you_mean
from ..scheduling.json_fields import MOST


class Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print how a command is used and end the process."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown words are refused here, by the command that got them, and not by the program around it."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unknown argument {unknown[0]}{hint or f'; `{self.prog} --help` lists what there is'}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Of an argument that has choices."""
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            raise argparse.ArgumentError(action, f"must be one of {', '.join(choices)}; got {value}{did_you_mean(value, choices)}")

    def error(self, message: str) -> NoReturn:
        flag, colon, rest = message.removeprefix("argument ").partition(": ")
        raise ValueError(message if not colon else f"{flag} {rest}" if rest.startswith("must") else f"{flag}: {rest}")


def whole(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """Reads a whole number. Tables have 32 bits, so none is larger."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            limits = f">= {least}" if found < least and most == MOST else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be a whole number {limits}; got {text}")
        return found

    return read


def number(text: str) -> float:
    """A time."""
    if not 0 <= _float(text) < inf:
        raise argparse.ArgumentTypeError(f"must be a finite number >= 0; got {text}")
    return float(text)


def positive(text: str) -> float:
    if not _float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be a number > 0; got {text}")
    return float(text)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(whole(), words(text)))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be whole numbers >= 1, separated by commas; got {text!r}") from None


def words(text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise argparse.ArgumentTypeError("must name at least one, separated by commas")
    return found
