"""benchmarks/compare.py --memory without a GPU: what the setups tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import compare


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.exhaustive
def test_workspaces_of_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare, "MEMORY_HEADS", [(2, 1), (4, 1)])
    monkeypatch.setattr(compare, "MEMORY_TOKENS", 256)
    assert compare.main(["--memory", "--json", str(tmp_path / "m.json")]) == 0
    few, many = json.loads((tmp_path / "m.json").read_text())["rows"]
    assert few["others"] == []
    fp32_dq = 4 * 256 * 2 * 128
    assert fp32_dq < few["here"]["workspace_bytes"] < 1.2 * fp32_dq
    assert many["here"]["workspace_bytes"] > 1.8 * few["here"]["workspace_bytes"]
    assert "measured_bytes" not in few["here"]
    assert capsys.readouterr().out.startswith("2/1 heads, 256 tokens: ")


def test_measured_bytes_are_told_beside_the_workspace() -> None:
    found = {"workspace_bytes": 3 * 2**20, "measured_bytes": 5 * 2**20}
    row = {"q_heads": 8, "kv_heads": 1, "tokens": 32768, "here": found, "others": [{"workspace_bytes": 2**21}]}
    assert compare.memory_in_words(row) == "8/1 heads, 32768 tokens: 3 MiB, measured 5; other 2 MiB"
    assert compare.MEMORY_HEADS == [(8, 1), (71, 1), (64, 8)]
    assert compare.MEMORY_TOKENS == 32768
