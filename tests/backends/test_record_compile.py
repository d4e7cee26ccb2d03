"""The recording kernel spills nothing more, and what records costs the other one nothing: its machine code is the same without it."""

from __future__ import annotations

import re
from struct import unpack_from

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from dash_attn.backends.hopper.driver.compile import compile_uncached, sources

PLAIN = "attention_backward<bf16, 128, 128, true, false, MaskKind::Band>"
VARIANTS = (("64, 64", "Rows"), ("128, 128", "Blocks"))  # Band is among the variants that must be clean


def local_memory(name: str) -> list[int]:
    """Bytes of stack, of spilled stores and of spilled loads."""
    log = compile_uncached("backward/attention.cuh", name).log
    sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    assert len(sizes) == 3, "the assembler's report is missing"
    return [int(size) for size in sizes]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dims", "mask"), VARIANTS)
def test_recording_spills_no_register(dims: str, mask: str) -> None:
    """The drains have 24 registers. What the kernel itself spills is judged elsewhere."""
    name = f"attention_backward<bf16, {dims}, true, false, MaskKind::{mask}>"
    assert max(local_memory(name.replace(">", ", true>"))) <= max(local_memory(name))


def machine_code(cubin: bytes) -> bytes:
    """The .text section of a binary with one kernel (a 64-bit little-endian ELF file)."""
    table, entry_size, count, names_at = *unpack_from("<Q", cubin, 40), *unpack_from("<HHH", cubin, 58)
    headers = [unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]  # name, ..., offset, size
    names = cubin[headers[names_at][4] :]
    (code,) = (cubin[h[4] : h[4] + h[5]] for h in headers if names[h[0] :].startswith(b".text"))
    return code


def test_recording_costs_nothing_when_it_is_off() -> None:
    drain = sources()["backward/drain.cuh"].splitlines()
    without = "\n".join(line for line in drain if "if (RECORD" not in line).replace("RECORD ? cycles() : 0", "0")
    assert len(drain) - without.count("\n") >= 4, "the lines that record are gone"
    stripped = compile_uncached("backward/attention.cuh", PLAIN, {"backward/drain.cuh": without})
    assert machine_code(compile_uncached("backward/attention.cuh", PLAIN).cubin) == machine_code(stripped.cubin)
    recording = compile_uncached("backward/attention.cuh", PLAIN.replace(">", ", true>"))
    assert machine_code(recording.cubin) != machine_code(stripped.cubin), "the control: recording does add code"
