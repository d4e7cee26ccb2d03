"""Masks as text, as JSON and as arguments of a torch operator, and back. Whoever adds a mask that a few numbers describe adds its line
to FORMS; its class says its word and its numbers (`encoded`)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import did_you_mean
from .boolean_mask import BooleanMask, TilePattern
from .rules import EMPTY, FULL, Causal, Documents, Full, Mask, Prefix, TileMap, Window, check_mask, mask_in_words


class Form(NamedTuple):
    """How the numbers behind a word are written, how many there are (None: one or more), and what makes a mask of them."""

    usage: str
    numbers: int | None
    make: Callable[..., Mask]

    def takes(self, numbers: Sequence[int]) -> bool:
        return len(numbers) == self.numbers or (self.numbers is None and len(numbers) > 0)


FORMS = {
    "full": Form("", 0, Full),
    "causal": Form("", 0, Causal),
    "window": Form(":LEFT,RIGHT", 2, Window),
    "documents": Form(":LEN,LEN,...", None, lambda *lengths: Documents(lengths)),
    "documents-full": Form(":LEN,LEN,...", None, lambda *lengths: Documents(lengths, causal=False)),
    "prefix": Form(":LEN", 1, Prefix),
}
MASK_FORMS = ", ".join(word + form.usage for word, form in FORMS.items())
TILES = "tiles:"  # followed by the blocks, row by row, eight per byte, in hexadecimal
LETTERS = ".+#"  # of a block in JSON: empty, partial, full


def parse_mask(text: str, unit: int = 1) -> Mask:
    """Read a mask as it prints. Lengths are multiplied by `unit` (tokens per KV tile, when they are given in tiles)."""
    if not isinstance(text, str):
        raise TypeError(f"a mask is read from text, written {MASK_FORMS}; got {mask_in_words(text)}")
    word, _, argument = text.strip().partition(":")
    if word not in FORMS:
        raise ValueError(f"unknown mask {text!r}; masks are written {MASK_FORMS}{did_you_mean(word, FORMS)}")
    try:
        numbers = [int(number) for number in argument.split(",")] if argument else []
    except ValueError:
        raise ValueError(f"mask {text!r}: lengths must be whole numbers, as in {word}{FORMS[word].usage}") from None
    if not FORMS[word].takes(numbers):
        raise ValueError(f"mask {text!r} is written {word}{FORMS[word].usage}")
    return FORMS[word].make(*(number if number < 0 else number * unit for number in numbers))


def encode_mask(mask: Mask | BooleanMask) -> tuple[str, list[int]]:
    """One word and a list of whole numbers: arguments of a torch operator. Sizes are numbers and not text because a traced program may
    know them as symbols."""
    if isinstance(mask, BooleanMask):
        raise TypeError(
            "a compiled or exported program takes a boolean mask as a tensor, of which it makes a BooleanMask in each call: pass the tensor"
            " as mask; got a BooleanMask"
        )
    check_mask(mask)
    return mask.encoded()


def decode_mask(name: str, sizes: Sequence[int]) -> Mask:
    if name.startswith(TILES) and len(sizes) == 4:
        return _decode_tiles(name[len(TILES) :], *sizes)
    if name not in FORMS or not FORMS[name].takes(sizes):
        raise ValueError(f"unknown mask {name[:80]!r} with sizes {list(sizes)}; masks are encoded by dash_attn.masks.encoding.encode_mask")
    return FORMS[name].make(*sizes)


def _decode_tiles(hexadecimal: str, rows: int, columns: int, block_q: int, block_kv: int) -> TileMap:
    octets = np.frombuffer(bytes.fromhex(hexadecimal), dtype=np.uint8)
    if min(rows, columns) < 1 or len(octets) != -(-rows * columns // 8):
        raise ValueError(f"a tile map of {rows} x {columns} blocks needs {-(-rows * columns // 8)} bytes; got {len(octets)}")
    return TileMap(np.unpackbits(octets, count=rows * columns).astype(np.bool_).reshape(rows, columns), block_q, block_kv)


def mask_to_json(mask: Mask) -> dict[str, Any] | str:
    """A JSON value. `as_mask` in scheduling/json_fields.py reads it back and says what is wrong with it."""
    if isinstance(mask, TileMap):
        return {"tiles": _rows(np.where(mask.blocks, FULL, EMPTY)), "block_q": mask.block_q, "block_kv": mask.block_kv}
    if isinstance(mask, TilePattern):  # the elements are data of a call
        return {"pattern": _rows(mask.blocks)}
    return str(mask)


def _rows(blocks: NDArray[Any]) -> list[str]:
    return ["".join(LETTERS[block] for block in row) for row in blocks.tolist()]


def blocks_of(rows: Sequence[str]) -> NDArray[np.uint8]:
    """Blocks as `mask_to_json` writes them."""
    return np.array([[LETTERS.index(letter) for letter in row] for row in rows], dtype=np.uint8)
