"""Structures that Python and the kernels share are written once, as C. Python reads their members from there (`structures_in`), and the
generated headers have them with assertions (`declaration`): where the compiler lays one out otherwise than Python, it says so.
"""

import ctypes
import re
from ctypes import c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

NUMBERS: dict[str, Any] = {"int": c_int, "u32": c_uint32, "u64": c_uint64, "i64": c_int64, "float": c_float}
STRUCT = re.compile(r"^struct (?:alignas\((\d+)\) )?(\w+) \{\n(.+?)\n\};$", re.MULTILINE | re.DOTALL)
UNION = re.compile(r"union \{ (.+) \};")
MEMBERS = re.compile(r"(?:const )?(\w+(?: char)?)(\*?) ([^;]+);")
NAME = re.compile(r"(\*?)(\w+)(?:\[(\d+)\])?")


class Structure(ctypes.Structure):
    """`in_c`: its declaration. `alignment`: in bytes, where it is not that of its members."""

    in_c: ClassVar[str]
    alignment: ClassVar[int]
    names: ClassVar[list[str]]  # of all members, those of unions, too

    @classmethod
    def bytes(cls) -> int:
        """As the compiler counts them: a multiple of the alignment."""
        return -(-ctypes.sizeof(cls) // cls.alignment) * cls.alignment


def structures_in(text: str) -> dict[str, type[Structure]]:
    """Those that a text in C declares, in its order. One may be a member of those behind it."""
    kinds, found = dict(NUMBERS), {}
    for declared in STRUCT.finditer(text):
        alignment, name, lines = declared.groups()
        fields: list[tuple[str, Any]] = []
        unions: list[str] = []
        names: list[str] = []
        for line in lines.splitlines():
            members = _members(line.partition("//")[0], kinds)
            names += [member for member, _ in members]
            if UNION.match(line.strip()):
                unions.append(f"union_{len(unions)}")
                members = [(unions[-1], type("Union", (ctypes.Union,), {"_fields_": members}))]
            fields += members
        given = {"in_c": declared[0], "alignment": int(alignment or 1), "names": names, "_anonymous_": unions, "_fields_": fields}
        found[name] = kinds[name] = type(name, (Structure,), given)
    return found


def _members(line: str, kinds: dict[str, Any]) -> list[tuple[str, Any]]:
    """As C writes them: `int a, pair[2];` or `const float *x, *y;`."""
    found = []
    for c_type, star, names in MEMBERS.findall(UNION.sub(r"\1", line)):
        for is_pointer, name, count in NAME.findall(names):
            kind = c_void_p if star or is_pointer else kinds[c_type]
            found.append((name, kind * int(count) if count else kind))
    return found


def declaration(structure: type[Structure]) -> str:
    """In C, with assertions that the compiler lays it out as Python does."""
    name = structure.__name__
    offsets = [
        f'static_assert(OFFSET_OF({name}, {member}) == {getattr(structure, member).offset}, "Python has {name}.{member} elsewhere");'
        for member in structure.names
    ]
    size = f'static_assert(sizeof({name}) == {structure.bytes()}, "Python counts other bytes in {name}");'
    return "\n".join([structure.in_c, size, *offsets])
