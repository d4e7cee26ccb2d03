"""PyTorch's own context_parallel, and Accelerate's, around our attention: the bits of one process, or an error (gloo, two ranks)."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import torch_context_workers
from dash_attn.integrations import _torch_context_parallel, sdpa
from processes import Group, run_processes

Found = list[dict[str, Any]]
ERRORS = {
    "a plain block outside": 'query is a DTensor .* sdpa.enable(context_parallel="torch") takes those',
    "a group outside": 'query is a DTensor .* sdpa.enable(context_parallel="torch") takes those',
    "a plain block inside": 'enter sdpa.enable(context_parallel="torch") before it',
    "torch inside": 'enter sdpa.enable(context_parallel="torch") before it',
    "other rows": "has dealt the rows as 'zigzag', and sharding is 'contiguous': pass sharding='zigzag'",
    "other rows, given": "has dealt the rows as 'zigzag', and sharding is Sharding",
    "Hugging Face": 'attn_implementation="dash_attn" sees only those of its own rank: .*attn_implementation="sdpa"',
    "cut tiles": "4 chunks of equal length fit sequences of 512 rows",
    "not in PyTorch's block": "takes DTensors inside PyTorch's context_parallel only",
    "other placement": "shards dimension 2, the sequence",
    "replicated": "shards dimension 2, the sequence",
    "mixed": "key differs from query",
}
GROUP = Group(torch_context_workers.everything, torch_context_workers.RANKS)


@pytest.fixture(scope="module")
def found() -> Found:
    """By rank."""
    return GROUP.found


@pytest.mark.parametrize("dealt", ["zigzag", "contiguous"])
def test_pytorch_deals_the_rows_that_we_assume(found: Found, dealt: str) -> None:
    assert all(one["rows"][dealt] for one in found)


@pytest.mark.parametrize("case", [f"{dealt}, causal={causal}" for dealt in ("zigzag", "contiguous") for causal in (True, False)])
def test_inside_pytorchs_block_bits_are_those_of_one_process(found: Found, case: str) -> None:
    assert all(all(one["attention"][case].values()) for one in found), found


@pytest.mark.parametrize("way", ["ulysses", "checkpointed"])
def test_so_they_are_in_other_ways(found: Found, way: str) -> None:
    assert all(all(one[way].values()) for one in found), found


@pytest.mark.parametrize("dealt", ["zigzag", "contiguous"])
def test_a_block_with_the_mesh_may_be_inside_pytorchs(found: Found, dealt: str) -> None:
    assert all(all(one["inside"][dealt].values()) for one in found), found


def test_modules_that_pytorch_has_wrapped(found: Found) -> None:
    if found[0]["wrapped module"] is None:
        pytest.skip("this PyTorch does not wrap modules")
    assert all(all(one["wrapped module"].values()) for one in found), found


def test_outside_pytorchs_block_calls_are_plain(found: Found) -> None:
    assert all(all(one["outside"].values()) for one in found), found


def test_a_training_step_ends_with_the_weights_of_one_process(found: Found) -> None:
    for one in found:
        weights = one["training"]
        assert weights["auto"] == weights["one process"]
        assert weights["ascending"] != weights["one process"]  # the hash sees the order of sums


def test_pytorchs_own_ring_has_other_bits(found: Found) -> None:
    """The control: its block cannot run on the CPU, but its ring can."""
    for one in found:
        assert "does not have a sharding strategy registered" in one["ring"]["block"]
        assert one["ring"]["close"]
    assert not all(one["ring"]["equal"] for one in found)


@pytest.mark.parametrize("case", ERRORS)
def test_what_would_be_wrong_raises(found: Found, case: str) -> None:
    pattern = ".*".join(map(re.escape, ERRORS[case].split(".*")))
    for one in found:
        assert re.search(pattern, one["errors"][case]), one["errors"][case]
        assert one["errors"][case].startswith(("ValueError: ", "RuntimeError: "))


def test_accelerate(found: Found) -> None:
    if found[0]["accelerate"] is None:
        pytest.skip("needs an Accelerate with ParallelismConfig")
    assert all(all(one["accelerate"].values()) for one in found), found


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_part_of_a_mesh_and_traced_calls() -> None:
    for found in run_processes(torch_context_workers.slower, 2 * torch_context_workers.RANKS):
        assert all(all(bits.values()) for bits in found.values()), found


@pytest.mark.exhaustive
def test_a_model_of_transformers_with_accelerate() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate.parallelism_config")
    for found in run_processes(torch_context_workers.model_of_transformers, torch_context_workers.RANKS):
        assert found["ours"] < 1e-5
    assert found["control"] > 1e-4


def test_pytorch_decides_the_sharding() -> None:
    with pytest.raises(TypeError, match="PyTorch deals the rows"), sdpa.enable(context_parallel="torch", sharding="zigzag"):
        pass


def test_other_names_raise() -> None:
    with pytest.raises(ValueError, match="or \"torch\"; got 'pytorch'"), sdpa.enable(context_parallel="pytorch"):
        pass


def test_a_pytorch_that_tells_nothing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a guess: rows may have been dealt in another way."""
    monkeypatch.setattr(_torch_context_parallel, "import_module", lambda name: SimpleNamespace())
    with pytest.raises(RuntimeError, match=f"cannot find out what PyTorch {re.escape(torch.__version__)} has done"):
        _torch_context_parallel.dealt_by_torch()


def test_pytorchs_function_is_not_taken_for_its_block() -> None:
    assert not _torch_context_parallel.is_inside()
    with sdpa.enable():
        assert functional.scaled_dot_product_attention.__module__.startswith("dash_attn")
        assert not _torch_context_parallel.is_inside()
