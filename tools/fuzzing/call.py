"""A random call: what it is given, the sequences that it is made of, and what each of them gives by the definition or alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dash_attn import flash_attn_func
from dense import largest_error, same_bits
from fuzzing.drawing import Attended, alone
from kept_pairs import dense_modified, kept_pairs_at_once

Leaves = dict[str, Tensor]
OutAndLse = tuple[Tensor, Tensor | None]
Sequence = tuple[Tensor, Tensor, Tensor]  # q, k and v of one: (1, length, heads, dim)
ERRORS = 4  # roundings that are allowed of the largest number
LSE_OF_A_KERNEL = 1e-4  # exponentials are approximate there


@dataclass
class Modifiers:
    """What is beside q, k, v and the mask."""

    scores: dict[str, Any] = field(default_factory=dict)  # softmax_scale, softcap
    dropout_p: float = 0.0
    seeds: Tensor | None = None
    slopes: Tensor | None = None  # (heads,) or (sequences, heads)
    head_offset: int = 0
    schedule: Any = "auto"

    def given(self) -> dict[str, Any]:
        """As arguments."""
        found = {**self.scores, "schedule": self.schedule, "head_offset": self.head_offset}
        if self.dropout_p:
            found |= {"dropout_p": self.dropout_p, "dropout_seed": self.seeds}
        return found if self.slopes is None else {**found, "alibi_slopes": self.slopes}

    def of(self, number: int) -> Modifiers:
        """Of one sequence."""
        seeds = None if self.seeds is None else self.seeds[number : number + 1]
        slopes = self.slopes if self.slopes is None or self.slopes.ndim == 1 else self.slopes[number]
        return Modifiers(self.scores, self.dropout_p, seeds, slopes, self.head_offset, self.schedule)

    def kept(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Pairs that dropout keeps in a sequence, (query heads, queries, keys)."""
        if not self.dropout_p or self.seeds is None:
            return None
        first = self.head_offset * (q.shape[2] // k.shape[2])
        seed, sizes = int(self.seeds[0]), (q.shape[1], k.shape[1], self.dropout_p)
        return torch.stack([kept_pairs_at_once(seed, first + head, *sizes) for head in range(q.shape[2])]).to(q.device)


@dataclass
class Call:
    """`leaves` have gradients, if the function has. `cut` gives the sequences of leaves, `join` puts their results together."""

    function: str
    words: str
    leaves: Leaves
    run: Callable[[Leaves], OutAndLse]
    cut: Callable[[Leaves], list[Sequence]]
    join: Callable[[Leaves, list[Tensor], list[Tensor]], OutAndLse]
    attended: list[Attended]
    modifiers: Modifiers = field(default_factory=Modifiers)
    ordered: bool = True
    differentiable: bool = True
    rounded: bool = False  # q and k are, on the way to the products
    comparable: bool = True  # bit by bit with its sequences alone
    check: Callable[[], str | None] = lambda: None  # of what else the last run has changed
    run_alone: Callable[[Leaves], OutAndLse] | None = None  # where it is not flash_attn_func of each sequence
    cotangents: tuple[Tensor, ...] = ()  # of the output, and maybe of the LSE
    draw_cotangents: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]] | None = None  # once there is an output

    def __post_init__(self) -> None:
        device = next(iter(self.leaves.values())).device
        self.attended = [one.on(device) for one in self.attended]

    def ours(self) -> Leaves:
        return self._results(self.run, self.leaves)

    def elsewhere(self) -> Leaves:
        """The same numbers in other memory, in the plainest layout."""
        return self._results(self.run, {name: x.clone(memory_format=torch.contiguous_format) for name, x in self.leaves.items()})

    def truth(self) -> Leaves:
        return self._results(self._by_definition, {name: x.double() for name, x in self.leaves.items()})

    def alone(self) -> Leaves:
        """By flash_attn_func, a sequence at a time."""
        return self._results(self.run_alone or self._one_by_one, self.leaves)

    def _results(self, run: Callable[[Leaves], OutAndLse], leaves: Leaves) -> Leaves:
        """Output, LSE and gradients, by name."""
        leaves = {name: x.detach().requires_grad_(self.differentiable) for name, x in leaves.items()}
        out, lse = run(leaves)
        found = {"out": out} if lse is None else {"out": out, "lse": lse}
        if self.differentiable:
            self.cotangents = self.cotangents or self.draw_cotangents(out, lse)  # type: ignore[misc]
            outputs = tuple(found.values())[: len(self.cotangents)]
            of_outputs = [x.to(o.dtype) for x, o in zip(self.cotangents, outputs, strict=True)]
            gradients = torch.autograd.grad(outputs, list(leaves.values()), of_outputs)
            found |= {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
        return {name: x.detach() for name, x in found.items()}

    def _by_definition(self, leaves: Leaves) -> OutAndLse:
        outs, lses = [], []
        for number, (q, k, v) in enumerate(self.cut(leaves)):
            own = self.modifiers.of(number)
            more = {"kept": own.kept(q, k), "dropout_p": own.dropout_p, "slopes": own.slopes, "sinks": leaves.get("sinks")}
            scores = {"scale": own.scores.get("softmax_scale"), "softcap": own.scores.get("softcap", 0.0)}
            with q.device:
                out, lse = dense_modified(q, k, v, self.attended[number].keep, **more, **scores)
            outs.append(out)
            lses.append(lse)
        return self.join(leaves, outs, lses)

    def _one_by_one(self, leaves: Leaves) -> OutAndLse:
        outs, lses = [], []
        for number, sequence in enumerate(self.cut(leaves)):
            own = {**alone(*self.attended[number]), **self.modifiers.of(number).given(), "sinks": leaves.get("sinks")}
            out, lse = flash_attn_func(*sequence, **own, return_lse=True)
            outs.append(out)
            lses.append(lse)
        return self.join(leaves, outs, lses)

    def allowed(self, truth: Leaves) -> dict[str, float]:
        """By name, how far a result may be from the truth: roundings of the largest terms. Kernels round weights to 16 bits."""
        dtype = self.leaves[next(iter(self.leaves))].dtype
        rounding, of_lse = torch.finfo(dtype).eps, LSE_OF_A_KERNEL if self.leaves[next(iter(self.leaves))].is_cuda else 0.0
        arithmetic = rounding if dtype == torch.float64 or self.rounded else torch.finfo(torch.float32).eps
        sizes = Sizes.of(self)
        gradient = max([sizes.gradient, *(largest(x) for name, x in truth.items() if name.startswith("gradient"))])
        largest_lse = max(sizes.scores, largest(truth["lse"]) if "lse" in truth else 0.0)  # of small scores: the logarithm of their number
        of_sums = arithmetic * (sizes.scores + sizes.equal_terms) + rounding
        found = {"out": of_sums * sizes.values, "lse": arithmetic * (largest_lse + sizes.equal_terms) + of_lse}
        of_gradient = of_sums * gradient
        return {name: ERRORS * found.get(name, of_gradient) for name in truth}


@dataclass(frozen=True)
class Sizes:
    """Of the largest terms that a call sums."""

    scores: float
    values: float
    gradient: float
    equal_terms: float  # how many are rounded the same way each time, where tokens are all the same: by half a rounding

    @classmethod
    def of(cls, call: Call) -> Sizes:
        scores, values, gradient, equal_terms = 1.0, 1.0, 1.0, 0.0
        repeats = any(0 in x.stride() for x in call.leaves.values())
        with torch.no_grad():
            sequences = call.cut({name: x.double() for name, x in call.leaves.items()})
        dout = max([1.0, *(longest_row(x) if x.ndim > 2 else largest(x) for x in call.cotangents)])
        for q, k, v in sequences:
            scale = abs(call.modifiers.scores.get("softmax_scale") or q.shape[-1] ** -0.5)
            biased = 0.0 if call.modifiers.slopes is None else largest(call.modifiers.slopes) * max(q.shape[1], k.shape[1])
            scores = max(scores, 1 + scale * longest_row(q) * longest_row(k) + biased)
            values = max(values, largest(v) / (1 - call.modifiers.dropout_p))
            weight = dout * max(1.0, longest_row(v)) / (1 - call.modifiers.dropout_p)
            gradient = max(gradient, weight, scale * weight * max(largest(q), largest(k)))
            equal_terms = max(equal_terms, repeats * max(q.shape[1], k.shape[1]) / (2 * ERRORS))
        return cls(scores, values, gradient, equal_terms)


def answers(function: Callable[..., OutAndLse], *more: Any, **options: Any) -> Callable[[Leaves], OutAndLse]:
    """Of a function that takes q, k and v first."""
    return lambda leaves: function(*map(leaves.get, "qkv"), *more, **options, sinks=leaves.get("sinks"), return_lse=True)


def each(leaves: Leaves) -> list[Sequence]:
    return list(zip(*(leaves[name].split(1) for name in "qkv"), strict=True))


def in_rows(_: Leaves, outs: list[Tensor], lses: list[Tensor]) -> OutAndLse:
    return torch.cat(outs), torch.cat(lses)


def end_to_end(_: Leaves, outs: list[Tensor], lses: list[Tensor]) -> OutAndLse:
    return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], -1)


def largest(x: Tensor) -> float:
    return x.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if x.numel() else 0.0


def longest_row(x: Tensor) -> float:
    return x.double().norm(dim=-1).max().item() if x.numel() else 0.0


def too_far(found: Leaves, truth: Leaves, allowed: dict[str, float]) -> str | None:
    """The first result that is off, in words."""
    for name, expected in truth.items():
        if found[name].shape != expected.shape:
            return f"{name} has shape {tuple(found[name].shape)}, expected {tuple(expected.shape)}"
        try:
            off = largest_error(found[name], expected) if expected.numel() else 0.0
        except AssertionError as error:
            return f"{name}: {error}"
        if not off <= allowed[name]:
            return f"{name} is off by {off:.3g}, allowed are {allowed[name]:.3g}"
    return None


def other_bits(found: Leaves, expected: Leaves, zeros_alike: bool = False) -> str | None:
    """The first result that has other bits. zeros_alike: -0.0 is 0.0, where PyTorch summed parts."""
    for name, x in expected.items():
        same = torch.equal(found[name], x) if zeros_alike and not x.isnan().any() else same_bits(found[name], x)
        if not same:
            return f"{name} has other bits"
    return None
