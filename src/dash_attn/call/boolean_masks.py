"""The argument `mask` where it is a boolean matrix: its pattern is planned, its elements are data."""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..masks import BooleanMask, Full
from ..masks.boolean_mask import check_shape

MOST_VIEWS = 16  # of one tensor whose masks are kept
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


def _mask_of(tensor: Tensor, q_len: int, kv_len: int) -> BooleanMask:
    """A tensor that was seen before has the mask that it had, unless it was changed since: PyTorch counts changes of tensors in place
    (not those by kernels that it does not know, nor through `.data`). Else the host reads it, and waits for it.
    """
    if tensor.is_inference():  # nobody counts
        return _read(tensor, q_len, kv_len)
    owner = tensor if tensor._base is None else tensor._base
    key = tensor.data_ptr(), tensor.shape, tensor.stride(), q_len, kv_len
    with _lock:
        of_owner: dict[Any, tuple[int, BooleanMask]] = _seen.setdefault(owner, {})
        version, mask = of_owner.pop(key, (-1, None))
    if mask is None or version != tensor._version:
        version, mask = tensor._version, _read(tensor, q_len, kv_len)
    with _lock:
        of_owner[key] = version, mask  # the last one used is the last to go
        if len(of_owner) > MOST_VIEWS:
            del of_owner[next(iter(of_owner))]
    return mask


def _read(tensor: Tensor, q_len: int, kv_len: int) -> BooleanMask:
    return BooleanMask(tensor.expand(*tensor.shape[:-2], q_len, kv_len))


def check_mask_tensor(mask: Tensor | BooleanMask, q: Tensor, k: Tensor) -> None:
    """Looks at shape, dtype and device only."""
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise ValueError(f"a mask tensor must be boolean, True where a query attends a key (there are no biases); got {mask.dtype}")
        if mask.layout is not torch.strided or mask.is_nested:
            raise ValueError(f"a mask tensor must be dense (layout torch.strided); got {mask.layout}")
        if mask.device != q.device and q.device.type != "meta":
            raise ValueError(f"a mask tensor must be on the device of q, k and v ({q.device}); got {mask.device}")
    needed = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    check_shape(tuple(mask.shape), needed, broadcast=4 if isinstance(mask, Tensor) else 2)


def _refuse_unreadable(mask: Tensor) -> None:
    """Planning looks at the elements: on a GPU the host waits for them, which a graph cannot hold."""
    if mask.device.type == "meta":
        raise ValueError("a mask tensor decides the plan by its values: it must not be on the meta device")
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a mask tensor cannot be planned while a CUDA graph is captured, because the host looks at its values:"
            " make a BooleanMask of it before the capture"
        )
