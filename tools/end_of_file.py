"""Text files end with exactly one newline: python tools/end_of_file.py FILE... mends those that do not, and then fails."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path


def mended(text: bytes) -> bytes:
    """With one newline at its end; nothing stays nothing."""
    body = text.rstrip(b"\r\n")
    return body + b"\n" if body else b""


def main(paths: Iterable[str]) -> int:
    wrong = [path for path in map(Path, paths) if mended(path.read_bytes()) != path.read_bytes()]
    for path in wrong:
        path.write_bytes(mended(path.read_bytes()))
        print(f"mended the end of {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
