"""What the tensors of a call must look like. Looks at shapes, dtypes and devices only, never at values."""

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {4: "(batch, length, heads, head dim)", 3: "(tokens, heads, head dim)"}


def check_tensors(q: Tensor, k: Tensor, v: Tensor, ndim: int = 4) -> None:
    """Dense tensors are 4-d, packed ones 3-d."""
    check_strided(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != ndim:
            raise ValueError(f"{name} must be {ndim}-d {LAYOUTS[ndim]}; got shape {tuple(tensor.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must have one device; got {q.device}, {k.device}, {v.device}")
    check_dtype(q.dtype)
    problem = shape_problem(q.shape, k.shape, v.shape)
    if problem is not None:
        raise ValueError(f"{problem}; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")


def check_strided(**tensors: Tensor) -> None:
    """Tensors of plain memory. A traced call asks this first: PyTorch's own answer to others names our operator only."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ValueError(f"{name} must be dense (layout torch.strided); got a {kind} tensor")


def check_flags(**flags: object) -> None:
    """Yes or no: a word like "False" would count as yes."""
    for name, value in flags.items():
        if value is not True and value is not False and not isinstance(value, np.bool_):
            raise TypeError(f"{name} must be True or False; got {value!r}")


def shape_problem(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> str | None:
    """What is wrong with shapes of dense or packed tensors, in words."""
    if len(q) == 4 and not q[0] == k[0] == v[0]:
        return "q, k and v must have one batch size"
    if k[-3] != v[-3]:
        return f"k and v must have the same {'length' if len(q) == 4 else 'number of tokens'}"
    if k[-2] != v[-2]:
        return "k and v must have the same heads"
    if q[-1] != k[-1]:
        return "q and k must have the same head dim"
    if 0 in (q[-2], k[-2], q[-1], v[-1]):
        return "there must be at least one head and one head dim"
    if q[-2] % k[-2]:
        return "query heads must be a multiple of KV heads"
    return None


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """One logit per query head."""
    heads = q.shape[-2]
    _check_beside("sinks", sinks, q, f"{heads} floating-point numbers, one per query head", (heads,))


def check_seeds(seeds: Tensor | None, q: Tensor, sequences: int) -> None:
    """One whole number per sequence."""
    _check_beside("dropout_seed", seeds, q, f"{sequences} numbers of torch.int64, one per sequence", (sequences,), floating=False)


def check_slopes(slopes: Tensor | None, q: Tensor, sequences: int) -> None:
    """One number per query head, or per sequence and query head."""
    heads = q.shape[-2]
    wanted = f"floating-point numbers of shape ({heads},), one per query head, or ({sequences}, {heads})"
    _check_beside("alibi_slopes", slopes, q, wanted, (heads,), (sequences, heads))
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes get no gradient, as in FlashAttention: pass alibi_slopes.detach(); got slopes that require one")


def _check_beside(name: str, given: Tensor | None, q: Tensor, wanted: str, *shapes: tuple[int, ...], floating: bool = True) -> None:
    """A tensor that comes with q, k and v, if it comes: of one of these shapes, and of floating-point numbers or else of int64."""
    if given is None:
        return
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor or None; got {type(given).__name__}")
    if given.device != q.device:
        raise ValueError(f"{name} must be on the device of q, k and v ({q.device}); got {given.device}")
    fits = given.dtype.is_floating_point if floating else given.dtype == torch.int64
    if tuple(given.shape) not in shapes or not fits:
        raise ValueError(f"{name} must be {wanted}; got {given.dtype} of shape {tuple(given.shape)}")
