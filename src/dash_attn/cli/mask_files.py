"""`--mask FILE.npy`: a boolean matrix that numpy.save wrote, in place of a mask by name."""

from __future__ import annotations

import argparse
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..masks import BooleanMask

ENDING = ".npy"
MOST_ELEMENTS = 2**32  # 65,536 x 65,536: half a gigabyte of bits


class MaskFile(str):
    """The path, as it was typed, and the matrix that is there."""

    matrix: NDArray[np.bool_]

    @cached_property
    def mask(self) -> BooleanMask:
        """Of elements. Of tiles the matrix itself says which are kept."""
        return BooleanMask(self.matrix)


def is_file(mask: str) -> bool:
    return mask.endswith(ENDING)


def read_mask_file(arguments: argparse.Namespace) -> None:
    """In place of its name, where --mask is one. Lengths that were not given become those of the matrix. It has one element per token, or
    per tile if tile counts were given."""
    if isinstance(arguments.mask, MaskFile):  # was read before
        return
    if not is_file(arguments.mask):
        if set("./") & set(arguments.mask.partition(":")[0]):  # no mask has such a name
            raise ValueError(f"--mask: a matrix is read from FILE{ENDING}, as numpy.save writes it; got {arguments.mask}")
        return
    if arguments.ranks is not None:
        raise ValueError(f"--ranks takes a mask by name, because ranks that share a sequence take no matrix; got {arguments.mask}")
    arguments.mask = mask = MaskFile(arguments.mask)
    mask.matrix = _matrix_of(mask)
    of_tiles = arguments.seqlen is None and (arguments.q_tiles, arguments.kv_tiles) != (None, None)
    for name, size in zip(("q_tiles", "kv_tiles") if of_tiles else ("seqlen", "kv_seqlen"), mask.matrix.shape, strict=True):
        if (given := getattr(arguments, name)) not in (None, size):
            rows, columns = mask.matrix.shape
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} must be {size}, because the mask {mask} has {rows} x {columns} elements; got {given}")
        setattr(arguments, name, size)


def _matrix_of(path: str) -> NDArray[np.bool_]:
    """The file is only mapped, so that shape and dtype are looked at before anything is read."""
    try:
        matrix: NDArray[np.bool_] = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise ValueError(f"--mask: cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"--mask: {path} is no array that numpy.save wrote: {str(error).strip()}") from None
    if matrix.dtype != np.bool_ or matrix.ndim != 2 or matrix.size == 0:
        what = f"--mask: {path} must hold a boolean matrix, one row per query and one column per key, not empty"
        raise ValueError(f"{what}; got {matrix.dtype} of shape {matrix.shape}")
    if matrix.size > MOST_ELEMENTS:
        raise ValueError(f"--mask: {path} may have at most {MOST_ELEMENTS:,} elements; got shape {matrix.shape}")
    return matrix
