"""Which modules one call passes on its way: python tools/passed_modules.py [--list]

Counts modules and functions of dash_attn that a forward and a backward of flash_attn_func enter, by `sys.setprofile`: the first call of a
shape (cold) and the next one (warm). Hopper calls run on a driver that launches nothing (tests/helpers/launchless.py), so no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers")]
PACKAGE = str(ROOT / "src" / "dash_attn")

Passed = set[tuple[str, str]]  # module, function


def passed_by(action: Callable[[], object]) -> Passed:
    found: Passed = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.add((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname if sys.version_info >= (3, 11) else code.co_name))

    threading.setprofile(note)  # a backward may run in a thread of autograd's
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def calls(backend: str) -> dict[str, Passed]:
    """Of a forward and a backward, cold and warm."""
    import torch

    from dash_attn import flash_attn_func

    q, k, v = (torch.zeros(2, 300, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    outs: list[Any] = []
    found = {}
    for when in ("cold", "warm"):
        found[f"{when} forward"] = passed_by(lambda: outs.append(flash_attn_func(q, k, v, causal=True, backend=backend)))
        dout = torch.ones_like(outs[-1])
        found[f"{when} backward"] = passed_by(lambda dout=dout: torch.autograd.grad(outs[-1], (q, k, v), dout))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the modules")
    arguments = parser.parse_args()
    from dash_attn import backends
    from launchless import launchless_driver

    with launchless_driver(), patch.dict(backends.DEVICE_OF, hopper="cpu"):
        hopper = calls("hopper")
    for backend, found in (("hopper", hopper), ("cpu", calls("cpu"))):
        for what, passed in found.items():
            modules = sorted({module for module, _ in passed})
            print(f"{backend} {what}: {len(modules)} modules, {len(passed)} functions")
            if arguments.list:
                print("  " + "\n  ".join(modules))


if __name__ == "__main__":
    main()
