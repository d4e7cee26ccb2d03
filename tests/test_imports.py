"""The scheduling core needs numpy alone, and each of its files imports only files below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dash_attn

PACKAGE = Path(dash_attn.__file__).parent
LAYERS = [
    "json_fields",
    "masks",
    "problem",
    "order",
    "engine",
    "validate",
    "schedule",
    "generators",
    "runs",
    "plan",
    "bounds",
    "critical_path",
    "simulate",
    "machines",
    "visits",
]
CORE = [*(PACKAGE / f"{layer}.py" for layer in LAYERS if layer != "generators"), *sorted((PACKAGE / "generators").glob("*.py"))]
BLOCKED = ("torch", "matplotlib", "rich", "triton", "cuda")

USE_THE_CORE = """
import sys
for name in BLOCKED:
    sys.modules[name] = None
import dash_attn
from dash_attn import Machine, Problem, generate, lower, simulate
for schedule in ("auto", *dash_attn.GENERATORS):
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
    results = [run_python(USE_THE_API) for _ in range(3)]
    assert all(result.returncode == 0 for result in results), results[0].stderr
    seconds, *modules = zip(*(result.stdout.split() for result in results), strict=True)
    assert not HEAVY & {name for (name, *_) in modules}
    assert "dash_attn" in {name for (name, *_) in modules}
    assert min(map(float, seconds)) < 1.0


def test_attention_without_torch_fails_on_use_not_on_import() -> None:
    code = "import sys; sys.modules['torch'] = None; import dash_attn; dash_attn.flash_attn_func"
    result = run_python(code)
    assert result.returncode != 0
    assert "torch" in result.stderr


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'flash_atn_func'"):
        _ = dash_attn.flash_atn_func  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_core_imports_point_downward(path: Path) -> None:
    own = LAYERS.index("generators" if path.parent.name == "generators" else path.stem)
    for module in runtime_imports(path):
        if module.startswith("dash_attn."):
            layer = module.split(".")[1]
            inside_generators = layer == "generators" == path.parent.name
            assert LAYERS.index(layer) < own or inside_generators, f"{path.name} imports {module}"
        else:
            assert module.split(".")[0] in {"numpy", *sys.stdlib_module_names}, f"{path.name} imports {module}"


def runtime_imports(path: Path) -> list[str]:
    """Modules a file imports when it runs, as absolute names; imports for the type checker do not count."""
    tree = ast.parse(path.read_text())
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {id(child) for node in for_types for child in ast.walk(node)}
    package = ".".join(["dash_attn", *path.relative_to(PACKAGE).parts[:-1]])
    found: list[str] = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            found.append(".".join([*base, node.module] if node.module else base))
    return found


def test_the_import_check_sees_what_is_there() -> None:
    assert {"numpy", "dash_attn.schedule", "dash_attn.generators._walks"} <= set(runtime_imports(PACKAGE / "generators" / "spt.py")) | set(
        runtime_imports(PACKAGE / "generators" / "ascending.py")
    )
    assert "dash_attn.schedule" not in runtime_imports(PACKAGE / "engine.py")
