"""PyTorch's own context_parallel, which Accelerate uses, too: what it hands to scaled_dot_product_attention inside its block.

These are DTensors of this rank's rows, on the mesh of its ranks. They do not say how rows were dealt. An option of PyTorch's does.
Names that start with an underscore are PyTorch's own. Where one is missing we raise, because then nothing is known.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HERE = "torch"  # context_parallel="torch"
MODULE = "torch.distributed.tensor.experimental"
SEQUENCE = 2  # the dimension in (batch, heads, length, head dim)
ENTER_BEFORE = 'enter sdpa.enable(context_parallel="torch") before it'


def check_block(context_parallel: Any, sharding: Any) -> None:
    """Whether sdpa.enable with these options may begin here. Inside PyTorch's block a rank has only some of the rows."""
    if isinstance(context_parallel, str) and context_parallel != HERE:
        raise ValueError(f'context_parallel must be a ProcessGroup, a DeviceMesh of one dimension or "torch"; got {context_parallel!r}')
    if not is_inside():
        return
    if context_parallel is None or context_parallel == HERE:
        raise RuntimeError(f"PyTorch's context_parallel has dealt the rows of this sequence to ranks: {ENTER_BEFORE}")
    dealt = dealt_by_torch()
    if sharding != dealt:
        raise ValueError(
            f"PyTorch's context_parallel has dealt the rows as {dealt!r}, and sharding is {sharding!r}: pass sharding={dealt!r}, or"
            f" {ENTER_BEFORE}"
        )


def refuse_inside(what: str) -> None:
    """`what` would attend to this rank's rows only."""
    if is_inside():
        raise RuntimeError(
            f"PyTorch's context_parallel has dealt the rows of this sequence to ranks, and {what} sees only those of its own rank:"
            f' use PyTorch\'s scaled_dot_product_attention (attn_implementation="sdpa"), and {ENTER_BEFORE}'
        )


def is_inside() -> bool:
    """Whether the innermost block that replaces scaled_dot_product_attention is PyTorch's."""
    return str(getattr(functional.scaled_dot_product_attention, "__module__", "")).startswith(MODULE)


def dealt_by_torch() -> str:
    """The sharding that PyTorch's ring attention assumes, too. Its blocks set this option; set_rotate_method has no part in it."""
    return "zigzag" if _of_torch(import_module(f"{MODULE}._attention"), "_cp_options").enable_load_balance else "contiguous"


def has_placement(x: Any) -> bool:
    """Whether it is a DTensor. Asked of every call: torch.distributed need not be there."""
    return hasattr(x, "placements")


def rows_of_torch(context_parallel: Any, **tensors: Any) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """This rank's rows of query, key and value of a call that PyTorch's context_parallel makes, and the options that say whose rows they
    are. Raises where they are not such a call's."""
    for name, x in tensors.items():
        _check(name, x, tensors["query"], context_parallel)
    from torch.distributed.tensor import DTensor

    # Without its handler PyTorch takes a DTensor for what it says it is: rows that were dealt one rank after the other.
    handlers = _of_torch(_of_torch(DTensor, "_op_dispatcher"), "_custom_op_handlers")
    if torch.ops.aten._scaled_dot_product_flash_attention.default not in handlers:
        raise ValueError('context_parallel="torch" takes DTensors inside PyTorch\'s context_parallel only; here it is not active')
    query, key, value = (x.to_local() for x in tensors.values())
    return (query, key, value), {"context_parallel": tensors["query"].device_mesh, "sharding": dealt_by_torch()}


def placed_like(query: Any, out: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(out, query.device_mesh, [Shard(SEQUENCE)], run_check=False)


def _check(name: str, x: Any, query: Any, context_parallel: Any) -> None:
    if not has_placement(x) or not has_placement(query):
        raise ValueError(f"query, key and value must be DTensors, or plain tensors, all three; {name} differs from query")
    placed = f"{name} is a DTensor with placements {tuple(x.placements)} on a mesh of {x.device_mesh.ndim} dimensions"
    if context_parallel != HERE:
        raise ValueError(
            f'{placed}: sdpa.enable(context_parallel="torch") takes those of PyTorch\'s context_parallel. Of others, pass x.to_local()'
        )
    if len(x.placements) != 1 or not x.placements[0].is_shard(SEQUENCE):
        raise ValueError(f"{placed}: PyTorch's context_parallel shards dimension {SEQUENCE}, the sequence, on a mesh of one dimension")
    if x.device_mesh != query.device_mesh:
        raise ValueError(f"query, key and value must be on one mesh; that of {name} is {x.device_mesh}, that of query {query.device_mesh}")


def _of_torch(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise RuntimeError(
            f'context_parallel="torch" cannot find out what PyTorch {torch.__version__} has done: {owner} has no {name}.'
            " Use sdpa.enable(context_parallel=mesh, sharding=...) inside its block"
        )
    return getattr(owner, name)
