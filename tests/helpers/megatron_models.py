"""GPT models of the megatron-core package on the CPU, for tests.

Megatron runs on CUDA devices only. Two of its functions are replaced so that it computes on the CPU: the name of the device, and the
generators of dropout, which is off. The attention, the layers and the specs are the package's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from dash_attn.integrations.megatron import enable

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
OFF = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
LENGTH = 150


@contextmanager
def megatron_on_the_cpu(ranks: int = 1) -> Iterator[None]:
    """Inside a process group; `ranks` of it share each layer's heads."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    generators = SimpleNamespace(fork=nullcontext)
    try:
        with (
            patch.object(torch.cuda, "current_device", lambda: "cpu"),
            patch.object(tensor_parallel, "get_cuda_rng_tracker", lambda: generators),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()


def model(spec: Any, seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = TransformerConfig(**SIZES, **OFF | changes, use_cpu_initialization=True)
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=LENGTH, position_embedding_type="rope")


def ours(**changes: Any) -> nn.Module:
    return model(enable(get_gpt_layer_local_spec()), **changes)


def tokens(rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens, and their positions."""
    source = torch.Generator().manual_seed(1)
    return torch.randint(64, (rows, LENGTH), generator=source), torch.arange(LENGTH).expand(rows, -1)


def loss_and_gradients(net: nn.Module, mask: Tensor | None = None) -> dict[str, Tensor]:
    batch, positions = tokens()
    net.zero_grad()
    loss = net(batch, positions, mask, labels=batch).mean()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in net.named_parameters()}


def _first_call(net: nn.Module) -> tuple[float, Any, list[Tensor]]:
    """The loss of a training step, the first layer's core attention, and what that is called with."""
    attention, inputs = net.decoder.layers[0].self_attention.core_attention, []
    hook = attention.register_forward_pre_hook(lambda _, given: inputs.extend(x.detach() for x in given[:3]))
    loss = float(loss_and_gradients(net)["loss"])
    hook.remove()
    return loss, attention, inputs


def _gradients(attention: Any, inputs: list[Tensor], part: slice) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    dout = torch.randn(LENGTH, 2, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    return list(torch.autograd.grad(attention(*leaves), leaves, dout[:, :, part]))


def sharded_gpt(rank: int) -> dict[str, Any]:
    """What each of two ranks that share the heads finds, against a model of its own."""
    with megatron_on_the_cpu():
        whole_loss, whole, whole_inputs = _first_call(ours())
    with megatron_on_the_cpu(ranks=2):
        loss, mine, inputs = _first_call(ours(tensor_model_parallel_size=2))
    heads, keys = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
    own = heads, keys, keys
    expected = [x[:, :, part] for x, part in zip(_gradients(whole, whole_inputs, slice(None)), own, strict=True)]
    columns = slice(32 * rank, 32 * rank + 32)
    found = _gradients(mine, inputs, columns)
    mine.head_offset = 0
    without = _gradients(mine, inputs, columns)
    return {
        "losses": (loss, whole_loss),
        "same_inputs": [torch.equal(x, y[:, :, part]) for x, y, part in zip(inputs, whole_inputs, own, strict=True)],
        "same": [torch.equal(x, y) for x, y in zip(found, expected, strict=True)],
        "same_without": [torch.equal(x, y) for x, y in zip(without, expected, strict=True)],
    }
