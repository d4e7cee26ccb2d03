"""One word for one thing: names of modules, and of public functions and classes, use words as the glossary of DESIGN.md does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooms import PACKAGE

# Where a word may stand in a name, by the path in the package. Files that have the word in their own name are such places, too.
RANKS = (
    *("scheduling/ranks/", "simulation/cluster/", "distributed/", "ledgers/", "integrations/", "cli/"),
    *("viewing/explore/runs.py", "viewing/words.py", "backends/__init__.py", "backends/hopper/calls/leg_tables.py", "errors.py"),
    "tools/verify/ways.py",
)
PACKED_SEQUENCES = (
    *("backends/hopper/calls/", "backends/hopper/driver/parameters.py", "backends/hopper/driver/launch.py"),
    *(
        "call/parts.py",
        "tools/bench/candidates.py",
        "attention/signatures.py",
        "attention/torch_ops.py",
        "attention/varlen.py",
        "backends/run.py",
    ),
)
LEDGERS = ("ledgers/", "integrations/", "cli/", "errors.py")
FLASH_ATTENTION_NAMES = {"flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"}
EXPLAINS = {"explain", "explained", "explaining", "explains", "explanation", "explanations"}


def words(name: str) -> set[str]:
    """Of snake_case and of CamelCase, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def defined_in(path: Path) -> Iterator[str]:
    """Functions and classes without an underscore."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name


def fault(module: str, name: str) -> str | None:
    """What is wrong with a name. module: its path in the package, which is a name itself."""
    said, is_module = words(name), module.endswith(f"{name}.py")
    at_home = set[str]() if is_module else words(Path(module).stem)
    if said & {"rank", "ranks"} and not (module.startswith(RANKS) or is_module or at_home & {"rank", "ranks"}):
        return "a rank is a process of a group; the place of a task in a sum is its turn"
    if "packed" in name.lower() and name not in FLASH_ATTENTION_NAMES and not module.startswith(PACKED_SEQUENCES):
        return "packed are sequences that are laid end to end"
    if said & {"ledger", "ledgers"} and not module.startswith(LEDGERS):
        return "a ledger is the record of a run"
    if is_module and "devices" in said:
        return "a device is a GPU; a member of a group is a rank"
    if is_module and said & EXPLAINS and name != "explain":
        return "the file of a room that explains is explain.py"
    return None


def faults(path: Path) -> Iterator[tuple[str, str]]:
    module = path.relative_to(PACKAGE).as_posix()
    for place, name in ((module, path.stem), *((f"{module}: {name}", name) for name in defined_in(path))):
        found = fault(module, name)
        if found is not None:
            yield place, found


def test_names_use_words_as_the_glossary_does() -> None:
    found = dict(pair for path in sorted(PACKAGE.rglob("*.py")) for pair in faults(path))
    assert found == {}


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("scheduling/order.py", "rank_within", "its turn"),
        ("scheduling/order.py", "RankOrder", "its turn"),
        ("masks/boolean_mask.py", "PackedMatrix", "end to end"),
        ("masks/packed.py", "packed", "end to end"),
        ("execution/rules.py", "Ledger", "record of a run"),
        ("simulation/devices.py", "devices", "is a rank"),
        ("viewing/explaining.py", "explaining", "is explain.py"),
    ],
)
def test_the_check_sees_other_meanings(module: str, name: str, said: str) -> None:
    assert said in (fault(module, name) or "")


def test_the_check_lets_names_pass_where_they_belong() -> None:
    for module, name in (
        ("scheduling/ranks/units.py", "of_rank"),
        ("backends/cpu/ranks.py", "RankBackward"),
        ("call/explain.py", "explain"),
    ):
        assert fault(module, name) is None
    assert words("RankTimeline_of_KVCaches") == {"rank", "timeline", "of", "kv", "caches"}
