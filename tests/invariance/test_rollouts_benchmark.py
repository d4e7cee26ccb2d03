"""benchmarks/rollouts.py on a CPU, small: all that it tells. And its product with fixed tiles, by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dash_attn

ROOT = Path(__file__).parents[2]
PRODUCT = """
import torch
from benchmarks import fixed_tiles

fixed_tiles.TILES.update(ROWS=16, COLUMNS=16, DEPTH=16)
x, weight, bias = torch.randn(5, 7, 40, requires_grad=True), torch.randn(21, 40, requires_grad=True), torch.randn(21)
expected = torch.nn.functional.linear(x, weight, bias)
with fixed_tiles.products_replaced():
    found = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(torch.nn.functional.linear(x[0], weight, bias), found[0])
torch.testing.assert_close(found, expected)
upstream = torch.randn_like(found)
for ours, pytorchs in zip(*(torch.autograd.grad(out, [x, weight], upstream) for out in (found, expected))):
    torch.testing.assert_close(ours, pytorchs)
"""


def ran(*words: str, **more: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(dash_attn.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "", **more}
    subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, timeout=240, env=environment, cwd=ROOT)


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["inside"], row["call"]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_all_parts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "found.json"
    small = ("-m", "benchmarks.rollouts", "--small", "--json", str(file))
    ran(*small)
    parts: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())["parts"]
    ran(*small, "rows", "--models", "Llama,GPT2")
    assert {place(row) for row in json.loads(file.read_text())["parts"]["rows"]} == {place(row) for row in parts["rows"]}
    file.write_text(file.read_text().replace('"torch.float32"', '"another"'))
    with pytest.raises(subprocess.CalledProcessError):
        ran(*small, "probes")
    layouts = ("alone", "padded", "packed", "log_probs")
    inside, outside = ([row for row in parts["rows"] if row["inside"] == kind] for kind in (True, False))
    assert len({row["model"] for row in inside}) == 11
    assert all(row["kinds_of_rows"] == row["rows"] for row in inside if "kinds_of_rows" in row)
    assert sum(row.get(layout, 0) for row in inside for layout in layouts) == 0
    assert all(row["alone"] for row in outside if "alone" in row)
    ways = {kind: {row["way"].split(":")[0] for row in parts["probes"] if row["kind"] == kind} for kind in ("switches", "by place")}
    assert (ways["by place"], "raises" in ways["switches"]) == ({"raises"}, False)
    first, second, without = parts["example"]
    assert first == second
    assert (first["differ"], without["differ"] > 0) == (0, True)
    sums = {kind: {row["gradients"] for row in parts["speed"] if row.get("per_sequence") == kind} for kind in (True, False)}
    assert (len(sums[True]), len(sums[False])) == (1, 4)


@pytest.mark.exhaustive
def test_a_product_with_fixed_tiles() -> None:
    pytest.importorskip("triton")
    ran("-c", PRODUCT, TRITON_INTERPRET="1")
