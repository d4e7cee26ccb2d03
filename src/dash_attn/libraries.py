"""The oldest versions of other libraries that work, in one place. docs/compatibility.md says which versions were run."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

from .errors import Unsupported

LEAST = {"torch": "2.9", "transformers": "5.6", "triton": "3.4", "megatron-core": "0.16", "torchtitan": "0.3"}
LEAST_WITH_FLASH_PLUG = "2.11"  # of torch: 2.10 can activate an implementation of flash attention, and not end that
LEAST_WITH_PAGES = "5.17"  # of transformers: in 5.6, windows of generate_batch have other bits


def check_library(name: str, who: str, least: str = "") -> None:
    """Raise where the installed version is older than what `who` works with. A library that is missing says so when it is imported."""
    least, found = least or LEAST[name], installed(name)
    if found is not None and numbers(found) < numbers(least):
        raise Unsupported(f"{who} needs {name} {least} or later; got {found}: pip install '{name}>={least}'")


def installed(name: str) -> str | None:
    """What the imported module says, because some builds have another name; else what pip knows."""
    said = getattr(sys.modules.get(name.replace("-", ".")), "__version__", None)
    try:
        return version(name) if said is None else str(said)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, int]:
    """Major and minor. A version that has none is older than all."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))
