"""The argument `mask` where it is a matrix: its pattern is planned, its elements are data.

A matrix of numbers is taken where it is a boolean one: 0 where a query attends to a key, -inf where not, as to be added to the scores.
"""

import threading
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..masks import BooleanMask, Full
from ..masks.boolean_mask import check_shape
from .tensor_checks import DTYPES, check_strided

MOST_VIEWS = 16  # of one tensor whose masks are kept
NO_BIASES = "dash_attn takes no biases"
_lock = threading.Lock()
_seen = WeakTensorKeyDictionary()  # as long as the tensor is there whose memory it is: its views, each with the version that was read


def take_mask(mask: Any, q: Tensor, k: Tensor) -> tuple[Any, BooleanMask | None]:
    """The mask to plan, and the elements of its partial tiles where it has any. Masks that have rules are as they are."""
    if not isinstance(mask, (Tensor, BooleanMask)):
        return mask, None
    check_mask_tensor(mask, q, k)
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        return Full(), None  # nobody attends anything
    if isinstance(mask, Tensor):
        _refuse_unreadable(mask)
        mask = _mask_of(mask, q.shape[1], k.shape[1])
    return mask.pattern, mask if mask.has_partial_blocks else None


def seen_mask(mask: Any, q: Tensor, k: Tensor) -> BooleanMask | None:
    """A mask that was made, or that of a tensor that was read before, for a call that nobody traces or captures."""
    if torch.compiler.is_compiling() or type(mask) is not Tensor or mask.requires_grad:
        return mask if type(mask) is BooleanMask else None
    try:
        captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
        return None if captured else _seen_as(mask, q.shape[1], k.shape[1])
    except (AttributeError, IndexError, RuntimeError):  # no tensors, or others than attention has
        return None


def _seen_as(tensor: Tensor, q_len: int, kv_len: int) -> BooleanMask | None:
    """A tensor that was seen before has the mask that it had, unless it was changed since: PyTorch counts changes of tensors in place
    (not those by kernels that it does not know, nor through `.data`).
    """
    if tensor.is_inference():  # nobody counts
        return None
    with _lock:
        views, key = _views_of(tensor), _key_of(tensor, q_len, kv_len)
        version, mask = views.pop(key, (-1, None))
        if version != tensor._version:
            return None
        views[key] = version, mask  # the last one used is the last to go
    found: BooleanMask | None = mask
    return found


def _views_of(tensor: Tensor) -> dict[Any, Any]:
    views: dict[Any, Any] = _seen.setdefault(tensor if tensor._base is None else tensor._base, {})
    return views


def _key_of(tensor: Tensor, q_len: int, kv_len: int) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), q_len, kv_len


def _mask_of(tensor: Tensor, q_len: int, kv_len: int) -> BooleanMask:
    """What was not seen before the host reads, and waits for it."""
    mask = _seen_as(tensor, q_len, kv_len)
    if mask is not None:
        return mask
    version = None if tensor.is_inference() else tensor._version
    kept, others = (tensor, None) if tensor.dtype == torch.bool else _kept(tensor)
    mask = BooleanMask(kept.expand(*tensor.shape[:-2], q_len, kv_len))
    if others is not None and bool(others):
        _refuse_number(tensor)
    if version is not None:
        with _lock:
            views = _views_of(tensor)
            views[_key_of(tensor, q_len, kv_len)] = version, mask
            if len(views) > MOST_VIEWS:
                del views[next(iter(views))]
    return mask


def _kept(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """What a matrix of 0 and -inf keeps, and whether there are other numbers in it. That is on the host once what is kept has been read, so
    that nobody waits for it.
    """
    once = numbers[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in numbers.stride()])]  # where it was expanded
    kept = once == 0
    others = (~kept & (once != -torch.inf)).any()
    return kept.expand(numbers.shape), others.to("cpu", non_blocking=True)


def _refuse_number(numbers: Tensor) -> NoReturn:
    other = numbers[(numbers != 0) & (numbers != -torch.inf)][0].item()
    raise ValueError(f"{NO_BIASES}: a mask tensor of numbers must have 0 where a query attends to a key, and -inf elsewhere; got {other}")


def check_mask_tensor(mask: Tensor | BooleanMask, q: Tensor, k: Tensor) -> None:
    """Looks at shape, dtype and device only."""
    if isinstance(mask, Tensor):
        if type(mask).__name__ == "CausalBias":  # of torch.nn.attention.bias: a shape whose memory nobody has written
            raise ValueError("a mask tensor must have values, and PyTorch's CausalBias has none: causal_lower_right is causal=True here")
        if mask.dtype not in (torch.bool, *DTYPES):
            raise ValueError(f"a mask tensor must be boolean, True where a query attends to a key, or of 0 and -inf; got {mask.dtype}")
        refuse_learnt(mask)
        check_strided(**{"a mask tensor": mask})
        if mask.device != q.device and q.device.type != "meta":
            raise ValueError(f"a mask tensor must be on the device of q, k and v ({q.device}); got {mask.device}")
    needed = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    check_shape(tuple(mask.shape), needed, broadcast=4 if isinstance(mask, Tensor) else 2)


def refuse_learnt(mask: Tensor) -> None:
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{NO_BIASES}: a mask tensor gets no gradient; got a mask that requires one")


def _refuse_unreadable(mask: Tensor) -> None:
    """Planning looks at the elements: on a GPU the host waits for them, which a graph cannot hold."""
    if mask.device.type == "meta":
        raise ValueError("a mask tensor decides the plan by its values: it must not be on the meta device")
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a mask tensor cannot be planned while a CUDA graph is captured, because the host looks at its values:"
            " make a BooleanMask of it before the capture"
        )
