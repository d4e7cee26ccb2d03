"""Who may ask the server for what."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from dash_attn.cli import explore
from dash_attn.cli.main import main
from dash_attn.viewing.explore.server import MOST_BYTES, PageServer, served_page
from started import started

DOCS = Path(__file__).parents[2] / "docs"
JSON = {"Content-Type": "application/json"}


class Asked:
    """A server whose answers are counted."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.server = PageServer(lambda: served_page(explore.start_of_form(explore.START)), self.answer)
        self.port = self.server.port

    def answer(self, options: Any, watch: Any) -> dict[str, Any]:
        self.options.append(options)
        return explore.answer(options, watch=watch)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        text = body if isinstance(body, (str, bytes)) or body is None else json.dumps(body)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"Host": f"127.0.0.1:{self.port}", **({"Content-Length": str(len(text))} if text is not None else {}), **headers}
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(text.encode() if isinstance(text, str) else text)
        reply = connection.getresponse()
        found = reply.status, reply.read().decode()
        connection.close()
        return found


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    made = Asked()
    Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_the_page_and_its_data(asked: Asked) -> None:
    status, page = asked.ask("GET", "/")
    assert (status, page[:15]) == (200, "<!DOCTYPE html>")
    status, text = asked.ask("POST", "/runs", explore.START, **JSON, Origin=f"http://127.0.0.1:{asked.port}")
    answer = json.loads(text)
    assert status == 200
    assert [run["name"] for run in answer["runs"]] == ["ascending", "alternating"]
    assert [run["makespan"] for run in answer["runs"]] == [135, 72]
    status, page = asked.ask("POST", "/page", explore.START, **JSON)
    assert (status, "connect-src 'none'" in page) == (200, True)


PATHS = [
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//etc/passwd",
    "/page/main.js",
    "/page.html",
    "/runs",
    "/?",
    "/./",
    "*",
    "/\\..\\",
]


@pytest.mark.parametrize("path", [*PATHS, "http://127.0.0.1/etc/passwd"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_there_are_no_other_paths(asked: Asked, method: str, path: str) -> None:
    if (method, path) == ("POST", "/runs"):
        return
    status, text = asked.ask(method, path, {} if method == "POST" else None, **(JSON if method == "POST" else {}))
    assert status == 404
    assert "root:" not in text


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"])
def test_there_are_no_other_methods(asked: Asked, method: str) -> None:
    assert asked.ask(method, "/")[0] == 501


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:PORT"},  # a name that leads to 127.0.0.1
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},  # a file, or a frame without rights
        {"Origin": "https://127.0.0.1:PORT"},
        {"Origin": "http://127.0.0.1:1"},  # another page of this machine
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # the same
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/runs"), ("POST", "/page")])
def test_other_origins_are_refused(asked: Asked, method: str, path: str, headers: dict[str, str]) -> None:
    before = len(asked.options)
    named = {name: value.replace("PORT", str(asked.port)) for name, value in headers.items()}
    status, text = asked.ask(method, path, explore.START if method == "POST" else None, **{**JSON, **named})
    assert status == 403
    assert "answers" in json.loads(text)["error"]
    assert len(asked.options) == before


@pytest.mark.parametrize(
    "headers", [{"Host": "localhost:PORT"}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": "http://localhost:PORT"}, {}]
)
def test_the_page_itself_is_answered(asked: Asked, headers: dict[str, str]) -> None:
    """The control of the test above."""
    named = {name: value.replace("PORT", str(asked.port)) for name, value in headers.items()}
    assert asked.ask("POST", "/runs", {"q-tiles": "2"}, **{**JSON, **named})[0] == 200


def test_a_request_without_a_host_is_refused(asked: Asked) -> None:
    with socket.create_connection(("127.0.0.1", asked.port), timeout=30) as wire:
        wire.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b" 403 " in wire.recv(4096).splitlines()[0]


def test_only_this_machine_can_connect(asked: Asked) -> None:
    assert asked.server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        ("a=1", {"Content-Type": "text/plain"}, 415, "application/json"),
        ("a=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "application/json"),
        ("{", JSON, 400, "no JSON"),
        ("[" * 60_000, JSON, 400, "no JSON"),
        (b"\xff\xfe", JSON, 400, "no JSON"),
        ("[]", JSON, 400, "an object"),
        ("", {**JSON, "Content-Length": "much"}, 411, "how long"),
        ("", {**JSON, "Content-Length": str(MOST_BYTES + 1)}, 413, "at most"),
        ({"save": "page.html"}, JSON, 400, "options are"),
        ({"port": "1"}, JSON, 400, "options are"),
        ({"heads": 4}, JSON, 400, "as text"),
        ({"heads": ["4"]}, JSON, 400, "as text"),
        ({"machine": "/etc/passwd"}, JSON, 400, "machines h200"),
        ({"mask": "--save=x"}, JSON, 400, "unknown mask"),
        ({"mask": "diagonal"}, JSON, 400, "unknown mask 'diagonal'"),
        ({"q-tiles": "eight"}, JSON, 400, "--q-tiles must be a whole number >= 1; got eight"),
        ({"schedule": "shift"}, JSON, 400, "full masks only"),
        ({"schedule": "spt,weave,auto"}, JSON, 400, "one or two schedules"),
        ({"seqlen": "1000000", "mask": "full"}, JSON, 400, "at most 16,777,216 tiles"),
        ({"seqlen": "65536", "heads": "16"}, JSON, 400, "at most 2,000,000 tasks"),
        ({"compute": "1e300"}, JSON, 400, "larger unit"),
        ({"ranks": "2"}, JSON, 400, "needs --seqlen"),
        ({"ranks": "2", "seqlen": "1024", "measured": True}, JSON, 400, "does not go with --ranks"),
        ({"sharding": "zigzag"}, JSON, 400, "goes with --ranks"),
    ],
)
def test_what_cannot_be_answered_is_said(asked: Asked, body: Any, headers: dict[str, str], status: int, said: str) -> None:
    got, text = asked.ask("POST", "/runs", body, **headers)
    assert got == status
    assert said in json.loads(text)["error"]
    assert asked.ask("GET", "/")[0] == 200  # and it goes on


def test_a_fault_of_ours_is_said(asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(asked.server, "answer", lambda options, watch: 1 // 0)
    status, text = asked.ask("POST", "/runs", {}, **JSON)
    assert (status, json.loads(text)["error"][:20]) == (500, "a fault in dash-attn")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_schedule_that_does_not_serve_stands_beside_one_that_does(asked: Asked) -> None:
    _, text = asked.ask("POST", "/runs", {"mask": "causal", "schedule": "shift,auto"}, **JSON)
    answer = json.loads(text)
    assert [run["name"] for run in answer["runs"]] == ["auto: alternating"]
    assert [name for name, _ in answer["refused"]] == ["shift"]


def test_the_page_and_the_command_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Also the command that the page shows is one that works."""
    options = {"mask": "window:2,0", "q-tiles": "6", "heads": "3", "workers": "4", "schedule": "weave,ascending", "latency": "0.5"}
    answer = explore.answer(options)
    words = answer["command"].split()
    assert words[:2] == ["dash-attn", "plan"]
    assert main([*words[1:], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [run["makespan"] / run["ticks"] for run in answer["runs"]] == [row["makespan"] for row in rows]


def test_a_machine_file_is_read_only_if_the_command_was_started_with_it(tmp_path: Path) -> None:
    from dash_attn.simulation.machines import SHIPPED

    path = tmp_path / "machine.json"
    path.write_text(json.dumps(SHIPPED["h200"].to_json()))
    options = {"machine": str(path), "seqlen": "512"}
    assert explore.answer(options, options)["runs"]
    assert str(path) in explore.start_of_form(options)["choices"]["machine"]
    with pytest.raises(ValueError, match="machines h200"):
        explore.answer(options)


def test_options_of_a_command_line_come_back() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    explore.add_arguments(parser)
    words = ["--seqlen", "4096", "--heads", "8", "--schedule", "ascending", "auto", "--machine", "h200"]
    options = explore.options_of(parser.parse_args(words))
    assert options == {"schedule": "ascending,auto", "machine": "h200", "seqlen": "4096", "heads": "8"}
    assert explore.options_of(parser.parse_args([])) == explore.START
    assert explore.options_of(parser.parse_args(["--measured", "--seqlen", "64"])) == {"seqlen": "64", "measured": True}


def test_a_page_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["explore", "--ranks", "2", "--seqlen", "2048", "--heads", "2", "--save", str(path)]) == 0
    assert "connect-src 'none'" in path.read_text()
    assert f"wrote {path}" in capsys.readouterr().err


def shown_commands() -> list[str]:
    """Of the page about the page, and of its help."""
    (block,) = re.findall(r"```sh\n(.*?)```", (DOCS / "explore.md").read_text(), re.S)
    return [line for line in (*block.splitlines(), *explore.EXAMPLES.splitlines()) if "dash-attn explore" in line]


@pytest.mark.parametrize("command", [line for line in shown_commands() if "--ledgers" not in line])
def test_shown_commands_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("tree.npy", np.tri(256, dtype=bool))
    words = shlex.split(command, comments=True)[1:]
    quick = ["--seqlen", "256"] if "--measured" in words else []
    assert main([*words, *quick, "--save", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 50_000


def test_shown_commands_are_found() -> None:
    assert len(shown_commands()) == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--save nowhere/page.html", "no directory"),
        ("--mask diagonal --save page.html", "unknown mask"),
        ("--port 70000", "--port"),
        ("--mask diagonal", "unknown mask"),
        ("--schedule all", "one or two schedules"),
        ("--ranks 2 --heads 0 --seqlen 512", "heads"),
        ("--compute 0", "compute"),
        ("--schedule all --save page.html", "one or two schedules"),
        ("--machine nowhere.json --save page.html", "unknown machine"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explore", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_said(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--port", str(asked.port)]) == 2
    assert f"--port {asked.port}: cannot listen there" in capsys.readouterr().err


ENDS = {  # how SIGINT is set where the command starts, what is sent, how it ends
    "at a terminal": (signal.SIG_DFL, signal.SIGINT, 130),
    "in the background of a script": (signal.SIG_IGN, signal.SIGTERM, -signal.SIGTERM),
}


@pytest.mark.parametrize("where", ENDS)
def test_the_command_serves_until_it_is_told_to_end(where: str) -> None:
    inherited, sent, code = ENDS[where]
    command = [sys.executable, "-m", "dash_attn.cli.main", "explore", "--q-tiles", "4"]
    begin: dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, inherited), "stdout": subprocess.PIPE, "text": True}
    with started(command, **begin) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        connection = http.client.HTTPConnection(*url.removeprefix("http://").rstrip("/").split(":"), timeout=30)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        process.send_signal(sent)
        assert process.wait(30) == code
