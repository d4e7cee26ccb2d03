"""CUDA graphs of torch.compile and of training programs, each the first use of the library in its process: eager's bits."""

from __future__ import annotations

import pytest

from gpu_helpers import run_script

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_compiled_calls(mode: str) -> None:
    check(f"main({mode!r})")


@pytest.mark.parametrize("what", ["graphed_callables", "captured_step"])
def test_graphs_of_a_training_program(what: str) -> None:
    check(f"{what}()")


def check(call: str) -> None:
    done = run_script(f"import compiled_graphs; compiled_graphs.{call}", limit=240)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
