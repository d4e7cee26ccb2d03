"""The page of two runs: what diff says, and modules over steps, in headless Chromium."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from chromium import Chromium
from dash_attn.cli.explore import ledgers_answer
from dash_attn.cli.main import main
from dash_attn.ledgers.comparing import spread
from dash_attn.viewing.explore.runs import encoded
from dash_attn.viewing.explore.server import PageServer, saved_page
from flipped_runs import FLIPPED, train

CELLS = """
const { tree } = explore.state.charts[0]
const cells = (direction, module) => [...tree.steps.keys()].map((step) => tree.counts(module, step, step + 1, [direction]))
return tree.directions.map((_, direction) => tree.modules.map((_, module) => cells(direction, module)))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two that agree, and one that does not."""
    folder = tmp_path_factory.mktemp("runs")
    return train(folder / "a"), train(folder / "same"), train(folder / "other", flip=True)


def opened(browser: Chromium, folder: Path, answer: dict[str, Any]) -> None:
    path = folder / "page.html"
    path.write_text(saved_page(answer))
    browser.problems.clear()
    browser.open(path.as_uri())


def details(browser: Chromium) -> list[str]:
    """Lines that are not empty."""
    return [line for line in browser.run('document.getElementById("details").innerText').splitlines() if line]


def test_it_shows_where_the_runs_part(browser: Chromium, tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    opened(browser, tmp_path, ledgers_answer(runs[0], runs[2]))
    seen = spread(runs[0], runs[2])
    cells = np.array(browser.run(CELLS))
    assert np.array_equal(cells[..., 0], seen.compared)
    assert np.array_equal(cells[..., 1], seen.differing)
    assert "The runs differ, first in step 2" in browser.run('document.getElementById("title").innerText')
    facts = browser.run('document.getElementById("figures").innerText')
    assert "second.0" in facts
    assert "forward" in facts
    assert details(browser)[:2] == ["second.0", f"step {FLIPPED}: here the runs part"]
    assert browser.problems == []


def test_agreeing_runs_are_one_colour(browser: Chromium, tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    """And the control, the same of runs that part."""
    count = """
const [chart] = explore.state.charts
const want = rgb(chart.theme.stall)
const { data } = chart.context.getImageData(0, 0, chart.lower.width, chart.lower.height)
let found = 0
for (let i = 0; i < data.length; i += 4) found += data[i] === want[0] && data[i + 1] === want[1] && data[i + 2] === want[2]
return found
""".replace("rgb(", "((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)))(")
    opened(browser, tmp_path, ledgers_answer(runs[0], runs[1]))
    assert "The runs agree" in browser.run('document.getElementById("title").innerText')
    assert browser.run("document.getElementById('to-first').hidden") is True
    assert browser.run(count) == 0
    opened(browser, tmp_path, ledgers_answer(runs[0], runs[2]))
    assert browser.run(count) > 1000
    assert browser.problems == []


def test_it_says_how_large_a_difference_is(browser: Chromium, tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    """Where values were kept, for a module and for all that contain it. One weight was moved by a half."""
    a, b = train(tmp_path / "a", keep=16), train(tmp_path / "b", keep=16, flip=True)
    seen = spread(a, b)
    step = seen.steps.index(FLIPPED)
    apart, share = seen.apart[0, seen.modules.index("second.0"), step]
    assert apart == pytest.approx(0.5)
    assert 0.3 < share < 1
    assert seen.apart[0, 0, step] >= (apart, share)
    assert {step for _, _, step in seen.apart} == set(range(FLIPPED, 4))
    opened(browser, tmp_path, ledgers_answer(a, b))
    assert f"by up to 0.500 ({100 * share:.0f} % of the largest value)" in details(browser)[3]
    address = browser.run("explore.state.charts[0].choose(0, 3)\nawait new Promise((done) => setTimeout(done, 400))\nlocation.href")
    assert "module=&step=3" in address
    for button in ("[data-key='+']", "#to-first"):
        browser.run(f'document.querySelector("{button}").click()\n1')
    seen = "const { chosen, view } = explore.state.charts[0]\n[chosen.step, view.from, view.to]"
    address = browser.run("await new Promise((done) => setTimeout(done, 400))\nlocation.href")
    step, start, end = browser.run(seen)
    assert (step, end - start) == (FLIPPED, pytest.approx(0.6 * 4))
    browser.reopen(address)
    assert browser.run(seen) == [step, start, end]
    opened(browser, tmp_path, ledgers_answer(runs[0], runs[2]))
    assert "no such values were kept" in details(browser)[3]
    assert browser.problems == []


def test_one_tensor_is_not_called_several(browser: Chromium, tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    answer = ledgers_answer(runs[0], runs[2])
    cells = len(answer["modules"]) * 4
    counts = [np.ones(cells, dtype=int), np.zeros(cells, dtype=int)]
    opened(
        browser, tmp_path, answer | {"compared": [encoded(counts[0])] * 3, "differing": [encoded(each) for each in (*counts, counts[1])]}
    )
    assert details(browser)[3].startswith("1 of 1 tensor differs, by ")
    assert details(browser)[5] == "the tensor agrees"
    assert browser.problems == []


def test_what_differs_before_a_step_is_where_the_runs_part(browser: Chromium, tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    """Such as a setting of the optimizer, which belongs to no module."""
    answer = ledgers_answer(runs[0], runs[2])
    first = {**answer["comparison"]["first"], "module": None, "step": 0}
    opened(browser, tmp_path, answer | {"comparison": {**answer["comparison"], "first": first}})
    assert details(browser)[:2] == ["the model", "step 0: here the runs part"]


def test_keys_go_through_modules_and_steps(browser: Chromium, tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    opened(browser, tmp_path, ledgers_answer(runs[0], runs[2]))
    browser.run("explore.state.charts[0].lower.focus()\n1")
    browser.press("ArrowLeft")
    assert details(browser)[:2] == ["second.0", "step 1"]
    assert details(browser)[2] == "forward"
    assert browser.run('document.getElementById("spoken").textContent').startswith("second.0, step 1: forward: all")
    browser.press("ArrowUp")
    assert details(browser)[0] == "second"
    rows = browser.run("explore.state.charts[0].rows.length")
    browser.press("Enter")
    assert browser.run("explore.state.charts[0].rows.length") == rows - 2
    browser.press("Enter")
    browser.press("+")
    assert browser.run("explore.state.charts[0].view.to - explore.state.charts[0].view.from") < 4
    browser.press("0")
    browser.press("f")
    assert details(browser)[:2] == ["second.0", "step 2: here the runs part"]
    browser.press("ArrowDown")
    browser.press("-")
    assert browser.problems == []


def test_a_long_run_is_redrawn_within_a_tenth_of_a_second(browser: Chromium, tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    """5,000 steps, 43 rows."""
    blocks = [name for block in range(40) for name in (f"blocks.{block}", *(f"blocks.{block}.{part}" for part in "abc"))]
    modules = ["", "blocks", *blocks, "head"]
    rng, cells = np.random.default_rng(0), len(modules) * 5000
    counts = [rng.integers(0, 3, cells) for _ in range(3)]
    answer = ledgers_answer(runs[0], runs[2]) | {"modules": modules, "steps": encoded(np.arange(5000))}
    answer |= {"compared": [encoded(each) for each in counts], "differing": [encoded(each * (each > 1)) for each in counts]}
    opened(browser, tmp_path, answer)
    times = browser.run(
        """
const chart = explore.state.charts[0]
const times = []
chart.tree.open.add(chart.tree.number.get("blocks"))
chart.measure()
for (const span of [5000, 1500, 300, 30]) {
  const all = []
  for (let i = 0; i < 5; i++) {
    const start = performance.now()
    chart.view.show(0, span)
    chart.context.getImageData(0, 0, 1, 1)
    all.push(performance.now() - start)
  }
  times.push(Math.min(...all))
}
return [times, chart.rows.length]
"""
    )
    assert times[1] == 43
    assert max(times[0]) < 100, times
    assert browser.problems == []


def test_the_command_saves_serves_and_refuses(tmp_path: Path, runs: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path, (a, _, other) = tmp_path / "page.html", map(str, runs)
    assert main(["explore", "--ledgers", a, other, "--save", str(path)]) == 0
    assert '"kind":"ledgers"' in path.read_text()
    capsys.readouterr()
    for words, said in ((["--heads", "2"], "does not go with --heads"), (["--save", str(tmp_path)], "is a directory")):
        assert main(["explore", "--ledgers", a, other, *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["explore", "--ledgers", a, str(tmp_path / "nowhere"), "--save", str(path)]) == 2
    assert "there is no ledger" in capsys.readouterr().err


def test_a_run_that_goes_on_is_not_said_to_agree(tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    answer = ledgers_answer(runs[0], train(tmp_path / "shorter", steps=3))
    assert answer["verdict"].startswith("Not complete: the runs agree only as far as both go, steps 0 to 2.")
    assert answer["comparison"]["notes"][0] == "rank 0: step 3 of A alone"


def test_a_served_page_is_read_anew_and_has_nothing_to_ask(tmp_path: Path, runs: tuple[Path, Path, Path]) -> None:
    made: list[int] = []

    def page() -> str:
        made.append(1)
        if len(made) > 2:
            raise ValueError("the ledger is damaged")
        return saved_page(ledgers_answer(runs[0], runs[1]))

    with PageServer(page) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def ask(method: str, path: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request(method, path, body="{}" if method == "POST" else None, headers={"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

        assert ask("GET", "/")[0] == ask("GET", "/")[0] == 200
        assert len(made) == 2
        status, text = ask("GET", "/")
        assert (status, json.loads(text)) == (400, {"error": "the ledger is damaged"})
        assert ask("POST", "/runs")[0] == ask("POST", "/page")[0] == 404
        server.shutdown()
