"""One page from the files in page/: with data in it, or with a form that asks the server for them."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "page"
# In the order in which they use each other.
SCRIPTS = ("data", "colours", "canvas", "bars", "tasks", "units", "drawing", "overlay", "chart", "panels", "form", "ledgers", "main")
MOST_PLAIN = 2**18  # characters of data; more are compressed, which makes the bytes depend on the version of zlib


def as_text(answer: dict[str, Any]) -> str:
    """JSON that can stand inside of a script element."""
    return json.dumps(answer, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def compressed(answer: dict[str, Any]) -> str:
    """The same, gzipped and in base64. Without a time stamp: the same answer gives the same text."""
    return base64.b64encode(gzip.compress(as_text(answer).encode(), compresslevel=6, mtime=0)).decode()


def saved_page(answer: dict[str, Any]) -> str:
    """A page that needs no server."""
    text = as_text(answer)
    encoding, data = ("plain", text) if len(text) <= MOST_PLAIN else ("gzip", compressed(answer))
    return _page(data, encoding, connect="'none'")


def served_page(start: dict[str, Any]) -> str:
    """A page that asks for its data. `start`: the form's choices and the first options."""
    return _page(as_text(start), "form", connect="'self'")


def _page(data: str, encoding: str, connect: str) -> str:
    style, script = _style(), _script()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src {connect}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script, "data": data, "encoding": encoding}
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    before, *others = page.split("{{")  # one pass: what is put in is not looked at again
    return before + "".join(parts[name] + rest for name, _, rest in (other.partition("}}") for other in others))


@cache
def _style() -> str:
    return (FOLDER / "style.css").read_text(encoding="utf-8")


@cache
def _script() -> str:
    return "".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)


def _hash(text: str) -> str:
    """As a Content-Security-Policy names an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
