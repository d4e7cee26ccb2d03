"""The package works under another name than its own: Hugging Face's `kernels` loads packages from any folder, by a name it makes up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dash_attn

PACKAGE = Path(dash_attn.__file__).parent
CODE = """
import importlib.util, sys, torch
sys.path = [path for path in sys.path if "site-packages" in path or "lib/python" in path]  # not the folder of the sources
spec = importlib.util.spec_from_file_location("_another_name_1", {file!r})
module = sys.modules["_another_name_1"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["dash_attn"] = None  # an absolute import of the package now raises
q, k, v = (torch.randn(1, 150, 2, 16, requires_grad=True) for _ in range(3))
module.flash_attn_func(q, k, v, causal=True).sum().backward()
assert q.grad.abs().sum() > 0
"""


def test_no_module_needs_the_name_of_the_package() -> None:
    code = CODE.format(file=str(PACKAGE / "__init__.py"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
