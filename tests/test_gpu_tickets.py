"""The device expands a plan's start order by a formula; here its tickets are compared with those of the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dash_attn import Causal, Full, Mask, Problem, Window, flash_attn_varlen_func
from dash_attn.generators import generate
from dash_attn.options import AttentionOptions
from dash_attn.planning import problem_of
from dense import run_ours
from gpu_helpers import gpu_inputs, hopper

pytestmark = pytest.mark.gpu

WORDS = 12  # of struct Ticket: KV head, first row, sequence, ...
HEADS = [((1, 1), 1), ((2, 2), 3), ((5, 5), 3), ((16, 16), 8), ((8, 2), 20), ((33, 33), 5)]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "batch"), HEADS)
@pytest.mark.parametrize(("mask", "length"), [(Causal(), 900), (Full(), 900), (Full(), 2500), (Window(300, 0), 900)], ids=str)
@pytest.mark.parametrize("head_offset", [0, 1])
def test_tickets(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, length: int, heads: tuple[int, int], batch: int, dim: int, head_offset: int
) -> None:
    inputs = gpu_inputs(length, length, heads, dim, batch=batch)
    kept = keep_workspaces(monkeypatch)
    run_ours(inputs, mask, head_offset=head_offset)
    q, k = inputs[:2]
    tiles = hopper("shapes").backward_tiles(dim)
    problem = problem_of(q, k, AttentionOptions(mask, 1.0, head_offset=head_offset), tiles.q_rows, tiles.kv_rows)
    found = tickets_in(*kept[-1], problem.chains)[:, [2, 0, 1]]
    found[:, 2] //= tiles.kv_rows
    expected = generate("auto", problem, hopper("support").check_device(0)).tickets
    assert found.tolist() == expected.tolist()


def keep_workspaces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each pass from now on allocates: memory, and the address of every part."""
    workspace, kept = hopper("workspace").Workspace, list[Any]()
    allocate = workspace.allocate

    def allocate_and_keep(self: Any, device: torch.device) -> Any:
        kept.append(allocate(self, device))
        return kept[-1]

    monkeypatch.setattr(workspace, "allocate", allocate_and_keep)
    return kept


def tickets_in(memory: torch.Tensor, at: dict[str, int], count: int) -> torch.Tensor:
    first = at["tickets"] - memory.data_ptr()
    return memory[first : first + 4 * WORDS * count].view(torch.int32).view(-1, WORDS).cpu()


LENGTHS = [[3500, 40, 900, 2500, 128, 129, 900], [64], [4000, 4000], [100] * 40]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 5, 8, 16])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
@pytest.mark.parametrize("mask", [Causal(), Full(), Window(300, 0)], ids=str)
@pytest.mark.parametrize("head_offset", [0, 1])
def test_tickets_of_packed_sequences(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, lengths: list[int], heads: int, dim: int, head_offset: int
) -> None:
    """Longest sequence first, each in the order in which it would start alone (but in no rounds). Where one ends and the next
    begins, their heads that walk down and up are shuffled together."""
    q, k, v, dout = (x[0] for x in gpu_inputs(sum(lengths), sum(lengths), (heads, heads), dim))
    places = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=q.device)
    kept = keep_workspaces(monkeypatch)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    window = (300, 0) if isinstance(mask, Window) else (-1, -1)
    longest = max(lengths)
    flash_attn_varlen_func(
        *leaves, places, places, longest, longest, causal=isinstance(mask, Causal), window_size=window, head_offset=head_offset
    ).backward(dout)
    tiles = hopper("shapes").backward_tiles(dim)
    problems = [Problem(mask, n, n, tiles.q_rows, tiles.kv_rows, heads, head_offset=head_offset) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda i: -problems[i].q_tiles * problems[i].kv_tiles)
    expected = laid_end_to_end([starts_alone(i, problems[i]) for i in order])
    found = tickets_in(*kept[-1], len(expected))[:, [0, 2, 6]]  # KV head, end of the sequence, keys from the chain's first one on
    ends = {int(end): i for i, end in enumerate(np.cumsum(lengths))}
    assert [(head, ends[end], (lengths[ends[end]] - keys) // tiles.kv_rows) for head, end, keys in found.tolist()] == expected


def starts_alone(number: int, problem: Problem) -> tuple[list[Any], int, int]:
    """(head, sequence, KV tile) of every chain; how many of them, of the first heads that walk up and of the last that walk
    down, may be shuffled with their neighbours."""
    schedule = generate("auto", problem, hopper("support").check_device(0))
    placement = replace(schedule.placement, heads_in_round=0)
    chains = [(head, number, kv_tile) for _, head, kv_tile in placement.tickets(problem).tolist()]
    if len(placement.starts) == 1:
        return chains, 0, 0
    walks_down = [(head + problem.head_offset) % 2 for head, *_ in chains]
    first_up, last_down = (*walks_down, 1).index(1), (*walks_down[::-1], 0).index(0)
    if 0 in map(len, placement.heads_of_kinds(problem)):  # of one kind only, so that turns do not show
        size, turns = placement.segments[0], -(-problem.heads // placement.lanes)
        first_up, last_down = min(first_up, problem.heads // turns * size), min(last_down, problem.heads // turns * placement.segments[-1])
    return chains, first_up, last_down


def laid_end_to_end(sequences: list[tuple[list[Any], int, int]]) -> list[Any]:
    laid: list[Any] = []
    waiting: list[Any] = []  # chains that end the sequence before
    for chains, first_up, last_down in sequences:
        laid += shuffled(chains[:first_up], waiting) if first_up else waiting
        end = len(chains) - last_down
        laid += chains[first_up:end]
        waiting = chains[end:]
    return laid + waiting


def shuffled(up: list[Any], down: list[Any]) -> list[Any]:
    """Both in their order, in proportion, beginning with `up`."""
    places = [(i / len(up), 0, i) for i in range(len(up))] + [(i / len(down), 1, i) for i in range(len(down))]
    return [(up, down)[which][i] for _, which, i in sorted(places)]
