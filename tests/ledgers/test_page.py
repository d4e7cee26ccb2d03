"""What docs/ledger.md shows runs, and prints what it says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from torch import nn

from dash_attn.cli.main import main
from doc_pages import DOCS, blocks
from tiny_gpt import TinyGpt, Training, flip_bit

PAGE = (DOCS / "ledger.md").read_text()


def test_blocks_and_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(PAGE, "python"))
    for name in "ab":
        exec(compile(code.replace("runs/a", f"runs/{name}"), "<docs>", "exec"), {})
    commands = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
    assert [main(shlex.split(command, comments=True)[1:]) for command in commands] == [0, 0]


def flip(step: int, model: nn.Module) -> None:
    if step == 7:
        assert isinstance(model, TinyGpt)
        flip_bit(model.layers[2].mlp[0].weight)


def test_the_output_is_the_one_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But for values and counts: another processor may round in another way."""
    for name, fault in (("a", lambda step, model: None), ("b", flip)):
        Training(tmp_path / name, steps=9, ledger={"detail": range(6, 9), "keep": 4}, before_step=fault).run()
    main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    printed = capsys.readouterr().out.splitlines()
    (shown,) = blocks(PAGE, "text")
    for one, other in zip(shown.splitlines(), printed, strict=True):
        assert one[:23] == other[:23]
        if not one.startswith(("The runs", "  in ", "  tensors that differ")):
            assert one == other
