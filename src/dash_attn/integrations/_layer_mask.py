"""What `mask_for` gives to every layer of a model: never None and never a tensor, so that no other code can use it as a mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from ..call.offsets import SequenceOffsets
from ..masks import Mask
from ._padding import Padding

NAME = "dash_attn"  # our attn_implementation
ANOTHER_IMPLEMENTATION = 'use attn_implementation="eager" or "sdpa" for this model'


class ForeignUse(AttributeError, TypeError):
    """Code other than dash_attn tried to use our mask. Both bases, so that `hasattr` and operators see what they expect."""


@dataclass(slots=True, eq=False, repr=False)
class LayerMask:
    """A mask and the lengths it is for, with the documents' offsets where the batch is packed."""

    mask: Mask
    lengths: tuple[int, int]
    offsets: SequenceOffsets | None = None
    keys: int = -1  # how many of the keys that a layer gets are attended; -1 for all. A static cache has slots behind them
    first_key: int = 0  # where they begin among those. Chunked attention does not look at the chunks before
    first_position: int = 0  # that of the first of them. A cache of a window dropped those before
    lengths_on_device: Tensor | None = None  # `keys` as a tensor with one number per sequence, where the cache is static
    windows: tuple[int | None] | None = None  # of a causal mask, its window, or None without one; None if nothing of the kind is known
    documents_are_known: bool = False  # False where nothing has said yet whether rows hold documents, so that position_ids may
    noted: dict[str, Any] = field(default_factory=dict)  # what the model was given that tells documents (`_documents.py`)
    padding: Padding | None = None  # of rows that may be padded
    places: dict[str, Tensor] | None = None  # of such rows in a cache (`_padding.py`); None if keys are from slot 0 and first_position on
    model: str = "this model"  # the name of the configuration it was made for, for messages
    ndim: ClassVar[int] = 4  # transformers asks whether it has made this mask already: of four dimensions it has

    def __post_init__(self) -> None:
        self.keys = self.lengths[1] if self.keys < 0 else self.keys
        self.documents_are_known = self.offsets is not None

    def contiguous(self) -> LayerMask:
        """`generate` lays out masks that it makes ahead, for static caches."""
        return self

    def check(self, q_len: int, kv_len: int) -> None:
        """Raise if a layer attends other lengths than the mask was made for: the pattern would be shifted."""
        if self.lengths != (q_len, kv_len):
            raise NotImplementedError(
                f"dash_attn has a mask of {self.lengths[0]} queries and {self.lengths[1]} keys for {self.model};"
                f" a layer attends {q_len} queries and {kv_len} keys"
            )

    def __repr__(self) -> str:
        return f"<mask of dash_attn: {self.mask}, {self.lengths[0]} queries, {self.lengths[1]} keys>"

    def __getitem__(self, index: Any) -> LayerMask:
        """Models cut a mask to the length of the keys. A cut that keeps all is the mask itself."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) == 4 and all(isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1) for part in parts):
            stops = [part.stop for part in parts]
            if stops[:2] == [None, None] and all(stop is None or stop >= n for stop, n in zip(stops[2:], self.lengths, strict=True)):
                return self
        _refuse(self.model, "cuts it")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy, pickle and numpy ask for methods that we do not have
            raise AttributeError(name)
        _refuse(self.model, f"asks for its .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = next((given for given in (*args, *(kwargs or {}).values()) if isinstance(given, LayerMask)), None)
        _refuse("this model" if found is None else found.model, f"calls {getattr(func, '__name__', func)} on it")


def _refuse(model: str, what: str) -> NoReturn:
    raise ForeignUse(
        f"dash_attn's mask is not a tensor, and {model} {what}: its attention code is its own and does not go through dash_attn;"
        f" {ANOTHER_IMPLEMENTATION}"
    )


def _operator(name: str) -> Any:
    def refuse(self: LayerMask, *others: Any) -> NoReturn:
        _refuse(self.model, f"applies {name} to it")

    return refuse


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OPERATORS = (
    *(f"__{side}{name}__" for name in _BINARY for side in ("", "r", "i")),
    *("__neg__", "__pos__", "__invert__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *("__bool__", "__len__", "__iter__", "__float__", "__int__", "__index__", "__setitem__", "__contains__"),
)
for _name in _OPERATORS:
    setattr(LayerMask, _name, _operator(_name))
LayerMask.__hash__ = object.__hash__  # type: ignore[method-assign]
