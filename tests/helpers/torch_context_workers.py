"""What two ranks do inside PyTorch's own context_parallel. All in one run, because starting processes takes longer than what they do."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import _attention as of_torch
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dash_attn import flash_attn_func
from dash_attn.distributed import Sharding, TreeAccumulator, positions
from dash_attn.integrations import sdpa
from dash_attn.integrations.huggingface import mask_for
from processes import said

RANKS, ROWS, HEADS, DIM = 2, 512, (4, 2, 2), 16
EXAMPLE = Path(__file__).parents[2] / "examples/long_context.py"
Block = Callable[[], AbstractContextManager[None]]
Bits = dict[str, bool]


def everything(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    return {
        "rows": {dealt: _rows(mesh, dealt) for dealt in ("zigzag", "contiguous")},
        "attention": {f"{dealt}, causal={causal}": _attention(mesh, dealt, causal) for dealt in _DEALT for causal in (True, False)},
        "inside": {dealt: _attention(mesh, dealt, True, inside=True) for dealt in _DEALT},
        "ulysses": _attention(mesh, "zigzag", True, ulysses=2),
        "checkpointed": _attention(mesh, "zigzag", True, attend=_checkpointed),
        "wrapped module": _wrapped_module(mesh),
        "outside": _outside(mesh),
        "training": _training(rank, mesh),
        "ring": _ring(mesh),
        "errors": _errors(mesh),
        "accelerate": _accelerate(rank),
    }


def slower(rank: int) -> dict[str, Bits]:
    """On four ranks, of which two share a sequence."""
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "cp"))["cp"]
    return {
        "part of a mesh": _attention(mesh, "zigzag", True),
        "traced": _attention(mesh, "zigzag", True, attend=torch.compile(_attend, backend="eager")),
    }


# Rows and attention.

_DEALT = {"zigzag": True, "contiguous": False}


@contextmanager
def _dealt(name: str) -> Iterator[None]:
    """How PyTorch's blocks deal rows. Users set the same option."""
    of_torch._cp_options.enable_load_balance = _DEALT[name]
    try:
        yield
    finally:
        of_torch._cp_options.enable_load_balance = True


def _rows(mesh: Any, dealt: str) -> bool:
    """Whether PyTorch's rows are those of `positions`."""
    rows = torch.arange(ROWS)
    with _dealt(dealt), context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0], no_restore_buffers={rows}):
        return torch.equal(rows, positions(ROWS, mesh, sharding=dealt))


def _tensors() -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, ROWS, DIM, generator=source) for heads in (*HEADS, HEADS[0])]


def _on_one_process(causal: bool) -> list[Tensor]:
    """out, dQ, dK and dV of the whole sequence, in PyTorch's layout."""
    q, k, v, dout = (x.transpose(1, 2) for x in _tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(q, k, v, causal=causal)
    return [x.detach().transpose(1, 2).contiguous() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _checkpointed(*arguments: Any) -> Tensor:
    return checkpoint(_attend, *arguments, use_reentrant=False)  # type: ignore[no-any-return]


def _attention(mesh: Any, dealt: str, causal: bool, inside: bool = False, attend: Callable[..., Tensor] = _attend, **options: Any) -> Bits:
    """Whether this rank's rows of out, dQ, dK and dV are those of one process. `inside`: our block is inside PyTorch's."""
    tensors, truth = _tensors(), _on_one_process(causal)
    outer: Block = nullcontext if inside else lambda: sdpa.enable(context_parallel="torch", **options)
    inner: Block = (lambda: sdpa.enable(context_parallel=mesh, sharding=dealt)) if inside else nullcontext
    with _dealt(dealt), outer(), context_parallel(mesh, buffers=[*tensors, *truth], buffer_seq_dims=[2] * 8), inner():
        return _compare(lambda *qkv: attend(*qkv, causal), tensors, truth)


def _compare(attend: Callable[..., Tensor], tensors: list[Tensor], truth: list[Tensor]) -> Bits:
    q, k, v, dout = (x.clone() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(q, k, v)
    assert not isinstance(out, DTensor)
    found = (out, *torch.autograd.grad(out, leaves, dout))
    return {name: torch.equal(mine, its) for name, mine, its in zip(("out", "dq", "dk", "dv"), found, truth, strict=True)}


class _Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v, True)


def _wrapped_module(mesh: Any) -> Bits | None:
    """PyTorch's other way: hooks of modules make the DTensors. None where PyTorch does not have it."""
    if not hasattr(of_torch, "_ContextParallel"):
        return None
    style = of_torch._ContextParallel(seq_dim=2, attention_type=of_torch._ContextParallel.AttentionType.SDPA)
    module = parallelize_module(_Attention(), mesh, style)
    balancer = of_torch._HeadTailLoadBalancer(ROWS, RANKS, "cpu")
    tensors = of_torch._context_parallel_shard(mesh, [*_tensors(), *_on_one_process(True)], [2] * 8, balancer)
    of_torch._enable_context_parallel_dispatcher()
    try:
        with sdpa.enable(context_parallel="torch"):
            return _compare(module, tensors[:4], tensors[4:])  # type: ignore[arg-type]
    finally:
        of_torch._disable_context_parallel_dispatcher()


def _outside(mesh: Any) -> Bits:
    """After PyTorch's block a call is a plain one, and after ours the name is PyTorch's again."""
    before = functional.scaled_dot_product_attention
    with sdpa.enable(context_parallel="torch"):
        with context_parallel(mesh, buffers=_tensors(), buffer_seq_dims=[2] * 4):
            pass
        found = _compare(lambda *qkv: _attend(*qkv, True), _tensors(), _on_one_process(True))
    return found | {"restored": functional.scaled_dot_product_attention is before}


# Training, and PyTorch's own attention.


def _training(rank: int, mesh: Any) -> dict[str, str]:
    """A hash of the weights after a step on the two ranks, and on one process with dash-attn."""
    example = _example()
    alone = [dist.new_group([other]) for other in range(RANKS)][rank]
    weights = {"one process": _trained(example, example.whole, _sequence(example), alone)}
    for schedule in ("auto", "ascending"):
        buffers = _sequence(example)
        with sdpa.enable(context_parallel="torch", schedule=schedule), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            weights[schedule] = _trained(example, _as_pytorch_calls_it, buffers, mesh.get_group())
    return weights


def _example() -> Any:
    """Its layers work on fixed chunks of tokens, so that weights can have the same bits on every number of ranks."""
    spec = importlib.util.spec_from_file_location("long_context", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sequence(example: Any) -> list[Tensor]:
    tokens, labels = example.sequence(example.LONG, 0)
    return [tokens.clone(), labels.clone(), torch.arange(example.LONG)]


def _as_pytorch_calls_it(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attend(*(x.transpose(1, 2) for x in (q, k, v)), True).transpose(1, 2)


def _trained(example: Any, attend: Callable[..., Tensor], buffers: list[Tensor], group: Any) -> str:
    torch.manual_seed(0)
    model = example.Model()
    places = buffers[2]
    twins = {chunk: example.twin(model) for chunk in (places[:: example.CHUNK] // example.CHUNK).tolist()}
    example.loss_of(list(twins.values()), attend, *buffers).backward()
    accumulator = TreeAccumulator(example.CHUNKS, group)
    for leaf in accumulator.owned:  # in the order of the example
        chunk = example.CHUNKS - 1 - leaf // 2 if leaf % 2 else leaf // 2
        for parameter, its in zip(model.parameters(), twins[chunk].parameters(), strict=True):
            parameter.grad = its.grad
        accumulator.add(model, weight=example.CHUNK)
    accumulator.finish(model)
    torch.optim.AdamW(model.parameters(), lr=3e-3).step()
    return example.fingerprint(model.parameters())  # type: ignore[no-any-return]


def _ring(mesh: Any) -> dict[str, Any]:
    """PyTorch's own attention: its block has no kernel for the CPU. Its ring, called directly, has other bits than its single process."""
    q, k, v = (torch.randn(1, 4, ROWS, DIM, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    buffers = [q, k, v, functional.scaled_dot_product_attention(q, k, v, is_causal=True)]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        words = said(lambda: functional.scaled_dot_product_attention(*buffers[:3], is_causal=True))
        out = of_torch._templated_ring_attention(mesh.get_group(), 2, kernel, *buffers[:3], is_causal=True)[0]  # type: ignore[arg-type]
        return {"block": words, "equal": torch.equal(out, buffers[3]), "close": torch.allclose(out, buffers[3], atol=1e-5)}


# Errors.


def _errors(mesh: Any) -> dict[str, str]:
    tensors = _tensors()[:3]
    outer: dict[str, Block] = {
        "a plain block outside": sdpa.enable,
        "a group outside": lambda: sdpa.enable(context_parallel=mesh),
    }
    inner: dict[str, Block] = {
        "a plain block inside": sdpa.enable,
        "torch inside": lambda: sdpa.enable(context_parallel="torch"),
        "other rows": lambda: sdpa.enable(context_parallel=mesh, sharding="contiguous"),
        "other rows, given": lambda: sdpa.enable(context_parallel=mesh, sharding=Sharding.contiguous(ROWS, RANKS)),
    }
    found = {name: said(lambda block=block: _one_call(mesh, block, nullcontext)) for name, block in outer.items()}  # type: ignore[misc]
    found |= {name: said(lambda block=block: _one_call(mesh, nullcontext, block)) for name, block in inner.items()}  # type: ignore[misc]
    with context_parallel(mesh, buffers=[x.clone() for x in tensors], buffer_seq_dims=[2] * 3):
        found["Hugging Face"] = said(lambda: mask_for(1, ROWS, ROWS))
    with sdpa.enable(context_parallel="torch"):
        for name, placement in {"not in PyTorch's block": Shard(2), "other placement": Shard(1), "replicated": Replicate()}.items():
            placed = [DTensor.from_local(x, mesh, [placement], run_check=False) for x in tensors]
            found[name] = said(lambda placed=placed: _attend(*placed, True))  # type: ignore[misc]
        placed = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in tensors]
        found["mixed"] = said(lambda: _attend(placed[0], tensors[1], placed[2], True))
    # Last: behind an error PyTorch 2.11 leaves its block as if it were still inside.
    found["cut tiles"] = said(lambda: _one_call(mesh, lambda: sdpa.enable(context_parallel="torch"), nullcontext, rows=256))
    return found


def _one_call(mesh: Any, outer: Block, inner: Block, rows: int = ROWS) -> object:
    buffers = [x[:, :, :rows].contiguous() for x in _tensors()[:3]]
    with outer(), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3), inner():
        return _attend(*buffers, True).shape


# Accelerate.


def _accelerator(rank: int) -> Any:
    """Accelerate refuses context parallelism on CPU processes. Without this one check the rest is as on GPUs."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost")
    ParallelismConfig._validate_accelerator = lambda *_: None
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=RANKS))


def _accelerate(rank: int) -> Bits | None:
    """None: it is not there."""
    if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("accelerate.parallelism_config") is None:
        return None
    accelerator = _accelerator(rank)
    module = accelerator.prepare(_Scaled())
    tensors, truth = _tensors(), _on_one_process(True)
    with (
        sdpa.enable(context_parallel="torch"),
        accelerator.maybe_context_parallel(buffers=[*tensors, *truth], buffer_seq_dims=[2] * 8, no_restore_buffers=set(tensors)),
    ):
        assert tensors[0].shape[2] == ROWS // RANKS
        return _compare(module, tensors, truth)


class _Scaled(_Attention):
    """With a weight, which a prepared model must have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(q * self.scale, k, v)


def model_of_transformers(rank: int) -> dict[str, float]:
    """The largest difference of logits between two ranks and one process, and what it is where ranks attend to their own rows only.

    Its linear layers see fewer rows than on one process, so that nothing else than this is promised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, attn_implementation="sdpa", **sizes))
    tokens, places = torch.randint(64, (1, ROWS)), torch.arange(ROWS)[None]
    with torch.no_grad():
        truth = model(tokens, position_ids=places).logits
    accelerator = _accelerator(rank)
    model = accelerator.prepare(model)
    buffers = [tokens, places, truth]
    with (
        sdpa.enable(context_parallel="torch"),
        accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)),
    ):
        logits = model(tokens, position_ids=places).logits
        logits.sum().backward()
    with torch.no_grad():
        control = model(tokens, position_ids=places).logits
    return {"ours": float((logits - truth).abs().max().detach()), "control": float((control - truth).abs().max())}
