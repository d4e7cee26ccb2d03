"""What of a cubin decides bits: its instructions and the sizes of its parameters and shared memory. The rest names things."""

import hashlib
import struct

SECTIONS = (".text.", ".nv.constant0.", ".nv.shared.")  # instructions, kernel parameters, static shared memory
NO_BITS = 8  # a section that has a size but no contents


def machine_code_hash(cubin: bytes) -> str:
    """sha256 of those sections of an ELF file, whatever else the compiler put beside them."""
    digest = hashlib.sha256()
    for name, kind, contents in sorted(_sections(cubin)):
        if name.startswith(SECTIONS) and not name.startswith(".nv.shared.reserved"):
            digest.update(f"{name} {kind} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()


def _sections(elf: bytes) -> list[tuple[str, int, bytes]]:
    """(name, kind, contents) of every section; contents of NO_BITS are its size."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    names = elf[headers[names_at][4] :]
    found = []
    for name_at, kind, _, _, offset, size in headers:
        contents = str(size).encode() if kind == NO_BITS else elf[offset : offset + size]
        found.append((names[name_at : names.index(b"\0", name_at)].decode(), kind, contents))
    return found
