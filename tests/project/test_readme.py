"""What README, DESIGN and the first pages show runs, their figures are those of the committed results, their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from dash_attn import GENERATORS
from dash_attn.cli.main import main
from dash_attn.tools.bench.relative import relative_table
from dash_attn.tools.bench.results import read
from rooms import PACKAGE, ROOMS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README, DESIGN = (ROOT / "README.md").read_text(), (ROOT / "DESIGN.md").read_text()
INDEX, RESULTS, SIMULATOR, CALL = ((DOCS / f"{name}.md").read_text() for name in ("index", "results", "simulator", "how-a-call-runs"))
PAGES = [ROOT / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(DOCS.rglob("*.md"))
REFUSED = ("biases other than ALiBi", "double backward", "`torch.func`")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.S)


@pytest.mark.parametrize(("page", "most"), [(README, 900), (DESIGN, 1800)], ids=["README", "DESIGN"])
def test_it_is_short_enough_to_be_read(page: str, most: int) -> None:
    assert len(page.split()) <= most
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 125


@pytest.mark.parametrize("page", [README, INDEX], ids=["README", "index"])
def test_what_is_refused_is_named(page: str) -> None:
    sentence = re.sub(r"\s+", " ", page[page.index("Refused today") :]).split(". ")[0]
    assert all(name in sentence for name in REFUSED)
    assert "paged" not in sentence, "pages are served"


BITS = "\nimport hashlib\nprint(hashlib.sha256(b''.join(x.grad.float().cpu().numpy().tobytes() for x in (q, k, v))).hexdigest())"


@pytest.mark.parametrize("example", [*blocks(README, "python"), *blocks(INDEX, "python")], ids=["README", "index"])
def test_the_examples_give_the_same_bits_in_every_run(example: str) -> None:
    """What they print, and the gradients that they promise."""
    runs = [subprocess.run([sys.executable, "-c", example + BITS], capture_output=True, text=True, timeout=120) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert "nan" not in runs[0].stdout


def plan_commands() -> list[str]:
    """Of the pages that say how to look at schedules. Long ones go on behind a backslash."""
    lines = "\n".join(block.replace("\\\n", " ") for page in (README, SIMULATOR, CALL) for block in blocks(page, "sh")).splitlines()
    return [line for line in lines if line.startswith("dash-attn plan")]


@pytest.mark.parametrize("command", plan_commands())
def test_plan_commands_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out
    for name in re.findall(r"--(?:gantt|trace) (\S+)", command):
        assert (tmp_path / name).stat().st_size > 1000


def test_plan_commands_are_found() -> None:
    assert len(plan_commands()) == 7


def measured(suite: str, direction: str = "backward") -> list[dict[str, Any]]:
    rows = json.loads((ROOT / f"benchmarks/results/h200-{suite}.json").read_text())["rows"]
    return [row for row in rows if row["status"] == "ok" and row["pass"] == direction]


def ratios(suite: str, q_heads: int | None = None) -> dict[tuple[str, int, int], float]:
    shapes = [(row["shape"], row["ratio_to_cudnn"]) for row in measured(suite) if row["candidate"] == "dash-attn"]
    return {(s["mask"], s["head_dim"], s["seqlen"]): ratio for s, ratio in shapes if q_heads in (None, s["q_heads"])}


@pytest.mark.parametrize(("page", "count"), [(README, 4), (INDEX, 4), (RESULTS, 5)], ids=["README", "index", "results"])
def test_result_tables_are_the_committed_figures(page: str, count: int) -> None:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    rows = re.findall(r"^\| (causal|full)(, 32 query and 8 KV heads)? \| (64|128) \|(.*)\|$", page, re.M)
    assert len(rows) == count
    for mask, grouped, dim, cells in rows:
        committed = ratios("llama", q_heads=32) if grouped else ratios("paper")
        for length, cell in zip(lengths, cells.split("|"), strict=True):
            if cell.strip():
                assert float(cell) == round(committed[mask, int(dim), length], 2), (mask, grouped, dim, length)


def by_shape(suite: str, direction: str = "backward") -> dict[str, dict[str, dict[str, Any]]]:
    """Rows by shape and candidate."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in measured(suite, direction):
        found.setdefault(json.dumps(row["shape"]), {})[row["candidate"]] = row
    return found


def test_the_table_of_masks_is_the_committed_one() -> None:
    """Row by row in the order of the suite: ours, the best deterministic peer, the best other peer."""
    cases: dict[str, dict[str, list[float]]] = {}
    for shape, rows in by_shape("masks").items():
        for name, row in rows.items():
            if name != "dash-attn unordered":
                kind = "ours" if name == "dash-attn" else "deterministic" if row["deterministic"] else "other"
                cases.setdefault(shape, {}).setdefault(kind, []).append(row["tflops"])
    table = RESULTS[RESULTS.index("| | dash-attn | deterministic |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(cases)
    cells = [[cell.split() for cell in line.split("|")[2:5]] for line in table]
    shown = [[int(words[0]) if words else None for words in row] for row in cells]
    kinds = ("ours", "deterministic", "other")
    expected = [[round(max(found[kind])) if kind in found else None for kind in kinds] for found in cases.values()]
    assert sorted(map(str, shown)) == sorted(map(str, expected))


def shares(suite: str) -> list[float]:
    """Our ordered backward over our unordered one."""
    rows = by_shape(suite).values()
    return [row["dash-attn"]["tflops"] / row["dash-attn unordered"]["tflops"] for row in rows if "dash-attn unordered" in row]


def test_the_cost_of_determinism_is_the_committed_one() -> None:
    paper, masks = shares("paper"), sorted(shares("masks"))
    assert f"| the {len(paper)} of `h200-paper.json` |" in RESULTS
    assert f"| {prod(paper) ** (1 / len(paper)):.2f} in the geometric mean, {min(paper):.2f} at worst" in RESULTS
    assert f"| windows, documents, packed sequences, prefix | {masks[3]:.2f} to {masks[-1]:.2f} |" in RESULTS
    assert f"| head dim 256; sinks | {masks[0]:.2f} to {masks[2]:.2f} |" in RESULTS
    ours = [[row["median_ms"] for name, row in rows.items() if name.startswith("dash-attn")] for rows in by_shape("paper").values()]
    assert f"by up to a factor of {max(max(times) / min(times) for times in ours):.1f} on one shape" in RESULTS


def test_other_figures_are_the_committed_ones() -> None:
    flash = [row["ratio_to_cudnn"] for row in measured("paper") if row["candidate"] == "PyTorch flash deterministic"]
    assert f"deterministic flash backward reaches {min(flash):.2f} to {max(flash):.2f} of cuDNN" in RESULTS
    peers = [f"FlashAttention-{number}{mode}" for number in (3, 4) for mode in ("", " deterministic")]
    for name in ("dash-attn", "dash-attn unordered", *peers):
        ratio = [f"{row['ratio_to_cudnn']:.2f}" for row in measured("paper-fa4") if row["candidate"] == name]
        assert f"| {name} | {' | '.join(ratio)} |" in RESULTS
    hosts = json.loads((ROOT / "benchmarks/results/h200-host.json").read_text())["host"]
    took = {row["candidate"]: round(row["median_us"]) for row in hosts}
    for name, shown in (("dash-attn", "dash-attn"), ("PyTorch flash", "PyTorch SDPA, flash"), ("cuDNN", "PyTorch SDPA, cuDNN")):
        assert f"| {shown} | {took[name]} | {took[f'{name}, one thread']} |" in RESULTS
    assert f"Our own part (look-up, descriptors, launches) is {took['dash-attn, without autograd']}." in RESULTS


def test_the_table_of_ranks_is_the_committed_one() -> None:
    header, lines = relative_table(read(ROOT / "benchmarks/results/h200-ranks.json"), "backward")
    section = RESULTS[RESULTS.index("| query/KV heads, tokens |") :]
    shown = [line.replace("**", "").split("|")[1:-1] for line in section[: section.index("\n\n")].splitlines()[2:]]
    columns = ("cuDNN", "FlashAttention-4", "FlashAttention-4 deterministic", "dash-attn equal heads", "dash-attn unordered")
    for place, name in enumerate(columns, start=1):
        measured_ones = [line[header.index(name)].split()[0] for line in lines if line[header.index(name)] != "-"]
        figures = [figure for row in shown for figure in row[place].strip().split("; ") if re.fullmatch(r"\d\.\d\d", figure)]
        assert sorted(figures) == sorted(measured_ones), name


def test_the_forward_is_the_committed_one() -> None:
    ours = [(row["shape"], row["ratio_to_cudnn"]) for row in measured("paper", "forward") if row["candidate"] == "dash-attn"]
    long, short, wide = (
        [ratio for shape, ratio in ours if keep(shape["head_dim"], shape["seqlen"])]
        for keep in (lambda d, n: d == 64 and n >= 2048, lambda d, n: d == 64 and n < 2048, lambda d, n: d == 128)
    )
    assert f"| 128 | {min(wide):.2f} to {max(wide):.2f} |" in RESULTS
    assert f"| 64, from 2k tokens on | {min(long):.2f} to {max(long):.2f} |" in RESULTS
    assert f"| 64, 512 and 1k tokens | {min(short):.2f} to {max(short):.2f} |" in RESULTS
    rows = [row for row in by_shape("masks", "forward").values() if "FlashAttention-4" in row]
    *others, softcap = sorted(row["dash-attn"]["tflops"] / row["FlashAttention-4"]["tflops"] for row in rows)
    assert f"ours is {others[0]:.2f} to {others[-1]:.2f} of it in `h200-masks.json`, and {softcap:.2f} with softcap" in RESULTS


def bench_commands() -> list[str]:
    inline = re.findall(r"`(dash-attn bench [^`]*)`", RESULTS)
    return [*inline, *(line for block in blocks(RESULTS, "sh") for line in block.splitlines() if line.startswith("dash-attn bench"))]


@pytest.mark.parametrize("command", bench_commands())
def test_commands_that_reproduce_the_results_are_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU they list their cases, or draw the committed ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    assert main([*shlex.split(command)[1:], *([] if "--from" in command or "--list" in command else ["--list"])]) == 0


def test_there_is_a_command_for_every_result() -> None:
    assert len(bench_commands()) == 13
    files = {path.name for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert files == set(re.findall(r"h200-[\w-]+\.json", RESULTS))


def links() -> list[Any]:
    return [
        pytest.param(page.parent / link, id=f"{page.name}: {link}")
        for page in PAGES
        for link in re.findall(r"\]\((?!http|#)([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    ]


@pytest.mark.parametrize("target", links())
def test_links_lead_somewhere(target: Path) -> None:
    assert target.exists()


def test_the_tree_names_every_room() -> None:
    (tree,) = blocks(README, "text")
    named = {
        word.removesuffix("/").removesuffix(".py") for line in tree.splitlines() if (word := line.split()[0]) and line.startswith("  ")
    }
    assert named | {"nn"} == set(ROOMS)
    assert "nn.py" in tree


def test_the_design_has_the_rules_of_the_rooms() -> None:
    """The same table as in test_imports.py, which checks it against the code."""
    section = DESIGN.split("## Rooms")[1].split("## ")[0]
    core = set(re.findall(r"`(\w+)`", re.findall(r"\*Core\* is (.*)\.", section)[0]))
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.M)
    said = {
        room: set(re.findall(r"`(\w+)`", cells)) | (core if "core" in cells.replace("`", " ").split(",")[0].split() else set())
        for room, cells in rows
    }
    assert said == ROOMS
    assert [room for room, _ in rows] == list(ROOMS)


def test_the_design_has_every_schedule() -> None:
    section = DESIGN.split("## The schedules")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == {"auto", *GENERATORS}


def test_files_that_the_guide_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|cuh)|[\w/]+/)`", CALL)) - {"src/dash_attn/"}
    assert len(named) > 30
    known = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*")]
    missing = [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name.rstrip('/')}") for path in known)]
    assert not missing


def test_six_questions_of_a_newcomer_have_an_answer() -> None:
    rows = re.findall(r"^\| (a .*|the .*) \|(.*)\|$", CALL.split("## Where to look")[1].split("## ")[0], re.M)
    assert len(rows) == 6
    assert "def tile_map" in (PACKAGE / "masks/rules.py").read_text()
    assert "store_release(p.semaphores" in (PACKAGE / "backends/hopper/kernels/backward/drain.cuh").read_text()
    assert "cuLaunchKernelEx" in (PACKAGE / "backends/hopper/device/driver.py").read_text()
    assert "class Order" in (PACKAGE / "scheduling/order.py").read_text()
    assert "class Backend(Protocol)" in (PACKAGE / "backends/__init__.py").read_text()
