"""The committed pictures of docs/: what draws each, and what each shows. `make pages` draws those again that show something else now.
And the page docs/tutorial/schedules.md, which draws some: the script beside it, cell by cell, with what each cell prints.

docs/images/shown.txt has a line for each picture: its file, a hash of what its figure shows, and a hash of the file itself.
Tests draw the figures, without rendering them, and compare. What a figure shows are its texts, and the numbers behind its lines, shapes
and images. Fonts, layout and rendering are not in it: they differ between versions of Matplotlib.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

import call_picture
from benchmarks import paper, suite
from dash_attn.cli.main import main
from dash_attn.viewing import style

DOCS = Path(__file__).parent.parent / "docs"
TUTORIAL = "tutorial/schedules.md"
SCRIPT = (DOCS / TUTORIAL).with_suffix(".py")
LIST = DOCS / "images" / "shown.txt"
DIGITS = 6  # behind the point of the numbers of a figure: more would be rounding
BENCHMARKS = {"python -m benchmarks.suite": suite.main, "python -m benchmarks.paper": paper.main}  # in the root of the repository
COMMANDS = dict(
    re.findall(
        rf"^\| `([\w-]+\.png)` \|.*\| `((?:dash-attn|{'|'.join(BENCHMARKS)}) [^`]+)`.*\|$", (DOCS / "images/README.md").read_text(), re.M
    )
)
MEASURED = "images/gantt-measured-4k.png"  # needs a Hopper GPU. What is simulated in it is held here


def run_command(command: str, folder: Path) -> None:
    """A command of docs/images/README.md, which writes to that folder. Nothing is measured."""
    run, skipped = next(((run, 3) for start, run in BENCHMARKS.items() if command.startswith(start)), (main, 1))
    text = re.sub(r"(\.\./\.\./)?benchmarks/", f"{DOCS.parent}/benchmarks/", command).replace(" --measured", "")
    words = [str(folder / Path(word).name) if word.endswith(".png") else word for word in shlex.split(text)[skipped:]]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert run([*words, *(["--output", str(folder)] if words[0] == "demo" else [])]) == 0, command


def tutorial_page(pictures: Path) -> str:
    """Run every cell, draw the pictures into that directory, and return the page."""
    namespace: dict[str, Any] = {"__name__": "tutorial", "__file__": str(SCRIPT)}
    parts = []
    with chdir(pictures):
        for is_text, cell in cells(SCRIPT.read_text(encoding="utf-8")):
            prose = "\n".join(line.removeprefix("#").removeprefix(" ") for line in cell.splitlines())
            parts.append(prose if is_text else _code(cell, namespace))
    for picture in pictures.glob("*.png"):
        _shrink(picture)
    return "\n\n".join(parts) + "\n"


def _shrink(path: Path) -> None:
    """Two thirds of the size, and few colours, so that its file is small."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").resize((picture.width * 2 // 3, picture.height * 2 // 3), Image.Resampling.LANCZOS)
    frequent = sorted(small.getcolors(small.width * small.height), reverse=True)[:32]
    others = small.quantize(96, method=Image.Quantize.MAXCOVERAGE).getpalette()
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for _, colour in frequent for channel in colour] + others)
    small.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


@contextmanager
def chdir(folder: Path) -> Iterator[None]:
    """contextlib has it from Python 3.11 on."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def cells(source: str) -> list[tuple[bool, str]]:
    """(whether it is text, content) of every cell; what is before the first one is for those who open the script."""
    _, *found = re.split(r"^# %%(?=[ \n])", source, flags=re.M)
    return [(cell.startswith(" [markdown]"), cell.split("\n", 1)[1].strip("\n")) for cell in found]


def _code(cell: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(cell, str(SCRIPT), "exec"), namespace)
    output = printed.getvalue().rstrip()
    return f"```python\n{cell.strip()}\n```" + (f"\n\n```text\n{output}\n```" if output else "")


DRAWINGS: dict[str, Callable[[Path], object]] = {  # by picture, or by the page that has several
    **{f"images/{name}": partial(run_command, command) for name, command in COMMANDS.items()},
    "images/how-a-call-runs.png": lambda folder: call_picture.draw(folder / "how-a-call-runs.png"),
    TUTORIAL: tutorial_page,
}


def recorded() -> dict[str, tuple[str, str]]:
    """(what it shows, its file) of every picture."""
    lines = [line.split() for line in LIST.read_text().splitlines()] if LIST.exists() else []
    return {name: (what, file) for name, what, file in lines}


def file_hash(name: str) -> str:
    return hashlib.sha256((DOCS / name).read_bytes()).hexdigest()[:16]


def drawn(drawing: str, folder: Path, rendered: bool = False) -> dict[str, str]:
    """What the pictures of a drawing show now; they are in the folder if they are to be rendered."""
    with watched(rendered) as found:
        DRAWINGS[drawing](folder)
    place = Path(drawing)
    return {f"{place.parent}/{name}": what for name, what in found.items() if place.suffix != ".png" or name == place.name}


@contextmanager
def watched(rendered: bool = False) -> Iterator[dict[str, str]]:
    """What figures show that are saved meanwhile, by file. One that is not rendered is saved as a blank, which takes no time."""
    from PIL import Image

    found: dict[str, str] = {}

    def save(figure: Any, path: str | Path, exact: Any = None) -> None:
        found[Path(path).name] = shown(figure)
        render(figure, path, exact) if rendered else Image.new("RGB", (90, 60)).save(path)

    render = style.save
    with patch.object(style, "save", save):
        yield found


def refresh() -> None:
    before, now = recorded(), {}
    for drawing in DRAWINGS:
        with TemporaryDirectory() as folder:
            for name, what in drawn(drawing, Path(folder), rendered=True).items():
                if before.get(name, ("",))[0] != what:
                    _replace(name, Path(folder) / Path(name).name, before)
                now[name] = what
    LIST.write_text("".join(f"{name} {what} {file_hash(name)}\n" for name, what in sorted(now.items())))


def _replace(name: str, made: Path, before: dict[str, tuple[str, str]]) -> None:
    if name != MEASURED:
        shutil.copy(made, DOCS / name)
    elif name in before and before[name][1] == file_hash(name):
        raise SystemExit(f"docs/{name} shows something else now: draw it on a Hopper GPU first, by its command in docs/images/README.md")


# ---- a hash of what a Matplotlib figure shows


def shown(figure: Any) -> str:
    found = hashlib.sha256()
    for part in _parts(figure):
        found.update(f"{part}\n".encode() if isinstance(part, str) else _numbers(part))
    return found.hexdigest()[:16]


def _numbers(values: Any) -> bytes:
    plain = np.round(np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan), DIGITS) + 0.0  # no -0.0
    return f"{plain.shape}".encode() + plain.tobytes()


def _parts(figure: Any) -> Iterator[Any]:
    yield from (text.get_text() for text in figure.texts)
    yield from (text.get_text() for legend in figure.legends for text in legend.get_texts())
    for axes in figure.axes:
        yield from (axes.get_title(loc=place) for place in ("left", "center", "right"))
        for axis in (axes.xaxis, axes.yaxis):
            yield axis.get_label_text()
            yield from _ticks(axis)
        yield from (text.get_text() for text in axes.texts)
        if axes.get_label() != "<colorbar>":  # which Matplotlib draws
            yield from _data(axes)


def _ticks(axis: Any) -> Iterator[Any]:
    """Where we put them, and what we write there. Others Matplotlib chooses."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

    places, labels = axis.get_major_locator(), axis.get_major_formatter()
    if isinstance(places, FixedLocator):
        yield places.locs
        if isinstance(labels, (FixedFormatter, FuncFormatter)):
            yield from (labels(place, index) for index, place in enumerate(places.locs))


def _data(axes: Any) -> Iterator[Any]:
    from matplotlib.colors import to_rgba_array

    yield from (getattr(text, attribute) for text in axes.texts for attribute in ("xy", "xyann") if hasattr(text, attribute))
    yield from (text.get_position() for text in axes.texts)
    for line in axes.lines:
        yield line.get_xydata()
        yield to_rgba_array(line.get_color())
    for shape in axes.patches:
        corners = shape.get_patch_transform().transform(shape.get_path().vertices)
        yield corners.min(0), corners.max(0)
        yield shape.get_facecolor()
    for collection in axes.collections:
        yield collection.get_offsets()
        yield from (path.vertices for path in collection.get_paths())
        yield collection.get_facecolor() if collection.get_array() is None else collection.get_array()
    for image in axes.images:
        yield image.get_array()
        yield image.get_extent()
