"""What the README shows runs, and its figures are those of the committed results."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dash_attn.cli.main import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def title(example: str) -> str:
    return "torch.compile" if "torch.compile" in example else re.findall(r"from dash_attn\S* import (\w+)", example)[0]


@pytest.mark.parametrize("example", blocks("python"), ids=title)
def test_the_examples_run(example: str) -> None:
    if "transformers" in example:
        pytest.importorskip("transformers")
    if "torch.compile" in example and not shutil.which("g++"):
        pytest.skip("torch.compile needs a C++ compiler")
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if "print(" in example:
        assert float(done.stdout) == float(done.stdout)  # a number, not NaN


def plan_commands() -> list[str]:
    lines = "\n".join(blocks("sh")).splitlines()
    shown = [line.split("#")[0] for line in lines if line.startswith("dash-attn plan")]
    inline = re.findall(r"`(dash-attn plan [^`]*)`", README)
    return [*shown, *inline]


@pytest.mark.parametrize("command", plan_commands())
def test_plan_commands_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out
    for name in re.findall(r"--(?:gantt|trace) (\S+)", command):
        assert (tmp_path / name).stat().st_size > 1000


def ratios(suite: str) -> dict[tuple[str, int, int], float]:
    rows = json.loads((ROOT / f"benchmarks/results/h200-{suite}.json").read_text())["rows"]
    ours = [row for row in rows if row["pass"] == "backward" and row["candidate"] == "dash-attn"]
    return {(r["shape"]["mask"], r["shape"]["head_dim"], r["shape"]["seqlen"]): r["ratio_to_cudnn"] for r in ours}


def test_result_tables_are_the_committed_figures() -> None:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    rows = re.findall(r"^\| (causal|full)(, 32 query and 8 KV heads)? \| (64|128) \|(.*)\|$", README, re.M)
    assert len(rows) == 5
    for mask, grouped, dim, cells in rows:
        committed = ratios("gqa" if grouped else "paper")
        for length, cell in zip(lengths, cells.split("|"), strict=True):
            if cell.strip():
                assert float(cell) == round(committed[mask, int(dim), length], 2), (mask, grouped, dim, length)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
