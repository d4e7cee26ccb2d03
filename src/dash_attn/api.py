"""flash_attn_func: FlashAttention-2's arguments, plus a mask, a schedule and how gradients are accumulated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import Attention
from .backends import load, resolve_to_explain
from .explanation import Explanation
from .masks import Causal, Full, Mask, Window, is_whole
from .options import AttentionOptions

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    mask: Mask | None = None,
    schedule: str = "auto",
    accumulation: str = "ordered",
    backend: str = "auto",
    return_lse: bool = False,
    head_offset: int = 0,
) -> Any:
    """Attention whose gradients are bitwise reproducible.

    q is (batch, q_len, q_heads, dim), k and v are (batch, kv_len, kv_heads, dim); q_heads is a multiple of kv_heads.
    The first eleven arguments are FlashAttention-2's; dropout and ALiBi are not supported and raise.

    mask: any mask of dash_attn.masks, instead of `causal` and `window_size`. Where the lengths differ, the last query
        is aligned with the last key.
    schedule: the order in which dQ is summed, "auto" or a name in dash_attn.GENERATORS.
    accumulation: "ordered", or "unordered" for sums in order of arrival. `deterministic=False` is still ordered.
    backend: "auto" (by the device of the tensors), "cpu" or "hopper". An explicit one never falls back.
    head_offset: index of the first KV head in the unsharded model, for tensor-parallel ranks.

    Returns out; (out, lse) with `return_lse`; (out, lse, None) with `return_attn_probs`, as FlashAttention-2 does
    without dropout. lse is (batch, q_heads, q_len), natural log, -inf where a query attends nothing (out is 0 there).
    """
    if dropout_p != 0:
        raise ValueError(f"dropout is not supported: dropout_p must be 0; got {dropout_p!r}")
    if alibi_slopes is not None:
        raise ValueError("ALiBi is not supported: alibi_slopes must be None")
    if deterministic and accumulation == "unordered":
        raise ValueError("deterministic=True contradicts accumulation='unordered'; choose one")
    _check_tensors(q, k, v)
    chosen = {"softcap": softcap, "schedule": schedule, "accumulation": accumulation, "backend": backend, "head_offset": head_offset}
    options = _read_options(q, k, _choose_mask(mask, causal, window_size), softmax_scale, chosen)
    out, lse = Attention.apply(q, k, v, options)
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    predict_time: bool = True,
    **options: Any,
) -> Explanation:
    """What flash_attn_func would do with these arguments (the keyword ones it shares), without running it.

    The tensors are looked at for shape, dtype and device only. Tensors on the meta device ask what a backend would do
    that is not here: explain(q, k, v, backend="hopper") then needs no GPU, and leaves out the hashes of kernels.
    predict_time: simulate the backward for predicted_backward_us, about a second for a million tile pairs.
    """
    _check_tensors(q, k, v)
    mask, scale = _choose_mask(options.pop("mask", None), causal, window_size), options.pop("softmax_scale", None)
    chosen = _read_options(q, k, mask, scale, options)
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        raise ValueError(f"nothing to explain: there is no query or no key; got q {tuple(q.shape)}, k {tuple(k.shape)}")
    return load(resolve_to_explain(chosen.backend, q.device)).explain(q, k, v, chosen, predict_time)


def _read_options(q: Tensor, k: Tensor, mask: Mask, softmax_scale: float | None, rest: dict[str, Any]) -> AttentionOptions:
    options = AttentionOptions(mask, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, **rest)
    options.mask.check(q.shape[1], k.shape[1])
    return options


def _choose_mask(mask: Mask | None, causal: bool, window_size: tuple[int, int]) -> Mask:
    """One mask from FlashAttention's two arguments or ours. A causal window ends at the query itself."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2 or not all(is_whole(w) and w >= -1 for w in window_size):
        raise ValueError(f"window_size must be (left, right), each a whole number >= 0 or -1 for no limit; got {window_size!r}")
    window = Window(window_size[0], 0 if causal else window_size[1])
    if mask is not None:
        if causal or not window.is_full:
            raise ValueError(f"give either mask or causal/window_size; got mask={mask!r}, causal={causal}, window_size={window_size}")
        return mask
    if window.is_full:
        return Full()
    return Causal() if window.is_causal else window


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be 4-d (batch, length, heads, head dim); got shape {tuple(tensor.shape)}")
    for what in ("dtype", "device"):
        found = [getattr(tensor, what) for tensor in tensors.values()]
        if len(set(found)) != 1:
            raise ValueError(f"q, k and v must have one {what}; got {', '.join(map(str, found))}")
    if q.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {q.dtype}")
    _check_shapes(q.shape, k.shape, v.shape)


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    shapes = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"q, k and v must have one batch size; got {shapes}")
    if k[1:3] != v[1:3]:
        raise ValueError(f"k and v must have the same length and heads; got {shapes}")
    if q[3] != k[3]:
        raise ValueError(f"q and k must have the same head dim; got {shapes}")
    if 0 in (q[2], k[2], q[3], v[3]):
        raise ValueError(f"there must be at least one head and one head dim; got {shapes}")
    if q[2] % k[2]:
        raise ValueError(f"query heads must be a multiple of KV heads; got {shapes}")
