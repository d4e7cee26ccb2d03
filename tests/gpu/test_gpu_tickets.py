"""The device expands a plan's start order by a formula; here its tickets are compared with those of the schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dash_attn import Causal, Full, Mask, Window
from dash_attn.call.call import Call
from dash_attn.call.options import AttentionOptions
from dash_attn.call.planning import problem_of
from dash_attn.scheduling import Problem, lower
from dash_attn.scheduling.generators import generate
from dense import run_ours
from gpu_helpers import gpu_inputs, hopper
from packed_batches import make_parts, run_packed
from start_orders import laid_end_to_end, starts_alone

pytestmark = pytest.mark.gpu

RECORD = hopper("driver.parameters").ChainRecord
WORDS = RECORD.bytes() // 4
HEADS = [((1, 1), 1), ((2, 2), 3), ((5, 5), 3), ((16, 16), 8), ((8, 2), 20), ((33, 33), 5), ((8, 1), 3), ((21, 3), 2), ((71, 1), 1)]


def column(name: str) -> int:
    """Of a chain's record, in words."""
    return getattr(RECORD, name).offset // 4


def part_of(problem: Problem) -> dict[int, int]:
    """The number of a part, by its first query head."""
    return {problem.members(part).start: part for part in range(problem.all_parts)}


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
    tiles = hopper("tiles").backward_tiles(dim)
    call = Call(*inputs[:3], AttentionOptions(mask, 1.0, head_offset=head_offset))
    problem = problem_of(call, tiles.q_rows, tiles.kv_rows)
    found = tickets_in(*kept[-1], problem.chains)
    expected = generate("auto", problem, hopper("support").sm_count(0))
    parts = part_of(problem)
    columns = [column(name) for name in ("kv_plane", "q_head", "kv_row")]
    assert [[s, parts[q], row // tiles.kv_rows] for s, q, row in found[:, columns].tolist()] == expected.tickets.tolist()
    if problem.parts == 1:
        return
    plan = lower(expected)
    for (sequence, part, kv_tile), record in zip(expected.tickets.tolist(), found.tolist(), strict=True):
        number, turn = plan.sum_of(part)
        tile = (sequence * problem.heads + part // problem.parts) * problem.kv_tiles + kv_tile
        first = problem.batch * problem.heads * problem.group * problem.q_tiles  # behind the dQ tiles
        assert record[column("members")] == len(problem.members(part))
        assert (record[column("first_sum")], record[column("turn")]) == (first + (tile * plan.sums + number) * tiles.sum_pieces, turn)


def keep_workspaces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each pass from now on allocates: memory, and the address of every part."""
    workspace, kept = hopper("driver.workspace").Workspace, list[Any]()
    allocate = workspace.allocate

    def allocate_and_keep(self: Any, device: torch.device) -> Any:
        kept.append(allocate(self, device))
        return kept[-1]

    monkeypatch.setattr(workspace, "allocate", allocate_and_keep)
    return kept


def tickets_in(memory: torch.Tensor, at: dict[str, int], count: int) -> torch.Tensor:
    first = at["tickets"] - memory.data_ptr()
    return memory[first : first + 4 * WORDS * count].view(torch.int32).view(-1, WORDS).cpu()


LENGTHS = [[3500, 40, 900, 0, 2500, 128, 129, 900], [64], [4000, 4000], [100] * 40]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (16, 16), (32, 8), (8, 1), (21, 3)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
@pytest.mark.parametrize("mask", [Causal(), Full(), Window(300, 0)], ids=str)
@pytest.mark.parametrize("head_offset", [0, 1])
def test_tickets_of_packed_sequences(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, lengths: list[int], heads: tuple[int, int], dim: int, head_offset: int
) -> None:
    """Longest sequence first. Where one ends and the next begins, heads that walk down and up are shuffled together."""
    parts = make_parts("cuda", tuple((n, n) for n in lengths), heads, dim)
    kept = keep_workspaces(monkeypatch)
    run_packed(parts, mask, head_offset=head_offset)
    tiles = hopper("tiles").backward_tiles(dim)
    shape = tiles.q_rows, tiles.kv_rows, heads[1], heads[0] // heads[1]
    problems = {i: Problem(mask, n, n, *shape, head_offset=head_offset) for i, n in enumerate(lengths) if n}
    order = sorted(problems, key=lambda i: -problems[i].q_tiles * problems[i].kv_tiles)
    workers = hopper("support").sm_count(0)
    expected = laid_end_to_end([starts_alone(i, generate("auto", problems[i], workers)) for i in order])
    columns = [
        column(name) for name in ("q_head", "kv_plane", "keys")
    ]  # kv_plane: end of the sequence; keys: from the chain's first one on
    found = tickets_in(*kept[-1], len(expected))[:, columns].tolist()
    ends = {int(end): i for i, end in enumerate(np.cumsum(lengths)) if lengths[i]}
    parts_of = {i: part_of(problem) for i, problem in problems.items()}
    chains = [(parts_of[ends[end]][q_head], ends[end], (lengths[ends[end]] - keys) // tiles.kv_rows) for q_head, end, keys in found]
    assert chains == expected
