"""Gradients that can be added in a fixed order, and their sums over ranks, a bucket of parameters at a time.

Additions are element by element, so buckets and shares never change bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...call.tensor_checks import DTYPES
from ..peers import Peers
from .tree import tree_sum

# By name: importing them takes long. FSDP, and what gives a base to a module's class: FSDP2 and the functional DistributedDataParallel.
ADD_GRADIENTS = {
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard (FSDP2)",
    "torch.distributed._composable.replicate.DDP": "replicate",
}
Parameters = dict[str, nn.Parameter]
Layout = tuple[tuple[str, str], ...]  # name, and all else that counts
BUCKET_BYTES = 25 * 2**20
Presence = tuple[bool, ...]  # by rank: has it a partial sum of the parameter?


def trainable(model: nn.Module) -> Parameters:
    """By name, each once, in the model's order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    _check_own_reduction(model)
    if frozen := [name for name, p in model.named_parameters() if not p.requires_grad and p.grad is not None]:
        raise ValueError(f"parameter {frozen[0]!r} is frozen but has a gradient: set its .grad to None, or let it require a gradient")
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("the model has no parameter that requires a gradient")
    for name, parameter in found.items():
        _check(name, parameter)
    return found


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """That of .grad; PyTorch 2.10 and later let it differ from the parameter's."""
    chosen: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return chosen


def sum_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Sums are at least float32. So each gradient is added exactly as it is, and the mean is rounded once."""
    return torch.promote_types(gradient_dtype(parameter), torch.float32)


def layout_of(parameters: Parameters) -> Layout:
    """What must not change within a step, and not differ between ranks."""
    numbers = {device: number for number, device in enumerate(dict.fromkeys(p.device for p in parameters.values()))}  # ranks number alike
    return tuple((name, f"{tuple(p.shape)} {gradient_dtype(p)} {p.device.type} {numbers[p.device]}") for name, p in parameters.items())


def take(parameter: nn.Parameter) -> Tensor | None:
    """A copy of the gradient in the dtype of sums; the parameter has none afterwards."""
    if parameter.grad is None:
        return None
    taken = parameter.grad.detach().to(sum_dtype(parameter), copy=True, memory_format=torch.contiguous_format)
    parameter.grad = None
    return taken


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right, in the memory of left. What is not there adds nothing, not even a zero: -0.0 + 0.0 would be 0.0."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def _check(name: str, parameter: nn.Parameter) -> None:
    dtype, gradient = gradient_dtype(parameter), parameter.grad
    if dtype not in DTYPES:
        raise ValueError(f"the gradient of {name!r} must have one of {', '.join(map(str, DTYPES))}; got {dtype}")
    if gradient is None:
        return
    if type(gradient) not in (Tensor, nn.Parameter):
        raise TypeError(f"the gradient of {name!r} must be a plain tensor with all elements; got {type(gradient).__name__}")
    if gradient.is_meta:
        raise ValueError(f"the gradient of {name!r} must have values; got one on the meta device")
    if gradient.layout is not torch.strided:
        raise ValueError(f"the gradient of {name!r} must be dense; got layout {gradient.layout}: build its layer with sparse=False")
    if gradient.dtype is not dtype:
        raise ValueError(f"the gradient of {name!r} must have dtype {dtype}, so that .grad can hold the mean; got {gradient.dtype}")


def _check_own_reduction(model: nn.Module) -> None:
    """A wrapper that reduces gradients during backward would add them in its own order, before we see them."""
    for module in model.modules():
        names = (name for base in type(module).__mro__ for name in (base.__name__, f"{base.__module__}.{base.__name__}"))
        if found := [ADD_GRADIENTS[name] for name in names if name in ADD_GRADIENTS]:
            raise ValueError(
                f"{found[0]} adds gradients over its ranks during backward, in an order of its own, and keeps the sums or shards of them,"
                " so that there is nothing left to add in a tree: use the bare model or DistributedDataParallel"
            )
        if isinstance(module, DistributedDataParallel) and (module.require_backward_grad_sync or module.require_forward_param_sync):
            raise RuntimeError(
                "DistributedDataParallel reduces gradients itself: put the forward pass, backward, add and finish of all steps inside "
                "`with model.no_sync():`"
            )


@dataclass(frozen=True)
class Bucket:
    """Parameters with one device, one dtype and one presence."""

    parameters: Parameters
    present: Presence

    @property
    def like(self) -> nn.Parameter:
        return next(iter(self.parameters.values()))


def buckets_of(parameters: Parameters, presence: dict[str, Presence]) -> Iterator[Bucket]:
    """Parameters without a gradient anywhere are in none. All ranks find the same buckets in the same order."""
    alike: dict[tuple[torch.device, torch.dtype, Presence], Parameters] = {}
    for name, p in parameters.items():
        if any(presence[name]):
            alike.setdefault((p.device, gradient_dtype(p), presence[name]), {})[name] = p
    for (*_, present), members in alike.items():
        for piece in _pieces(members):
            yield Bucket(piece, present)


def _pieces(members: Parameters) -> Iterator[Parameters]:
    """Of BUCKET_BYTES at most, or one parameter that is larger."""
    piece: Parameters = {}
    size = 0
    for name, p in members.items():
        added = p.numel() * sum_dtype(p).itemsize
        if piece and size + added > BUCKET_BYTES:
            yield piece
            piece, size = {}, 0
        piece[name] = p
        size += added
    yield piece


def reduce_bucket(bucket: Bucket, sums: dict[str, Tensor | None], peers: Peers, divisor: int | None) -> None:
    """Takes this rank's partial sums, and sets .grad to the quotient of the whole sum.

    Each rank adds one share of the elements: it gets that share of all partial sums, and the quotients are gathered.
    """
    shares = _laid_out(bucket, sums, peers.count).chunk(peers.count)
    rows = peers.exchange(shares, [len(shares[0])] * peers.count)
    share = tree_sum([row if there else None for row, there in zip(rows, bucket.present, strict=True)], add)
    assert share is not None  # some rank has a partial sum
    if divisor is not None:  # a tensor: PyTorch multiplies by the rounded reciprocal of a Python number on GPUs
        share.div_(torch.tensor(divisor, dtype=share.dtype, device=share.device))
    begin, flat = 0, peers.gather(share.to(gradient_dtype(bucket.like)))
    for p in bucket.parameters.values():
        p.grad = torch.empty_like(p, dtype=flat.dtype).copy_(flat[begin : begin + p.numel()].view(p.shape))
        begin += p.numel()


def _laid_out(bucket: Bucket, sums: dict[str, Tensor | None], ranks: int) -> Tensor:
    """The partial sums end to end, filled up to as many equal shares as there are ranks."""
    share = max(-(-sum(p.numel() for p in bucket.parameters.values()) // ranks), 1)
    flat = torch.zeros(ranks * share, dtype=sum_dtype(bucket.like), device=bucket.like.device)
    begin = 0
    for name, p in bucket.parameters.items():
        partial = sums.pop(name)
        if partial is not None:
            flat[begin : begin + p.numel()] = partial.flatten()
        begin += p.numel()
    return flat
