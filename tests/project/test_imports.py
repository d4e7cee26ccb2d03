"""Who may import whom: rooms, top to bottom, without a circle. Importing the package imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dash_attn
from rooms import CORE, PACKAGE, ROOMS

NUMPY_ONLY = {*CORE, "execution", "viewing"}
PICTURES = {"matplotlib", "PIL"}  # inside functions of viewing
ONLY_INSIDE_FUNCTIONS = {*PICTURES, "rich", "transformers", "cuda", "flash_attn", "triton", "accelerate"}
KERNELS = "dash_attn.backends.triton.kernels"  # written in Triton; imported inside functions
PUBLIC = {"__init__", "__main__"}  # the package itself: may import every room
FILES = sorted(PACKAGE.rglob("*.py"))
BLOCKED = ("torch", "matplotlib", "rich", "triton", "cuda")

USE_THE_CORE = """
import sys
for name in BLOCKED:
    sys.modules[name] = None
import dash_attn
from dash_attn.scheduling import Problem, generate, lower
from dash_attn.simulation import Machine, simulate
for schedule in ("auto", *dash_attn.scheduling.GENERATORS):
    timeline = simulate(generate(schedule, Problem.from_tiles("full", 8, 4, heads=2), 4), Machine(overlap=2, latency=2))
    assert timeline.gap >= 0 and timeline.critical_path and lower(timeline.schedule).tables_bytes
print("core works")
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_core_works_without_the_heavy_packages() -> None:
    result = run_python(f"BLOCKED = {BLOCKED!r}\n{USE_THE_CORE}")
    assert result.stdout == "core works\n", result.stderr


def test_importing_the_package_imports_no_heavy_package() -> None:
    result = run_python(f"import dash_attn, sys; print([name for name in {BLOCKED!r} if name in sys.modules])")
    assert result.stdout == "[]\n", result.stderr


USE_THE_API = """
import sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import dash_attn
dash_attn.flash_attn_func, dash_attn.flash_attn_varlen_func, dash_attn.flash_attn_qkvpacked_func, dash_attn.explain
print(time.perf_counter() - start, *sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
HEAVY = {"triton", "transformers", "accelerate", "matplotlib", "rich", "cuda", "flash_attn"}


def test_the_api_brings_in_nothing_heavy_and_is_quick() -> None:
    """On top of torch. The quickest of three: other work on the machine slows single runs."""
    found = []
    while len(found) < 3 and min(found, default=1.0) >= 1.0:
        result = run_python(USE_THE_API)
        assert result.returncode == 0, result.stderr
        seconds, *modules = result.stdout.split()
        assert not HEAVY & set(modules)
        assert "dash_attn" in modules
        found.append(float(seconds))
    assert min(found) < 1.0


def test_attention_without_torch_fails_on_use_not_on_import() -> None:
    code = "import sys; sys.modules['torch'] = None; import dash_attn; dash_attn.flash_attn_func"
    result = run_python(code)
    assert result.returncode != 0
    assert "torch" in result.stderr


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'flash_atn_func'"):
        _ = dash_attn.flash_atn_func  # type: ignore[attr-defined]


def module_of(path: Path) -> str:
    parts = ["dash_attn", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports_of(path: Path, everywhere: bool = True) -> set[str]:
    """Modules that a file imports when it runs (`everywhere`: inside functions, too); those for the type checker do not count."""
    tree = ast.parse(path.read_text())
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {id(child) for node in for_types for child in ast.walk(node)}
    package = ["dash_attn", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*(package[: len(package) - node.level + 1] if node.level else []), *([node.module] if node.module else [])])
            found |= {name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return found


def room_of(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def broken_rules(module: str) -> list[str]:
    """The rules that a module breaks, in words."""
    room, found = room_of(module), []
    if room in PUBLIC:
        return []
    for imported in sorted(imports_of(MODULES[module])):
        top = imported.split(".")[0]
        if top == "dash_attn":
            other = room_of(imported)
            if other not in {room, *ROOMS[room], "errors", "formats", "libraries", "__init__"}:
                found.append(f"{module} imports {imported}, but {room} may import {', '.join(sorted(ROOMS[room])) or 'no other room'} only")
            backends = [name.split(".")[2] for name in (module, imported) if name.startswith("dash_attn.backends.")]
            folders = {name for name in backends if (PACKAGE / "backends" / name).is_dir()}  # a file beside them is for all
            if len(folders) == 2:
                found.append(f"{module} imports {imported}, but backends never import each other")
        elif room in NUMPY_ONLY and top not in {"numpy", *PICTURES, *sys.stdlib_module_names}:
            found.append(f"{module} imports {imported}, but {room} needs numpy alone")
    for imported in imports_of(MODULES[module], everywhere=False):
        if imported.startswith(KERNELS) and not module.startswith(KERNELS):
            found.append(f"{module} imports {imported} at its top; it needs Triton, so import it where it is used")
        if imported.split(".")[0] in ONLY_INSIDE_FUNCTIONS and not (module.startswith(KERNELS) and imported.startswith("triton")):
            found.append(f"{module} imports {imported} at its top; it may be missing, so import it where it is used")
    return found


def test_every_room_has_a_rule() -> None:
    assert {room_of(module) for module in MODULES} - PUBLIC == set(ROOMS)


def test_every_import_obeys_the_rules() -> None:
    found = [rule for module in MODULES for rule in broken_rules(module)]
    assert not found, "\n".join(found)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: {name for name in imports_of(path) if name in MODULES} - {module, "dash_attn"} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"modules import each other in a circle: {' -> '.join(error.args[1])}") from None


def test_the_check_sees_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {"numpy", "dash_attn.scheduling.schedule", "dash_attn.scheduling.order"} <= imports_of(
        MODULES["dash_attn.scheduling.generators.one_kind"]
    )
    assert "dash_attn.scheduling.schedule" not in imports_of(MODULES["dash_attn.scheduling.engine"])  # for the type checker only
    bad = PACKAGE / "scheduling" / "bad.py"
    text = "import torch\nfrom ..simulation import simulate\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **_: text if path == bad else "")
    monkeypatch.setitem(MODULES, "dash_attn.scheduling.bad", bad)
    assert broken_rules("dash_attn.scheduling.bad") == [
        "dash_attn.scheduling.bad imports dash_attn.simulation.simulate, but scheduling may import masks only",
        "dash_attn.scheduling.bad imports torch, but scheduling needs numpy alone",
    ]
