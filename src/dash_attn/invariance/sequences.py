"""Gradients of weights, sequence by sequence: so that a training step has the same bits for every size of micro-batch.

Rows of a forward and of a backward depend on themselves alone inside `enable()`. What is left are sums over rows: gradients of weights.
Here a module's forward has no gradients of its parameters. Its backward computes them from the rows of each sequence, in calls of that
sequence's size, and a TreeAccumulator adds them in the order of the sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import Unsupported
from .check import not_covered
from .enabling import DOOR
from .products import gradient_of_weight
from .rows import OF_NORMS, as_rows

if TYPE_CHECKING:
    from ..distributed import TreeAccumulator

NO_BACKWARD = -1  # the number of the backward that runs
Take = Callable[[str, Tensor], None]
Gradients = dict[str, Tensor]  # by the name of the parameter in its module


class Span(NamedTuple):
    """Where a sequence is in a batch."""

    row: int
    start: int
    end: int


@contextmanager
def per_sequence(model: nn.Module, accumulator: TreeAccumulator, sequences: Tensor | Sequence[int]) -> Iterator[None]:
    """For the forward and the backward of one micro-batch, inside `enable()`. Each sequence is a micro-batch of the accumulator, whose
    `finish` sets `.grad`: `TreeAccumulator(micro_batches=sequences of a step)`.

    sequences: the attention mask (batch, length) of a padded batch, or the lengths of sequences packed in one row. Padding must not
        enter the loss. A loss must be a sum over sequences, not divided by anything that depends on the micro-batch.
    """
    if not DOOR.is_open:
        raise RuntimeError("per_sequence keeps its promise inside dash_attn.invariance.enable() only")
    shape, spans = _laid_out(sequences)
    if shape[0] * shape[1] < OF_NORMS and any(parameter.is_cuda for parameter in model.parameters()):
        raise Unsupported(
            f"on a GPU a norm's backward sums fewer than {OF_NORMS} rows in another order: pad this batch of {shape[0]} x {shape[1]}"
        )
    with accumulator.taking(model, len(spans)) as take, ExitStack() as stack:
        uses = _Uses(model, shape, spans, take)
        for module in uses.modules:
            stack.callback(delattr, module, "forward")
            module.forward = uses.forward_of(module)
        yield
        uses.finish()


class _Uses:
    """Of the parameters in one micro-batch. A parameter of several modules, or of one that is called again, has several."""

    def __init__(self, model: nn.Module, shape: tuple[int, int], spans: list[Span], take: Take) -> None:
        self.shape, self.spans, self.take = shape, spans, take
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.modules = {module: name for name, module in model.named_modules() if _trainable(module)}
        for module, name in self.modules.items():
            _check_kind(name, module)
        self.anchor = torch.zeros((), requires_grad=True)  # so that also an embedding's rows have a backward
        self.waiting = Counter[str]()  # uses whose backward is still to come
        self.held: dict[str, list[Tensor]] = {}
        self.taken: set[str] = set()
        self.lost: Tensor | None = None  # how many gradients padding has

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(x: Tensor, *rest: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(x, *rest, **named)
            if any(isinstance(given, Tensor) for given in (*rest, *named.values())):
                raise Unsupported(f"per_sequence takes modules of one tensor; {self.modules[module]!r} was called with several")
            if len(x) == 1 < self.shape[0] and not x.is_floating_point():
                x = x.expand(self.shape[0], *x.shape[1:])  # places, which all sequences share
            device = x.device.type
            autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))  # as it is now
            with _without_gradients(module):
                out = original(x, *rest, **named)
            if torch._C._current_graph_task_id() == NO_BACKWARD:  # else a checkpoint computes it again
                self.waiting.update(self.names[parameter] for parameter in _trainable(module).values())

            def compute(rows: Tensor) -> Tensor:
                with torch.enable_grad(), autocast:
                    again: Tensor = original(rows, *rest, **named)
                return again

            return _used(out, x, self.anchor, lambda x, grad: self.gather(module, compute, x, grad))

        return forward

    def gather(self, module: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
        """Of one sequence after the other, so that no more than one gradient is there."""
        along, names = self._place_of_length(module, x), {key: self.names[parameter] for key, parameter in _trainable(module).items()}
        if again := self.taken & set(names.values()):
            raise Unsupported(f"per_sequence has summed {min(again)!r} already, which a checkpoint uses again: use_reentrant=False")
        if self.lost is None:  # the first: what comes behind it has none at padding, if this has none
            self.lost = grad.count_nonzero() - sum(_cut(grad, span, along).count_nonzero() for span in self.spans)
        for place, span in enumerate(self.spans):
            found = _gradients(module, compute, _cut(x, span, along), as_rows(_cut(grad, span, along)))
            for key, gradient in found.items():
                self._add(names[key], place, gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True))
        self.waiting.subtract(names.values())
        for name in names.values():
            if self.waiting[name] <= 0:
                self._release(name)

    def _add(self, name: str, place: int, gradient: Tensor) -> None:
        """What is used elsewhere, too, waits until all are there."""
        if self.waiting[name] <= 1 and name not in self.held:
            self.take(name, gradient)
            return
        held = self.held.setdefault(name, [])
        held[place : place + 1] = [held[place] + gradient if place < len(held) else gradient]

    def _release(self, name: str) -> None:
        for gradient in self.held.pop(name, ()):
            self.take(name, gradient)
        self.taken.add(name)

    def finish(self) -> None:
        for name in list(self.held):
            self._release(name)
        for parameter, name in self.names.items():
            if parameter.grad is not None:
                raise Unsupported(f"per_sequence cannot cut the gradient of {name!r}, which is used outside of its module's forward")
        if self.lost is not None and self.lost.item():
            raise ValueError("the loss has a gradient at padding: mask it there, so that sequences alone are summed")

    def _place_of_length(self, module: nn.Module, x: Tensor) -> int:
        """Tokens come behind the batch, or behind its heads."""
        batch, length = self.shape
        found = [place for place in ((1, 2) if x.ndim == 4 else (1,)) if x.ndim > 1 and x.shape[place] == length]
        if x.shape[0] != batch or len(found) != 1:
            raise Unsupported(
                f"per_sequence must find the tokens of each sequence; {self.modules[module]!r} got {tuple(x.shape)} in a batch of"
                f" {batch} x {length}{': pad to a length that is not its number of heads' if len(found) == 2 else ''}"
            )
        return found[0]


class _Use(torch.autograd.Function):
    """Gives what it gets; its backward tells what came back."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, anchor: Tensor, gather: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gather = gather
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gather(*ctx.saved_tensors, grad)
        return grad if ctx.needs_input_grad[0] else None, None, None, None


_used: Any = _Use.apply


def _gradients(module: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Gradients:
    """Of a module's parameters, from the rows of one sequence. Its size alone decides how they are summed."""
    rows = as_rows(x) if x.is_floating_point() else x.flatten()
    wanted = _trainable(module)
    if not _is_product(module):
        found = torch.autograd.grad(compute(rows), list(wanted.values()), grad)
        return dict(zip(wanted, found, strict=True))
    rows = rows.to(grad.dtype)  # as autocast did
    pair = (grad, rows) if isinstance(module, nn.Linear) else (rows, grad)
    return {name: gradient_of_weight(*pair) if name == "weight" else grad.sum(0) for name in wanted}


def _laid_out(sequences: Tensor | Sequence[int]) -> tuple[tuple[int, int], list[Span]]:
    """The shape of the batch, and where each sequence is. A mask on a GPU makes the host wait once."""
    if not isinstance(sequences, Tensor):
        ends = list(accumulate(sequences))
        if not ends or min(sequences) < 1:
            raise ValueError(f"per_sequence takes lengths of 1 or more; got {list(sequences)}")
        return (1, ends[-1]), [Span(0, end - length, end) for length, end in zip(sequences, ends, strict=True)]
    if sequences.ndim != 2:
        raise ValueError(f"per_sequence takes a mask (batch, length), or lengths; got a tensor {tuple(sequences.shape)}")
    spans = []
    for row, kept in enumerate(sequences.bool().cpu()):
        tokens = kept.nonzero().flatten().tolist()
        if not tokens or tokens[-1] - tokens[0] != len(tokens) - 1:
            raise ValueError(f"per_sequence takes masks whose rows have tokens side by side, left or right of padding; row {row} has not")
        spans.append(Span(row, tokens[0], tokens[-1] + 1))
    return (len(sequences), sequences.shape[1]), spans


def _cut(x: Tensor, span: Span, along: int) -> Tensor:
    return x[span.row].narrow(along - 1, span.start, span.end - span.start)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Its own, not those of modules in it."""
    return {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad}


def _check_kind(name: str, module: nn.Module) -> None:
    why = not_covered(module)
    of_rows = _is_product(module) or isinstance(module, nn.Embedding) or all(x.ndim == 1 for x in _trainable(module).values())
    if why is not None or not of_rows or list(module.children()):
        why = why or "it is neither a product, a norm nor an embedding"
        raise Unsupported(f"per_sequence cannot cut the gradients of {name!r} ({type(module).__name__}): {why}")


def _is_product(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    own: dict[str, Any] = module._parameters
    kept = dict(own)
    own.update({name: parameter.detach() for name, parameter in kept.items() if parameter is not None})
    try:
        yield
    finally:
        own.update(kept)
