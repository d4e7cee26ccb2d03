"""FlexAttention's BlockMask, with its mask_mod, as a boolean mask."""

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .boolean_mask import BitMatrix, BooleanMask


def from_block_mask(block_mask: Any) -> BooleanMask:
    """What FlexAttention would attend to: all of the full blocks, and of the partial ones what mask_mod says.

    Without a batch or head dimension in the BlockMask (B=None, H=None), one mask serves all. mask_mod is called once, here, with
    torch.vmap as FlexAttention does: a table that it reads may change later without effect. On a GPU this waits for the device.
    """
    missing = [name for name in ("mask_mod", "kv_num_blocks", "kv_indices", "seq_lengths", "BLOCK_SIZE") if not hasattr(block_mask, name)]
    if missing:
        raise TypeError(f"from_block_mask needs FlexAttention's BlockMask; got {type(block_mask).__name__}, which has no {missing[0]}")
    _check_rows(block_mask)
    sequences, heads = block_mask.kv_num_blocks.shape[:2]
    return BooleanMask.of_matrices([[BitMatrix.of(_matrix(block_mask, b, h)) for h in range(heads)] for b in range(sequences)])


def _check_rows(block_mask: Any) -> None:
    """A BlockMask that is sliced along queries keeps its lengths, so rows that it does not list would attend to nothing."""
    q_len, rows = block_mask.seq_lengths[0], block_mask.kv_num_blocks.shape[-1]
    needed = -(-q_len // block_mask.BLOCK_SIZE[0])
    if rows != needed:
        raise ValueError(
            f"from_block_mask needs all {needed} blocks of the BlockMask's {q_len} queries; got {rows}. If it was sliced along queries,"
            " make one for these queries with create_block_mask, or with BlockMask.from_kv_blocks and seq_lengths"
        )


def _matrix(block_mask: Any, sequence: int, head: int) -> NDArray[np.bool_]:
    """A strip of blocks at a time; mask_mod is asked only for strips that have partial blocks."""
    partial = _blocks(block_mask, "kv", sequence, head)
    full = _blocks(block_mask, "full_kv", sequence, head)
    (q_len, kv_len), (block_q, block_kv) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    matrix = np.zeros((q_len, kv_len), dtype=np.bool_)
    for number, first in enumerate(range(0, q_len, block_q)):
        rows = slice(first, min(first + block_q, q_len))
        everywhere, asked = (np.repeat(blocks[number], block_kv)[:kv_len] for blocks in (full, partial))
        matrix[rows] = everywhere
        if asked.any():
            matrix[rows] |= _ask(block_mask, sequence, head, rows) & asked
    return matrix


def _blocks(block_mask: Any, name: str, sequence: int, head: int) -> NDArray[np.bool_]:
    """Which blocks a BlockMask lists, (blocks of queries, blocks of keys)."""
    (q_len, kv_len), (block_q, block_kv) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    listed = np.zeros((-(-q_len // block_q), -(-kv_len // block_kv)), dtype=np.bool_)
    counts, indices = getattr(block_mask, f"{name}_num_blocks"), getattr(block_mask, f"{name}_indices")
    if counts is None:  # no block is full
        return listed
    for row, (count, places) in enumerate(zip(counts[sequence, head].tolist(), indices[sequence, head].tolist(), strict=True)):
        listed[row, places[:count]] = True
    return listed


def _ask(block_mask: Any, sequence: int, head: int, rows: slice) -> NDArray[np.bool_]:
    torch = sys.modules["torch"]  # whoever has a BlockMask has imported it; this room needs NumPy alone
    device = block_mask.kv_num_blocks.device
    b, h = (torch.tensor(number, device=device) for number in (sequence, head))
    queries, keys = torch.arange(rows.start, rows.stop, device=device), torch.arange(block_mask.seq_lengths[1], device=device)
    of_a_query = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    answer = torch.vmap(of_a_query, in_dims=(None, None, 0, None))(b, h, queries, keys)
    if answer.dtype != torch.bool:
        raise TypeError(f"mask_mod must answer True or False; got {answer.dtype}")
    found: NDArray[np.bool_] = answer.cpu().numpy()
    return found
