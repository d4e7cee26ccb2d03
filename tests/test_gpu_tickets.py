"""The device expands a plan's start order by a formula; here its tickets are compared with those of the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_attn import Causal, Full, Mask, Window
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
    workspace, kept = hopper("workspace").Workspace, []
    allocate = workspace.allocate

    def allocate_and_keep(self: Any, device: torch.device) -> Any:
        kept.append(allocate(self, device))
        return kept[-1]

    monkeypatch.setattr(workspace, "allocate", allocate_and_keep)
    run_ours(inputs, mask, head_offset=head_offset)
    q, k = inputs[:2]
    tiles = hopper("shapes").backward_tiles(dim)
    problem = problem_of(q, k, AttentionOptions(mask, 1.0, head_offset=head_offset), tiles.q_rows, tiles.kv_rows)
    memory, at = kept[-1]
    first = at["tickets"] - memory.data_ptr()
    found = memory[first : first + 4 * WORDS * problem.chains].view(torch.int32).view(-1, WORDS)[:, [2, 0, 1]].cpu()
    found[:, 2] //= tiles.kv_rows
    expected = generate("auto", problem, hopper("support").check_device(0)).tickets
    assert found.tolist() == expected.tolist()
