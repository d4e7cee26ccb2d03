"""What decides the bits of a call on this backend: its tiles, the fixed order of two passes, and the machine code."""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.documents import laid_end_to_end, of_a_document, offsets_of_documents, runs_packed
from ...call.explanation import Explanation
from ...call.options import AttentionOptions
from ...call.planning import DEFAULT_WORKERS, describe_call, hash_of
from ...masks import Documents, Mask, PatternPerHead, TileMap, TilePattern
from ...scheduling.order import ALL_GUARANTEES
from .launch import Launch
from .mask_tables import TABLES
from .setup import Call, RowValues, forward_launch, gradient_launches, statistics_launch
from .tiles import PASSES

NAME = "two passes"
ORDER = "partial tiles upward, then full tiles upward; query heads of a group upward"


def order_in_words(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    tiles = _call(q, k, v, options).tiles
    passes = "; ".join(f"{name} {words}" for name, words in tiles.in_words().items())
    return f"{NAME}, tiles of {tiles.architecture}: {passes}, order {order_hash(q, k, v, options)}"


def order_hash(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """Names the bits, together with the machine code: equal where everything is summed in the same sequence."""
    tiles = _call(q, k, v, options).tiles
    rows = [f"{name} {getattr(tiles, name).q_rows}x{getattr(tiles, name).kv_rows}" for name in PASSES]
    lengths = f"{q.shape[1]}x{k.shape[1]}, {q.shape[2] // k.shape[2]} heads"
    return hash_of(NAME, ORDER, *rows, repr(options.mask), _blocks(options.mask), lengths)


def _blocks(mask: Mask) -> str:
    """What the words of a mask leave out."""
    if isinstance(mask, PatternPerHead):
        return " ".join([str(mask.numbers), *map(_blocks, mask.patterns)])
    if isinstance(mask, TilePattern):
        return mask.blocks.tobytes().hex()
    return mask.hexadecimal if isinstance(mask, TileMap) else ""


def explain(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, predict_time: bool = True) -> Explanation:
    """Tensors on the meta device need no GPU; nothing is compiled for them, so there are no hashes of kernels."""
    call = _call(q, k, v, options)
    tiles, launches = call.tiles, _launches(call)
    tables = {name: launch for name, launch in launches.items() if name != "row statistics"}
    return Explanation(
        call=describe_call(q, k, v, options),
        backend="triton",
        schedule=NAME,
        accumulation=options.accumulation,
        guarantees=ALL_GUARANTEES,
        order_hash=order_hash(q, k, v, options),
        backward_tiles=(tiles.key_gradients.q_rows, tiles.key_gradients.kv_rows),
        forward_tiles=(tiles.forward.q_rows, tiles.forward.kv_rows),
        gang=1,
        workers=torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else DEFAULT_WORKERS,
        plan_bytes=sum(_table_bytes(launch) for launch in tables.values()),
        workspace_bytes=sum(values.nbytes for values in vars(RowValues.empty(call, "meta")).values()),
        prediction_note="the time of this backend is not modelled",
        kernels=_machine_code(q, launches),
        passes={**tiles.in_words(), "table": f"tiles of {tiles.architecture}"},
    )


def _table_bytes(launch: Launch) -> int:
    tables = (launch.numbers.get(name) for name in TABLES)
    return sum(table.nbytes for table in tables if table is not None)


def _call(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Call:
    if not runs_packed(options):
        return Call.of(q, k, v, options, None)
    assert isinstance(options.mask, Documents)
    offsets = offsets_of_documents(options.mask.lengths, q.shape[0], torch.device("meta"))
    flat_q, flat_k, flat_v = map(laid_end_to_end, (q, k, v))
    return Call.of(flat_q, flat_k, flat_v, of_a_document(options), offsets)


def _launches(call: Call) -> dict[str, Launch]:
    """The kernels of a training step, with outputs that have a shape and no memory."""
    q, k, v = (torch.empty_like(x, device="meta") for x in (call.q, call.k, call.v))
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device="meta")
    lse = torch.empty(call.lse_shape, dtype=torch.float32, device="meta")
    rows = RowValues.empty(call, "meta")
    backward = (statistics_launch(call, out, out, lse, None, rows), *gradient_launches(call, out, rows, (q, k, v)))
    return {"forward": forward_launch(call, out, lse, None), **{launch.kernel.replace("_", " "): launch for launch in backward}}


def _machine_code(q: Tensor, launches: dict[str, Launch]) -> dict[str, str]:
    if not q.is_cuda:
        return {}
    with torch.cuda.device(q.device):
        return {name: launch.machine_code() for name, launch in launches.items()}
