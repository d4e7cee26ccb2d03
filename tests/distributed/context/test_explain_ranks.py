"""explain tells what ranks would do: what it says is counted again in ranks that run, with every message recorded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_attn import Documents, backends, explain, flash_attn_func
from dash_attn.backends.cpu.ranks import RankBackward
from dash_attn.call.call import Call, Given, Grads
from dash_attn.call.options import Choices, options_for
from dash_attn.distributed import Sharding, context_parallel_attention, unshard
from dash_attn.distributed.context import of_rank
from dash_attn.distributed.context.asked import Asked, Part
from dash_attn.distributed.context.loopback import Mailbox, play_all_ranks
from dash_attn.distributed.context.mail import Keys
from dash_attn.distributed.context.of_rank import BackwardPass, OfRank
from dash_attn.distributed.context.shared_call import SharedCall
from dash_attn.distributed.context.ulysses import HeadExchange, outer_sharding
from dash_attn.distributed.peers import Peers, Pending
from dash_attn.scheduling.ranks.units import Unit

ROWS = ["call", "backend", "ranks", "schedule", "guarantees", "units", "hops", "sent forward", "sent backward", "memory", "predicted"]


def meta(rows: int, heads: int, dim: int = 16, batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(batch, rows, heads, dim, dtype=dtype, device="meta")


def test_it_explains_calls_of_context_parallel_attention() -> None:
    q = meta(256, 2)
    with pytest.raises(ValueError, match=r"explain takes a function of dash_attn .*context_parallel_attention; got <function unshard"):
        explain(unshard, q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        explain(context_parallel_attention, q, q, q, 2, casual=True)


def test_it_takes_a_group_too() -> None:
    q = meta(256, 2)
    assert explain(context_parallel_attention, q, q, q, causal=True, backend="cpu").ranks == 1
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh of one dimension or None; got str"):
        explain(context_parallel_attention, q, q, q, "cp")


class Done:
    """Of a message that has come at once."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True)
class Recording(Peers):
    """Ranks that are not there. They send zeros, and what is sent to them is written down."""

    sent: Counter[str] = field(default_factory=Counter)

    def start_gather(self, mine: Tensor, purpose: str = "") -> Pending:
        self.sent["gathered"] += (self.count - 1) * mine.nbytes
        return Pending(self, None, torch.zeros(self.count * mine.numel(), dtype=mine.dtype), mine.device, purpose)

    def exchange(self, pieces: Sequence[Tensor], sizes: Sequence[int], purpose: str = "") -> list[Tensor]:
        self.sent["rows"] += sum(piece.nbytes for rank, piece in enumerate(pieces) if rank != self.rank)
        return [torch.zeros(size, dtype=pieces[0].dtype) for size in sizes]

    def send(self, flat: Tensor, to: int, tag: int) -> Any:
        self.sent["hops"] += 1
        self.sent["states"] += flat.nbytes
        return Done()

    def receive(self, flat: Tensor, source: int, tag: int) -> Any:
        flat.zero_()
        return Done()


@dataclass
class Case:
    q_heads: int = 4
    kv_heads: int = 2
    value_dim: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float32
    sharding: str | Sharding = "zigzag"
    ulysses: int = 1
    ranks: int = 2
    rows: int = 1024  # of the whole sequence
    mask: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    sinks: bool = False
    return_lse: bool = False

    def tensors(self, rows: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((self.q_heads, 16), (self.kv_heads, 16), (self.kv_heads, self.value_dim))
        q, k, v = (torch.zeros(self.batch, rows, heads, dim, dtype=self.dtype, device=device) for heads, dim in shapes)
        return q, k, v

    @property
    def chosen(self) -> Sharding:
        return self.sharding if isinstance(self.sharding, Sharding) else Sharding.named(self.sharding, self.rows, self.ranks)

    def sink_values(self, device: str) -> Tensor | None:
        return torch.zeros(self.q_heads, dtype=self.dtype, device=device) if self.sinks else None

    def explain(self) -> Any:
        mine = self.tensors(len(self.chosen.rows_of(0)), "meta")
        rest = {"sharding": self.sharding, "ulysses": self.ulysses, "sinks": self.sink_values("meta"), "return_lse": self.return_lse}
        return explain(context_parallel_attention, *mine, self.ranks, backend="cpu", **self.mask, **rest)

    def rank(self, rank: int) -> tuple[OfRank, Recording, Recording]:
        """As OfRank.make builds it, among ranks that are not there."""
        group, place = divmod(rank, self.ulysses)
        inside = Recording(None, place, self.ulysses)
        outside = Recording(None, group, self.ranks // self.ulysses)
        asked = Asked(*self.tensors(len(self.chosen.rows_of(rank)), "cpu"), Given(), Choices(), *self.sharing)
        options = options_for(Choices(**{name: value for name, value in self.mask.items() if name != "cu_seqlens"}), 16)
        part = Part.of(asked, options, self.chosen, rank)
        return OfRank(part, HeadExchange(inside, self.chosen, rank - place), outside, Peers.alone(), 0), inside, outside

    @property
    def sharing(self) -> tuple[Any, ...]:
        return self.sharding, self.ulysses, self.mask.get("cu_seqlens")


OFFSETS = {"cu_seqlens": (0, 300, 324, 1024), "window_size": (200, 0)}
CASES = {
    "grouped": Case(),
    "batch, bf16, values of another dim": Case(batch=2, dtype=torch.bfloat16, value_dim=32, kv_heads=4, ranks=4, rows=1024),
    "sinks": Case(sinks=True, return_lse=True, dtype=torch.float64),
    "uneven": Case(sharding=Sharding((256, 128, 384, 200), (0, 1, 1, 0)), rows=968, sinks=True),
    "full": Case(mask={}, sharding="contiguous", ranks=4, kv_heads=4),
    "ulysses and states": Case(ulysses=2, ranks=4, sinks=True, return_lse=True),
    "ulysses alone": Case(ulysses=2, sinks=True),
    "documents": Case(mask={"mask": Documents((300, 24, 700))}, sinks=True, return_lse=True),
    "documents, window, bf16": Case(mask=OFFSETS, ranks=4, batch=2, dtype=torch.bfloat16, value_dim=32, sharding="contiguous"),
    "documents, ulysses": Case(mask=OFFSETS, ranks=4, ulysses=2, sinks=True),
    "documents, ulysses alone": Case(mask=OFFSETS, ulysses=2, sinks=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_rank_sends_what_it_says(case: Case) -> None:
    found = case.explain()
    assert len(found.each) == case.ranks
    for number, said in enumerate(found.each):
        rank, inside, outside = case.rank(number)
        q, k, v = case.tensors(len(case.chosen.rows_of(number)), "cpu")
        call = Call(q, k, v, rank.part.options, None, case.sink_values("cpu"))
        out, lse = saved = rank.forward(call)
        gathered = outside.sent["gathered"] + outside.sent["rows"]
        assert (inside.sent["rows"], gathered) == (said.forward.heads, said.forward.keys + said.forward.rows)
        assert said.forward.total == said.forward.heads + said.forward.keys + said.forward.rows
        for peers in (inside, outside):
            peers.sent.clear()
        rank.backward(call, saved, Grads(out, lse if case.return_lse else None))
        assert inside.sent["rows"] == said.backward.heads
        gathered = inside.sent["gathered"] + outside.sent["gathered"] + outside.sent["rows"]
        assert gathered == said.backward.keys + said.backward.sinks + said.backward.rows
        assert outside.sent["hops"] == said.hops
        assert outside.sent["states"] == said.backward.states + said.backward.final_states
    assert (sum(said.backward.sinks for said in found.each) > 0) == case.sinks
    assert (sum(said.hops for said in found.each) > 0) == (case.ulysses < case.ranks)


def test_ranks_that_have_whole_documents_send_nothing() -> None:
    case = Case(mask={"causal": True, "cu_seqlens": (0, 300, 512, 1024)}, sharding="contiguous")
    for number in range(case.ranks):
        rank, _, outside = case.rank(number)
        q, k, v = case.tensors(512, "cpu")
        call = Call(q, k, v, rank.part.options)
        saved = rank.forward(call)
        rank.backward(call, saved, Grads(*saved))
        assert not outside.sent


@pytest.mark.parametrize("case", [CASES["grouped"], Case(kv_heads=8, q_heads=8, ranks=4, batch=2)], ids=["grouped", "many heads"])
def test_a_rank_holds_the_keys_it_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start of a gather until its keys are dropped."""
    kept: list[Keys] = []
    dropped, most = 0, 0
    run, drop = RankBackward.run, RankBackward.drop_keys

    class Watched(Keys):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(self)

    def watched_run(self: RankBackward, unit: Unit, state: Tensor) -> None:
        nonlocal most
        most = max(most, len(kept[-1].started) - dropped)
        run(self, unit, state)

    def watched_drop(self: RankBackward, first_head: int, heads: int) -> None:
        nonlocal dropped
        dropped += 1
        drop(self, first_head, heads)

    monkeypatch.setattr(of_rank, "Keys", Watched)
    monkeypatch.setattr(RankBackward, "run", watched_run)
    monkeypatch.setattr(RankBackward, "drop_keys", watched_drop)
    group = case.batch * case.rows * 2 * 16 * 4 * -(-case.kv_heads // 4)  # a gather has a fourth of the KV heads
    for number, said in enumerate(case.explain().each):
        rank, *_ = case.rank(number)
        q, k, v = case.tensors(len(case.chosen.rows_of(number)), "cpu")
        call = Call(q, k, v, rank.part.options)
        saved = rank.forward(call)
        dropped = most = 0
        rank.backward(call, saved, Grads(saved.out))
        assert said.memory.keys == most * group
        assert most >= 2


@pytest.mark.parametrize("case", [CASES["grouped"], CASES["full"]], ids=["grouped", "full"])
def test_ranks_hold_the_states_and_sums_they_say(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks in one process, in the global sequence: looked at while a unit runs."""
    q, k, v = case.tensors(case.rows, "cpu")
    call = SharedCall.of((q, k, v), options_for(Choices(**case.mask), 16), outer_sharding(case.chosen, ulysses=1))
    mailbox, ranks, most = Mailbox(), [], [0] * case.ranks
    build, run = BackwardPass.__init__, RankBackward.run

    def noted(self: BackwardPass, *arguments: Any) -> None:
        build(self, *arguments)
        ranks.append(self)

    def watched(self: RankBackward, unit: Unit, state: Tensor) -> None:
        there = [sum(x.nbytes for x in rank._states.values()) for rank in ranks]
        there[unit.rank] += state.nbytes
        for number, waiting in mailbox.states.items():
            after = call.documents[0].shared.units[number].after
            assert after is not None
            there[call.documents[0].shared.units[after].rank] += waiting.nbytes
        most[:] = map(max, most, there)
        run(self, unit, state)

    monkeypatch.setattr(BackwardPass, "__init__", noted)
    monkeypatch.setattr(RankBackward, "run", watched)
    play_all_ranks(call, q, k, v, torch.zeros_like(q), mailbox)
    said = [rank.memory for rank in case.explain().each]
    assert [memory.states for memory in said] == most
    sums = [sum(x.nbytes for pair in rank.backward.sums for x in pair) for rank in ranks]  # type: ignore[attr-defined]
    assert [memory.sums for memory in said] == sums
    assert all(memory.total == memory.keys + memory.states + memory.sums for memory in said)


def test_it_names_the_bits_of_one_rank() -> None:
    found = explain(context_parallel_attention, meta(256, 4), meta(256, 2), meta(256, 2), 4, causal=True, backend="cpu")
    alone = explain(flash_attn_func, meta(1024, 4), meta(1024, 2), meta(1024, 2), causal=True, backend="cpu")
    assert (found.schedule, found.order_hash, found.call) == (alone.schedule, alone.order_hash, alone.call)
    assert found.guarantees == (*alone.guarantees, "context-parallel-invariant")
    assert "context-parallel-invariant" not in alone.guarantees, "who shares nothing is promised nothing about sharing"
    assert json.loads(json.dumps(asdict(found)))["order_hash"] == found.order_hash


def test_documents_are_explained_as_one_rank_has_them() -> None:
    q, lengths = meta(256, 2), (300, 24, 700)
    alone = explain(flash_attn_func, *(meta(1024, 2),) * 3, mask=Documents(lengths), backend="cpu")
    by_mask = explain(context_parallel_attention, q, q, q, 4, mask=Documents(lengths), backend="cpu")
    by_ends = explain(context_parallel_attention, q, q, q, 4, causal=True, cu_seqlens=(0, 300, 324, 1024), backend="cpu")
    assert by_mask.order_hash == by_ends.order_hash == alone.order_hash
    assert by_mask.guarantees == by_ends.guarantees == (*alone.guarantees, "context-parallel-invariant")
    assert by_ends.call.endswith("float32, causal, 3 documents")
    assert by_mask.each == by_ends.each
    window = explain(context_parallel_attention, q, q, q, 4, window_size=(100, 0), cu_seqlens=(0, 300, 324, 1024), backend="cpu")
    assert window.order_hash != alone.order_hash
    assert "rows" in str(window)


def test_short_documents_send_few_rows_and_no_state() -> None:
    """Each is on one rank. Only those at the borders of chunks change hands; as one sequence, all keys are gathered."""
    q = meta(256, 2)
    short = explain(context_parallel_attention, q, q, q, 4, causal=True, cu_seqlens=tuple(range(0, 1025, 32)), backend="cpu")
    long = explain(context_parallel_attention, q, q, q, 4, causal=True, cu_seqlens=(0, 1024), backend="cpu")
    assert sum(rank.hops for rank in short.each) == 0
    assert sum(rank.backward.total for rank in short.each) == 0  # borders of chunks are borders of documents here
    assert short.predicted_efficiency == pytest.approx(1.0)
    plain = explain(context_parallel_attention, q, q, q, 4, causal=True, backend="cpu")
    assert long.each == plain.each, "a sequence is a row of one document"
    assert long.predicted_efficiency == pytest.approx(plain.predicted_efficiency)


def test_ranks_work_on_many_documents_at_once() -> None:
    """In the order of the row they would work one after the other: 0.14."""
    lengths = [700 + 37 * number % 1100 for number in range(100)]
    lengths.append(-sum(lengths) % 16)
    ends, rows = [0, *accumulate(lengths)], sum(lengths)
    q = meta(rows // 8, 4)
    assert explain(context_parallel_attention, q, q, q, 8, causal=True, cu_seqlens=ends, backend="cpu").predicted_efficiency > 0.6
    own = Sharding.by_document(list(filter(None, lengths)), 8)
    q = meta(len(own.rows_of(0)), 4)
    assert (
        explain(context_parallel_attention, q, q, q, 8, causal=True, cu_seqlens=ends, backend="cpu", sharding=own).predicted_efficiency
        > 0.95
    )


def test_one_rank_sends_nothing() -> None:
    q = meta(300, 2)
    (only,) = explain(context_parallel_attention, q, q, q, 1, causal=True, backend="cpu").each
    assert (only.units, only.hops, only.forward.total, only.backward.total, only.memory.total) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("sharding", "kv_heads", "expected"),
    [("contiguous", 16, 8 / 15), ("zigzag", 1, 0.70), ("zigzag", 16, 0.95)],
)
def test_efficiency_is_that_of_the_chunk_model(sharding: str, kv_heads: int, expected: float) -> None:
    """Contiguous shares of a causal mask are uneven, P / (2P - 1) at best. Heads of both kinds keep all ranks busy; one alone does not."""
    q = meta(1024, kv_heads)
    found = explain(context_parallel_attention, q, q, q, 8, causal=True, sharding=sharding, backend="cpu").predicted_efficiency
    assert found == pytest.approx(expected, abs=0.06)


def test_it_prints_as_a_table() -> None:
    q, k = meta(1024, 32, 128, dtype=torch.bfloat16), meta(1024, 8, 128, dtype=torch.bfloat16)
    lines = str(explain(context_parallel_attention, q, k, k, 4, causal=True, backend="cpu", ulysses=2)).splitlines()
    shown = {line[:13].strip(): line[14:] for line in lines}
    assert list(shown) == ROWS
    assert shown["ranks"] == "4, 8 chunks of 512 rows, ulysses 2"
    assert shown["sent forward"].startswith("14.06 MiB per rank at most: heads 10.06 MiB, keys 4 MiB")
    assert shown["hops"].endswith("per rank")
    assert "final states" in shown["sent backward"]
    assert re.match(r"efficiency (1\.000|0\.9\d\d) of the backward", shown["predicted"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group": 0}, "ranks must be a whole number >= 1; got 0"),
        ({"group": 3, "ulysses": 2}, "ulysses must divide the number of ranks"),
        ({"sharding": "striped"}, "unknown sharding 'striped'"),
        ({"sharding": Sharding((256, 384), (0, 1))}, "a rank of this sharding has 256 or 384 of the 640 rows.*; got 512 queries"),
        ({"group": 5, "sharding": "contiguous", "mask": Documents((2500,))}, "documents need as many queries as keys, the sum"),
        ({"cu_seqlens": (0, 1000)}, "end with the 1024 rows of all ranks together"),
        ({"dropout_p": 0.1}, "ranks that share a sequence must drop the same pairs, .*: give dropout_seed"),
        ({"backend": "auto"}, "say which one to explain"),
        ({"group": 16, "causal": True}, None),
    ],
    ids=str,
)
def test_it_raises_what_the_call_would(change: dict[str, Any], said: str | None) -> None:
    q = meta(512, 2)
    arguments: dict[str, Any] = {"group": 2, "backend": "cpu", **change}
    if said is None:
        assert explain(context_parallel_attention, q, q, q, **arguments).ranks == 16
        return
    with pytest.raises(ValueError, match=said):
        explain(context_parallel_attention, q, q, q, **arguments)


def test_a_backend_that_cannot_share_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only heads are exchanged, nothing is shared, and Hopper can."""
    q = meta(512, 2, 64, dtype=torch.bfloat16)
    assert explain(context_parallel_attention, q, q, q, 2, causal=True, backend="hopper", ulysses=2).each[0].hops == 0
    find_spec = backends.find_spec
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name.endswith("hopper.ranks") else find_spec(name))
    backends.import_ranks.cache_clear()
    try:
        with pytest.raises(NotImplementedError, match=r"backend 'hopper' .* cannot share a sequence between ranks"):
            explain(context_parallel_attention, q, q, q, 2, causal=True, backend="hopper")
    finally:
        backends.import_ranks.cache_clear()
