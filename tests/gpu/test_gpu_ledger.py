"""Ledgers on a GPU: the sums of a CPU, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dash_attn
from dash_attn.ledgers import compare_runs
from dash_attn.ledgers.bit_sums import LARGE_CHUNK, part_sums
from dash_attn.ledgers.reading import read_rank
from tensor_sums import bit_sum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.complex64], ids=str)
def test_sums_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    for size in (0, 1, 7, 1000, 2 * LARGE_CHUNK + 3):
        tensor = torch.randint(-1000, 1000, (size,), generator=torch.Generator().manual_seed(0)).to(dtype)
        assert bit_sum(tensor.cuda()) == bit_sum(tensor)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("waiting_is_an_error")
def test_sums_do_not_wait_for_the_device() -> None:
    tensors = [torch.randn(size, device="cuda") for size in (10, 1000, 3, 5_000_000)]
    torch.cuda.set_sync_debug_mode("error")
    found = part_sums(tensors)
    torch.cuda.set_sync_debug_mode("default")
    assert sum(len(group.owners) for group in found) >= len(tensors)


@pytest.mark.usefixtures("waiting_is_an_error")
def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with dash_attn.ledger(tmp_path) as ledger:
        ledger.watch(model, optimizer)
        for _ in range(3):
            loss = model(torch.randn(16, 256, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            torch.cuda.set_sync_debug_mode("error")
            ledger.step(model, optimizer, loss=loss)
            torch.cuda.set_sync_debug_mode("default")
            optimizer.zero_grad()
    assert list(read_rank(tmp_path / "rank-0.ledger").steps) == [0, 1, 2]


def test_runs_agree_with_all_of_pytorch_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        for name in "ab":
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), dash_attn_layer(), nn.Linear(64, 64)).cuda().bfloat16()
            with dash_attn.ledger(tmp_path / name, detail=True, keep=4) as ledger:
                ledger.watch(model)
                for _ in range(2):
                    model.zero_grad()
                    loss = model(torch.randn(2, 512, 64, device="cuda", dtype=torch.bfloat16)).float().square().mean()
                    loss.backward()
                    ledger.step(model, loss=loss)
    finally:
        torch.use_deterministic_algorithms(False)
    assert compare_runs(tmp_path / "a", tmp_path / "b").agree
    run = read_rank(tmp_path / "a" / "rank-0.ledger")
    ((_, name),) = run.steps[1].layout.attention
    assert run.plans[name]["kernels"]
    assert "torch cuda:0" in run.steps[1].layout.generators


def dash_attn_layer() -> nn.Module:
    from dash_attn.nn import SelfAttention

    return SelfAttention(64, 1)
