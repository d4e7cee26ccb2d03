"""Files that a command will write are looked at before any work, because nobody wants to hear of a typo an hour later."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

from .arguments import flag_of

PICTURES = ("gantt", "plot", "plot_schedules")


def check_files(arguments: argparse.Namespace, *written: str, read: str | None = None) -> None:
    """Raise unless all files that were asked for can be written, and none is another one or the one that is read."""
    seen: dict[Path, str] = {}
    for name in (*written, *filter(None, [read])):
        flag, path = flag_of(name), getattr(arguments, name)
        if path is None:
            continue
        if name in written:
            (check_picture if name in PICTURES else check_file)(flag, path)
        other = seen.setdefault(path.resolve(), flag)
        if other != flag:
            raise ValueError(f"{flag} and {other} name the same file, {path}: one would overwrite the other")


def check_file(flag: str, path: Path) -> None:
    """Raise unless a file can be written there; what is there stays as it is."""
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"{flag}: cannot write {path}: it is a directory; name a file")
    if not folder.is_dir():
        raise ValueError(f"{flag}: cannot write {path}: there is no directory {folder}")
    _try_to_write(path, f"{flag}: cannot write {path}")


def check_picture(flag: str, path: Path) -> None:
    """The same for a picture, whose name decides the format. Also says what is missing to draw one."""
    from ..viewing.style import check_format

    check_format(path, f"{flag}: a picture")
    check_file(flag, path)
    import_module("matplotlib")


def write_text(path: Path, text: str) -> None:
    with named_in_errors(path):
        path.write_text(text + "\n", encoding="utf-8")
    say_written(path)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """An error while a file is written, such as that of a full disk, names no file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


def say_written(path: Path) -> None:
    print(f"wrote {path}", file=sys.stderr)


def check_folder(flag: str, path: Path) -> None:
    """Raise unless a folder is there that can be written to, or can be made."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{flag}: cannot write to {path}: {there} is not a directory")
    _try_to_write(there / "file", f"{flag}: cannot write to {path}: {there}")


def _try_to_write(path: Path, complaint: str) -> None:
    """Rights alone do not tell: an administrator has them all, also where nothing can be written."""
    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # a device or a pipe is not opened: somebody may be waiting at its other end
            TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{complaint}: {error.strerror}") from None
