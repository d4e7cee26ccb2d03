"""Writes dash-attn as a Python-only kernel of the Hugging Face Hub: `python tools/hub_kernel.py FOLDER` (docs/migration.md).

A variant is a folder build/torch-cpu or build/torch-cuda that `kernels` imports under a name of its own, so that two versions can be
loaded at once. Every import in it is therefore relative, and its operators are named by that variant.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dash_attn"
NAME = "dash-flash-attn"  # transformers knows by the word flash what a kernel's masks can say
VERSION = 1  # transformers loads version 1 of a repository that it does not know
ROOMS = ("masks", "scheduling", "simulation", "execution", "viewing", "call", "backends", "attention", "distributed", "integrations")
LEFT_OUT = {"integrations/megatron.py", "integrations/torchtitan.py", "integrations/trainer.py"}  # for programs that install the package
KINDS = (".py", ".cuh", ".cubin", ".json")
MAY_IMPORT = {"numpy", "torch", "triton", *sys.stdlib_module_names}  # PyTorch's GPU builds bring Triton
BACKENDS: dict[str, dict[str, Any]] = {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["8.0", "9.0", "10.0", "12.0"]}}
OPERATORS = ("dash_attn::", "torch.ops.dash_attn.", 'NAMESPACE = "dash_attn"')
OUR_NAMES = re.compile(r"\bops\.dash_attn\b|dash_attn::|(?:NAMESPACE = |Library\()[\"']dash_attn\b|[\"']dash_attn\.[\w.]+[\"']")

# What a kernel has, by the module that it comes from.
NAMES = {
    "attention.explain": ("explain",),
    "attention.side_by_side": ("flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"),
    "integrations.hub": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "integrations.huggingface": ("disable", "enable"),
    "masks": ("BooleanMask", "Causal", "Documents", "Full", "Mask", "Prefix", "TileMap", "Window"),
}
INIT = '''"""dash-attn {version}: attention whose gradients have the same bits in every run."""

{imports}

__version__ = "{version}"
__all__ = {names}
'''
CARD = """---
library_name: kernels
license: apache-2.0
---

dash-attn {version} as a Python-only kernel: attention whose gradients have the same bits in every training run.
"""


def write_kernel(folder: Path) -> None:
    """A repository of the Hub in a new folder. Raises if anything in it could not be imported there."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} must be a new or empty folder")
    files = dict(_files())
    (version,) = re.findall(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    imports = "\n".join(f"from .{module} import {', '.join(names)}" for module, names in NAMES.items())
    files["__init__.py"] = INIT.format(version=version, imports=imports, names=sorted(sum(NAMES.values(), ()))).encode()
    sums = "".join(f"{path} {hashlib.sha256(content).hexdigest()}\n" for path, content in sorted(files.items()))
    for backend, described in BACKENDS.items():
        variant = folder / "build" / f"torch-{backend}"
        name = f"_dash_attn_{backend}_{hashlib.sha256(sums.encode()).hexdigest()[:12]}"
        written = dict(files)
        for path, content in files.items():
            if path.endswith(".py"):  # operators are global, and the installed package may be there too
                text = content.decode()
                for ours in OPERATORS:
                    text = text.replace(ours, ours.replace("dash_attn", name))
                check_source(path, text)
                written[path] = text.encode()
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            (variant / path).write_bytes(written[path])
        (variant / "metadata.json").write_text(json.dumps(_metadata(name, described, written), indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(CARD.format(version=version))


def check_source(path: str, text: str) -> None:
    """Raise for what works only in a package that is installed as dash_attn, or needs others."""
    left = OUR_NAMES.search(text)
    if left:
        raise ValueError(f"{path} names the installed package: {left.group()}")
    tree = ast.parse(text)
    always = {id(statement) for statement in tree.body}  # what stands in a function is imported where it is needed
    for node in ast.walk(tree):
        for module in _absolute_imports(node):
            root = module.partition(".")[0]
            if root == "dash_attn" or (id(node) in always and root not in MAY_IMPORT):
                raise ValueError(f"{path} imports {module}; a kernel imports itself by relative names, and torch, triton and numpy")


def _absolute_imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module else []


def _files() -> Iterator[tuple[str, bytes]]:
    for room in ("errors.py", "formats.py", "libraries.py", "door.py", *ROOMS):
        for file in sorted((PACKAGE / room).rglob("*")) or [PACKAGE / room]:
            path = file.relative_to(PACKAGE).as_posix()
            if file.suffix in KINDS and path not in LEFT_OUT:
                yield path, file.read_bytes()


def _metadata(name: str, backend: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    digests = {path: base64.b64encode(hashlib.sha256(content).digest()).decode() for path, content in sorted(files.items())}
    return {
        "name": NAME,
        "id": name,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],  # numpy cannot be named here: `kernels` has a list of those that can
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests},
    }


if __name__ == "__main__":
    write_kernel(Path(sys.argv[1]))
