"""CONTRIBUTING.md: its answers name files that are there, and its steps work in a clean clone, in as many places as it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import suite
from dash_attn.cli.main import _parser, main
from doc_pages import blocks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LEADS = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "DESIGN.md").read_text(encoding="utf-8")
GENERATORS = "src/dash_attn/scheduling/generators"


def test_readme_and_design_lead_to_every_answer() -> None:
    """To its room; and by its name to what is deep in one."""
    answers = re.findall(r"^\| .* \| `([\w/]+\.\w+)` \|$", PAGE.split("## Where would you change")[1].split("\n## ")[0], re.MULTILINE)
    assert len(answers) == 8
    for answer in answers:
        assert (ROOT / "src/dash_attn" / answer).exists(), answer
        assert f"  {answer.split('/')[0]}/" in LEADS, answer
        name = answer.rpartition("/")[2]
        assert answer.count("/") == 1 or name in LEADS or f"| `{name.partition('.')[0]}` |" in LEADS, answer


def run(clone: Path, *words: str, **environment: str) -> None:
    """A command of the guide, in the clone."""
    settings = {**os.environ, "PYTHONPATH": f"{clone}/src:{clone}", **environment}
    done = subprocess.run([sys.executable, *words], cwd=clone, env=settings, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_tests(clone: Path, *words: str, **environment: str) -> None:
    run(clone, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *words, **environment)


def record_the_surface(clone: Path) -> None:
    run_tests(clone, "tests/project/test_surface.py", DASH_ATTN_UPDATE_GOLDEN="1")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} in {path}"
    path.write_text(text.replace(old, new))


def changed(clone: Path) -> set[str]:
    words = ["git", "status", "--short", "--untracked-files=all"]
    return {line[3:] for line in subprocess.run(words, cwd=clone, capture_output=True, text=True, check=True).stdout.splitlines()}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("a clone needs the repository")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    return tmp_path / "clone"


FIRST_HOUR = PAGE.split("## Your first hour")[1].split("\n## ")[0]
ENTRY = """#!/bin/sh
exec {python} -c 'import sys; from {module} import main; sys.exit(main())' "$@"
"""


@pytest.fixture
def ready(clone: Path) -> Path:
    """A clone whose .venv has this Python's commands, with the clone's code."""
    (clone / ".venv/bin").mkdir(parents=True)
    for name, module in (("dash-attn", "dash_attn.cli.main"), ("pytest", "pytest")):
        (clone / ".venv/bin" / name).write_text(ENTRY.format(python=shlex.quote(sys.executable), module=module))
        (clone / ".venv/bin" / name).chmod(0o755)
    return clone


@pytest.mark.exhaustive
def test_the_first_hour_goes_as_the_guide_says(ready: Path) -> None:
    """Its commands as they stand, one after another; one is meant to fail. Its figures are what they print."""
    settings = {**os.environ, "PYTHONPATH": f"{ready}/src:{ready}"}
    lines, said, changes = [line for block in blocks(FIRST_HOUR, "sh") for line in block.splitlines()], [], []
    for line in lines:
        done = subprocess.run(["bash", "-c", line], cwd=ready, env=settings, capture_output=True, text=True, timeout=900, check=False)
        assert (done.returncode != 0) == line.endswith("# fails"), line + done.stdout + done.stderr
        said.append(done.stdout)
        changes.append(changed(ready))
    before, after = (next(row for row in said[place].splitlines() if row.startswith("ascending ")) for place in (0, 2))
    assert " 44.1 % " in before
    assert " 4.1 % " in after
    (failed,) = (text for line, text in zip(lines, said, strict=True) if line.endswith("# fails"))
    assert "ascending on " in failed
    assert "DASH_ATTN_UPDATE_GOLDEN=1 refreshes the golden files" in failed
    golden = {"tests/golden/ascending.json", "tests/golden/order_hashes.txt"}
    assert max(changes, key=len) == {f"{GENERATORS}/one_kind.py", *golden, "before.png", "after.png"}
    assert changes[-1] == set()
    assert all(f" {time} " in "".join(said) for time in ("1511.88", "1059.04"))
    assert "measured on" in said[-3]


def test_other_figures_and_commands_of_the_first_hour(capsys: pytest.CaptureFixture[str]) -> None:
    """The speed before the change, and what needs a GPU."""
    assert main(shlex.split("plan --seqlen 4096 --heads 16 --batch 4 --machine h200 --schedule ascending")) == 0
    (before,) = re.findall(r"^ascending +([\d.]+) ", capsys.readouterr().out, re.MULTILINE)
    assert f"{before} us before" in FIRST_HOUR
    (measured, timed) = re.findall(r"`(--measured [^`]*|[^`]*benchmarks\.suite [^`]*)`", FIRST_HOUR)
    assert _parser().parse_args(["plan", "--seqlen", "512", *measured.split()]).measured
    assert suite.main([*timed.split()[3:], "--list"]) == 0


@pytest.mark.exhaustive
def test_a_schedule_is_added_in_three_steps(clone: Path) -> None:
    """A copy of `arrival` under another name: two files of src, and what the command writes."""
    folder = clone / GENERATORS
    (folder / "rising.py").write_text((folder / "arrival.py").read_text().replace("arrival", "rising"))
    edit(folder / "__init__.py", "from .shift import", "from .rising import rising\nfrom .shift import")
    edit(folder / "__init__.py", "alternating, arrival, weave)", "alternating, arrival, weave, rising)")
    edit(folder / "__init__.py", '"arrival", "weave"\n', '"arrival", "weave", "rising"\n')
    run_tests(clone, "tests/scheduling/test_golden.py", DASH_ATTN_UPDATE_GOLDEN="1")
    run_tests(clone, "tests/scheduling/test_golden.py")
    run_tests(clone, "tests/scheduling/test_generators.py", "-k", "rising")
    golden = {"tests/golden/rising.json", "tests/golden/order_hashes.txt"}
    assert changed(clone) == {f"{GENERATORS}/__init__.py", f"{GENERATORS}/rising.py", *golden}


CHUNKS = '''@dataclass(frozen=True)
class Chunks(IntervalMask):
    """A query attends to what is before it in its own chunk of `size` keys."""

    size: int

    def row_bounds(self, rows: Ints, q_len: int, kv_len: int) -> Bounds:
        places = rows + (kv_len - q_len)
        return places // self.size * self.size, places + 1

    def encoded(self) -> tuple[str, list[int]]:
        return "chunks", [self.size]


class BlockMap(Mask):
'''
CALL_WITH_CHUNKS = """
import torch
from dash_attn import Chunks, flash_attn_func, parse_mask
from dash_attn.masks.encoding import decode_mask, encode_mask
mask = Chunks(70)
assert parse_mask("chunks:70") == decode_mask(*encode_mask(mask)) == mask
q, k, v = (torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3))
place = torch.arange(300)
matrix = (place[:, None] // 70 == place // 70) & (place[:, None] >= place)
out, other = flash_attn_func(q, k, v, mask=mask), flash_attn_func(q, k, v, mask=matrix)
assert torch.allclose(out, other, atol=1e-6)
out.sum().backward()
"""


@pytest.mark.exhaustive
def test_a_mask_is_added_in_four_steps(clone: Path) -> None:
    """Five files, and what two commands write."""
    masks, top, page = clone / "src/dash_attn/masks", clone / "src/dash_attn/__init__.py", clone / "tools/support_page.py"
    edit(masks / "rules.py", "class BlockMap(Mask):\n", CHUNKS)
    edit(masks / "rules.py", 'Documents, Prefix, TileMap"', 'Documents, Prefix, Chunks, TileMap"')
    edit(masks / "encoding.py", "FULL, Causal, Documents", "FULL, Causal, Chunks, Documents")
    edit(masks / "encoding.py", "1, Prefix),\n", '1, Prefix),\n    "chunks": Form(":LEN", 1, Chunks),\n')
    edit(masks / "__init__.py", "import Causal as Causal\n", "import Causal as Causal\nfrom .rules import Chunks as Chunks\n")
    edit(top, "import BooleanMask, Causal,", "import BooleanMask, Causal, Chunks,")
    edit(top, '\n    "Causal",\n', '\n    "Causal",\n    "Chunks",\n')
    edit(page, "BooleanMask, Causal,", "BooleanMask, Causal, Chunks,")
    edit(page, '\n    "`Prefix`": Prefix(200),\n', '\n    "`Prefix`": Prefix(200),\n    "`Chunks`": Chunks(200),\n')
    run(clone, "tools/write_pages.py")
    record_the_surface(clone)
    run(clone, "-c", CALL_WITH_CHUNKS)
    run_tests(clone, "tests/project/test_pages.py", "tests/project/test_surface.py", "tests/project/test_glossary.py")
    files = {"__init__.py", "masks/__init__.py", "masks/encoding.py", "masks/rules.py"}
    written = {"docs/errors.md", "docs/support.md", "tests/golden/public_surface.txt"}
    assert changed(clone) == {*(f"src/dash_attn/{file}" for file in files), "tools/support_page.py", *written}


@pytest.mark.exhaustive
def test_a_head_dim_of_the_forward_is_two_lines(clone: Path) -> None:
    """Its tiles have the rows of the next larger kernel; products of 112 columns are there already."""
    tiles = clone / "src/dash_attn/backends/hopper/tiles.py"
    edit(tiles, "(96, 96), (128, 128), (192, 128)", "(96, 96), (112, 112), (128, 128), (192, 128)")
    edit(tiles, "(96, 96): {2: 229584}, ", "(96, 96): {2: 229584}, (112, 112): {2: 229584}, ")
    named = "no_variant or every_choice or (attention_forward and 112)"
    run(
        clone,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/backends/test_hopper_compile_others.py",
        "-k",
        f"({named}) and not f16",
    )
    run(clone, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/backends/test_hopper_compile.py", "-k", "sizes and 112")
    assert changed(clone) == {"src/dash_attn/backends/hopper/tiles.py"}


PLAIN_BACKEND = '''"""Attention by its definition, with whole matrices of scores: each sum is PyTorch's."""

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Grads, Saved
from ...call.explain import Explanation
from ...call.planning import describe_call, hash_of
from ...errors import Unsupported

HEADS_AT_ONCE = False
EXACT_PARTS = True


def check_schedule(call: Call) -> None:
    refused = [call.options.gives_schedule, call.offsets, call.sinks, call.modifiers, call.options.softcap]
    if any(one not in (None, False, 0.0) for one in refused):
        raise Unsupported("backend 'plain' takes dense tensors and a mask, and nothing else")


def _attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Saved:
    check_schedule(call)
    group, lengths = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    kept = torch.from_numpy(call.options.mask.keep(*map(slice, (0, 0), lengths), *lengths))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * call.options.scale
    scores = scores.masked_fill(~kept, -torch.inf)
    return Saved(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1))


def forward(call: Call) -> Saved:
    return _attend(call, *call.tensors)


def backward(call: Call, saved: Saved, grads: Grads) -> Gradients:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in call.tensors]
        found = _attend(call, *leaves)
    return Gradients(*torch.autograd.grad([found.out], leaves, [grads.out]))


def prepared(call: Call, *of_backward: object) -> None:
    """Nothing."""


def order_in_words(call: Call) -> str:
    return "whole matrices"


def explain(call: Call, predict_time: bool = True) -> Explanation:
    check_schedule(call)
    tiles, order = (call.q.shape[1], call.k.shape[1]), hash_of("plain", str(call.options.mask))
    return Explanation(describe_call(call), "plain", "none", "ordered", (), order, tiles, tiles, gang=1, workers=1, plan_bytes=0)
'''
CALL_OF_BACKEND = """
import pytest, torch
from dash_attn import Unsupported, Window, explain, flash_attn_func
found = {}
for backend in ("cpu", "plain"):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    out = flash_attn_func(q, k, v, mask=Window(40, 0), backend=backend)
    out.square().sum().backward()
    found[backend] = [out, q.grad, k.grad, v.grad]
assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found.values(), strict=True))
assert not all(map(torch.equal, *found.values()))
assert explain(flash_attn_func, q, k, v, causal=True, backend="plain").backend == "plain"
with pytest.raises(Unsupported, match="'plain'"):
    flash_attn_func(q, k, v, softcap=2.0, backend="plain")
"""


@pytest.mark.exhaustive
def test_a_backend_is_a_folder_and_three_lines(clone: Path) -> None:
    backends = clone / "src/dash_attn/backends"
    (backends / "plain").mkdir()
    (backends / "plain/__init__.py").write_text(PLAIN_BACKEND)
    edit(backends / "__init__.py", '"triton": "cuda"}', '"triton": "cuda", "plain": "cpu"}')
    edit(backends / "__init__.py", '("triton",)', '("triton", "plain")')
    edit(clone / "src/dash_attn/call/options.py", '"hopper", "triton"]', '"hopper", "triton", "plain"]')
    edit(clone / "tools/support_page.py", '"triton": torch.bfloat16}', '"triton": torch.bfloat16, "plain": torch.float32}')
    run(clone, "tools/write_pages.py")
    run(clone, "-c", CALL_OF_BACKEND)
    run_tests(clone, "tests/project/test_pages.py", "tests/project/test_imports.py", "tests/project/test_surface.py")
    files = {"src/dash_attn/backends/plain/__init__.py", "src/dash_attn/backends/__init__.py", "src/dash_attn/call/options.py"}
    assert changed(clone) == {*files, "tools/support_page.py", "docs/support.md", "docs/errors.md"}


DOOR = '''"""A library whose attention has our layout."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ..attention.functions import flash_attn_func
from ..attention.kept_options import kept_options
from ..door import Change, Door

DOOR = Door("integrations.library")


def enable(**options: Any) -> AbstractContextManager[object]:
    """Until `disable()`, or inside a block."""
    import library

    return DOOR.open(Change(library, "attention", partial(flash_attn_func, **kept_options(options))))


def disable() -> None:
    """The library's own again."""
    DOOR.close()
'''
THROUGH_THE_DOOR = """
import pytest, sys, torch, types
library = sys.modules["library"] = types.SimpleNamespace(attention=None)
from dash_attn import flash_attn_func
from dash_attn.integrations import library as door
q = torch.randn(1, 64, 2, 16)
with door.enable(schedule="descending"):
    assert torch.equal(library.attention(q, q, q, causal=True), flash_attn_func(q, q, q, causal=True))
assert library.attention is None
door.enable()
door.disable()
assert library.attention is None
with pytest.raises(RuntimeError, match="integrations.library is not enabled"):
    door.disable()
with pytest.raises(ValueError, match="schedule"):
    door.enable(schedule="none such")
"""


@pytest.mark.exhaustive
def test_a_door_is_a_module_and_its_docs(clone: Path) -> None:
    (clone / "src/dash_attn/integrations/library.py").write_text(DOOR)
    names = "".join(f"::: dash_attn.integrations.library.{name}\n\n" for name in ("enable", "disable"))
    edit(clone / "docs/api.md", "::: dash_attn.integrations.sdpa.enable\n", f"{names}::: dash_attn.integrations.sdpa.enable\n")
    record_the_surface(clone)
    run(clone, "-c", THROUGH_THE_DOOR)
    run_tests(clone, "tests/project/test_surface.py", "tests/project/test_imports.py", "tests/project/test_glossary.py")
    written = {"docs/api.md", "tests/golden/public_surface.txt"}
    assert changed(clone) == {"src/dash_attn/integrations/library.py", *written}
