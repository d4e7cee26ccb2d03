"""Calls that were made before: one look-up finds their options, checked, and what the backend has prepared for them.

Shapes, strides, dtypes, devices and choices decide all of it. What remains per call is addresses, allocations and launches.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import Prepared, cache_backend_for, run
from ..call.call import Call, Gradients, Grads, Modifiers, Saved
from ..call.kv_cache import CacheCall
from ..call.offsets import SequenceOffsets
from ..call.options import AttentionOptions, Choices
from ..masks import BooleanMask, Mask
from .autograd import Attention, attention_backward, attention_forward
from .observers import LOG_CALLS, log_cache_call, observers

MOST_KNOWN, MOST_OF_A_MASK = 1024, 16


class KnownCall:
    """All calls of these shapes and choices. `options` are there once one of them has passed all checks."""

    __slots__ = ("options", "prepared", "prepared_backward")
    alone = True
    run_new: Callable[[Any], Saved] = staticmethod(attention_forward)
    prepare: Callable[[Any], Callable[[], Prepared | None] | None] = staticmethod(run.prepared)

    def __init__(self) -> None:
        self.options: AttentionOptions | None = None
        self.prepared: Callable[[], Prepared | None] = _not_asked
        self.prepared_backward: Callable[[], Prepared | None] = _not_asked

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: SequenceOffsets | None = None, seen: BooleanMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Once there are options. seen: the mask, where it is a matrix."""
        options = self.options
        assert options is not None
        modifiers = None if seen is None or not seen.has_partial_blocks else Modifiers(elements=seen)
        if has_gradient(q, k, v):
            result: tuple[Tensor, Tensor] = apply_attention(q, k, v, None, options, offsets, modifiers, self)  # type: ignore[no-untyped-call]
            return result
        return self.forward(Call(q, k, v, options, offsets, None, modifiers))

    def forward(self, call: Call | CacheCall) -> Saved:
        prepared = self.prepared()
        saved = None if prepared is None or observers else prepared.forward(call)
        if saved is None:
            saved = self.run_new(call)
            if prepared is None and self.prepared is not _nothing:
                # Unordered sums look at PyTorch's settings each time.
                self.prepared = (self.prepare(call) if call.options.ordered else None) or _nothing
        return saved

    def backward(self, call: Call, saved: Saved, grads: Grads) -> Gradients:
        prepared = self.prepared_backward()
        gradients = None if prepared is None else prepared.backward(call, saved, grads)
        if gradients is None:
            gradients = attention_backward(call, saved, grads)
            if call.options.ordered:  # asked each time: strides of the gradient may be others than those that were prepared for
                self.prepared_backward = run.prepared(call, saved, grads) or _not_asked
        return gradients


def attend(call: CacheCall) -> Saved:
    """Of a call with a cache that was checked."""
    if LOG_CALLS:
        log_cache_call(call)
    return cache_backend_for(call.options.backend, call.q.device).attention_with_cache(call)


class KnownCacheCall(KnownCall):
    """Of calls with a cache."""

    __slots__ = ()
    run_new = staticmethod(attend)

    @staticmethod
    def prepare(call: CacheCall) -> Callable[[], Prepared | None] | None:
        return cache_backend_for(call.options.backend, call.q.device).prepared(call)


def has_gradient(*tensors: Tensor) -> bool:
    """Whether somebody may differentiate the call. Within forward-mode levels every call goes through autograd, which refuses them."""
    return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors))


# Attention.apply without what it does for torch.func's transforms, which are refused before.
apply_attention = super(torch.autograd.Function, Attention).apply


def _not_asked() -> None:
    """What is prepared before the first call."""


def _nothing() -> None:
    """What is prepared where the backend was asked and prepares nothing: it is not asked again."""


def known_of(tensors: tuple[Tensor, ...], choices: Choices, *others: Any, seen: BooleanMask | None = None) -> KnownCall | None:
    """Of calls with tensors like these and these choices; None where they are not all plain values, or the call is traced.
    seen: the mask, where it is a matrix, as long as which calls with it are known."""
    mask = choices.mask
    if torch.compiler.is_compiling() or not isinstance(choices.schedule, str):
        return None
    try:
        if seen is not None:
            tensors = (*tensors, mask) if isinstance(mask, Tensor) else tensors
            return known_for(tensors, *choices[1:], *choices.window_size, *others, known=_known_with(seen))
        return known_for(tensors, *choices, *choices.window_size, *others) if mask is None or isinstance(mask, Mask) else None
    except TypeError:  # no pair is a window
        return None


def known_for(
    tensors: tuple[Tensor, ...], *decides: Any, of: type[KnownCall] = KnownCall, known: Callable[..., KnownCall] | None = None
) -> KnownCall | None:
    try:
        return (known or _known)(of, tuple([(type(t), t.shape, t.stride(), t.dtype, t.device, t.layout) for t in tensors]), *decides)  # type: ignore[arg-type]
    except (TypeError, AttributeError, RuntimeError):  # no tensor, one without strides, or something without a hash
        return None


def _new(of: type[KnownCall], *decides: Any) -> KnownCall:
    return of()


_known = lru_cache(maxsize=MOST_KNOWN, typed=True)(_new)  # typed: 1, 1.0 and True are equal, but not all are allowed everywhere
_of_masks: WeakKeyDictionary[BooleanMask, Callable[..., KnownCall]] = WeakKeyDictionary()


def _known_with(mask: BooleanMask) -> Callable[..., KnownCall]:
    known = _of_masks.get(mask)
    return _of_masks.setdefault(mask, lru_cache(maxsize=MOST_OF_A_MASK, typed=True)(_new)) if known is None else known
