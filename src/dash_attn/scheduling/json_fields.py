"""JSON that somebody else may have written: every value is looked at, and whatever is wrong is a ValueError that names it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..masks import FULL, Mask, TileMap, TilePattern, parse_mask
from ..masks.encoding import LETTERS, blocks_of

MOST = 2**31 - 1  # of a whole number: tables have 32 bits
LONGEST = 60  # characters of a value that an error shows

Value = TypeVar("Value")


def shortened(value: Any) -> str:
    """A value as an error shows it."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of thousands of digits
        text = "a number of very many digits"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def load_json(text: Any, what: str) -> Any:
    """The value of a JSON text; `what` it should describe is named in the error."""
    if not isinstance(text, str):
        raise ValueError(f"the JSON of {what} must be text; got {type(text).__name__}")
    try:
        return _parse(text)
    except ValueError as error:
        raise ValueError(f"this is not the JSON of {what}: {error}") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_no_key_twice)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_file(path: Path, what: str) -> Any:
    """The JSON value of a file that should hold a `what`."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a {what}: it is not JSON, not even text") from None
    except OSError as error:
        raise ValueError(f"cannot read the {what} {path}: {error.strerror or error}") from None
    try:
        return _parse(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a {what}: it is not JSON ({error})") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key occurs twice among {shortened([key for key, _ in pairs])}")
    return found


def read_fields(value: Any, where: str, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of an object: all of `names`, maybe some of `optional`, and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object with {', '.join(names)}; got {shortened(value)}")
    optional = [name for name in optional if name not in names]
    missing = [name for name in names if name not in value]
    unknown = [name for name in value if name not in (*names, *optional)]
    if missing or unknown:
        trouble = f"lacks {missing[0]}" if missing else f"has the unknown field {shortened(unknown[0])}"
        raise ValueError(f"{where} {trouble}; it takes {', '.join((*names, *optional))}")
    return value


def as_whole(value: Any, where: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ValueError(f"{where} must be a whole number from {least} to {MOST}; got {shortened(value)}")
    return value


def as_number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
        raise ValueError(f"{where} must be a finite number; got {shortened(value)}")
    return value


def as_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} must be text; got {shortened(value)}")
    return value


def as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object; got {shortened(value)}")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list; got {shortened(value)}")
    return value


def as_wholes(value: Any, where: str) -> list[int]:
    return [as_whole(entry, where) for entry in as_list(value, where)]


def as_lists(value: Any, where: str, read: Callable[[Any, str], list[Value]]) -> list[list[Value]]:
    return [read(entry, f"{where}[{number}]") for number, entry in enumerate(as_list(value, where))]


def as_names(value: Any, where: str, known: Sequence[str]) -> tuple[str, ...]:
    """A list of names that we know."""
    if unknown := [name for name in as_list(value, where) if name not in known]:
        raise ValueError(f"{where} may be {', '.join(known)}; got {shortened(unknown[0])}")
    return tuple(value)


def as_mask(value: Any, where: str) -> Mask:
    """As `mask_to_json` in masks/encoding.py writes it."""
    if isinstance(value, str):
        return parse_mask(value)
    if isinstance(value, dict) and "pattern" in value:
        return TilePattern(blocks_of(_as_rows(read_fields(value, where, ("pattern",))["pattern"], f"{where}.pattern", LETTERS)))
    read = read_fields(value, where, ("tiles", "block_q", "block_kv"))
    kept = blocks_of(_as_rows(read["tiles"], f"{where}.tiles", LETTERS[0] + LETTERS[-1])) == FULL
    return TileMap(kept, *(as_whole(read[name], f"{where}.{name}", least=1) for name in ("block_q", "block_kv")))


def _as_rows(value: Any, where: str, letters: str) -> list[str]:
    rows = [as_text(row, where) for row in as_list(value, where)]
    if not rows or any(not row or len(row) != len(rows[0]) or set(row) - set(letters) for row in rows):
        allowed = f"{', '.join(letters[:-1])} and {letters[-1]}"
        raise ValueError(f"{where} must be rows of {allowed}, at least one, all equally long; got {shortened(rows)}")
    return rows
