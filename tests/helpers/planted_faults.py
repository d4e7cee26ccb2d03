"""Faults for the hand-over of dQ between SMs, as changes of backward/drain.cuh. tests/gpu/test_gpu_faults.py runs them."""

from __future__ import annotations

FILE = "backward/drain.cuh"
RELEASE = "store_release(p.semaphores + note.dq_tile, note.turn + 1);"
COUNT = "atomicAdd(p.semaphores + note.dq_tile, 1);"  # whoever comes: the postprocess waits until all have
HAND_OVER = """      bulk_wait();
      fence_async_global();
      store_release(p.semaphores + note.dq_tile, note.turn + 1);
"""
PLAIN_STORE = "*(volatile int*)(p.semaphores + note.dq_tile) = note.turn + 1;"
PIECES = "#pragma unroll 1\n    for (int piece = 0; piece < C::DQ_PIECES; piece++) {\n"

FAULTS: dict[str, list[tuple[str, str]]] = {
    "nobody waits": [("if (ORDERED && note.turn > 0) await_turn(note);", ""), (RELEASE, COUNT)],
    "handed over before the reduce": [(PIECES, f"    if (ORDERED) {PLAIN_STORE}\n{PIECES}"), (HAND_OVER, "")],
    "handed over before the writes have landed": [(HAND_OVER, f"      {PLAIN_STORE}\n")],
}


def plant(fault: str, sources: dict[str, str]) -> dict[str, str]:
    """The sources with a fault in them."""
    text = sources[FILE]
    for old, new in FAULTS[fault]:
        assert text.count(old) == 1, f"{FILE} has changed: it holds {text.count(old)} times\n{old}"
        text = text.replace(old, new)
    return {**sources, FILE: text}
