"""explain tells what a call would do without running it; DASH_ATTN_LOG=1 tells it while a program runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dash_attn import Causal, Documents, explain, flash_attn_func
from dash_attn.call import planning
from dash_attn.scheduling.order import ALL_GUARANTEES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-prediction.json"
# weave's order has changed since those runs
PREDICTED = [row for row in json.loads(RESULTS.read_text())["rows"] if row["seqlen"] <= 4096 and row["schedule"] != "weave"]
OF_AUTO = ("alternating", "shift_blocks")
CASES = [
    pytest.param(
        row,
        id=f"{row['mask']}-{row['head_dim']}-{row['seqlen']}-{row['schedule']}",
        marks=[] if row["seqlen"] < 4096 or row["schedule"] in OF_AUTO else [pytest.mark.exhaustive],  # they take long
    )
    for row in PREDICTED
]
ROWS = ["call", "backend", "schedule", "accumulation", "guarantees", "tiles", "workers", "plan", "workspace", "predicted", "kernels"]


def tensors(batch: int, seqlen: int, heads: int, dim: int, device: str = "meta", **rest: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(batch, seqlen, heads, dim, device=device, **rest) for _ in range(3))


def hopper(*shape: int, **options: Any) -> Any:
    return explain(flash_attn_func, *tensors(*shape, dtype=torch.bfloat16), backend="hopper", **options)


def test_cpu_says_everything_but_a_time() -> None:
    found = explain(flash_attn_func, *tensors(2, 300, 4, 16, "cpu"), causal=True)
    assert (found.backend, found.schedule, found.accumulation) == ("cpu", "alternating", "ordered")
    assert found.guarantees == ALL_GUARANTEES
    assert found.backward_tiles == found.forward_tiles == (64, 128)
    assert found.call == "q (2, 300, 4, 16), k (2, 300, 4, 16), v (2, 300, 4, 16), float32, causal"
    assert found.predicted_backward_us is None
    assert "not modelled" in found.prediction_note
    assert json.loads(json.dumps(asdict(found)))["order_hash"] == found.order_hash


@pytest.mark.parametrize("row", CASES)
def test_hopper_without_a_gpu_predicts_the_committed_times(row: dict[str, Any]) -> None:
    """The shapes of benchmarks/predict.py: 16384 tokens, 2048 wide. Placements have changed a little since they were measured."""
    shape = (16384 // row["seqlen"], row["seqlen"], 2048 // row["head_dim"], row["head_dim"])
    found = hopper(*shape, causal=row["mask"] == "causal", schedule=row["schedule"])
    assert found.predicted_backward_us == pytest.approx(row["predicted_us"], rel=0.002)
    assert found.schedule == row["schedule"]


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_what_auto_chooses_was_measured_within_a_tenth_of_the_prediction(mask: str) -> None:
    chosen = hopper(1, 4096, 16, 128, causal=mask == "causal", predict_time=False).schedule
    measured = [row for row in PREDICTED if (row["mask"], row["schedule"]) == (mask, chosen)]
    assert len(measured) == 4
    assert all(abs(row["predicted_us"] / row["measured_us"] - 1) < 0.1 for row in measured)


def test_hopper_without_a_gpu() -> None:
    found = hopper(1, 4096, 8, 128, causal=True)
    assert (found.backend, found.schedule, found.workers) == ("hopper", "alternating", 132)
    assert found.backward_tiles == (64, 128)
    assert found.workspace_bytes > 4 * 4096 * 8 * 128  # at least the fp32 accumulator
    assert found.kernels == {}
    assert found.predicted_backward_us > 0
    assert hopper(1, 4096, 8, 128, causal=True, predict_time=False).predicted_backward_us is None


def test_why_there_is_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    unordered = hopper(1, 512, 2, 64, accumulation="unordered")
    assert unordered.guarantees == ()
    capped = hopper(1, 512, 2, 64, softcap=10.0)
    for found in (unordered, capped):
        assert (found.predicted_backward_us, found.prediction_note) == (None, "the constants were fitted to ordered runs without softcap")
    assert "for this head dim" in hopper(1, 512, 2, 96).prediction_note
    monkeypatch.setattr(planning, "MOST_PREDICTED_TASKS", 10)
    assert "64 tasks take too long" in hopper(1, 1024, 1, 64).prediction_note


def test_meta_tensors_need_a_named_backend_and_only_explain() -> None:
    with pytest.raises(ValueError, match=r"say which one to explain, backend='cpu' or 'hopper' or 'triton'"):
        explain(flash_attn_func, *tensors(1, 128, 1, 64))
    with pytest.raises(ValueError, match="backend 'hopper' needs cuda tensors; got tensors on meta"):
        flash_attn_func(*tensors(1, 128, 1, 64), backend="hopper")
    with pytest.raises(ValueError, match="backend 'hopper' needs cuda tensors; got tensors on cpu"):
        explain(flash_attn_func, *tensors(1, 128, 1, 64, "cpu"), backend="hopper")
    with pytest.raises(ValueError, match="takes bfloat16 and float16"):
        explain(flash_attn_func, *tensors(1, 128, 1, 64), backend="hopper")


def test_it_prints_as_a_table() -> None:
    lines = str(hopper(1, 4096, 8, 128)).splitlines()
    shown = {line.split()[0]: line[14:] for line in lines}
    assert list(shown) == ROWS
    assert shown["tiles"] == "64 x 128 in the backward, 128 x 128 in the forward (queries x keys)"
    assert shown["workers"] == "132, 16 resident together"
    assert shown["workspace"].endswith("MiB")
    assert " us, the attention kernel alone" in shown["predicted"]
    assert "guarantees    none" in str(hopper(1, 4096, 8, 128, accumulation="unordered"))


def test_a_long_mask_is_cut() -> None:
    found = explain(flash_attn_func, *tensors(1, 200, 1, 16, "cpu"), mask=Documents((1,) * 200))
    assert len(found.call) < 200
    assert found.call.endswith("...")


LOGGED = """
import torch
from dash_attn import flash_attn_func, flash_attn_varlen_func
q = torch.zeros(1, 300, 2, 16)
for _ in range(3):
    flash_attn_func(q, q, q, causal=True)
flash_attn_func(q, q, q)
flash_attn_func(q, q, q, causal=True, schedule="shift")
flash_attn_func(q[:, :0], q, q)
for end in (100, 200):
    ends = torch.tensor([0, end, 300], dtype=torch.int32)
    flash_attn_varlen_func(q[0], q[0], q[0], ends, ends, 200, 200)
"""


def test_documents_on_hopper_have_the_order_of_each_alone() -> None:
    shape, documents = (1, 3000, 2, 64), Documents((1000, 1900, 100))
    several, whole = hopper(*shape, mask=documents), hopper(*shape, causal=True)
    assert (several.schedule, several.plan_bytes, several.gang) == ("alternating", 0, 1)
    assert several.order_hash != hopper(*shape, mask=Documents((1900, 1000, 100))).order_hash
    assert several.guarantees == whole.guarantees
    assert "one by one" in str(several)
    named = hopper(*shape, mask=documents, schedule="weave")
    assert (named.schedule, named.plan_bytes > 0) == ("weave", True)


@pytest.mark.parametrize("group", [8, 16, 71])
def test_parts_of_groups_on_hopper_cost_two_sums(group: int) -> None:
    """dK and dV in float32, for each kind of part: 16 bytes per element of K and V, whatever the group. No copies of K and V."""

    def explained(kv_heads: int) -> Any:
        q, k = (torch.zeros(1, 2000, n, 64, device="meta", dtype=torch.bfloat16) for n in (group, kv_heads))
        return explain(flash_attn_func, q, k, k, causal=True, backend="hopper")

    grouped, equal = explained(1), explained(group)
    assert grouped.order_hash != equal.order_hash
    assert (grouped.parts, equal.parts) == (-(-group // 2), 1)
    assert f"in {grouped.parts} parts" in str(grouped)
    sums = 2 * 2 * 4 * 2048 * 64
    few = 64 * 16 * group  # what chains and semaphores need
    assert sums - few < grouped.workspace_bytes - equal.workspace_bytes < sums + few


def lines_of(setting: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "DASH_ATTN_LOG"}
    if setting is not None:
        environment["DASH_ATTN_LOG"] = setting
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_the_log_has_one_line_for_every_kind_of_call() -> None:
    causal, full, refused, packed = lines_of("1")
    order = explain(flash_attn_func, *tensors(1, 300, 2, 16, "cpu"), mask=Causal()).order_hash
    shapes = ", ".join(f"{name} (1, 300, 2, 16)" for name in "qkv")
    assert causal == f"dash-attn: {shapes}, float32, causal: cpu on cpu, ordered, alternating, tiles 64 x 128, order {order}"
    assert "float32, full: cpu on cpu, ordered, shift_blocks" in full
    assert "no backward: shift serves full masks only" in refused
    assert packed.endswith("float32, full in 2 packed sequences: cpu on cpu, ordered, planned sequence by sequence")


@pytest.mark.exhaustive
def test_the_log_is_off_unless_asked_for() -> None:
    assert lines_of(None) == lines_of("0") == []
