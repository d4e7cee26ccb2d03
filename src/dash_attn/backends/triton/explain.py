"""What decides the bits of a call on this backend: its tiles, the fixed order of two passes, and the machine code."""

import torch
from torch import Tensor

from ...call.call import Call
from ...call.explain import Explanation
from ...call.parts import runs_packed
from ...call.planning import DEFAULT_WORKERS, describe_call, hash_of
from ...masks import Causal, Documents, Mask, PatternPerHead, TileMap, TilePattern, Window
from ...scheduling.order import ALL_GUARANTEES
from ..run import as_packed
from .launch import Launch
from .mask_tables import TABLES
from .passes import Passes, RowValues, forward_launch, gradient_launches, statistics_launch
from .tiles import PASSES

NAME = "two passes"
ORDER = "partial tiles upward, then full tiles upward; query heads of a group upward"


def order_in_words(call: Call) -> str:
    tiles = Passes(_as_run(call)).tiles
    passes = "; ".join(f"{name} {words}" for name, words in tiles.in_words().items())
    return f"{NAME}, tiles of {tiles.architecture}: {passes}, order {order_hash(call)}"


def order_hash(call: Call) -> str:
    """Names the bits, together with the machine code: equal where everything is summed in the same sequence."""
    tiles, (mask, each) = Passes(_as_run(call)).tiles, _masked(call)
    rows = [f"{name} {getattr(tiles, name).q_rows}x{getattr(tiles, name).kv_rows}" for name in PASSES]
    lengths = f"{call.q.shape[-3]}x{call.k.shape[-3]}, {call.q.shape[-2] // call.k.shape[-2]} heads"
    return hash_of(NAME, ORDER, *rows, repr(mask), _blocks(mask), lengths, *each)


def _masked(call: Call) -> tuple[Mask, list[str]]:
    """Packed sequences are documents, or have a mask and lengths of their own."""
    mask = call.options.mask
    if call.offsets is None:
        return mask, []
    both = [tuple(side.stop - side.start for side in sides) for sides in call.offsets.sequences(len(call.q), len(call.k))]
    if not isinstance(mask, Window) and all(queries == keys for queries, keys in both):
        return Documents(tuple(queries for queries, _ in both if queries), isinstance(mask, Causal)), []
    return mask, [f"{queries}x{keys}" for queries, keys in both]


def _blocks(mask: Mask) -> str:
    """What the words of a mask leave out."""
    if isinstance(mask, PatternPerHead):
        return " ".join([str(mask.numbers), *map(_blocks, mask.patterns)])
    if isinstance(mask, TilePattern):
        return mask.blocks.tobytes().hex()
    return mask.hexadecimal if isinstance(mask, TileMap) else ""


def explain(call: Call, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    passes, q = Passes(_as_run(call)), call.q
    tiles, launches = passes.tiles, _launches(passes)
    tables = [launch.numbers[name] for launch in launches.values() for name in TABLES if launch.numbers.get(name) is not None]
    return Explanation(
        call=describe_call(call),
        backend="triton",
        schedule=NAME,
        accumulation=call.options.accumulation,
        guarantees=ALL_GUARANTEES,
        order_hash=order_hash(call),
        backward_tiles=(tiles.key_gradients.q_rows, tiles.key_gradients.kv_rows),
        forward_tiles=(tiles.forward.q_rows, tiles.forward.kv_rows),
        gang=1,
        workers=torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else DEFAULT_WORKERS,
        plan_bytes=sum(table.nbytes for table in tables),
        workspace_bytes=sum(values.nbytes for values in vars(RowValues.empty(passes, "meta")).values()),
        prediction_note="the time of this backend is not modelled",
        kernels=_machine_code(q, launches),
        passes={**tiles.in_words(), "table": f"tiles of {tiles.architecture}"},
    )


def _as_run(call: Call) -> Call:
    """Documents in a row run as packed sequences."""
    return as_packed(call) if call.offsets is None and runs_packed(call.options) else call


def _launches(passes: Passes) -> dict[str, Launch]:
    """The kernels of a training step, with outputs that have a shape and no memory."""
    q, k, v = (torch.empty_like(x, device="meta") for x in (passes.q, passes.k, passes.v))
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device="meta")
    lse = torch.empty(passes.lse_shape, dtype=torch.float32, device="meta")
    rows = RowValues.empty(passes, "meta")
    backward = (statistics_launch(passes, out, out, lse, None, rows), *gradient_launches(passes, out, rows, (q, k, v)))
    return {"forward": forward_launch(passes, out, lse, None), **{launch.kernel.replace("_", " "): launch for launch in backward}}


def _machine_code(q: Tensor, launches: dict[str, Launch]) -> dict[str, str]:
    if not q.is_cuda:
        return {}
    with torch.cuda.device(q.device):
        return {name: launch.machine_code() for name, launch in launches.items()}
