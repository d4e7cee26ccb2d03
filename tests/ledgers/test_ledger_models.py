"""What a ledger records of models that are sharded, wrapped, compiled or sparse, and what cannot be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dash_attn
from dash_attn.ledgers import LedgerError, read_run
from dash_attn.ledgers.reading import read_rank
from recorded_steps import FILE, keys, record, sums
from tensor_sums import bit_sum


def test_sparse_gradients(tmp_path: Path) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    (step,) = record(tmp_path, model, torch.tensor([1, 1, 3]), detail=())
    assert {name for _, _, name, _ in keys(step, "gradient")} == {"weight.indices", "weight.values"}


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_shards_are_recorded_where_they_are(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(4, 4, bias=False)
    weight = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
    model.weight = nn.Parameter(weight)
    with dash_attn.ledger(tmp_path) as ledger:
        ledger.step(model)
    (step,) = read_rank(tmp_path / FILE).steps.values()
    assert sums(step)["weight", "", "weight"] == bit_sum(weight.to_local())


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    """DataParallel on the CPU calls its module; a compiled model is one module from outside, but has the parameters' names."""
    names = []
    for place, model in enumerate((nn.Sequential(nn.Linear(2, 2)), nn.DataParallel(nn.Sequential(nn.Linear(2, 2))))):
        (step,) = record(tmp_path / str(place), model, torch.ones(1, 2))
        names.append([entry.key for entry in step.layout.entries if entry.phase != "rng"])
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_compiled_model(tmp_path: Path) -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    first, second = record(tmp_path / "a", compiled, torch.ones(1, 2), steps=2)
    assert {module for module, *_ in keys(second, "forward")} == {""}
    assert keys(first, "gradient") == [("0", "", "bias", 0), ("0", "", "weight", 0)]
    inside = nn.Linear(2, 2)
    inside.compile(backend="eager")
    for place, model in enumerate((inside, nn.DataParallel(inside))):
        with dash_attn.ledger(tmp_path / f"b{place}", detail=range(5000, 5003)) as ledger:
            with pytest.raises(LedgerError, match=r"model\.compile\(\) leaves none"):
                ledger.watch(model)
            with pytest.raises(LedgerError, match=r"model\.compile\(\) leaves none"):
                ledger.step(model)
    record(tmp_path / "c", inside, torch.ones(1, 2), detail=range(0))  # without detail


def test_what_cannot_be_recorded_raises(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with dash_attn.ledger(tmp_path / "a", detail=[1]) as ledger:
        ledger.step(model)
        # The model is known now, but did not run.
        with pytest.raises(LedgerError, match="detail of step 1: no module of the model ran"):
            ledger.step(model)
    with dash_attn.ledger(tmp_path / "b", detail=True) as ledger, pytest.raises(LedgerError, match=r"call ledger.watch\(model\) before it"):
        ledger.step(model)
    with dash_attn.ledger(tmp_path / "c") as ledger, pytest.raises(TypeError, match=r"got <class 'object'> in batch\['x'\]"):
        ledger.step(model, batch={"x": object()})
    for wrong in ({"keep": -1}, {"keep": 1.5}, {"optimizer_every": 0}, {"resume_from": -1}, {"keep": True}, {"rank": False}, {"rank": ""}):
        with pytest.raises(ValueError, match="must be a whole number >= "):
            dash_attn.ledger(tmp_path / "d", **wrong)
    for wrong_steps in (3, "all", None):
        with pytest.raises(TypeError, match="detail must be a range, a set or a list of steps, or True for all"):
            dash_attn.ledger(tmp_path / "d", detail=wrong_steps)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="view must be a function of a tensor, or None; got 3"):
        dash_attn.ledger(tmp_path / "d", view=3)  # type: ignore[arg-type]
    assert not (tmp_path / "d").exists()


UNREADABLE = {
    "on the meta device": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),  # PyTorch ends a process that views its bytes
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*nested tensors.*")
def test_a_tensor_without_elements_to_read_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with dash_attn.ledger(tmp_path) as ledger, pytest.raises(TypeError, match=rf"got one that is {kind} in batch\['x'\]"):
        ledger.step(nn.Linear(2, 2), batch={"x": UNREADABLE[kind]()})


@pytest.mark.parametrize("given", [None, [nn.Linear(2, 2)]])
def test_a_model_is_a_module(tmp_path: Path, given: Any) -> None:
    with dash_attn.ledger(tmp_path) as ledger:
        for record_it in (ledger.watch, ledger.step):
            with pytest.raises(TypeError, match=f"model must be an nn.Module; got {type(given).__name__}"):
                record_it(given)


def test_a_view_gives_a_tensor(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with dash_attn.ledger(tmp_path, detail=True, view=lambda x: [x]) as ledger:  # type: ignore[arg-type, return-value]
        ledger.watch(model)
        with pytest.raises(TypeError, match="view must give a tensor for each that it takes; got list for 0"):
            model(torch.ones(1, 2))


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_variables_of_the_launcher_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Empty counts as not set."""
    for wrong in ("-1", "x", "1.5"):
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(ValueError, match=f"the environment variable {variable} must be a whole number >= 0; got '{wrong}'"):
            dash_attn.ledger(tmp_path / wrong)
    monkeypatch.setenv(variable, "")
    dash_attn.ledger(tmp_path / "empty").close()
    assert list((tmp_path / "empty").iterdir()) == [tmp_path / "empty" / "rank-0.ledger"]


def test_arrays_of_another_byte_order_are_recorded_by_value(tmp_path: Path) -> None:
    swapped = np.arange(3, dtype=np.dtype("f4").newbyteorder())
    for name, batch in (("a", swapped), ("b", swapped.astype("f4"))):
        with dash_attn.ledger(tmp_path / name) as ledger:
            ledger.step(torch.nn.Identity(), batch=batch)
    a, b = (read_run(tmp_path / name)[0].steps[0] for name in "ab")
    assert a.sums.tolist() == b.sums.tolist()


class _FailsOnce(nn.Module):
    failed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.failed:
            self.failed = True
            raise ValueError("once")
        return x


def test_a_module_that_raised_has_ended(tmp_path: Path) -> None:
    """A program may catch the error and try again, as after a lack of memory: what runs then is not inside of that module."""
    model = nn.Sequential(nn.Linear(2, 2), _FailsOnce())
    with dash_attn.ledger(tmp_path, detail=True) as ledger:
        ledger.watch(model)
        with pytest.raises(ValueError, match="once"):
            model(torch.ones(1, 2))
        ledger.step(model, loss=model(torch.ones(1, 2)))
    entries = read_run(tmp_path)[0].steps[0].layout.entries
    assert {entry.caller for entry in entries if entry.phase == "forward" and not entry.module} == {None}
    assert {entry.caller for entry in entries if entry.module == "1"} == {""}


def test_a_run_that_raised_says_so(tmp_path: Path) -> None:
    def raises() -> None:
        with dash_attn.ledger(tmp_path) as ledger:
            ledger.step(nn.Linear(2, 2))
            raise ZeroDivisionError("a test")

    with pytest.raises(ZeroDivisionError):
        raises()
    found = read_rank(tmp_path / FILE)
    assert found.ending() == "ended by ZeroDivisionError: a test"
    assert len(found.heads) == 1
