"""The recording kernel on a GPU: the same bits, times that are possible, and constants that predict."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dash_attn import Causal, Full, Mask
from dash_attn.call.call import Call, Grads
from dash_attn.call.options import AttentionOptions
from dash_attn.scheduling import Problem, generate
from dash_attn.viewing.task_times import TaskTimes, task_table
from dense import same_bits
from gpu_helpers import Inputs, full_size, gpu_inputs, hopper, times_the_gpu

pytestmark = pytest.mark.gpu

# The clocks of two SMs may disagree: they are compared when a CTA starts and ends, and an SM's frequency may change between.
MOST_SLOP = 0.02  # of the kernel's time, for the worst pair of tasks
USUAL_SLOP = 0.005  # for 99 of 100


def options_of(mask: Mask, schedule: str, dim: int) -> AttentionOptions:
    return AttentionOptions(mask, dim**-0.5, 0.0, schedule)


def recorded(inputs: Inputs, options: AttentionOptions) -> TaskTimes:
    call, dout = Call(*inputs[:3], options), inputs[3]
    return hopper("calls.recorder").record_backward(call, hopper("calls.forward").forward(call), Grads(dout))


@times_the_gpu
@pytest.mark.parametrize(
    ("dim", "mask", "schedule"), [(128, Causal(), "ascending"), (128, Full(), "auto"), (64, Causal(), "auto")], ids=str
)
def test_recorded_times_are_possible(dim: int, mask: Mask, schedule: str) -> None:
    inputs = full_size(2048, (2048 // dim,) * 2, dim)
    options = options_of(mask, schedule, dim)
    spans = recorded(inputs, options)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = hopper("tiles").backward_tiles(dim)
    problem = Problem(mask, 2048, 2048, tiles.q_rows, tiles.kv_rows, 2048 // dim, batch=8)
    made = generate(schedule, problem, sms)
    assert (len(spans.q_tile), spans.workers) == (problem.tasks, sms)
    assert len(set(spans.worker.tolist())) == sms, "every SM took chains"
    assert (spans.compute_end <= spans.reduce_start).all()
    assert (spans.reduce_start <= spans.reduce_end).all()
    table = task_table(made)
    tile = (table.sequence * problem.heads + table.head) * problem.q_tiles + table.q_tile
    order = np.lexsort((table.turn, tile))
    late = [spans.reduce_start[b] - spans.reduce_end[a] for a, b in pairwise(order) if tile[a] == tile[b]]
    assert min(late) > -MOST_SLOP * spans.makespan, "a turn started before the one below it had landed"
    assert np.percentile(late, 1) > -USUAL_SLOP * spans.makespan
    from dash_attn.tools.calibrate.measured import kernel_time

    q, k, v, dout = inputs
    assert spans.makespan == pytest.approx(kernel_time(Call(q, k, v, options), Grads(dout)), rel=0.25)


@pytest.mark.parametrize("heads", [(8, 2), (8, 1), (7, 1)], ids=str)
@pytest.mark.parametrize("length", [1000, 2100])
def test_recording_changes_no_bit(length: int, heads: tuple[int, int]) -> None:
    """Whole groups, and parts of groups."""
    *tensors, dout = inputs = gpu_inputs(length, length, heads, batch=2)
    options = options_of(Causal(), "auto", 128)
    call, record = Call(*tensors, options), hopper("calls.recorder")
    saved = hopper("calls.forward").forward(call)
    expected = hopper("calls.backward").backward(call, saved, Grads(dout))
    recording, ready = hopper("calls.layout").CallCache(record.RecordingCall).find(call, dout, saved.out)
    found = recording.run(ready, call, saved.lse, None)
    assert all(same_bits(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    assert recorded(inputs, options).makespan > 0


@times_the_gpu
def test_waits_show_where_the_order_is_bad() -> None:
    """`ascending` makes chains wait, `auto` does not: the measured pictures must show it."""
    inputs = full_size(4096)
    lost = {}
    for schedule in ("ascending", "auto"):
        spans = recorded(inputs, options_of(Causal(), schedule, 128))
        lost[schedule] = float((spans.reduce_start - spans.compute_end).sum()) / spans.makespan
    assert lost["ascending"] > 3 * lost["auto"]


@times_the_gpu
def test_the_command_calibrates_this_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dash_attn.cli.main import main

    path = tmp_path / "machine.json"
    assert main(["calibrate", "--head-dims", "128", "--output", str(path)]) == 0
    print(capsys.readouterr().out)
    found = json.loads(path.read_text())
    constants = found["head_dims"]["128"]
    assert 0 < constants["reduce"] < constants["compute"] < constants["latency"] * 3
    errors = [abs(row["error"]) for row in found["measured"]]
    assert np.median(errors) < 0.1
    pytest.importorskip("matplotlib")
    picture = tmp_path / "measured.png"
    words = ["plan", "--seqlen", "2048", "--heads", "16", "--batch", "4", "--schedule", "ascending,auto", "--machine", str(path)]
    assert main([*words, "--measured", "--gantt", str(picture)]) == 0
    assert picture.stat().st_size > 20_000
