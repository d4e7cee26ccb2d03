"""The generated pages of docs/ say what the code says today."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import call_picture
import errors_page
import pictures
import support_page
from dash_attn import flash_attn_func
from dash_attn.backends import DEVICE_OF
from dash_attn.backends.hopper import support
from dash_attn.masks import rules
from page_parts import cells, numbers_in_words, row
from pictures import TUTORIAL, watched
from support_page import ARGUMENTS, OPTIONS, Question
from write_pages import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), f"docs/{name} is out of date: run `make pages`"


def test_every_argument_is_on_the_page() -> None:
    asked = {"q", "k", "v", "schedule", "backend"}.union(*(question.options for question in OPTIONS), *(given for _, given in ARGUMENTS))
    missing = set(inspect.signature(flash_attn_func).parameters) - asked
    assert not missing, f"add {missing} to OPTIONS or ARGUMENTS of tools/support_page.py"


def test_every_mask_is_on_the_page() -> None:
    def concrete(base: type) -> Iterator[type]:
        for kind in base.__subclasses__():
            yield from concrete(kind)
            if not getattr(kind, "__abstractmethods__", None) and kind.__module__ == rules.__name__:
                yield kind

    assert {type(mask) for mask in support_page.MASKS.values()} == set(concrete(rules.Mask))


def test_the_page_follows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the backend refuses is refused on the page."""
    assert support_page.by_backend("dtype", [Question("bf16")])[-1] == row(["bf16", *("yes" for _ in DEVICE_OF)])
    monkeypatch.setattr(support, "DTYPES", {})
    _, _, found, _, error = support_page.by_backend("dtype", [Question("bf16")])
    assert found == row(["bf16", *("raises" if backend == "hopper" else "yes" for backend in DEVICE_OF)])
    assert error.startswith("- `hopper`, bf16: `backend 'hopper' takes")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "none"),
        ([64, 128], "64, 128"),
        ([1, 2, 3, 4], "1 to 4"),
        ([8, 16, 24, 32, 64, 128], "8 to 32 in steps of 8, 64, 128"),
        ([64, 96, 128, 192, 256], "64, 96, 128, 192, 256"),
        ([1, 2, 3, 4, 6, 8, 10, 12], "1 to 4, 6 to 12 in steps of 2"),
    ],
)
def test_numbers_in_words(numbers: list[int], text: str) -> None:
    assert numbers_in_words(numbers) == text


@pytest.mark.parametrize("call", errors_page.mistakes())
def test_every_misuse_says_what_is_allowed(call: str) -> None:
    found = errors_page.outcome(call)
    assert found is not None
    assert 15 < len(str(found)) < 300  # a sentence, not a dump of a tensor
    assert type(found).__name__ in {
        "ValueError",
        "TypeError",
        "Unsupported",
        "ScheduleError",
        "TooFewWorkers",
        "CutTile",
        "NotImplementedError",
        "RuntimeError",
    }


def test_a_call_without_error_is_noticed() -> None:
    assert errors_page.outcome("flash_attn_func(q, k, v)") is None
    with pytest.raises(AssertionError, match="raises nothing"):
        errors_page._filled("| `flash_attn_func(q, k, v)` | | Nothing. |")


def test_an_error_is_filled_in() -> None:
    assert errors_page._filled("| `q[9]  # or more` |  | A |") == (
        "| `q[9]  # or more` | IndexError: index 9 is out of bounds for dimension 0 with size 2 | A |"
    )
    assert errors_page._filled("| `q.ndim` | ? |") == "| `q.ndim` | `4` |"
    assert cells(row(["a | b", "c"])) == ["a | b", "c"]
    assert len(errors_page.mistakes()) > 90


def test_the_tutorial_runs_and_its_page_is_up_to_date(tmp_path: Path) -> None:
    """Its pictures: test_pictures.py."""
    pytest.importorskip("matplotlib")
    with watched():
        page = pictures.tutorial_page(tmp_path)
    committed = (DOCS / TUTORIAL).read_text(encoding="utf-8")
    assert page == committed, "docs/tutorial is out of date: run `make pages`"
    shown = re.findall(r"!\[[^]]+\]\(([\w-]+\.png)\)", committed)
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir())
    assert all((DOCS / "tutorial" / name).stat().st_size < 120_000 for name in shown)


def test_the_picture_of_a_call_names_files_that_exist() -> None:
    package = Path(rules.__file__).parents[1]
    for box in call_picture.BOXES.values():
        folder = package
        for name in box.place.split(", "):  # "cli/main.py, plan.py" are neighbours, unless both have a folder
            path = package / name if "/" in name or folder == package else folder / name
            assert path.exists(), name
            folder = path.parent if path.is_file() or name.endswith("generators/") else path


def test_cells_are_told_apart() -> None:
    source = '"""Doc."""\n# %% [markdown]\n# Text\n# %%\nx = 1\n# %%no cell\n'
    assert pictures.cells(source) == [(True, "# Text"), (False, "x = 1\n# %%no cell")]
