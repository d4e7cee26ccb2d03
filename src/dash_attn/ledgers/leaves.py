"""Tensors inside nested values, each with its path: batches, arguments and results of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Leaf = tuple[str, Tensor]
PLAIN = (Tensor, torch.nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; other tensors as they are."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if callable(to_local) else tensor


def strided(path: str, tensor: Tensor) -> Iterable[Leaf]:
    """What holds the bits: sparse tensors are made of others, shards are in a DTensor."""
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return ((path, tensor),)
    return _parts(path, local(tensor.detach()))


def _parts(path: str, tensor: Tensor) -> Iterator[Leaf]:
    if tensor.layout is torch.strided:
        yield path, tensor
    elif tensor.layout == torch.sparse_coo:
        yield from ((f"{path}.indices", tensor._indices()), (f"{path}.values", tensor._values()))
    else:
        raise TypeError(f"the ledger takes strided and sparse COO tensors; got layout {tensor.layout} in {path}")


def tensors_in(value: Any, path: str = "") -> Iterator[Leaf]:
    """Tensors alone, as they are; everything else is passed over."""
    for name, leaf in _leaves(value, path):
        if isinstance(leaf, Tensor):
            yield name, leaf


def all_leaves(value: Any, path: str) -> Iterator[Leaf]:
    """Tensors, and numbers and texts as tensors. What has no bits of its own raises."""
    for name, leaf in _leaves(value, path):
        if isinstance(leaf, Tensor):
            yield from strided(name, leaf)
        elif leaf is not None:
            yield name, _as_tensor(leaf, name)


def of_text(text: str | bytes) -> Tensor:
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{place}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def _as_tensor(leaf: Any, name: str) -> Tensor:
    if isinstance(leaf, (str, bytes)):
        return of_text(leaf)
    if isinstance(leaf, int) and not isinstance(leaf, bool) and not -(2**63) <= leaf < 2**63:
        return of_text(str(leaf))
    if isinstance(leaf, (bool, int)):
        return torch.tensor(leaf)
    if isinstance(leaf, (float, complex)):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.complex128)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        return torch.from_numpy(np.array(leaf))
    if isinstance(leaf, np.generic):
        return _as_tensor(leaf.item(), name)
    allowed = "tensors, numpy arrays, numbers, texts, and lists, tuples, dicts and dataclasses of them"
    raise TypeError(f"the ledger records {allowed}; got {type(leaf)} in {name}")
