"""The way of a call from Python to its launches, on a driver that launches nothing: shapes, workspaces and launches, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, c_uint64
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dash_attn import Causal, Documents, Full, Mask, Window
from dash_attn.backends import run
from dash_attn.call.call import Call, Grads, Saved
from dash_attn.call.offsets import SequenceOffsets
from dash_attn.call.options import AttentionOptions
from dash_attn.scheduling.order import WORKER_INVARIANT
from launchless import Driver, calls_on_hopper

CALLS = ("forward", "backward", "backward_setup", "explain", "kernel_names", "layout", "packed", "tables")
forward, backward, setup, explain, kernel_names, layout, packed, tables = (
    import_module(f"dash_attn.backends.hopper.calls.{name}") for name in CALLS
)
rank_backward = import_module("dash_attn.backends.hopper.calls.rank_backward")
leg_tables = import_module("dash_attn.backends.hopper.calls.leg_tables")
trouble = import_module("dash_attn.backends.hopper.driver.trouble")


@pytest.fixture
def driver() -> Iterator[Driver]:
    with calls_on_hopper() as driver:
        yield driver


def made(length: int, heads: int, dim: int, batch: int = 2) -> Tensor:
    return torch.zeros(batch, length, heads, dim, dtype=torch.bfloat16)


def shapes(*tensors: Tensor | None) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors if t is not None]


def test_addresses_are_told_again_only_where_they_changed() -> None:
    workspace = import_module("dash_attn.backends.hopper.driver.workspace").Workspace(first=300, second=8)
    memory = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]
    with patch("torch.empty_strided", side_effect=[memory[0], memory[0], memory[1], memory[0]]):
        (_, first), (_, again), (_, other), (_, back) = (workspace.allocate(torch.device("cpu")) for _ in range(4))
    assert again is first
    assert other is not first
    assert [at["second"] - at["first"] for at in (first, other)] == [512, 512]
    assert [at["first"] for at in (first, other, back)] == [memory[n].data_ptr() for n in (0, 1, 0)]


class Descriptors:
    """A driver whose descriptors begin with their address, or end with it."""

    def __init__(self, place: int) -> None:
        self.place, self.replaced = place, 0

    def __getattr__(self, name: str) -> Any:
        return MagicMock()

    def cuTensorMapEncodeTiled(self, kind: Any, rank: int, address: int, *_: Any) -> tuple[int, Any]:
        words = (c_uint64 * 16)()
        words[self.place] = address
        return 0, SimpleNamespace(words=words, getPtr=lambda: addressof(words))

    def cuTensorMapReplaceAddress(self, made: Any, address: int) -> tuple[int]:
        self.replaced += 1
        made.words[self.place] = address
        return (0,)


@pytest.mark.parametrize(("place", "replaced"), [(0, 0), (15, 2)])
def test_descriptors_are_written_only_where_it_is_known_how(place: int, replaced: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_map, driver = import_module("dash_attn.backends.hopper.driver.tensor_map"), Descriptors(place)
    monkeypatch.setattr(tensor_map, "cuda_driver", lambda: driver)
    tensor = made(16, 2, 64)
    one = tensor_map.TensorMap(tensor, 64)
    words = (c_uint64 * 16).from_address(one.address)
    before, driver.replaced = list(words), 0
    assert before[place] == tensor.data_ptr()
    for pointer in (4096, 4096, 8192):
        one.point_to(pointer)
        assert words[place] == pointer
    assert driver.replaced == replaced
    assert [word for at, word in enumerate(words) if at != place] == [0] * 15


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(100, 0), Documents((200, 100))], ids=str)
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (59, 59), (40, 72)])
def test_a_dense_call(driver: Driver, dim: int, v_dim: int, mask: Mask) -> None:
    options = AttentionOptions(mask, 1.0)
    q, k, v, sinks = made(300, 4, dim), made(300, 2, dim), made(300, 2, v_dim), torch.zeros(4, dtype=torch.bfloat16)
    call = Call(q, k, v, options, None, sinks)
    out, lse = saved = forward.forward(call)
    assert shapes(out, lse) == [(2, 300, 4, v_dim), (2, 4, 300)]
    *gradients, dsinks = backward.backward(call, saved, Grads(torch.zeros_like(out)))
    assert shapes(*gradients) == shapes(q, k, v)
    assert (tuple(dsinks.shape), dsinks.dtype) == ((4,), torch.bfloat16)
    assert all(g.is_contiguous() for g in (out, *gradients))
    names = [name for name, _ in driver.launched]
    assert names == ["attention_forward", "backward_preprocess", "attention_backward", "backward_postprocess", "sink_gradient"]
    call = Call(q, k, v, options)
    assert forward.forward(call).out.shape == out.shape
    assert backward.backward(call, saved, Grads(torch.zeros_like(out))).sinks is None


@pytest.mark.parametrize("dim", [64, 128, 256, 59])
def test_a_packed_call(driver: Driver, dim: int) -> None:
    lengths = (100, 0, 1, 500)
    places = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    offsets = SequenceOffsets(places, places, 500, 2**33)
    options = AttentionOptions(Causal(), 1.0)
    q, k = made(601, 4, dim, 1)[0], made(601, 2, dim, 1)[0]
    out, lse = saved = forward.forward(Call(q, k, k, options, offsets, torch.zeros(4)))
    assert shapes(out, lse) == [(601, 4, dim), (4, 601)]
    gradients = backward.backward(Call(q, k, k, options, offsets), saved, Grads(torch.zeros_like(out)))
    assert shapes(*gradients) == shapes(q, k, k)
    names = [name for name, _ in driver.launched]
    assert names[:3] == ["packed_layout", "packed_tiles", "attention_forward"]
    assert names[3:] == ["packed_layout", "packed_plan", "backward_preprocess", "attention_backward", "backward_postprocess"]


def test_the_forward_takes_heads_in_groups_no_larger_than_all_of_them(driver: Driver) -> None:
    """A kernel multiplies them with Q tiles, in 32 bits."""
    places = torch.arange(0, 601, 1, dtype=torch.int32)
    q, options = made(600, 4, 64, 1)[0], AttentionOptions(Causal(), 1.0)
    for tensors, offsets in (
        ((q, q, q), SequenceOffsets(places, places, 1, 1)),
        ((made(600, 4, 64),) * 3, None),
        ((made(1, 1, 64),) * 3, None),
    ):
        params = forward._calls.find(Call(*tensors, options, offsets))[0].params
        assert 1 <= params.heads_side_by_side <= params.batch * params.q_heads
        assert 1 <= params.last_heads <= params.batch * params.q_heads


@pytest.mark.parametrize("gaps", [False, True], ids=["end to end", "gaps between sequences"])
def test_documents_run_as_packed_sequences(driver: Driver, gaps: bool) -> None:
    options = AttentionOptions(Documents((100, 1, 199)), 1.0)
    q, k, v = (made(301 if gaps else 300, heads, 64)[:, :300] for heads in (4, 2, 2))
    call = Call(q, k, v, options, None, torch.zeros(4))
    out, lse = saved = run.forward(call)
    assert shapes(out, lse) == [(2, 300, 4, 64), (2, 4, 300)]
    *gradients, dsinks = run.backward(call, saved, Grads(torch.zeros_like(out)))
    assert shapes(*gradients, dsinks) == [*shapes(q, k, v), (4,)]
    assert all(t.is_contiguous() for t in (out, lse, *gradients))
    names = [name for name, _ in driver.launched]
    assert names[:3] == ["packed_layout", "packed_tiles", "attention_forward"]
    assert names[3:5] == ["packed_layout", "packed_plan"]
    offsets = run.document_offsets(call)
    assert offsets.cu_seqlens_q.tolist() == [0, 100, 101, 300, 400, 401, 600]
    assert offsets.max_seqlen_q == 256, "room for 199 and for other lengths"


def test_only_the_last_document_lengths_are_kept(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(run, "_kept", layout.Kept(run.MOST_OFFSETS))
    monkeypatch.setattr(run, "upload", lambda array, device: torch.from_numpy(array))
    with FakeTensorMode():
        q = torch.empty(1, 1, 1, 64, device="cuda")

    def recent(lengths: tuple[int, ...]) -> SequenceOffsets:
        return run.document_offsets(Call(q, q, q, AttentionOptions(Documents(lengths), 1.0)))

    first = recent((1, 2))
    assert recent((1, 2)) is first
    for length in range(run.MOST_OFFSETS):
        recent((length + 2,))
    assert recent((1, 2)) is not first
    assert len(run._kept.values) == run.MOST_OFFSETS


def test_documents_with_a_schedule_of_their_own_run_as_one_sequence(driver: Driver) -> None:
    q = made(300, 4, 64)
    run.forward(Call(q, q, q, AttentionOptions(Documents((100, 200)), 1.0, schedule="weave")))
    assert [name for name, _ in driver.launched] == ["attention_forward"]


# Parts of groups. At 2100 queries each query head is a part; at 300 up to 13 are.


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("length", "group", "parts"), [(2100, 3, 3), (300, 71, 6), (300, 13, 1), (2100, 1, 1)])
def test_sums_of_a_dense_call(driver: Driver, length: int, group: int, parts: int, dim: int) -> None:
    q, k = made(length, 2 * group, dim), made(length, 2, dim)
    found = setup.backward_setup(Call(q, k, k, AttentionOptions(Causal(), 1.0, head_offset=1)))
    tiles = -(-length // found.tiles.kv_rows)
    sums = 2 if parts > 1 else 0
    assert (found.parts, found.kinds, found.sizes.sums, found.sizes.kv_tiles) == (parts, 2, sums, tiles)
    assert found.chains == 2 * 2 * tiles * parts
    sizes = found.memory
    assert sizes["sums"] == 4 * 2 * sums * (2 * 2 * tiles * found.tiles.kv_rows) * dim  # dK and dV of two KV heads, two sequences
    assert sizes["semaphores"] == 4 * (found.sizes.dq_tiles + 2 * 2 * tiles * sums * found.tiles.sum_pieces)
    assert sizes["tickets"] == 64 * found.chains
    assert list(sizes).index("sums") == list(sizes).index("dq") + 1, "both are zeroed at once"
    split = found.split
    fields = [split.group, split.parts, split.kinds, split.sums, split.pieces, split.first_sum]
    assert fields == [group, parts, 2, sums, found.tiles.sum_pieces, found.sizes.dq_tiles]


def run_backward(q: Tensor, k: Tensor, options: AttentionOptions, offsets: SequenceOffsets | None = None) -> Any:
    """The call that was launched."""
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1]) if offsets is None else torch.zeros(q.shape[1], q.shape[0])
    gradients = backward.backward(Call(q, k, k, options, offsets), Saved(q, lse), Grads(q))
    assert shapes(*gradients) == shapes(q, k, k)
    return next(reversed(backward._calls._kept.values.values()))


def grid_of(driver: Driver, name: str) -> int:
    return [grid for launched, grid in driver.launched if launched == name][-1]


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize(
    ("mask", "schedule", "of_sums"), [(Causal(), "auto", [2, 1]), (Causal(), "ascending", [3, 0]), (Full(), "shift_blocks", [3, 0])]
)
def test_the_postprocess_finishes_sums(driver: Driver, mask: Mask, schedule: str, of_sums: list[int], dim: int) -> None:
    q, k = made(2100, 6, dim, 1), made(2100, 2, dim, 1)
    call = run_backward(q, k, AttentionOptions(mask, 1.0, schedule=schedule))
    places, found = call.after.sums, call.setup
    rows = 2 * found.sizes.kv_tiles * found.tiles.kv_rows
    assert grid_of(driver, "backward_postprocess") == found.sizes.dq_tiles + 2 * rows // 64  # dK and dV, 64 rows a block
    assert list(places.parts) == of_sums
    assert (places.count, places.first_sum, places.kv_heads, places.kv_len) == (sum(map(bool, of_sums)), found.sizes.dq_tiles, 2, 2100)
    assert (places.dk_dim, places.dv_dim, places.head_chains) == (dim, dim, found.sizes.kv_tiles)
    assert places.sums == call.main.sums
    assert None not in (places.sums, places.dk, places.dv)
    assert call.before.semaphore_count == found.sizes.semaphores
    assert 4 * call.before.floats_to_zero == found.memory["dq"] + found.memory["sums"]
    assert bytes(call.before.plan.split) == bytes(found.split)


def test_a_whole_group_has_no_sums(driver: Driver) -> None:
    q, k = made(300, 6, 64, 1), made(300, 2, 64, 1)
    call = run_backward(q, k, AttentionOptions(Causal(), 1.0))
    assert (call.main.sums, call.after.sums.sums, call.after.sums.count) == (None, None, 0)
    assert grid_of(driver, "backward_postprocess") == call.setup.sizes.dq_tiles
    assert call.before.semaphore_count == call.setup.sizes.dq_tiles


def test_unordered_sums_are_zeroed_and_not_waited_for(driver: Driver) -> None:
    q, k = made(2100, 6, 64, 1), made(2100, 2, 64, 1)
    call = run_backward(q, k, AttentionOptions(Causal(), 1.0, accumulation="unordered"))
    assert call.before.dq_to_zero == call.main.dq
    assert call.main.sums == call.main.dq + call.setup.memory["dq"], "behind dQ, so that both are zeroed at once"


@pytest.mark.parametrize("group", [1, 3, 71])
def test_packed_sequences_have_room_for_every_part(driver: Driver, group: int) -> None:
    """Their lengths are on the device, so each query head may be a part."""
    places = torch.tensor([0, 100, 601], dtype=torch.int32)
    q, k = made(601, 2 * group, 64, 1)[0], made(601, 2, 64, 1)[0]
    call = run_backward(q, k, AttentionOptions(Causal(), 1.0, head_offset=1), SequenceOffsets(places, places, 501, 501))
    found, rows = call.setup, 601 // 128 + 2
    assert (found.parts, found.sizes.sums, found.sizes.kv_tiles) == (group, 2 if group > 1 else 0, rows)
    assert found.memory["tickets"] == 64 * 2 * rows * group
    assert found.memory["sum_places"] == 16 * rows
    assert call.planner.params.chain_rows == rows
    assert bytes(call.planner.params.split) == bytes(found.split)
    assert (call.after.sums.places is not None, call.after.sums.head_chains) == (True, rows)


@pytest.mark.parametrize("group", [8, 71])
def test_the_workspace_of_a_group(driver: Driver, group: int) -> None:
    """Beyond dQ and its statistics, 16 bytes per element of K and V, and 64 per chain: no copies for each part."""
    q, k = (made(4096, heads, 128, 1) for heads in (group, 1))
    found = setup.backward_setup(Call(q, k, k, AttentionOptions(Causal(), 1.0)))
    of_queries = 4 * q.numel() + 2 * 4 * group * 4096
    of_keys = 16 * k.numel()
    assert of_queries + of_keys < found.workspace.bytes < of_queries + of_keys + (64 + 16) * found.chains + 8 * found.sizes.dq_tiles + 4096


def test_the_workspace_is_linear_in_tokens(driver: Driver) -> None:
    sizes = []
    for length in (4096, 8192, 16384):
        q = made(length, 4, 128, 1)
        sizes.append(setup.backward_setup(Call(q, q, q, AttentionOptions(Causal(), 1.0))).workspace.bytes)
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=1e-3)


def test_what_tma_cannot_read_is_copied(driver: Driver) -> None:
    options = AttentionOptions(Causal(), 1.0)
    wide = torch.zeros(2, 300, 4, 65, dtype=torch.bfloat16)
    q = wide[..., 1:]  # rows of 130 bytes, and not at a multiple of 16
    k = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16).expand(2, 300, 4, 64)  # stride 0
    out, _ = forward.forward(Call(q, k, k, options))
    assert out.shape == (2, 300, 4, 64)


@pytest.mark.parametrize("mask", [Full(), Causal(), Documents((200, 100)), Documents((100, 200), causal=False)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (32, 2)], ids=str)
def test_explain_tells_of_the_call_that_runs(driver: Driver, mask: Mask, heads: tuple[int, int]) -> None:
    """The same kernels by name, the same workspace, gang and workers: both are asked of one setup."""
    q, k = made(300, heads[0], 64), made(300, heads[1], 64)
    options = AttentionOptions(mask, 1.0)
    asked = Call(q, k, k, options)
    told = explain.explain(asked, predict_time=False)
    driver.loaded.clear()
    run.backward(asked, run.forward(asked), Grads(q))
    assert set(told.kernels.values()) <= set(driver.loaded)
    call = next(reversed(backward._calls._kept.values.values()))
    assert (told.workspace_bytes, told.gang) == (call.workspace.bytes, call.setup.gang)
    assert told.backward_tiles == (call.setup.tiles.q_rows, call.setup.tiles.kv_rows)
    ahead = next(reversed(forward._calls._kept.values.values()))
    assert told.forward_tiles == ahead.setup.tile
    assert (call.planner is not None) == isinstance(mask, Documents)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
def test_explain_tells_of_legs_where_sms_are_few(driver: Driver, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    """Kernels and memory of the call that runs there, and no gang: its chains rest in memory."""
    for module in (setup, rank_backward):
        monkeypatch.setattr(module, "sm_count", lambda index: 8)
    q, k = made(4096, heads[0], 128, 1), made(4096, heads[1], 128, 1)
    options = AttentionOptions(Full(), 1.0)
    told = explain.explain(Call(q, k, k, options))
    driver.loaded.clear()
    with counted_memory(monkeypatch) as most:
        backward.backward(Call(q, k, k, options), Saved(q, torch.zeros(1, heads[0], 4096)), Grads(q))
    assert told.workspace_bytes == max(most)
    behind = {name: kernel for name, kernel in told.kernels.items() if name != "forward"}
    assert set(behind.values()) == {name for name in driver.loaded if not name.startswith("sink_gradient")}
    assert behind["backward"].startswith("attention_backward_of_legs<")
    assert behind["ending"].startswith("end_trips<")
    assert (told.gang, told.workers, told.guarantees[2]) == (1, 8, WORKER_INVARIANT)
    assert told.predicted_backward_us is None
    assert "8 SMs are too few for 16 chains at once" in told.prediction_note


@contextmanager
def counted_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of the workspace and of all states, after each that was made."""
    live: WeakSet[Tensor] = WeakSet()
    counts: list[int] = []

    def counting(make: Any) -> Any:
        def make_and_count(*arguments: Any) -> Any:
            found = make(*arguments)
            live.add(found if isinstance(found, Tensor) else found[0])
            counts.append(sum(x.nbytes for x in live))
            return found

        return make_and_count

    monkeypatch.setattr(rank_backward.RankBackward, "new_state", counting(rank_backward.RankBackward.new_state))
    monkeypatch.setattr(rank_backward.Workspace, "allocate", counting(rank_backward.Workspace.allocate))
    yield counts


@pytest.mark.parametrize("mask", [Causal(), Documents((200, 100))], ids=str)
def test_explain_of_meta_tensors_loads_and_uploads_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    monkeypatch.setattr(tables, "upload", None)
    q = made(300, 4, 64).to("meta")
    assert explain.explain(Call(q, q, q, AttentionOptions(mask, 1.0))).kernels == {}
    assert not driver.loaded


def test_what_is_not_what_runs_is_not_recorded() -> None:
    record = import_module("dash_attn.backends.hopper.calls.recorder")
    mask = Documents((100, 200))
    with pytest.raises(ValueError, match="packed sequences"):
        record.check_recordable(AttentionOptions(mask, 1.0))
    record.check_recordable(AttentionOptions(mask, 1.0, schedule="weave"))
    record.check_recordable(AttentionOptions(Causal(), 1.0))  # groups of any size
