"""examples/train.py as a module, as it is or with faults planted into a copy, and runs of it that are small."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
SMALL: dict[str, Any] = {
    **{"steps": 9, "micro_batches": 2, "size": 1, "sequences": 40, "length": 64, "vocabulary": 8},
    **{"layers": 4, "width": 32, "heads": 2, "device": "cpu"},
}
NOT_DETERMINISTIC = ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)")
MADE = "    model = Gpt(config).to(config.device)\n"
LOADED = "    first_step = load(config, model, optimizer)\n"
BEGUN = "            losses, batch = train_step("
# Its backward adds rows in an order left to chance, as index_add_ does on a GPU.
UNORDERED_EMBEDDING = """
class AnyOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.save_for_backward(weight, tokens)
        return weight[tokens]

    @staticmethod
    def backward(ctx, gradient):
        import numpy
        weight, tokens = ctx.saved_tensors
        order = torch.from_numpy(numpy.random.default_rng().permutation(tokens.numel()))
        rows, places = gradient.flatten(0, 1)[order], tokens.flatten()[order]
        return torch.zeros_like(weight).index_add_(0, places, rows), None


class Unordered(nn.Embedding):
    def forward(self, tokens):
        return AnyOrder.apply(self.weight, tokens)


"""
OF_WORKER = """
def of_worker(number):
    if number == 1:
        torch.utils.data.get_worker_info().dataset.seed = 5


"""
FLIP = """
            if step == 7:
                model.layers[2].mlp[0].weight.data.view(-1).view(torch.int32)[3] ^= 1 << 12
"""
FAULTS: dict[str, list[tuple[str, str]]] = {
    "unordered attention in layer 3": [
        NOT_DETERMINISTIC,
        (MADE, MADE + '    model.layers[3].attention.options["accumulation"] = "unordered"\n'),
    ],
    "index_add_ without determinism": [
        ("class Gpt(nn.Module):", UNORDERED_EMBEDDING + "class Gpt(nn.Module):"),
        ("self.tokens = nn.Embedding(", "self.tokens = Unordered("),
        NOT_DETERMINISTIC,
    ],
    "another seed in one worker": [
        ("num_workers=config.workers,", "num_workers=config.workers, worker_init_fn=of_worker,"),
        ("def micro_batches(", OF_WORKER + "def micro_batches("),
    ],
    "a flipped bit at step 7": [(BEGUN, FLIP + BEGUN)],
    "other data": [("manual_seed(self.seed * self.count + number)", "manual_seed(99 + number)")],
    "ends after step 4": [(BEGUN, "            if step == 5:\n                raise KeyboardInterrupt\n" + BEGUN)],
    "waits after step 4": [(BEGUN, "            if step == 5:\n                time.sleep(600)\n" + BEGUN)],
    "lost generators": [('    torch.set_rng_state(kept["random"].cpu())\n', "")],
    "unseeded dropout": [("        torch.manual_seed(seed)\n", "        torch.seed()\n")],
}  # fmt: skip


def module_of(path: Path) -> ModuleType:
    name = f"train_example_{path.stem}_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    with pytest.MonkeyPatch.context() as patch:  # the example sets a variable of cuBLAS, which other tests must not see
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        spec.loader.exec_module(module)
    return module


def copy_with(fault: str, folder: Path) -> Path:
    """A copy of the example with a fault. What it replaces must be there, once."""
    text = EXAMPLE.read_text()
    for old, new in FAULTS[fault]:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {EXAMPLE.name}"
        text = text.replace(old, new)
    path = folder / f"{fault.replace(' ', '_')}.py"
    path.write_text(text)
    return path


def train(out: Path, path: Path = EXAMPLE, **settings: Any) -> str:
    """In this process. The hash of the weights."""
    module = module_of(path)
    with settings_kept():
        bits: str = module.train(module.Config(out=str(out), **{**SMALL, **settings}))
    return bits


@contextmanager
def settings_kept() -> Iterator[None]:
    """The example sets what belongs to a process."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    filled, generator = torch.utils.deterministic.fill_uninitialized_memory, torch.get_rng_state()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)
