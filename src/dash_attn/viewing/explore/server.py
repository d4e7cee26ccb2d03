"""One page from the files in page/: with data in it, or with a form that asks the server for them.

The server serves it to this machine alone. docs/explore.md says who may ask for what.
"""

import base64
import gzip
import hashlib
import json
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from ...scheduling.engine import Progress
from ..words import complaint

FOLDER = Path(__file__).parent / "page"
# In the order in which they use each other.
DRAWING = ("data", "colours", "canvas", "bars", "tasks", "units", "drawing", "overlay", "chart", "grid")
SCRIPTS = (*DRAWING, "panels", "address", "form", "ledgers", "main")
MOST_PLAIN = 2**18  # characters of data; more are compressed, which makes the bytes depend on the version of zlib
ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
MOST_BYTES = 2**16  # of a question
SECONDS = 30  # that somebody may take to ask it
SOON, OFTEN = 0.4, 0.2  # seconds until it is first said how far the work has come, and then again
JSON, HTML = "application/json", "text/html; charset=utf-8"
OWN = ("same-origin", "none")  # Sec-Fetch-Site: from this page, or typed by a person
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
Options = Mapping[str, Any]
Made = TypeVar("Made")
Watch = Callable[[str], Progress]  # from what is done to who is told how far it has come
Answering = Callable[[Options, Watch], dict[str, Any]]


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
    style, script = _read("style.css"), _read(*(f"{name}.js" for name in SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src {connect}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "script": script, "data": data, "encoding": encoding}
    before, *others = _read("page.html").split("{{")  # one pass: what is put in is not looked at again
    return before + "".join(parts[name] + rest for name, _, rest in (other.partition("}}") for other in others))


@cache
def _read(*names: str) -> str:
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    """As a Content-Security-Policy names an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class Refused(Exception):
    """What is not answered: an HTTP status, and why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class PageServer(ThreadingHTTPServer):
    """`make_page` is asked for every page, `answer` for what its form asks; both may raise ValueError. None: the page has no form."""

    daemon_threads = True

    def __init__(self, make_page: Callable[[], str], answer: Answering | None = None, port: int = 0) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.make_page, self.answer = make_page, answer

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"{name}:{self.port}" for name in NAMES)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = SECONDS
    server_version, sys_version = "dash-attn", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def _reply(self, make: Callable[[], tuple[str, str]]) -> None:
        self.in_lines, self.next_line = False, monotonic() + SOON
        try:
            self._check_asker()
            kind, text = make()
            self._send(HTTPStatus.OK, kind, text)
        except Refused as refused:
            self.close_connection = True  # a body may not have been read
            self._send(refused.status, JSON, as_text({"error": str(refused)}))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):  # nobody is there any more
            self.close_connection = True
        except Exception as error:  # a fault of ours: the page says so, and the terminal has the rest
            traceback.print_exc()
            self.close_connection = True
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, JSON, as_text({"error": f"a fault in dash-attn: {error!r}"}))

    def _check_asker(self) -> None:
        host, origin, site = (self.headers.get(name) for name in ("Host", "Origin", "Sec-Fetch-Site"))
        if host not in self.server.hosts:
            raise Refused(HTTPStatus.FORBIDDEN, f"this page answers to {' and '.join(self.server.hosts)}; asked as {host}")
        if origin is not None and origin not in [f"http://{name}" for name in self.server.hosts]:
            raise Refused(HTTPStatus.FORBIDDEN, f"this page answers itself alone; asked by {origin}")
        if site is not None and site not in OWN:
            raise Refused(HTTPStatus.FORBIDDEN, f"this page answers itself alone; asked {site}")

    def _get(self) -> tuple[str, str]:
        if self.path != "/":
            raise Refused(HTTPStatus.NOT_FOUND, "there is one page here: /")
        return HTML, self._made(self.server.make_page)

    def _post(self) -> tuple[str, str]:
        if self.path not in ("/runs", "/page") or self.server.answer is None:
            raise Refused(HTTPStatus.NOT_FOUND, "ask /runs for data or /page for a file")
        make, options = self.server.answer, self._options()
        answer = self._made(lambda: make(options, self._watch))
        return JSON, as_text(answer if self.path == "/runs" else {"page": saved_page(answer)})

    def _watch(self, label: str) -> Progress:
        """Who has left cannot be told, which ends the work."""

        def tell(done: int, total: int) -> None:
            if monotonic() < self.next_line:
                return
            if not self.in_lines:
                self._begin(HTTPStatus.OK, {"Content-Type": JSON, "Connection": "close"})
            self.in_lines, self.next_line = True, monotonic() + OFTEN
            self.wfile.write(as_text({"doing": label, "share": done / max(total, 1)}).encode() + b"\n")

        return tell

    def _options(self) -> Options:
        if self.headers.get_content_type() != JSON:  # a form of another page cannot send this type
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {JSON}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "say how long the question is")
        if int(length) > MOST_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {MOST_BYTES} bytes; got {length}")
        try:
            options = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, "that is no JSON") from None
        if not isinstance(options, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "options are an object, from name to value")
        return options

    def _made(self, make: Callable[[], Made]) -> Made:
        try:
            return make()
        except (MemoryError, OverflowError, ValueError, NotImplementedError, RuntimeError, ModuleNotFoundError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, complaint(error)) from None

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        """As a whole; or as the last line, where others have been sent."""
        body, headers = text.encode(), {"Content-Type": kind}
        if not self.in_lines:
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
            self._begin(status, {**headers, "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""
