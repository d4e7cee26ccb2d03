"""A door into another library: functions of ours stand where that library looks for its own. `enable()` opens it, `disable()` closes it."""

from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Change(NamedTuple):
    """Ours, as an attribute of an object or an entry of a dictionary."""

    owner: Any
    name: str
    ours: Any

    def found(self) -> Any:
        return self.owner.get(self.name) if isinstance(self.owner, dict) else getattr(self.owner, self.name)

    def put(self, value: Any) -> None:
        if isinstance(self.owner, type) and any(vars(base).get(self.name) is value for base in self.owner.__mro__[1:]):
            delattr(self.owner, self.name)  # it was inherited
        elif not isinstance(self.owner, dict):
            setattr(self.owner, self.name, value)
        elif value is None:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value


class Door:
    """What an integration has changed, and what was there before. `module`: its name, for messages."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._made: list[tuple[Change, Any]] = []

    def open(self, *changes: Change) -> AbstractContextManager[object]:
        """Until `close`, or to the end of a block: then all is as before the block, whatever was changed in it. Blocks nest."""
        with ExitStack() as block:
            block.callback(self._put_back, len(self._made))
            for change in changes:
                before = change.found()
                if before != change.ours:  # twice is once
                    change.put(change.ours)
                    self._made.append((change, before))
            return block.pop_all()  # after an error nothing is changed

    @property
    def is_open(self) -> bool:
        return bool(self._made)

    def close(self) -> None:
        """However often it was opened. Raises rather than undo what another library has done since."""
        if not self._made:
            raise RuntimeError(f"dash_attn.{self.module} is not enabled, so that there is nothing to disable")
        self._put_back(0, insist=True)

    def _put_back(self, length: int, insist: bool = False) -> None:
        while len(self._made) > length:
            change, before = self._made[-1]
            if insist and change.found() not in (change.ours, before):
                raise RuntimeError(
                    f"{change.name} was changed again after dash_attn.{self.module}.enable(): undo that before disable();"
                    f" found {change.found()!r}"
                )
            change.put(before)
            self._made.pop()


def refuse_unknown(who: str, given: dict[str, Any], known: Collection[str], where: str) -> None:
    """Raise for an argument that nothing here is known about: it may choose what is attended. None says nothing."""
    unknown = [(name, value) for name, value in given.items() if value is not None and name not in known]
    if unknown:
        named = (f"{name}={x}" if isinstance(x, (bool, int, float, str)) else f"{name} (a {type(x).__name__})" for name, x in unknown)
        raise ValueError(f"{who} does not support {', '.join(named)}, {where}")


def names_of(layer: type) -> set[str]:
    """All names that the code of a class uses, also those it inherits from classes that are not PyTorch's."""
    found: set[str] = set()
    for base in layer.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for member in vars(base).values():
            function = unwrap(member) if callable(member) else member
            if isinstance(function, FunctionType):
                found |= names_of_code(function.__code__)
    return found


def names_of_code(code: CodeType) -> set[str]:
    """And of functions in it."""
    inner = [names_of_code(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
