"""What the README shows runs, and its figures are those of the committed results."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from compilers import needs_gxx
from dash_attn.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def title(example: str) -> str:
    return "torch.compile" if "torch.compile" in example else re.findall(r"from dash_attn\S* import (\w+)", example)[0]


@pytest.mark.parametrize("example", blocks("python"), ids=title)
def test_the_examples_run(example: str) -> None:
    if "transformers" in example:
        pytest.importorskip("transformers")
    if "torch.compile" in example:
        needs_gxx()
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


def measured(suite: str) -> list[dict]:
    rows = json.loads((ROOT / f"benchmarks/results/h200-{suite}.json").read_text())["rows"]
    return [row for row in rows if row["status"] == "ok"]


def ratios(suite: str, q_heads: int | None = None) -> dict[tuple[str, int, int], float]:
    ours = [row for row in measured(suite) if row["pass"] == "backward" and row["candidate"] == "dash-attn"]
    shapes = [row["shape"] for row in ours]
    keys = [(s["mask"], s["head_dim"], s["seqlen"]) for s in shapes]
    return {key: r["ratio_to_cudnn"] for key, s, r in zip(keys, shapes, ours, strict=True) if q_heads in (None, s["q_heads"])}


def test_result_tables_are_the_committed_figures() -> None:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    rows = re.findall(r"^\| (causal|full)(, 32 query and 8 KV heads)? \| (64|128) \|(.*)\|$", README, re.M)
    assert len(rows) == 5
    for mask, grouped, dim, cells in rows:
        committed = ratios("llama", q_heads=32) if grouped else ratios("paper")
        for length, cell in zip(lengths, cells.split("|"), strict=True):
            if cell.strip():
                assert float(cell) == round(committed[mask, int(dim), length], 2), (mask, grouped, dim, length)


def test_the_table_of_masks_is_the_committed_one() -> None:
    """Row by row in the order of the suite: ours, the best deterministic peer, the best other peer."""
    cases: dict[str, dict[str, list[float]]] = {}
    for row in measured("masks"):
        if row["pass"] == "backward" and row["candidate"] != "dash-attn unordered":
            kind = "ours" if row["candidate"] == "dash-attn" else "deterministic" if row["deterministic"] else "other"
            cases.setdefault(json.dumps(row["shape"]), {}).setdefault(kind, []).append(row["tflops"])
    table = README[README.index("| | dash-attn | deterministic |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(cases)
    cells = [[cell.split() for cell in line.split("|")[2:5]] for line in table]
    shown = [[int(words[0]) if words else None for words in row] for row in cells]
    kinds = ("ours", "deterministic", "other")
    expected = [[round(max(found[kind])) if kind in found else None for kind in kinds] for found in cases.values()]
    assert sorted(map(str, shown)) == sorted(map(str, expected))


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
