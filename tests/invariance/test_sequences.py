"""A training step has the same bits for every size of micro-batch, padded or packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dash_attn import Unsupported, invariance
from dash_attn.distributed import TreeAccumulator
from dense import same_bits
from model_sizes import SMALL

LENGTHS = (17, 40, 5, 33, 1, 26, 40, 9)
SIZES = (1, 2, 4, 8)
Gradients = dict[str, Tensor]


def model_of(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from dash_attn.integrations import huggingface

    huggingface.enable()
    torch.manual_seed(0)
    base = {**SMALL, "pad_token_id": 0, "max_position_embeddings": 64}
    wide = {**base, "head_dim": 16}
    config = {
        "llama": lambda: transformers.LlamaConfig(**base, tie_word_embeddings=False),
        "llama tied": lambda: transformers.LlamaConfig(**base, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**base),
        "gemma3": lambda: transformers.Gemma3TextConfig(**wide, sliding_window=20),
        "gpt2": lambda: transformers.GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=64, n_positions=64, pad_token_id=0),
    }[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash_attn").eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def sequences() -> list[Tensor]:
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(1, 64, (length,), generator=chance) for length in LENGTHS]


def loss_of(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """A sum over tokens, each with a target of its own."""
    return -(invariance.log_probs(logits, tokens * 7 % 64) * mask * (tokens % 3 - 1)).sum() / 100


def padded(batch: list[Tensor], side: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    tokens = pad_sequence(batch, batch_first=True, padding_side=side)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in batch], batch_first=True, padding_side=side)
    places = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if side == "left" else {}
    return {"input_ids": tokens, "attention_mask": mask, **places}, mask, mask


def packed(batch: list[Tensor]) -> tuple[dict[str, Tensor], Tensor, list[int]]:
    tokens, places = torch.cat(batch)[None], torch.cat([torch.arange(len(sequence)) for sequence in batch])[None]
    return {"input_ids": tokens, "position_ids": places}, torch.ones_like(tokens), [len(sequence) for sequence in batch]


def step(model: Any, size: int, layout: str = "right") -> Gradients:
    accumulator = TreeAccumulator(len(LENGTHS))
    model.zero_grad()
    with invariance.enable():
        for start in range(0, len(LENGTHS), size):
            batch = sequences()[start : start + size]
            inputs, mask, where = packed(batch) if layout == "packed" else padded(batch, layout)
            with invariance.per_sequence(model, accumulator, where):
                loss_of(model(**inputs, use_cache=False).logits, inputs["input_ids"], mask).backward()
        accumulator.finish(model, divide=False)
    return gradients(model)


def plain(model: Any, size: int) -> Gradients:
    model.zero_grad()
    with invariance.enable():
        for start in range(0, len(LENGTHS), size):
            inputs, mask, _ = padded(sequences()[start : start + size], "right")
            loss_of(model(**inputs, use_cache=False).logits, inputs["input_ids"], mask).backward()
    return gradients(model)


def gradients(model: nn.Module) -> Gradients:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def differing(some: Gradients, others: Gradients) -> list[str]:
    assert set(some) == set(others)
    return [name for name in some if not same_bits(some[name], others[name])]


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "gemma3", "qwen2"])
def test_every_size_of_micro_batch(name: str) -> None:
    """The control: plain sums, of which most differ."""
    model = model_of(name)
    whole = step(model, len(LENGTHS))
    assert set(whole) == {name for name, _ in model.named_parameters()}
    for size in SIZES:
        for layout in ("right", "left", *(["packed"] if name != "gpt2" else [])):
            assert differing(step(model, size, layout), whole) == [], f"{size} sequences, {layout}"
    expected = plain(model, 8)
    for parameter, grad in whole.items():
        torch.testing.assert_close(grad, expected[parameter], rtol=1e-3, atol=1e-5)
    assert len(differing(plain(model, 1), expected)) > len(whole) / 2


def test_a_checkpoint_computes_rows_again() -> None:
    model = model_of("llama tied")
    whole = step(model, 8)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert differing(step(model, 2), whole) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_and_autocast(dtype: torch.dtype) -> None:
    model = model_of("qwen2")
    with torch.autocast("cpu", torch.bfloat16):
        assert differing(step(model, 1), step(model, 8)) == []
    model.to(dtype)
    assert differing(step(model, 1), step(model, 8)) == []
    assert all(grad.dtype == dtype for grad in step(model, 4).values())


def test_frozen_weights_and_those_without_a_gradient() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "frozen": nn.Linear(4, 4).requires_grad_(False), "unused": nn.LayerNorm(4)})
    accumulator, x = TreeAccumulator(2), torch.randn(2, 3, 4)
    with invariance.enable(), invariance.per_sequence(model, accumulator, torch.ones(2, 3)):
        model["frozen"](model["used"](x)).square().sum().backward()
        with torch.no_grad():
            assert not model["used"](x).requires_grad, "a sampler may run inside"
    accumulator.finish(model, divide=False)
    assert set(gradients(model)) == {"used.weight", "used.bias"}
    expected = torch.autograd.grad(model["frozen"](model["used"](x)).square().sum(), list(model["used"].parameters()))
    for parameter, grad in zip(model["used"].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    assert "forward" not in vars(model["used"])


class Scaled(nn.Module):
    """Uses a weight of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.layer.weight


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate * self.weight


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = Both()

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x)


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT)


@pytest.mark.parametrize(
    ("model", "sequences", "error", "why"),
    [
        (nn.Sequential(nn.BatchNorm1d(4)), [2, 3], Unsupported, r"gradients of '0' \(BatchNorm1d\): statistics of the batch"),
        (nn.Sequential(nn.Conv1d(5, 5, 1)), [2, 3], Unsupported, r"gradients of '0' \(Conv1d\): convolutions"),
        (nn.Sequential(Turned(5, 4)), [2, 3], Unsupported, r"gradients of '0' \(Turned\): it is neither a product"),
        (Scaled(), [2, 3], Unsupported, "'layer.weight', which is used outside of its module's forward"),
        (Gated(), [2, 3], Unsupported, "modules of one tensor; 'both' was called with several"),
        (nn.Sequential(nn.Linear(4, 4)), [2, 2], Unsupported, r"the tokens of each sequence; '0' got \(1, 5, 4\) in a batch of 1 x 4"),
        (nn.Sequential(nn.Linear(4, 4)), [2, 0], ValueError, r"lengths of 1 or more; got \[2, 0\]"),
        (nn.Sequential(nn.Linear(4, 4)), torch.tensor([[1, 0, 1, 1, 1]]), ValueError, "tokens side by side.*; row 0 has not"),
        (nn.Sequential(nn.Linear(4, 4)), torch.tensor([[1, 1, 1, 1, 0]]), ValueError, "the loss has a gradient at padding"),
        (
            nn.Sequential(nn.Linear(4, 4)),
            [1, 1, 3],
            RuntimeError,
            "has added 0 of its 2 micro-batches, and cannot add 3 more: call finish, or reset",
        ),
    ],
    ids=str,
)
def test_what_is_refused(model: nn.Module, sequences: Any, error: type[Exception], why: str) -> None:
    accumulator = TreeAccumulator(2)
    with pytest.raises(error, match=why), invariance.enable(), invariance.per_sequence(model, accumulator, sequences):
        model(torch.randn(1, 5, 4)).sum().backward()
    assert accumulator._stacks == {}
    assert all("forward" not in vars(module) for module in model.modules())


def test_heads_that_are_as_many_as_tokens() -> None:
    norm = nn.Sequential(nn.LayerNorm(3))
    with invariance.enable(), pytest.raises(Unsupported, match="pad to a length that is not its number of heads"):  # noqa: SIM117
        with invariance.per_sequence(norm, TreeAccumulator(2), torch.ones(2, 4)):
            norm(torch.randn(2, 4, 4, 3)).sum().backward()


def test_outside_of_enable_it_promises_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"inside dash_attn.invariance.enable\(\) only"):  # noqa: SIM117
        with invariance.per_sequence(nn.Linear(4, 4), TreeAccumulator(1), [3]):
            pass
