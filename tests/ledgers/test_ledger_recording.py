"""What a ledger records, and that recording changes nothing."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.attention.observers import observers
from dash_attn.ledgers import collecting, compare_runs, read_run
from dash_attn.ledgers.collecting import HostCopies
from dash_attn.ledgers.comparing import _compare_rank
from dash_attn.ledgers.reading import RankPair, read_rank
from dense import same_bits
from recorded_steps import FILE, keys, record, sums
from tensor_sums import bit_sum
from tiny_gpt import TinyGpt, Training


def test_recording_changes_no_bit(tmp_path: Path) -> None:
    """Neither weights nor generators: with detail, without, and without a ledger at all."""

    class NoLedger:
        __enter__ = watch = step = lambda self, *_, **__: self
        __exit__ = lambda self, *_: None  # noqa: E731

    runs = [Training(tmp_path / str(place), model={"dropout": 0.1}, ledger={"detail": detail}) for place, detail in enumerate(((), True))]
    ends = [run.run() for run in runs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_gpt.dash_attn.ledger", lambda *_, **__: NoLedger(), raising=False)
        ends.append(runs[0].run())
    for end in ends[:2]:
        assert all(same_bits(one, other) for one, other in zip(end["model"].values(), ends[2]["model"].values(), strict=True))
        assert torch.equal(end["torch"], ends[2]["torch"])


def test_a_step_by_default(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    x = torch.randn(4, 3)
    with dash_attn.ledger(tmp_path, optimizer_every=2) as ledger:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            ledger.step(model, optimizer, loss=loss, batch={"x": x, "names": ["a", "b"], "scale": 2.0, "array": np.arange(3)})
    first, second = read_rank(tmp_path / FILE).steps.values()
    found = sums(second)
    assert found["batch", "", "batch['x']"] == bit_sum(x)
    assert found["loss", "", "loss"] == bit_sum(loss)
    assert found["gradient", "0", "weight"] == bit_sum(model[0].weight.grad)
    assert found["weight", "1", "running_mean"] == bit_sum(model[1].running_mean)
    assert found["rng", "", "torch cpu"] == bit_sum(torch.get_rng_state())
    assert {name for phase, _, name in found if phase == "batch"} == {
        "batch['x']", "batch['names'][0]", "batch['names'][1]", "batch['scale']", "batch['array']",
    }  # fmt: skip
    assert ("optimizer", "0", "weight momentum_buffer") in sums(first)
    assert ("optimizer", "0", "weight momentum_buffer") not in found
    assert ("optimizer", "", "group 0 lr") in found
    gradients = [name for _, _, name, _ in keys(second, "gradient")]
    assert gradients == ["bias", "weight", "bias", "weight"]  # last module first
    assert len(read_rank(tmp_path / FILE).path.read_bytes()) < 10_000


def test_detail_is_in_execution_order(tmp_path: Path) -> None:
    (step,) = record(tmp_path, nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3, requires_grad=True))
    assert keys(step, "forward") == [
        ("", "input", "0", 0),
        ("0", "input", "0", 0),
        ("0", "parameter", "weight", 0),
        ("0", "parameter", "bias", 0),
        ("0", "output", "", 0),
        ("1", "input", "0", 0),
        ("1", "output", "", 0),
        ("", "output", "", 0),
    ]
    assert keys(step, "backward") == [("1", "output", "", 0), ("0", "output", "", 0), ("", "input", "0", 0)]
    takers = [entry.takers for entry in step.layout.entries if entry.phase == "backward"]
    assert takers == [(), ("1",), ("", "0")]
    phases = list(dict.fromkeys(entry.phase for entry in step.layout.entries))
    assert phases == ["batch", "forward", "loss", "backward", "gradient", "weight", "rng"]


class Named(nn.Module):
    """Keyword arguments, a dict as result, a change in place behind a module, a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        y = self.inner(input=x)
        y += 1
        return {"y": self.inner(y), "z": y}


def test_any_arguments_and_results(tmp_path: Path) -> None:
    (step,) = record(tmp_path, Named(), torch.ones(2, 3))
    forward = keys(step, "forward")
    assert ("inner", "input", "input", 0) in forward
    assert ("inner", "output", "", 1) in forward
    assert ("", "output", "['z']", 0) in forward


def test_micro_batches_are_calls_of_one_step(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with dash_attn.ledger(tmp_path, detail=True) as ledger:
        ledger.watch(model)
        parts = [torch.ones(2, 3), torch.zeros(2, 3)]
        losses = []
        for part in parts:
            losses.append(model(part).square().mean())
            losses[-1].backward()
        ledger.step(model, loss=losses, batch=parts)
    (step,) = read_rank(tmp_path / FILE).steps.values()
    assert [call for _, role, _, call in keys(step, "forward") if role == "output"] == [0, 1]
    assert [call for *_, call in keys(step, "backward")] == [0, 1]
    assert len(keys(step, "loss")) == 2


def test_recomputed_activations_are_recorded_as_such(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    (step,) = record(tmp_path, Checkpointed(), torch.ones(2, 3))
    assert ("inner", "input", "0", 0) in keys(step, "forward")
    assert ("inner", "input", "0", 0) in keys(step, "recompute")


def test_detail_at_chosen_steps_and_kept_elements(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    steps = record(tmp_path, nn.Linear(3, 3), x, steps=4, detail={1, 3}, keep=4)
    assert [bool(keys(step, "forward")) for step in steps] == [False, True, False, True]
    place = next(place for place, entry in enumerate(steps[1].layout.entries) if entry.phase == "batch")
    assert np.frombuffer(steps[1].kept_of(place), dtype=np.float32).tolist() == [0, 1, 2, 3]
    kept_without_detail = {entry.phase for entry in steps[0].layout.entries if entry.kept}
    assert kept_without_detail == {"loss"}


def test_hooks_are_gone_after_the_ledger(tmp_path: Path) -> None:
    model = TinyGpt()
    before = len(observers)
    record(tmp_path, nn.Sequential(model, nn.Identity()), torch.zeros(1, 8, dtype=torch.int64), detail=range(5))
    assert len(observers) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_activations_are_not_kept_alive(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with dash_attn.ledger(tmp_path, detail=True) as ledger:
        ledger.watch(model)
        model(torch.ones(7, 3))
        gc.collect()
        alive = [found for found in gc.get_objects() if type(found) is Tensor and not found.is_nested and found.shape == (7, 3)]
        assert not alive


def test_attention_calls_are_recorded(tmp_path: Path) -> None:
    Training(tmp_path, steps=2).run()
    found = read_rank(tmp_path / FILE)
    ((module, name),) = set(found.steps[1].layout.attention)
    assert module is None  # no detail
    plan = found.plans[name]
    q = torch.empty(2, 64, 1, 16)
    explained = dash_attn.explain(dash_attn.flash_attn_func, q, q, q, causal=True)
    assert (plan["order_hash"], plan["schedule"], plan["backend"]) == (explained.order_hash, explained.schedule, "cpu")
    assert len(found.steps[1].layout.attention) == 5


def test_packed_sequences_and_orders_that_do_not_fit_are_recorded(tmp_path: Path) -> None:
    """Whatever runs: a forward without a possible backward is not the ledger's business."""
    q, ends = torch.randn(24, 1, 16), torch.tensor([0, 10, 24], dtype=torch.int32)
    dense = torch.randn(1, 300, 1, 16)
    with dash_attn.ledger(tmp_path) as ledger:
        dash_attn.flash_attn_varlen_func(q, q, q, ends, ends, 14, 14, causal=True)
        dash_attn.flash_attn_func(dense, dense, dense, causal=True, schedule="shift")
        ledger.step(nn.Linear(2, 2))
    found = read_rank(tmp_path / FILE)
    orders = [found.plans[name]["order_hash"] for _, name in found.steps[0].layout.attention]
    assert orders[0] == "planned sequence by sequence"
    assert orders[1].startswith("not explained: ")


class Late:
    """Copies of a GPU, which arrive when somebody waits for them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.copies, self.on_host = HostCopies(tensors), False

    def wait(self) -> list[bytes]:
        return self.copies.wait()


class Lost(Late):
    def wait(self) -> list[bytes]:
        raise RuntimeError("CUDA error: unspecified launch failure")


def steps_of(folder: Path) -> list[int]:
    return list(read_rank(folder / "rank-0.ledger").steps)


def test_a_step_is_written_when_the_next_one_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def look(_: int, __: nn.Module) -> None:
        seen.append(steps_of(tmp_path / "late"))

    Training(tmp_path / "at once").run()
    monkeypatch.setattr(collecting, "HostCopies", Late)
    Training(tmp_path / "late", before_step=look).run()
    assert seen[1:] == [[], [0]]
    assert steps_of(tmp_path / "late") == [0, 1, 2]
    assert compare_runs(tmp_path / "at once", tmp_path / "late").agree


def test_what_a_failed_device_had_not_told_is_lost_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: int, _: nn.Module) -> None:
        if step == 2:
            monkeypatch.setattr(collecting, "HostCopies", Lost)

    with pytest.warns(RuntimeWarning, match="lacks its last step: CUDA error"):
        Training(tmp_path, before_step=fail).run()
    assert steps_of(tmp_path) == [0, 1]
    assert compare_runs(tmp_path, tmp_path).verdict == "incomplete"
    assert read_rank(tmp_path / FILE).ending() == "ended by RuntimeError: CUDA error: unspecified launch failure"


def test_the_head_has_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    record(tmp_path / "a", nn.Linear(2, 2), torch.ones(1, 2))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr("sys.argv", ["train.py", "--other"])
    record(tmp_path / "b", nn.Linear(2, 2), torch.ones(1, 2))
    found = read_run(tmp_path / "a")[0].environment
    assert found["versions"]["torch"] == torch.__version__
    assert {finding.id for finding in dash_attn.doctor()} == set(found["doctor"])
    changes = {name: values for name, *values in compare_runs(tmp_path / "a", tmp_path / "b").environment}
    assert changes["variables.CUBLAS_WORKSPACE_CONFIG"] == [":4096:8", ":16:8"]
    assert "--other" in changes["argv"][1]
    assert "time" not in changes


def test_runs_in_different_detail_are_compared_where_they_can(tmp_path: Path) -> None:
    Training(tmp_path / "a", steps=4, ledger={"detail": range(1, 3), "keep": 8}).run()
    Training(tmp_path / "b", steps=2, watched=False, ledger={"optimizer_every": 1}).run()
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.steps) == ("incomplete", (0, 1))
    detail = [f"rank 0: A alone has {phase}, in 1 step" for phase in ("forward", "backward")]
    assert sorted(found.lacking) == sorted(["rank 0: 2 steps from 2 to 3 of A alone", *detail])
    partial = compare_runs(tmp_path / "a", tmp_path / "b", partial=True)
    assert partial.agree
    assert partial.taken_as_partial == found.lacking


def test_other_shapes_and_missing_tensors_are_differences(tmp_path: Path) -> None:
    torch.manual_seed(0)
    narrow = nn.Linear(3, 2)
    record(tmp_path / "a", narrow, torch.ones(1, 3), detail=())
    frozen = nn.Linear(3, 2)
    frozen.load_state_dict(narrow.state_dict())
    frozen.bias.requires_grad_(False)
    record(tmp_path / "b", frozen, torch.ones(1, 3), detail=())
    record(tmp_path / "c", nn.Linear(3, 4), torch.ones(1, 3), detail=())
    missing, shapes = (compare_runs(tmp_path / "a", tmp_path / other).first for other in "bc")
    assert missing is not None
    assert (missing.pair.how, missing.pair.entry.tensor, missing.culprit.module) == ("recorded in A alone", "bias", None)
    assert shapes is not None
    assert shapes.pair.how == "float32 (2, 3) in A, float32 (4, 3) in B"


def test_long_runs_are_compared_quickly(tmp_path: Path) -> None:
    """Steps that are the same need no look at every tensor: 500 steps of 400 tensors."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(200))
    with dash_attn.ledger(tmp_path) as ledger:
        for _ in range(2):
            ledger.step(model)
    run = read_rank(tmp_path / FILE)
    run.steps.update(dict.fromkeys(range(2, 500), run.steps[1]))
    start = time.perf_counter()
    found = _compare_rank(RankPair(0, run, run))
    assert len(found.steps) == 500
    assert time.perf_counter() - start < 1.0  # 0.003 s here, 1.5 s pair by pair


def test_ranks_are_compared_one_by_one(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        for rank in range(2):
            with dash_attn.ledger(tmp_path / name, rank=rank) as ledger:
                ledger.step(model, loss=factor if rank == 1 else 1.0)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.ranks == (0, 1)
    assert found.first is not None
    assert (found.first.rank, found.first.pair.entry.phase) == (1, "loss")
    assert found.first.pair.element is not None
    assert found.first.pair.element.a.startswith("1.0 (0x3ff")


def test_the_rank_is_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    dash_attn.ledger(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-5.ledger"]
