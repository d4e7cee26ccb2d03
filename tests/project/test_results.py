"""Figures of README and docs/results.md are those of the committed files, and a thing has one figure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import suite as suites
from benchmarks.result_files import ours_over, read, relative_table
from dash_attn.cli.main import _parser
from dash_attn.tools.bench.shape import Shape
from doc_pages import DOCS, blocks

ROOT = DOCS.parent
README, INDEX, RESULTS, LOG, DASH = (
    path.read_text() for path in (ROOT / "README.md", *(DOCS / f"{name}.md" for name in ("index", "results", "log", "dash")))
)
SUITE = "python -m benchmarks.suite"
CUDNN, FLASH = "cuDNN", [f"FlashAttention-{number}{mode}" for number in (4, 3) for mode in ("", " deterministic")]
Shapes = dict[str, dict[str, dict[str, Any]]]


def measured(suite: str, direction: str = "backward") -> list[dict[str, Any]]:
    rows = json.loads((ROOT / f"benchmarks/results/h200-{suite}.json").read_text())["rows"]
    return [row for row in rows if row["status"] == "ok" and row["pass"] == direction]


def by_shape(suite: str, direction: str = "backward") -> Shapes:
    """Rows by shape and candidate."""
    found: Shapes = {}
    for row in measured(suite, direction):
        found.setdefault(json.dumps(row["shape"]), {})[row["candidate"]] = row
    return found


def compared(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/comparisons/{name}-h200.json").read_text())


def table(head: str, page: str = RESULTS) -> list[list[str]]:
    """Cells of the rows of a table that begins like this; what misses an aim is bold."""
    lines = page[page.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.replace("**", "").split("|")[1:-1]] for line in lines]


# What the tables show of each file: the peers that ours is compared with, and the shapes.
SHOWN: dict[tuple[str, str], tuple[list[str], Callable[[Shape], bool]]] = {
    ("paper", "backward"): ([CUDNN], lambda shape: True),
    ("llama", "backward"): ([CUDNN], lambda shape: shape.q_heads == 32 and shape.seqlen < 16384),
    ("masks", "backward"): ([CUDNN, *FLASH], lambda shape: shape.head_dim < 256),
    ("paper-fa4", "backward"): (FLASH, lambda shape: True),
    ("ranks", "backward"): ([CUDNN, *FLASH], lambda shape: True),
    ("forward", "forward"): ([CUDNN, *FLASH], lambda shape: True),
    ("ranks-forward", "forward"): (["FlashAttention-4"], lambda shape: True),
    ("decode", "forward"): ([CUDNN, *FLASH], lambda shape: True),
}


def things(suite: str, direction: str) -> Iterator[tuple[Any, ...]]:
    peers, keep = SHOWN[suite, direction]
    for text, rows in by_shape(suite, direction).items():
        if keep(Shape.from_json(json.loads(text))):
            yield from ((direction, text, peer) for peer in peers if peer in rows)


def test_a_thing_has_one_figure() -> None:
    found = [thing for source in SHOWN for thing in things(*source)]
    assert len(found) == len(set(found))
    assert len(found) > 150


def ratios(suite: str) -> dict[tuple[str, int, int], float]:
    shapes = [(Shape.from_json(row["shape"]), row["ratio_to_cudnn"]) for row in measured(suite) if row["candidate"] == "dash-attn"]
    return {(shape.mask, shape.head_dim, shape.seqlen): ratio for shape, ratio in shapes if SHOWN[suite, "backward"][1](shape)}


@pytest.mark.parametrize(("page", "count"), [(README, 4), (INDEX, 4), (RESULTS, 5)], ids=["README", "index", "results"])
def test_result_tables_are_the_committed_figures(page: str, count: int) -> None:
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    rows = re.findall(r"^\| (causal|full)(, 32 query and 8 KV heads)? \| (64|128) \|(.*)\|$", page, re.M)
    assert len(rows) == count
    for mask, grouped, dim, cells in rows:
        committed = ratios("llama" if grouped else "paper")
        expected = [f"{committed[key]:.2f}" if (key := (mask, int(dim), length)) in committed else "" for length in lengths]
        assert [cell.strip() for cell in cells.split("|")] == expected


def test_the_table_of_masks_is_the_committed_one() -> None:
    """Row by row in the order of the suite: ours, the best deterministic peer, the best other peer."""
    cases: dict[str, dict[str, list[float]]] = {}
    for shape, rows in by_shape("masks").items():
        for name, row in rows.items():
            if name != "dash-attn unordered" and row["shape"]["head_dim"] < 256:
                kind = "ours" if name == "dash-attn" else "deterministic" if row["deterministic"] else "other"
                cases.setdefault(shape, {}).setdefault(kind, []).append(row["tflops"])
    shown = [[cell.split()[0] if cell else "" for cell in row[1:]] for row in table("| | dash-attn | deterministic |")]
    kinds = ("ours", "deterministic", "other")
    expected = [[f"{max(found[kind]):.0f}" if kind in found else "" for kind in kinds] for found in cases.values()]
    assert sorted(shown) == sorted(expected)


def shares(suite: str, keep: Callable[[dict[str, Any]], bool] = bool) -> list[float]:
    """Our ordered backward over our unordered one."""
    rows = [row for row in by_shape(suite).values() if "dash-attn unordered" in row and keep(row["dash-attn"]["shape"])]
    return [row["dash-attn"]["tflops"] / row["dash-attn unordered"]["tflops"] for row in rows]


def test_the_cost_of_determinism_is_the_committed_one() -> None:
    paper, masks = shares("paper"), shares("masks", lambda shape: shape["head_dim"] == 128)
    (sinks,) = shares("masks", lambda shape: "sinks" in shape)
    assert f"| the {len(paper)} of `h200-paper.json` |" in RESULTS
    assert f"| {prod(paper) ** (1 / len(paper)):.2f} in the geometric mean, {min(paper):.2f} at worst" in RESULTS
    assert f"| windows, documents, packed sequences, prefix | {min(masks):.2f} to {max(masks):.2f} |" in RESULTS
    assert f"| sinks | {sinks:.2f} |" in RESULTS
    ours = [[row["median_ms"] for name, row in rows.items() if name.startswith("dash-attn")] for rows in by_shape("paper").values()]
    assert f"by up to a factor of {max(max(times) / min(times) for times in ours):.1f} on one shape" in RESULTS


HOSTS = {
    "dash-attn": "dash-attn",
    "dash-attn, packed": "dash-attn, packed sequences",
    "dash-attn, boolean tensor": "dash-attn, a boolean tensor as mask",
    "dash-attn, compiled": "dash-attn, compiled (`fullgraph=True`)",
    "PyTorch flash": "PyTorch SDPA, flash",
    "PyTorch flash, compiled": "PyTorch SDPA, flash, compiled",
    "cuDNN": "PyTorch SDPA, cuDNN",
}


def test_the_backwards_that_the_host_limits_are_the_committed_ones() -> None:
    rows = [(Shape.from_json(row["shape"]), row["launched"], row["graphs"]["ratio_to_cudnn"]) for row in compared("host-limits")["rows"]]
    assert [row[1:] for row in table("| tokens | launched | cuDNN, launched |")] == [
        [f"{launched['dash-attn']:.0f}", f"{launched[CUDNN]:.0f}", f"{launched['ratio_to_cudnn']:.2f}", f"{graphs:.2f}"]
        for _, launched, graphs in rows
    ]
    assert [row[0] for row in table("| tokens | launched | cuDNN, launched |")] == [
        f"{shape.batch} x {shape.seqlen}, {shape.q_heads} heads of {shape.head_dim}, {shape.mask}" for shape, *_ in rows
    ]


def test_other_figures_are_the_committed_ones() -> None:
    flash = [row["ratio_to_cudnn"] for row in measured("paper") if row["candidate"] == "PyTorch flash deterministic"]
    assert f"deterministic flash backward reaches {min(flash):.2f} to {max(flash):.2f} of cuDNN" in RESULTS
    hosts = json.loads((ROOT / "benchmarks/results/h200-host.json").read_text())["host"]
    took = {row["candidate"]: round(row["median_us"]) for row in hosts}
    for name, shown in HOSTS.items():
        times = [str(took[f"{name}, {what}"]) for what in ("forward without gradients", "forward", "backward")]
        assert f"| {shown} | {' | '.join(times)} |" in RESULTS
    assert f"A step with a cache (`flash_attn_with_kvcache`) takes {took['dash-attn, cache']}." in RESULTS


def columns(suite: str, direction: str) -> dict[str, list[str]]:
    """Ours relative to each other kernel, case by case."""
    header, lines = relative_table(read(ROOT / f"benchmarks/results/h200-{suite}.json"), direction)
    return {name: [line[place].split()[0] for line in lines] for place, name in enumerate(header)}


def test_the_table_beside_flash_attention_is_the_committed_one() -> None:
    found = columns("paper-fa4", "backward")
    assert table("| relative to | causal, head dim 64 |") == [[name, *found[name]] for name in FLASH]


def test_the_table_of_ranks_is_the_committed_one() -> None:
    found, shown = columns("ranks", "backward"), table("| query/KV heads, tokens |")
    names = ("cuDNN", "FlashAttention-4", "FlashAttention-4 deterministic", "dash-attn equal heads", "dash-attn unordered")
    for place, name in enumerate(names, start=1):
        figures = [figure for row in shown for figure in row[place].split("; ") if re.fullmatch(r"\d\.\d\d", figure)]
        assert sorted(figures) == sorted(ratio for ratio in found[name] if ratio != "-"), name


def test_the_forward_is_the_committed_one() -> None:
    found = columns("forward", "forward")
    expected = [found[name][start : start + 6] for start in (6, 0) for name in ("cuDNN", "FlashAttention-3")]  # 64 comes first there
    assert [row[1:] for row in table("| | causal 2k | 4k | 16k |")] == expected
    ((*shown,),) = table("| 8/1 heads, 4k | 8/1, 8k |")
    order = [0, 1, 3, 2, *range(4, 11)]  # sixteen query heads come after the batch of four
    assert shown == [columns("ranks-forward", "forward")["FlashAttention-4"][place] for place in order]


SUSTAINED = {
    "forward-sustained": ("forward", "| TFLOP/s; joules per forward |", ("dash-attn", "FlashAttention-3", CUDNN)),
    "paper-sustained": ("backward", "| TFLOP/s; joules per backward | dash-attn | unordered | FlashAttention-3 |",
                        ("dash-attn", "dash-attn unordered", "FlashAttention-3", "FlashAttention-3 deterministic", CUDNN)),
    "ranks-sustained": ("backward", "| TFLOP/s; joules per backward | dash-attn | unordered | FlashAttention-4 |",
                        ("dash-attn", "dash-attn unordered", "FlashAttention-4", "FlashAttention-4 deterministic", CUDNN)),
}  # fmt: skip


@pytest.mark.parametrize("suite", SUSTAINED)
def test_sustained_runs_are_the_committed_ones(suite: str) -> None:
    direction, head, names = SUSTAINED[suite]
    cases = [rows for rows in by_shape(suite, direction).values() if set(names) <= set(rows)]
    runs = {
        tuple(f"{rows[name]['sustained']['tflops']:.0f}; {rows[name]['sustained']['joules']:.2f}" for name in names): rows for rows in cases
    }
    for label, *cells in table(head):
        shape = runs[tuple(cells)]["dash-attn"]["shape"]
        assert shape["mask"] in label
        assert f"head dim {shape['head_dim']}" in label or f"{shape['q_heads']}/{shape['kv_heads']}" in label
    watts = [row["sustained"]["watts"] for rows in by_shape(suite, direction).values() for row in rows.values()]
    assert suite == "ranks-sustained" or f"sits at {min(watts):.0f} to {max(watts):.0f} W" in RESULTS


def speed(row: dict[str, Any]) -> str:
    """TB/s of keys and values, which a step of decoding reads; with a window, those inside it and the newest."""
    shape = Shape.from_json(row["shape"])
    keys = 1025 if shape.mask == "window:1024,0" else shape.seqlen
    return f"{4 * shape.batch * keys * shape.kv_heads * shape.head_dim / row['median_ms'] / 1e9:.2f}"


def test_decode_is_the_committed_one() -> None:
    found = [
        {name: speed(rows[name]) if name in rows else "" for name in ("dash-attn", CUDNN, "PyTorch flash", "FlashAttention-4")}
        for rows in by_shape("decode", "forward").values()
    ]
    for label, *cells in table("| batch, keys, query/KV heads | ours | cuDNN |"):
        for single in zip(*(cell.split(" / ") if cell else [""] * 3 for cell in cells), strict=False):
            assert list(single) in [list(row.values()) for row in found], label


def test_the_triton_backend_is_the_committed_one() -> None:
    times = {(row["head_dim"], row["mask"], row["pass"], row["seqlen"]): row["ms"] for row in compared("triton")["rows"]}
    peers = {"flash": "PyTorch flash deterministic", "Flex": "FlexAttention"}
    shown = table("| | 512 | 1k | 2k | 4k | 8k | 16k |")
    assert len(shown) == 12
    for label, *cells in shown:
        dim, mask, direction, peer = re.fullmatch(r"head dim (\d+), (\w+): (\w+), (\w+)", label).groups()  # type: ignore[union-attr]
        took = [times[int(dim), mask, direction, 512 << step] for step in range(6)]
        assert cells == [f"{one[peers[peer]] / one['dash-attn']:.2f}" for one in took], label


def test_devices_and_memory_are_the_committed_ones() -> None:
    plain = [row for row in compared("devices")["time"] if "together" not in row["case"]]
    shown = {
        tuple(
            f"{row['plain_ms'] / row['devices'] / row['device_ms'][kind]:.2f}" for kind in ("launched", "replayed", "replayed overlapping")
        )
        for row in plain
    }
    assert all(tuple(cells[1:4]) in shown for cells in table("| tokens, P | launched |"))
    sizes = [
        [f"{row['q_heads']}/{row['kv_heads']}", *(f"{one['measured_bytes'] / 2**20:.0f} MiB" for one in (row["here"], *row["others"]))]
        for row in compared("memory")["rows"]
    ]
    assert sorted(sizes) == sorted(table("| query/KV heads | now | before |"))


def test_trainings_are_the_committed_ones() -> None:
    peers = [row for row in compared("training-peers")["rows"] if row["name"] != "dash_attn, deterministic"]
    expected = [
        [f"{row['step_ms']['none']:.0f}", f"{row['tokens_per_second']['none'] / 1000:.0f},000", f"{row['step_ms']['default']:.0f}"]
        for row in peers
    ]
    ours, *others = table("| attention | ms per step |")
    assert sorted(row[1:4] for row in others) == sorted(expected)
    (row,) = [row for row in compared("training-peers")["rows"] if row not in peers]
    turns, took = row["default_ledger_in_turns"], row["step_ms"]
    assert ours[1] == f"{turns['without_ms']:.0f} to {took['none']:.0f}"
    assert ours[3] == f"{took['default']:.0f} to {turns['with_ms']:.0f}"


def test_ledgers_and_first_calls_are_the_committed_ones() -> None:
    cost, first = compared("ledger-cost"), compared("first-call")["seconds"]
    assert f"its kernels take {median(cost['gpu_ms']):.2f} ms of the GPU per step" in RESULTS
    assert f"{cost['bytes'] / 1e9:.1f} GB at" in RESULTS
    with_one, without = (median(first[name]) for name in ("with NVRTC 13.0", "without NVRTC"))
    assert f"{with_one:.2f} s with NVRTC 13.0 installed, {without:.2f} s without any" in RESULTS
    assert f"one process took {first['nothing packed'][0]:.1f} s" in RESULTS


def test_ratios_over_flash_attention_3_are_the_committed_ones() -> None:
    """At the shapes of ranks that it runs."""
    found = ours_over(read(ROOT / "benchmarks/results/h200-ranks.json"), "backward")
    short = [f"{ratios['FlashAttention-3'].median:.2f}" for ratios in found.values() if "FlashAttention-3" in ratios]
    slower = [ratios["FlashAttention-3 deterministic"].median for ratios in found.values() if "FlashAttention-3 deterministic" in ratios]
    assert f"ours is {short[0]} and {short[1]} times as fast with queries shorter than keys" in RESULTS
    assert f"**{short[2]}** and {short[3]} times at head dim 64" in RESULTS
    assert f"{min(slower):.2f} to {max(slower):.2f} times as fast as its deterministic mode" in RESULTS


def bench_commands() -> list[str]:
    inline = re.findall(rf"`({SUITE} [^`]*)`", RESULTS)
    return [*inline, *(line for block in blocks(RESULTS, "sh") for line in block.splitlines() if line.startswith(SUITE))]


@pytest.mark.parametrize("command", bench_commands())
def test_commands_that_reproduce_the_results_are_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU they list their cases, or draw the committed ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    assert suites.main([*shlex.split(command)[3:], *([] if "--from" in command or "--list" in command else ["--list"])]) == 0


def test_there_is_a_command_for_every_result() -> None:
    assert len(bench_commands()) == 13
    (of_host,) = re.findall(r"`dash-attn (bench [^`]*)`", RESULTS)
    assert _parser().parse_args(of_host.split()).suite == "host"
    files = {path.name for path in (ROOT / "benchmarks/results").glob("*.json")}
    of_suites = {name for name in files if not name.startswith("evidence-")}  # those make a page of their own
    assert of_suites == set(re.findall(r"\bh200-[\w-]+\.json", RESULTS + DASH))
    compared_files = {path.name for path in (ROOT / "benchmarks/comparisons").glob("*.json")}
    assert compared_files == set(re.findall(r"[\w-]+-h[28]00\.json", RESULTS + LOG + DASH))
