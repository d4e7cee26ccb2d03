"""benchmarks/compare.py on the CPU: one tree beside another, process by process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.suites import Cases
from dash_attn.tools.bench.shape import Shape

SMALL = (
    Shape("causal", 64, 1, 2, 1, 16, softcap=5.0),
    Shape("window:20,0", 64, 1, 2, 2, 16, sinks=True),
    Shape("full", 64, 1, 2, 2, 16, lengths=(40, 24)),
    Shape("causal", 64, 2, 2, 2, 24, q_seqlen=16, v_head_dim=16),
    Shape("elements", 96, 1, 2, 2, 16),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compare.COMPARED, "masks", Cases(SMALL))


SPOILED = """

_true = flash_attn_func


def flash_attn_func(*tensors, **options):
    import time

    out = 2 * _true(*tensors, **options)
    out.register_hook(lambda gradient: time.sleep(0.3))
    return out
"""


def spoiled_tree(folder: Path) -> Path:
    """A checkout whose results are others, and whose backward takes its time."""
    shutil.copytree(compare.HERE / "dash_attn", folder / "src/dash_attn", ignore=shutil.ignore_patterns("packed", "__pycache__"))
    functions = folder / "src/dash_attn/attention/functions.py"
    functions.write_text(functions.read_text() + SPOILED)
    return folder / "src"


@pytest.mark.exhaustive
def test_trees_are_told_apart(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one sleeps: this tree is faster, and has other bits, but not with packed sequences."""
    other, out = spoiled_tree(tmp_path), tmp_path / "found.json"
    words = [str(other), "--suite", "masks", "--processes", "1", "--runs", "1", "--json", str(out)]
    assert compare.main(words) in (0, 1)  # packed sequences are as fast in both, and times on a shared machine vary
    found = json.loads(out.read_text())
    assert [row["shape"] for row in found["rows"]] == [shape.to_json() for shape in SMALL]
    assert [row["same_bits"] for row in found["rows"]] == ["lengths" in row["shape"] for row in found["rows"]]
    assert [row["slower"] for row in found["rows"] if not row["same_bits"]] == [False] * 4
    assert all(len(row["here"]) == len(row["others"][0]) == 1 for row in found["rows"])
    assert (found["suite"], found["pass"], found["graphs"]) == ("masks", "backward", False)
    said = capsys.readouterr().out
    assert said.count("not slower, OTHER BITS") == 4
    assert "of 5 rows more than 1% slower, 4 with other bits" in said


def found(ms: float, yardstick: float = 1.0, bits: int = 1) -> dict[str, Any]:
    return {"ms": ms, "yardstick_ms": yardstick, "bits": [bits]}


@pytest.mark.parametrize(("ms", "slower"), [(1.0, False), (1.009, False), (1.02, True), (0.9, False)])
def test_more_than_one_per_cent_is_slower(ms: float, slower: bool) -> None:
    """Medians of processes, each relative to the yardstick of its process."""
    here = [found(ms), found(5 * ms, 5.0), found(40.0)]
    row = compare.row_of(SMALL[0], [[found(1.0), found(2.0, 2.0), found(0.1)], here])
    assert row["slower"] is slower
    assert row["change"] == pytest.approx([1 / ms - 1])
    assert ("SLOWER" in compare.in_words(SMALL[0], row)) is slower
    assert row["same_bits"]
    assert not compare.row_of(SMALL[0], [[found(1.0)], [found(1.0, bits=2)]])["same_bits"]


def test_a_tree_that_is_not_imported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalledProcessError, match="returned non-zero exit status 1"):
        compare.measured_in(tmp_path, "measure", [])


def test_suites_that_are_compared() -> None:
    assert [len(suite.shapes()) for suite in compare.COMPARED.values()] == [8, 4, 24, 23, 15]
