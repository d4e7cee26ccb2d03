"""Every kind of attention gives the same bits in every run, whatever else keeps the machine busy; unordered ones do not.

DASH_ATTN_REPEATS sets how often a run is repeated on a GPU (1000 unless told otherwise); the CPU takes a few interleavings.
"""

from __future__ import annotations

import pytest

from devices import disturbed, on_each_device
from families import NAMES, assert_same, family
from gpu_helpers import REPEATS, poisoned_memory

RUNS = {"cpu": min(4, REPEATS), "cuda": REPEATS}
MOST_TRIES = 50  # of an unordered run, until it differs


@pytest.mark.parametrize("name", NAMES)
@on_each_device
def test_the_same_bits_every_time(device: str, name: str) -> None:
    chosen = family(name, device)
    inputs = chosen.inputs(device)
    expected = chosen.run(inputs)
    before = [x.clone() for x in inputs]
    for run in range(RUNS[device]):
        with disturbed(device, run), poisoned_memory():
            result = chosen.run(inputs)
        assert_same(result, expected, f"run {run}")
    assert_same(*({str(i): x for i, x in enumerate(tensors)} for tensors in (inputs, before)), "inputs")


@pytest.mark.parametrize("name", NAMES)
@on_each_device
def test_unordered_differs(device: str, name: str) -> None:
    """The control: without an order dQ changes from run to run, and nothing else does."""
    chosen = family(name, device)
    inputs = chosen.inputs(device)
    if device == "cuda" and name == "softcap":  # the GPU has no such kernel, and says so
        with pytest.raises(ValueError, match="unordered"):
            chosen.run(inputs, accumulation="unordered")
        return
    # Chains that meet at every tile; the default order keeps them so far apart that they mostly arrive in rank order.
    options = {"accumulation": "unordered"} if name == "varlen" else {"accumulation": "unordered", "schedule": "ascending"}
    first = chosen.run(inputs, **options)
    for run in range(MOST_TRIES):
        with disturbed(device, run):
            again = chosen.run(inputs, **options)
        assert_same({**again, "dq": first["dq"]}, first, "unordered")
        if not again["dq"].equal(first["dq"]):
            return
    pytest.fail(f"dQ was the same in {MOST_TRIES} unordered runs")


@pytest.mark.parametrize("name", ["window", "documents", "tile map", "softcap", "sink"])
@on_each_device
def test_what_makes_a_family_reaches_the_result(device: str, name: str) -> None:
    """Another control: these are not plain causal attention under another name."""
    chosen = family(name, device)
    inputs = chosen.inputs(device)
    assert not chosen.run(inputs)["out"].equal(family("causal", device).run(inputs[:4])["out"])
