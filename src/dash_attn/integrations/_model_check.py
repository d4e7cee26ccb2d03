"""Which models of transformers hand their attention to the function that was registered. Some have attention code of their
own, take any attn_implementation and ignore it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ._door import Change
from ._first_forward import is_attention, not_ours, watch_first_forward
from ._given_documents import note_documents
from ._layer_mask import NAME

INTERFACE = {"ALL_ATTENTION_FUNCTIONS", "AttentionInterface"}
OWN_ATTENTION = {"softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}


def check(model: nn.Module) -> None:
    """Raise ValueError if a layer of the model has attention that does not go through dash_attn, going by its code.

    After `enable()` every model that is built with attn_implementation="dash_attn" is checked, and watched in its first
    forward. This is for models whose configuration was changed by hand.
    """
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation == NAME:
            _check_one(part)
            watch_first_forward(part)
        if isinstance(part, PreTrainedModel):  # its configuration may be changed by hand
            note_documents(type(part))


def _check_one(model: Any) -> None:
    classes = {type(layer) for layer in _own_layers(model)}
    for layer in sorted(classes, key=lambda layer: layer.__name__):
        if is_attention(layer) and not _names(layer) & INTERFACE and _names(layer) & OWN_ATTENTION:
            raise ValueError(not_ours(type(model).__name__, f"{layer.__name__} computes attention of its own"))


def _own_layers(model: Any) -> Iterator[nn.Module]:
    """The model's layers, without those of parts that asked for another implementation."""
    from transformers import PreTrainedModel

    stack: list[nn.Module] = [model]
    while stack:
        layer = stack.pop()
        yield layer
        for child in layer.children():
            if not isinstance(child, PreTrainedModel) or child.config._attn_implementation == NAME:
                stack.append(child)


def _names(layer: type) -> set[str]:
    """All names that the code of a class uses, also those it inherits from classes that are not PyTorch's."""
    found: set[str] = set()
    for base in layer.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for member in vars(base).values():
            function = unwrap(member) if callable(member) else member
            if isinstance(function, FunctionType):
                found |= _names_of_code(function.__code__)
    return found


def _names_of_code(code: CodeType) -> set[str]:
    inner = [_names_of_code(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def checks_of_models() -> Iterator[Change]:
    """With which models are checked as they are built, and when their implementation is set. Once is enough."""
    from transformers import PreTrainedModel

    for method, wrapper in (("__init__", _choosing), ("post_init", _checking), ("set_attn_implementation", _insisting)):
        original = getattr(PreTrainedModel, method)
        if not getattr(original, "checks_dash_attn", False):
            wrapped = wrapper(original)
            wrapped.checks_dash_attn = True
            yield Change(PreTrainedModel, method, wrapped)


def _choosing(original: Any) -> Any:
    """Some models choose a class of layers by the implementation, from a table without ours: a KeyError while they are built."""

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.config._attn_implementation == NAME and _has_table_of_classes(type(self)):
            raise ValueError(not_ours(type(self).__name__, "it has a class of attention layers for each implementation, and none for this"))

    return __init__


def _has_table_of_classes(model: type) -> bool:
    tables = [value for value in vars(sys.modules[model.__module__]).values() if isinstance(value, dict) and "eager" in value]
    return any(NAME not in table and all(isinstance(entry, type) for entry in table.values()) for table in tables)


def _checking(original: Any) -> Any:
    @wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        check(self)
        return result

    return post_init


def _insisting(original: Any) -> Any:
    """transformers only warns about a model, or a part of one, that cannot be set."""
    from transformers import PreTrainedModel

    @wraps(original)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, attn_implementation, *args, **kwargs)
        asked = {id(config) for config in _configurations_of_ours(self.config, attn_implementation)}
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and id(part.config) in asked and part.config._attn_implementation != NAME:
                raise ValueError(not_ours(type(part).__name__, "transformers cannot set its attention implementation"))
        check(self)
        return result

    return set_attn_implementation


def _configurations_of_ours(config: Any, asked: Any) -> Iterator[Any]:
    """The configurations for which dash_attn is asked: all below for a word, those named in a dictionary."""
    if asked == NAME or (isinstance(asked, dict) and asked.get("") == NAME):
        yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configurations_of_ours(part, asked.get(name) if isinstance(asked, dict) else asked)
