"""What a type checker knows of a call: the results that its flags ask for, and nothing looser."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).parents[2]
DENSE, PACKED = ("(q, k, v, 0.0, causal=True, {})", "(q, k, v, ends, ends, 9, 9, 0.0, causal=True, {})")
CALLS = {
    "flash_attn_func": DENSE,
    "flash_attn_varlen_func": PACKED,
    "flash_attn_qkvpacked_func": "(qkv, 0.0, causal=True, {})",
    "flash_attn_kvpacked_func": "(q, kv, 0.0, causal=True, {})",
}
PLAIN, PAIR, TRIPLE = "Tensor", "tuple[Tensor, Tensor]", "tuple[Tensor, Tensor, None]"
RESULTS = {
    "": PLAIN,
    "return_lse=False": PLAIN,
    "schedule='weave', head_offset=1": PLAIN,
    "schedule=saved, mask=Causal(), sinks=q": PLAIN,
    "return_attn_probs=False": PLAIN,
    "return_lse=True": PAIR,
    "return_lse=True, return_attn_probs=False": PAIR,
    "return_attn_probs=True": TRIPLE,
    "return_attn_probs=True, return_lse=True": TRIPLE,
    "return_lse=flag": f"Tensor | {PAIR} | {TRIPLE}",
}
OF_CACHE = {"": PLAIN, "return_softmax_lse=True": PAIR, "return_softmax_lse=flag": f"Tensor | {PAIR}"}
HEAD = """
from torch import Tensor
from dash_attn.scheduling import Schedule
from dash_attn import Causal, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from dash_attn import flash_attn_with_kvcache
def check(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, qkv: Tensor, ends: Tensor, flag: bool, saved: Schedule) -> None:
"""


def test_mypy_infers_what_comes_back(tmp_path: Path) -> None:
    cases = [(name + call.format(rest), expected) for name, call in CALLS.items() for rest, expected in RESULTS.items()]
    cases += [(f"flash_attn_with_kvcache(q, k, v, causal=True, {rest})", expected) for rest, expected in OF_CACHE.items()]
    cases.append(("flash_attn_func(q, k, v, schedul='auto')", "an error"))  # the control
    snippet = tmp_path / "snippet.py"
    snippet.write_text(HEAD + "".join(f"    reveal_type({call})\n" for call, _ in cases))
    said, _, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), "--python-executable", sys.executable, str(snippet)])
    first = HEAD.count("\n") + 1
    for line, (call, expected) in enumerate(cases, first):
        notes = [text for text in said.splitlines() if f"snippet.py:{line}:" in text]
        if expected == "an error":
            assert any("No overload variant" in note for note in notes), said
            continue
        (note,) = notes
        found = re.sub(r"torch\._tensor\.|builtins\.", "", note.split('Revealed type is "')[1].rstrip('"'))
        assert _same(found, expected), f"{call}: {note}"


def _same(found: str, expected: str) -> bool:
    """mypy's versions write unions and tuples in two ways."""
    plain = found.replace("Tuple[", "tuple[")
    if plain.startswith("Union["):
        plain = plain[len("Union[") : -1].replace("Tensor, tuple", "Tensor | tuple", 1).replace("], tuple", "] | tuple")
    return plain == expected
