"""Which models of transformers hand their attention to the function that was registered. Some have attention code of their
own, take any attn_implementation and ignore it.

Their code tells as they are built. The first forward that ends well is watched, too: attention that does not go through here raises. A
compiled forward is not watched; the check of the model's classes, and masks that only we can read, also hold there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import unwrap
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..door import Change, names_of
from ._documents import InThisThread, noting_documents
from ._layer_mask import NAME

INTERFACE = {"ALL_ATTENTION_FUNCTIONS", "AttentionInterface"}
OWN_ATTENTION = {"softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
# PyTorch's own, also where this is first imported inside a block that replaces them.
ATTENTION = [unwrap(one) for one in (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)]
SOFTMAX = [unwrap(one) for one in (functional.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax)]
SCORES_NDIM = 4  # (batch, heads, queries, keys); in a layer that calls itself attention also (batch x heads, queries, keys)
_watches = InThisThread()


def check(model: nn.Module) -> None:
    """Raise ValueError if a layer of the model has attention that does not go through dash_attn, going by its code.

    After `enable()` every model that is built with attn_implementation="dash_attn" is checked, and watched in its first
    forward. This is for models whose configuration was changed by hand.
    """
    from transformers import PreTrainedModel

    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        if part.config._attn_implementation == NAME:
            _check_one(part)
            part.dash_attn_watches = True
        _observe_forward(type(part))  # its configuration may be changed by hand


def note_call() -> None:
    """The attention function of ours has been called."""
    if not torch.compiler.is_compiling() and _watches.open:
        for watch in _watches.open:
            watch.calls += 1


def watched_model() -> str | None:
    """The class of the model that is in its first forward."""
    return type(_watches.open[0].model).__name__ if _watches.open else None


def _is_attention(layer: type) -> bool:
    name = layer.__name__.lower()
    return "attention" in name or "attn" in name


def _check_one(model: Any) -> None:
    for layer in sorted({type(layer) for layer in _own_layers(model)}, key=lambda layer: layer.__name__):
        if _is_attention(layer) and not names_of(layer) & INTERFACE and names_of(layer) & OWN_ATTENTION:
            raise ValueError(_not_ours(type(model).__name__, f"{layer.__name__} computes attention of its own"))


def _own_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The model's layers, without those of parts that asked for another implementation."""
    from transformers import PreTrainedModel

    yield model
    for child in model.children():
        if not isinstance(child, PreTrainedModel) or child.config._attn_implementation == NAME:
            yield from _own_layers(child)


def checks_of_models() -> Iterator[Change]:
    """With which models are checked as they are built, and when their implementation is set. Once is enough."""
    from transformers import PreTrainedModel

    for method, then in (("__init__", _refuse_table_of_classes), ("post_init", check), ("set_attn_implementation", _insist)):
        original = getattr(PreTrainedModel, method)
        if not getattr(original, "checks_dash_attn", False):
            yield Change(PreTrainedModel, method, _followed_by(original, then))


def _followed_by(original: Callable[..., Any], then: Callable[..., None]) -> Any:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self, *args, **kwargs)
        return result

    method.checks_dash_attn = True  # type: ignore[attr-defined]
    return method


def _refuse_table_of_classes(model: Any, *_: Any, **__: Any) -> None:
    """Some models choose a class of layers by the implementation, from a table without ours: a KeyError while they are built."""
    tables = [value for value in vars(sys.modules[type(model).__module__]).values() if isinstance(value, dict) and "eager" in value]
    without_ours = any(NAME not in table and all(isinstance(entry, type) for entry in table.values()) for table in tables)
    if model.config._attn_implementation == NAME and without_ours:
        why = "it has a class of attention layers for each implementation, and none for this"
        raise ValueError(_not_ours(type(model).__name__, why))


def _insist(model: Any, attn_implementation: Any, *_: Any, **__: Any) -> None:
    """transformers only warns about a model, or a part of one, that cannot be set."""
    from transformers import PreTrainedModel

    asked = {id(config) for config in _configurations_of_ours(model.config, attn_implementation)}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and id(part.config) in asked and part.config._attn_implementation != NAME:
            raise ValueError(_not_ours(type(part).__name__, "transformers cannot set its attention implementation"))
    check(model)


def _configurations_of_ours(config: Any, asked: Any) -> Iterator[Any]:
    """The configurations for which dash_attn is asked: all below for a word, those named in a dictionary."""
    if asked == NAME or (isinstance(asked, dict) and asked.get("") == NAME):
        yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configurations_of_ours(part, asked.get(name) if isinstance(asked, dict) else asked)


def _observe_forward(model: type) -> None:
    """Every call of this model's forward notes what it is given, also one that goes past hooks; the first is watched. Once is enough."""
    from transformers import PreTrainedModel

    for part in model.__mro__:
        original = vars(part).get("forward")
        if issubclass(part, PreTrainedModel) and original is not None and not getattr(original, "is_observed", False):
            part.forward = _observed(original)  # type: ignore[attr-defined]


def _observed(original: Callable[..., Any]) -> Callable[..., Any]:
    noting = noting_documents(original)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_to_be_watched(self):
            return noting(self, *args, **kwargs)
        with _watched(self):
            return noting(self, *args, **kwargs)

    forward.is_observed = True  # type: ignore[attr-defined]
    return forward


def _is_to_be_watched(model: Any) -> bool:
    return getattr(model, "dash_attn_watches", False) and _implementation(model) == NAME


@contextmanager
def _watched(model: Any) -> Iterator[None]:
    watch = _Watch(model)
    _watches.open.append(watch)
    del model.dash_attn_watches  # a forward may call that of a base class
    try:
        with watch:
            yield
        watch.judge(outermost=len(_watches.open) == 1)
    except BaseException:
        model.dash_attn_watches = True
        raise
    finally:
        _watches.open.pop()


class _Watch(TorchFunctionMode):
    """Counts our calls and finds attention that is computed elsewhere, inside one forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0
        self.foreign: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.foreign is None and (func in ATTENTION or func in SOFTMAX):
            self.foreign = _foreign_layer(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def judge(self, outermost: bool) -> None:
        """After a forward that ended well. Models in models may have no attention of their own."""
        if self.foreign is not None:
            why = f"{self.foreign} computes attention of its own"
            raise RuntimeError(_not_ours(type(self.model).__name__, why) + _as_a_part(self.model))
        if self.calls == 0 and outermost:
            raise RuntimeError(_not_ours(type(self.model).__name__, "its forward did not call dash_attn once"))


def _foreign_layer(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """The class of the layer that computes attention by itself here, if that is what this call is."""
    layer, owner = _calling_modules()
    if layer is None or _implementation(owner) != NAME or _implementation(layer) not in (None, NAME):
        return None  # a part of the model for which another implementation was asked
    scores = args[0] if args else kwargs.get("input")
    ndim = SCORES_NDIM - _is_attention(type(layer))
    return type(layer).__name__ if func in ATTENTION or getattr(scores, "ndim", 0) >= ndim else None


def _calling_modules() -> tuple[nn.Module | None, nn.Module | None]:
    """The innermost module on the stack whose code is not PyTorch's, and the innermost model of transformers."""
    from transformers import PreTrainedModel

    layer = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if layer is None and isinstance(module, nn.Module) and not type(module).__module__.startswith("torch."):
            layer = module
        if isinstance(module, PreTrainedModel):
            return layer, module
        frame = frame.f_back
    return layer, None


def _implementation(module: nn.Module | None) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _as_a_part(model: Any) -> str:
    """How to ask for another implementation in this part of the watched model alone."""
    whole = _watches.open[0].model.config
    parts = {name: getattr(whole, name, None) for name in getattr(whole, "sub_configs", ())}
    if not any(part is model.config for part in parts.values()):
        return ""
    asked = {name: "sdpa" if part is model.config else NAME for name, part in parts.items() if part is not None}
    return f", or for this part alone: attn_implementation={asked}"


def _not_ours(model: str, why: str) -> str:
    return f'{model} does not work with attn_implementation="dash_attn": {why}. Use "eager" or "sdpa" for this model'
