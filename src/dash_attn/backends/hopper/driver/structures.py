"""A structure that Python and the kernels share is written once, as C. Python reads its members from there (`lay_out`), and the
generated headers have it with assertions (`declaration`): where the compiler lays it out otherwise than Python, it says so.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from textwrap import dedent, indent
from typing import Any, ClassVar

NUMBERS: dict[str, Any] = {"int": c_int, "u32": c_uint32, "u64": c_uint64, "i64": c_int64, "float": c_float}
UNION = re.compile(r"union \{ (.+) \};")
MEMBERS = re.compile(r"(?:const )?(\w+(?: char)?)(\*?) ([^;]+);")
NAME = re.compile(r"(\*?)(\w+)(?:\[(\d+)\])?")


class Structure(ctypes.Structure):
    """`in_c`: its members, a line for those of one type. `alignment`: in bytes, where it is not that of its members."""

    in_c: ClassVar[str]
    alignment: ClassVar[int] = 1

    @classmethod
    def bytes(cls) -> int:
        """As the compiler counts them: a multiple of the alignment."""
        return -(-ctypes.sizeof(cls) // cls.alignment) * cls.alignment

    @classmethod
    def names(cls) -> list[str]:
        return [name for line in _lines(cls) for name, _ in _members(UNION.sub(r"\1", line))]


STRUCTURES: dict[str, type[Structure]] = {}  # of the header that all kernels of attention include, in the order of their definition


def lay_out_all(module: str) -> None:
    """Those of a module, at its end."""
    for structure in Structure.__subclasses__():
        if structure.__module__ == module:
            lay_out(structure)
            STRUCTURES[structure.__name__] = structure


def lay_out(structure: type[Structure]) -> None:
    """Give it its members."""
    fields: list[tuple[str, Any]] = []
    unions: list[str] = []
    for line in _lines(structure):
        if not (union := UNION.match(line)):
            fields += _members(line)
            continue
        unions.append(f"union_{len(unions)}")
        fields.append((unions[-1], type("Union", (ctypes.Union,), {"_fields_": _members(union[1])})))
    structure._anonymous_ = unions
    structure._fields_ = fields


def declaration(structure: type[Structure]) -> str:
    """In C, with assertions that the compiler lays it out as Python does."""
    name = structure.__name__
    aligned = f"alignas({structure.alignment}) " if structure.alignment > 1 else ""
    offsets = [
        f'static_assert(OFFSET_OF({name}, {member}) == {getattr(structure, member).offset}, "Python has {name}.{member} elsewhere");'
        for member in structure.names()
    ]
    size = f'static_assert(sizeof({name}) == {structure.bytes()}, "Python counts other bytes in {name}");'
    members = indent(dedent(structure.in_c).strip(), "  ")
    return "\n".join([f"struct {aligned}{name} {{", members, "};", size, *offsets])


def _lines(structure: type[Structure]) -> list[str]:
    return [line.partition("//")[0].strip() for line in structure.in_c.splitlines() if line.partition("//")[0].strip()]


def _members(line: str) -> list[tuple[str, Any]]:
    """As C writes them: `int a, pair[2];` or `const float *x, *y;`."""
    found = []
    for c_type, star, names in MEMBERS.findall(line):
        for is_pointer, name, count in NAME.findall(names):
            kind = c_void_p if star or is_pointer else NUMBERS.get(c_type) or STRUCTURES[c_type]
            found.append((name, kind * int(count) if count else kind))
    return found
