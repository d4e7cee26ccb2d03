"""Bytes of a shared sequence and of its peers, by their formulas, and what ring attention and Ulysses take."""

from __future__ import annotations

import json
import math
import re

import pytest

from clusters import shared
from dash_attn import parse_mask
from dash_attn.cli.main import main
from dash_attn.scheduling import Problem
from dash_attn.scheduling.ranks.sharding import Sharding
from dash_attn.simulation.cluster import Cluster, PeerEstimate, Widths, ring_attention, simulate_ranks, ulysses
from doc_pages import DOCS, rows

ROWS, HEADS, GROUP, DIM = 131072, 8, 4, 128
LONG = Problem(parse_mask("causal"), ROWS, ROWS, heads=HEADS, group=GROUP)
FREE = Cluster(hop_latency_us=0.0, bandwidth_GBs=math.inf)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("group", [1, 4])
def test_bytes_of_a_shared_sequence(ranks: int, group: int) -> None:
    """From 4096 queries on each query head has a state of its own; shorter groups walk one after the other with one state."""
    rows, heads = 512 * ranks, 2
    run = simulate_ranks(shared("causal", rows, ranks, heads, group=group), Cluster(), "launch", "chunks")
    share = (ranks - 1) / ranks
    assert run.gathered == (4 * rows * heads * DIM * share,) * ranks
    trips = heads * group
    between_legs = 8 * rows * trips * DIM * share  # of a rank, on average
    # Those of even heads end on rank 0; with several members states come back to where they began, for the next one.
    members = group // run.shared.problem.parts
    home = 8 * rows * (heads * run.shared.problem.parts / 2) * DIM * share
    back = (members - 1) * 8 * rows * heads * run.shared.problem.parts * DIM * share
    assert sum(run.states) == pytest.approx(ranks * between_legs + home + back)
    assert run.sent == tuple(a + b for a, b in zip(run.gathered, run.states, strict=True))
    assert sum(run.hops) == sum(run.shared.hops(unit) for unit in run.shared.units) > 0


def test_long_groups_have_a_trip_per_query_head() -> None:
    """The figures of the design's section 6: 4.58 GB for gather and states, of which the gather is 0.47; here in 40 times fewer rows."""
    run = simulate_ranks(shared("causal", 4096, 8, HEADS, group=GROUP, together=4), Cluster(), "launch", "chunks")
    assert run.shared.problem.parts == GROUP
    states = 8 * 4096 * HEADS * GROUP * DIM * 7 / 8
    assert sum(run.states) / 8 == pytest.approx(states + states / 2 / 8)


def formula(text: str, ranks: int) -> float:
    """A cell of the page in numbers: 4 S H D (2P-1)/P."""
    code = re.sub(r"(\d)(?=[A-Z])", r"\1*", text.replace("²", "**2").replace(" ", "*"))
    return float(eval(code, {"S": ROWS, "h": HEADS, "H": HEADS * GROUP, "D": DIM, "P": ranks}))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_page_has_the_bytes_of_the_command(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """By their formulas, and for eight ranks in numbers."""
    page = (DOCS / "simulator.md").read_text()
    (command,) = re.findall(r"^dash-attn (plan --ranks 8 .*)$", page, re.M)
    assert main([*command.replace("8", str(ranks), 1).split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["dash-attn, the first rank", *["dash-attn, the others"] * (ranks - 2), "dash-attn, the last rank"]
    sent = [*zip(names, *(found["runs"][0][f"{direction}_bytes"] for direction in ("forward", "backward")), strict=True)]
    sent += [(peer["name"], peer["forward_bytes"], peer["backward_bytes"]) for peer in found["peers"]]
    cells = {name: rest for name, *rest in rows(page, 5)}
    assert {name for name, *_ in sent} == set(cells) - {"", "---"} - ({"dash-attn, the others"} if ranks == 2 else set())
    for name, forward, backward in sent:
        first, shown, second, and_shown = cells[name]
        assert [forward, backward] == [formula(first, ranks), formula(first, ranks) + formula(second, ranks)]
        if ranks == 8:
            assert [shown, and_shown] == [f"{n / 1e6:.0f} MB" if n < 1e9 else f"{n / 1e9:.2f} GB" for n in (forward, backward)]


def test_widths_count() -> None:
    narrow = Cluster(widths=Widths(dim_qk=64, dim_v=32, element=4))
    found = shared("causal", 2048, 4, 2)
    wide, thin = (simulate_ranks(found, cluster, "launch", "chunks") for cluster in (Cluster(), narrow))
    assert thin.states == tuple(size * 96 // 256 for size in wide.states)
    assert thin.gathered == tuple(size * 96 * 2 // 256 for size in wide.gathered)


def test_bytes_of_the_peers() -> None:
    """Section 6: 0.47 and 1.54 GB, and 0.29 GB each way."""
    ranks, share = 8, 7 / 8
    sharding = Sharding.zigzag(ROWS, ranks)
    ring = ring_attention(LONG, sharding, Cluster(), 1.0)
    assert ring.forward_bytes == 4 * ROWS * HEADS * DIM * share
    assert ring.backward_bytes == 4 * ROWS * HEADS * DIM * share + 8 * ROWS * HEADS * DIM
    assert (round(ring.forward_bytes / 1e9, 2), round(ring.backward_bytes / 1e9, 2)) == (0.47, 1.54)
    alltoall = ulysses(LONG, sharding, Cluster(), 1.0)
    assert isinstance(alltoall, PeerEstimate)
    assert alltoall.forward_bytes == alltoall.backward_bytes == 4 * DIM * (HEADS * GROUP + HEADS) * ROWS * share / ranks
    assert round(alltoall.backward_bytes / 1e9, 2) == 0.29


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_peers_lose_nothing_where_links_are_free(ranks: int) -> None:
    problem = Problem(parse_mask("causal"), 8192, 8192, heads=8)
    zigzag, contiguous = (Sharding.named(name, 8192, ranks) for name in ("zigzag", "contiguous"))
    assert ring_attention(problem, zigzag, FREE, 1000.0).efficiency == pytest.approx(1.0, abs=0.01)
    # In step s the ranks from s on have a whole block; the first step has the diagonals, half of one.
    expected = (ranks / 2) / (ranks - 0.5)
    assert ring_attention(problem, contiguous, FREE, 1000.0).efficiency == pytest.approx(expected, abs=0.03)
    alltoall = ulysses(problem, zigzag, FREE, 1000.0)
    assert isinstance(alltoall, PeerEstimate)
    assert alltoall.efficiency == 1.0


def test_a_slow_ring_takes_as_long_as_its_transfers() -> None:
    ranks, rows = 4, 8192
    problem, sharding = Problem(parse_mask("causal"), rows, rows, heads=2), Sharding.zigzag(rows, ranks)
    cluster = Cluster(hop_latency_us=5.0, bandwidth_GBs=0.5)
    found = ring_attention(problem, sharding, cluster, one_rank=40.0)
    assert found.makespan == pytest.approx(found.backward_bytes / 500 + (ranks + 1) * 5)
    assert found.makespan > ring_attention(problem, sharding, Cluster(), one_rank=40.0).makespan
    alltoall = ulysses(problem, Sharding.zigzag(rows, 2), cluster, one_rank=40.0)
    assert isinstance(alltoall, PeerEstimate)
    assert alltoall.makespan == pytest.approx(alltoall.backward_bytes / 500 + 20 + 10)


def test_one_rank_sends_nothing() -> None:
    problem, sharding = Problem(parse_mask("causal"), 1024, 1024, heads=2), Sharding.zigzag(1024, 1)
    for peer in (ring_attention, ulysses):
        found = peer(problem, sharding, Cluster(), 100.0)
        assert isinstance(found, PeerEstimate)
        assert (found.forward_bytes, found.backward_bytes, found.makespan, found.efficiency) == (0, 0, 100.0, 1.0)


def test_ulysses_needs_heads_for_all() -> None:
    problem = Problem(parse_mask("causal"), 1024, 1024, heads=6)
    assert ulysses(problem, Sharding.zigzag(1024, 4), FREE, 1.0) == "needs a number of KV heads that 4 ranks divide; got 6"
