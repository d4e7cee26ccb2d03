"""Train a small GPT so that the run can be repeated bit by bit, and keep a ledger of it.

python examples/train.py --out runs/a
python examples/train.py --out runs/b          (again: the same weights)
dash-attn diff runs/a runs/b

python examples/train.py --out runs/b --resume (after a kill at any moment: continues from the last checkpoint)
torchrun --nproc-per-node 2 examples/train.py --out runs/c    (on 1, 2 or 4 processes: the same weights)

A run on a CPU takes less than a minute. `--help` shows all settings; docs/examples.md says what is promised and what is not.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: cuBLAS sums in one order

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dash_attn
from dash_attn.distributed import MicroBatchSampler, TreeAccumulator
from dash_attn.nn import SelfAttention


@dataclass(frozen=True)
class Config:
    """Every field is an option of the command. Those of MAY_CHANGE may be others when a run resumes: no bit depends on them."""

    out: str = "runs/a"  # checkpoint and ledger
    resume: bool = False  # continue from the checkpoint in `out`; from the start if there is none yet
    checkpoint_every: int = 5  # steps
    workers: int = 0  # processes that make data
    detail_from: int = -1  # from this step on, the ledger has inputs and outputs of every module; -1: never

    seed: int = 0
    steps: int = 20
    micro_batches: int = 4  # per step, on all processes together
    size: int = 2  # sequences per micro-batch
    sequences: int = 100  # in the data
    length: int = 256  # tokens per sequence
    vocabulary: int = 64
    layers: int = 4
    width: int = 64
    heads: int = 4
    dropout: float = 0.1
    learning_rate: float = 3e-3
    bf16: bool = True  # autocast; weights stay float32
    compile: bool = False
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


MAY_CHANGE = ("out", "resume", "checkpoint_every", "workers", "detail_from")


# The model.


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, config.heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


# The data.


class Sentences(Dataset[Tensor]):
    """Each token is followed by one of four others. A sequence depends on its number alone, not on the worker that makes it."""

    def __init__(self, config: Config) -> None:
        self.seed, self.count, self.length, self.vocabulary = config.seed, config.sequences, config.length, config.vocabulary
        source = torch.Generator().manual_seed(self.seed)
        self.next: list[list[int]] = torch.randint(self.vocabulary, (self.vocabulary, 4), generator=source).tolist()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        source = torch.Generator().manual_seed(self.seed * self.count + number)
        choices = torch.randint(4, (self.length,), generator=source).tolist()
        tokens = [number % self.vocabulary]
        for choice in choices:
            tokens.append(self.next[tokens[-1]][choice])
        return torch.tensor(tokens)


def micro_batches(config: Config, first_step: int) -> Iterator[Tensor]:
    """Those of this process, from a step on, without end. The order is one for any number of processes, and can be entered anywhere."""
    sampler = MicroBatchSampler(config.sequences, config.size, config.micro_batches, seed=config.seed)
    # A loader draws a random number whenever it starts. From a generator of its own: a resumed run starts it once more.
    loader = DataLoader(Sentences(config), batch_sampler=sampler, num_workers=config.workers, generator=torch.Generator())
    epoch, step = divmod(first_step, sampler.steps)
    while True:
        sampler.set_epoch(epoch, step)
        yield from loader
        epoch, step = epoch + 1, 0


# One step.


def train_step(model: nn.Module, accumulator: TreeAccumulator, batches: Iterator[Tensor], config: Config) -> tuple[Tensor, Any]:
    """Sets gradients. The losses of all micro-batches of the step, and this process's tokens by the number of their micro-batch."""
    step_seed = int(torch.randint(2**62, ()))  # the same on every process, and the only use of the generator that runs on
    losses, batch = torch.zeros(config.micro_batches, device=config.device), {}
    for index in accumulator.owned:
        batch[index] = next(batches).to(config.device)
        with random_numbers_of(step_seed + index, config):
            loss = loss_of(model, batch[index], config)
            loss.backward()
        losses[index] = loss.detach()
        accumulator.add(model)
    accumulator.finish(model)  # the mean over all micro-batches, in one order for any number of processes
    if dist.is_initialized():
        dist.all_reduce(losses)  # every place has one summand that is not zero: no order to get wrong
    return losses, batch


@contextmanager
def random_numbers_of(seed: int, config: Config) -> Iterator[None]:
    """Dropout by the number of a micro-batch, so that it does not matter which process computes it, and what it did before."""
    with torch.random.fork_rng([torch.cuda.current_device()] if config.device == "cuda" else []):
        torch.manual_seed(seed)
        yield


def loss_of(model: nn.Module, tokens: Tensor, config: Config) -> Tensor:
    with torch.autocast(config.device, torch.bfloat16, enabled=config.bf16):
        logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def learning_rate(step: int, config: Config) -> float:
    """Up in a tenth of the run, then down along a cosine. A function of the step has no state that a checkpoint could lose."""
    warm = max(1, config.steps // 10)
    return config.learning_rate * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / config.steps)))


# Checkpoints hold all that a run carries from step to step.


def checkpoint_of(config: Config) -> Path:
    return Path(config.out) / "checkpoint.pt"


def save(config: Config, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Under another name first: a kill while it is written leaves the checkpoint before."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    kept = {
        "step": step,
        "config": asdict(config),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    unfinished = checkpoint_of(config).with_suffix(".unfinished")
    torch.save(kept, unfinished)
    unfinished.replace(checkpoint_of(config))


def load(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The first step to do."""
    if not config.resume or not checkpoint_of(config).exists():
        return 0
    kept = torch.load(checkpoint_of(config), map_location=config.device, weights_only=True)
    changed = {name: (old, getattr(config, name)) for name, old in kept["config"].items() if old != getattr(config, name)}
    changed = {name: values for name, values in changed.items() if name not in MAY_CHANGE}
    if changed:
        raise ValueError(f"a run resumes with the settings it had, except for {', '.join(MAY_CHANGE)}; changed (before, now): {changed}")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    torch.set_rng_state(kept["random"].cpu())
    return int(kept["step"])


# The run.


def deterministic(config: Config) -> None:
    torch.use_deterministic_algorithms(True)  # what has no order of its own raises
    torch.utils.deterministic.fill_uninitialized_memory = False  # nobody reads it here, and filling takes time
    torch.set_num_threads(1)  # on a CPU: with more, layers may sum in another order, and torchrun sets another number than python
    torch.manual_seed(config.seed)


def train(config: Config) -> str:
    """A hash of the weights at the end."""
    deterministic(config)
    model = Gpt(config).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    first_step = load(config, model, optimizer)
    compiled = torch.compile(model) if config.compile else model
    accumulator, batches = TreeAccumulator(config.micro_batches), micro_batches(config, first_step)
    detail = range(config.detail_from, config.steps) if config.detail_from >= 0 else ()
    options: dict[str, Any] = {"detail": detail, "keep": 4, "resume_from": first_step if config.resume else None}
    start = time.perf_counter()
    with dash_attn.ledger(config.out, **options) as ledger:
        ledger.watch(compiled, optimizer)
        for step in range(first_step, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            losses, batch = train_step(compiled, accumulator, batches, config)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ledger.step(compiled, optimizer, loss=losses, batch=batch)
            optimizer.zero_grad()
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                save(config, step + 1, model, optimizer)
            say(f"step {step:3}  loss {losses.mean().item():.4f}")
    tokens = (config.steps - first_step) * config.micro_batches * config.size * config.length
    say(f"{tokens / (time.perf_counter() - start):,.0f} tokens per second")
    bits = hash_of(model)
    say(f"weights {bits}")
    return bits


def hash_of(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def config_from(arguments: Sequence[str] | None) -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comments = dict(re.findall(r"^    (\w+): .*  # (.*)$", inspect.getsource(Config), re.MULTILINE))
    for field in fields(Config):
        name, default = f"--{field.name.replace('_', '-')}", field.default
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
        parser.add_argument(name, default=default, help=f"{comments.get(field.name, '')} (default: {default})".lstrip(), **kind)
    config = Config(**vars(parser.parse_args(arguments)))
    if config.steps < 1:
        parser.error(f"--steps must be at least 1; got {config.steps}")
    if Path(config.out).exists() and not Path(config.out).is_dir():
        parser.error(f"--out must be a folder; {config.out} is a file")
    if not config.resume and (Path(config.out) / f"rank-{os.environ.get('RANK', 0)}.ledger").exists():
        parser.error(f"there is a run in {config.out}: continue it with --resume, or name another folder with --out")
    return config


def main(arguments: Sequence[str] | None = None) -> None:
    config = config_from(arguments)
    if not dist.is_torchelastic_launched():
        train(config)
        return
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if config.device == "cuda" else "gloo")
    train(config)
    dist.barrier()  # a process that ends early would take its connections along
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
