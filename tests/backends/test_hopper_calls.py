"""What is prepared for a shape is found again, kept while a graph needs it, and let go in time. No GPU: only the look-up is tested."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dash_attn import Causal, Documents, Full, TileMap, Window, explain, flash_attn_func
from dash_attn.call.call import Call
from dash_attn.call.offsets import SequenceOffsets
from dash_attn.call.options import AttentionOptions
from dash_attn.scheduling import Problem, generate
from dash_attn.scheduling.validate import TooFewWorkers
from launchless import launchless_driver

setup = import_module("dash_attn.backends.hopper.calls.backward_setup")
layout = import_module("dash_attn.backends.hopper.calls.layout")
packed = import_module("dash_attn.backends.hopper.calls.packed")
shapes = import_module("dash_attn.backends.hopper.tiles")
tables = import_module("dash_attn.backends.hopper.calls.tables")
support = import_module("dash_attn.backends.hopper.support")
OPTIONS = AttentionOptions(Causal(), 1.0)


@dataclass
class Prepared:
    layout: Any
    shapes: list[torch.Size]
    holds_tables: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class Machine:
    """Stands in for a GPU: whether a graph is being captured, and how often somebody waited for it."""

    capturing = False
    waits = 0

    def wait(self, device: torch.device) -> None:
        self.waits += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(layout, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(layout, "device_index", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", machine.wait)
    return machine


def new_cache(holds_tables: bool = True) -> Any:
    return layout.CallCache(lambda found, tensors, options: Prepared(found, [t.shape for t in tensors], holds_tables))


def tensors(length: int, dim: int = 64) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(1, length, 2, dim, dtype=torch.bfloat16) for _ in range(3))


def test_same_layout_same_call(machine: Machine) -> None:
    calls = new_cache()
    first, _ = calls.find(Call(*tensors(16), OPTIONS))
    assert calls.find(Call(*tensors(16), OPTIONS))[0] is first
    assert calls.find(Call(*tensors(17), OPTIONS))[0] is not first
    assert calls.find(Call(*tensors(16), AttentionOptions(Causal(), 2.0)))[0] is not first
    turned = tuple(t.transpose(1, 2) for t in tensors(2))
    assert turned[0].shape == (1, 2, 2, 64)
    assert calls.find(Call(*turned, OPTIONS))[0] is not calls.find(Call(*tensors(2), OPTIONS))[0]


def test_padding_is_part_of_the_layout(machine: Machine) -> None:
    """A head dim of 59 is padded to 64, but its gradients have 59 columns."""
    calls = new_cache()
    narrow, padded = calls.find(Call(*tensors(16, 59), OPTIONS))
    assert padded[0].shape[-1] == 64
    assert narrow.layout.q_dim == 59
    assert calls.find(Call(*tensors(16, 64), OPTIONS))[0].layout.q_dim == 64
    assert calls.find(Call(*tensors(16, 59), OPTIONS))[0] is narrow


def test_the_number_of_calls_is_bounded(machine: Machine) -> None:
    calls = new_cache()
    hot, _ = calls.find(Call(*tensors(1), OPTIONS))
    for length in range(2, 2 * layout.MOST_CALLS):
        calls.find(Call(*tensors(length), OPTIONS))
        assert calls.find(Call(*tensors(1), OPTIONS))[0] is hot, "what is used stays"
    assert len(calls._kept.values) == layout.MOST_CALLS
    assert machine.waits == layout.MOST_CALLS - 1, "tables are let go only when nobody reads them"


def test_calls_without_tables_go_without_waiting(machine: Machine) -> None:
    calls = new_cache(holds_tables=False)
    for length in range(1, layout.MOST_CALLS + 10):
        calls.find(Call(*tensors(length), OPTIONS))
    assert machine.waits == 0


def test_graphs_keep_their_calls_and_prepare_nothing(machine: Machine) -> None:
    calls = new_cache()
    call, _ = calls.find(Call(*tensors(8), OPTIONS))
    machine.capturing = True
    calls.find(Call(*tensors(8), OPTIONS))
    with pytest.raises(RuntimeError, match="run it once before the graph"):
        calls.find(Call(*tensors(9), OPTIONS))
    machine.capturing = False
    for length in range(10, 10 + layout.MOST_CALLS):
        calls.find(Call(*tensors(length), OPTIONS))
    assert call not in calls._kept.values.values()
    assert any(kept is call for kept in calls._kept.in_graphs)


def test_nothing_is_uploaded_into_a_graph(machine: Machine) -> None:
    machine.capturing = True
    with pytest.raises(RuntimeError, match="run it once before the graph"):
        tables.mask_on_device(TileMap([[True]], 64, 64), 64, 64, torch.device("cuda"))


def offsets(longest: int) -> SequenceOffsets:
    places = torch.tensor([0, 40, 100], dtype=torch.int32)
    return SequenceOffsets(places, places, longest, longest)


def test_no_sequence_is_longer_than_the_batch(machine: Machine) -> None:
    """Callers may pass any number that is large enough, also one that does not fit 32 bits."""
    calls = new_cache()
    flat = tuple(t[0] for t in tensors(100))
    call, _ = calls.find(Call(*flat, OPTIONS, offsets(2**40)))
    assert call.layout.longest == (100, 100)
    assert calls.find(Call(*flat, OPTIONS, offsets(100)))[0] is call
    assert calls.find(Call(*flat, OPTIONS, offsets(60)))[0] is not call


def test_few_queries_share_what_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload is there for every stream, and takes no memory from the pool of a graph. Once for each number of sequences."""
    few, uploaded = import_module("dash_attn.backends.hopper.calls.few_queries"), list[int]()
    monkeypatch.setattr(few, "upload", lambda array, device: uploaded.append(len(array)) or torch.from_numpy(array))
    few._first_row.cache_clear()
    with launchless_driver():
        calls = [Call(*(x[0] for x in tensors(length)), OPTIONS, offsets(length)) for length in (600, 700)]
        made = [few.FewQueries(layout.Layout.of(call), call.tensors, OPTIONS, (128, 128)) for call in calls]
    few._first_row.cache_clear()
    assert made[0].row is made[1].row
    assert (uploaded, made[0].row.tolist()) == ([2], [0, 0])


def test_a_gang_must_fit_the_machine(machine: Machine) -> None:
    flat = tuple(torch.zeros(1, dtype=torch.bfloat16).expand(20000, 2, 128) for _ in range(3))
    found = layout.Layout.of(Call(*flat, OPTIONS, offsets(20000)))
    tiles = shapes.backward_tiles(*found.backward_dims)
    gang = packed.largest_gang(found, tiles, Full())
    assert (gang, packed.largest_gang(found, tiles, Window(-1, 30000))) == (16, 16)
    assert packed.largest_gang(found, tiles, Causal()) == packed.largest_gang(found, tiles, Window(-1, 0)) == 1
    support.check_gang(gang, 132)
    said = r"need 16 SMs at once; this GPU .* has 8\. Causal masks run on any number of SMs, .* schedule='alternating'"
    with pytest.raises(support.Unsupported, match=said):
        support.check_gang(gang, 8)


@pytest.mark.parametrize("tiles", [(64, 128), (128, 128), (64, 64)])
def test_a_causal_sequence_has_no_gang(tiles: tuple[int, int]) -> None:
    """Not even where few queries attend so many keys that every tile is kept."""
    kept = 0
    for q_len in (1, 63, 64, 65, 128, 129, 191, 192, 193, 255, 256, 257, 320):
        for kv_len in (100, 200, 256, 500, 9 * 128, 17 * 128, 17 * 128 + 1, 4095, 4096, 4097):
            schedule = generate("auto", Problem(Causal(), q_len, kv_len, *tiles), 1)
            assert schedule.gang == 1
            kept += schedule.name == "shift_blocks"
    assert kept > 5


SERVED = {
    (192, 128): (192, 128),
    (192, 1): (192, 128),
    (129, 100): (192, 128),
    (192, 129): (192, 192),
    (192, 192): (192, 192),
    (128, 192): (192, 192),
    (128, 128): (128, 128),
    (64, 96): (96, 96),
    (256, 128): (256, 256),
}


@pytest.mark.parametrize(("asked", "served"), SERVED.items(), ids=str)
def test_the_backward_kernel_of_head_dims(asked: tuple[int, int], served: tuple[int, int]) -> None:
    """Keys of 192 with values up to 128 have their own; the forward runs on the larger head dim."""
    q, v = (torch.empty(1, 300, 2, dim, dtype=torch.bfloat16, device="meta") for dim in asked)
    found = setup.backward_setup(Call(q, q, v, OPTIONS))
    assert (found.layout.backward_dims, found.layout.dim) == (served, served[0])
    assert found.tiles == shapes.backward_tiles(*served)
    kernels = found.kernels()
    assert f"<bf16, {served[0]}, {served[1]}, " in kernels.attention.name
    assert f"<bf16, {served[0]}, {served[1]}, " in kernels.postprocess.name
    assert kernels.attention.shared_bytes == found.tiles.shared_bytes
    assert (found.tiles.q_rows, found.tiles.kv_rows) == ((64, 64) if served[1] > 128 else (64, 128))


def test_tiles_are_those_of_a_kernel() -> None:
    assert shapes.backward_tiles(192) == shapes.backward_tiles(192, 192) != shapes.backward_tiles(192, 128)
    with pytest.raises(ValueError, match=r"no backward kernel has head dims 192 \(q and k\) and 64 \(v\); there are .*\(192, 128\)"):
        shapes.backward_tiles(192, 64)


def test_a_slice_of_a_gpu_runs_gangs_in_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 4096, 1, 128, dtype=torch.bfloat16, device="meta")
    full = AttentionOptions(Full(), 0.1)
    whole = setup.backward_setup(Call(q, q, q, full))
    assert (whole.gang, whole.legs) == (16, None)
    monkeypatch.setattr(setup, "sm_count", lambda index: 8)
    in_legs = setup.backward_setup(Call(q, q, q, full))
    assert in_legs.legs is not None
    assert (in_legs.plan.workers, in_legs.plan.order_hash) == (8, whole.plan.order_hash)
    others = (AttentionOptions(Full(), 0.1, schedule="alternating"), AttentionOptions(Causal(), 0.1))
    for runs_there in (*others, AttentionOptions(Full(), 0.1, accumulation="unordered")):
        found = setup.backward_setup(Call(q, q, q, runs_there))
        assert (found.plan.workers, found.legs) == (8, None)


def test_blocks_need_their_gang_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 4096, 1, 128, dtype=torch.bfloat16, device="meta")
    everything = AttentionOptions(TileMap(np.ones((32, 32), dtype=bool), 128, 128), 0.1, schedule="shift_blocks")
    assert setup.backward_setup(Call(q, q, q, everything)).gang == 16
    monkeypatch.setattr(setup, "sm_count", lambda index: 8)
    with pytest.raises(TooFewWorkers, match=r"^shift_blocks needs 16 workers at once \(SMs of a GPU.*there are 8\."):
        setup.backward_setup(Call(q, q, q, everything))


def test_documents_say_how_many_sms_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 6000, 1, 128, dtype=torch.bfloat16, device="meta")
    full = explain(flash_attn_func, q, q, q, mask=Documents((3000, 3000), causal=False), backend="hopper")
    assert (full.gang, full.guarantees[2]) == (16, "worker-count-invariant (16 workers or more)")
    causal = explain(flash_attn_func, q, q, q, mask=Documents((3000, 3000)), backend="hopper")
    assert (causal.gang, causal.guarantees[2]) == (1, "worker-count-invariant")
    monkeypatch.setattr(setup, "sm_count", lambda index: 8)
    with pytest.raises(support.Unsupported, match="need 16 SMs at once"):  # as the call would
        explain(flash_attn_func, q, q, q, mask=Documents((3000, 3000), causal=False), backend="hopper")
