"""The page docs/compatibility.md: which versions were run, which only compiled kernels, and which were not run, from what
tools/compatibility.py wrote down."""

from __future__ import annotations

import re
from typing import Any

from compatibility import COMBINATIONS, NVRTC_12, ROOT, TESTS, record
from dash_attn.libraries import LEAST, LEAST_WITH_FLASH_PLUG, LEAST_WITH_PAGES
from page_parts import code, section, table

TOP = """# What it runs with

`tools/compatibility.py` makes an environment for one combination of versions after another, runs a fixed list of tests there, on two CPU
cores and without a GPU, and compiles kernels. `make pages` makes this page of what came of it. What is not in a table was not run.

A library that is older than this is refused, by an error that names it, when a door is opened. Later ones than were run are not refused."""
REFUSED_BY = {
    "torch": f"`sdpa.enable`; `torch_flash.enable` needs {LEAST_WITH_FLASH_PLUG}, as 2.10 cannot end it again; `dash-attn doctor` tells",
    "transformers": f"`huggingface.enable`; `generate_batch` with dash_attn needs {LEAST_WITH_PAGES}: in 5.6 windows had other bits",
    "triton": "every call of backend `triton` on a GPU",
    "megatron-core": "`megatron.enable`",
    "torchtitan": "the import of `dash_attn.integrations.torchtitan`",
}
RUN = "The outcome counts tests, which are listed below. CUDA is what PyTorch was built for; without a GPU nothing runs on it."
COMPILED = """Kernels of a wheel are machine code for sm_90a, made by the pinned NVRTC: where they are, no compiler is needed. What a wheel
leaves out is compiled by the NVRTC at hand. Here each compiled one variant of every kernel, for a GPU that is not there. One that
*spills* is right, but slower. The Triton tests above compile their kernels for every architecture of [the table](support.md#gpus)."""
NOT_RUN = [
    ["any of this on a GPU", "No GPU is at hand where these environments are made. [Evidence](evidence.md) says what was run on one."],
    ["drivers of CUDA 12 and 13, and kernels that are loaded by them", "as above"],
    ["AMD GPUs, ROCm builds of PyTorch", "never; kernels are compiled for gfx942 only"],
    ["Python 3.14, nightly builds of PyTorch", "not tried"],
    ["macOS, Windows, ARM", "not tried; wheels of a checkout without kernels are plain Python"],
    ["megatron-core after 0.16", "0.19.2 was tried by hand; it imports Triton, which PyTorch's CPU builds do not bring"],
    ["torchtitan 0.3", "by hand: its requirements contradict those of the tests ([migration](migration.md#from-torchtitan))"],
]


def page() -> str:
    return made(record())


def made(rows: dict[str, Any]) -> str:
    ran, asked = {name: row for name, row in rows.items() if "tests" in row}, [name for name in COMBINATIONS if name not in rows]
    missing = [[f"combination {code(name)}", "not yet"] for name in asked]
    lines = [
        TOP,
        "",
        *_ranges(),
        *section("What was run", [RUN], _ran(ran), *_more("What failed:", _failed(ran)), *_more("What was skipped:", _skipped(ran))),
    ]
    files = [[room, ", ".join(map(code, paths))] for room, paths in TESTS.items()]
    lines += ["", "The tests:", "", *table(["room or door", "files"], files)]
    lines += section("What was only compiled", [COMPILED], _compiled(rows))
    lines += section("What was not run", table(["what", "why"], [*missing, *NOT_RUN]))
    return "\n".join(lines) + "\n"


def _ranges() -> list[str]:
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints-dev.txt").read_text(encoding="utf-8"), re.MULTILINE))
    return table(
        ["library", "from", "tests are pinned to", "refused by"],
        [[name, least, pinned.get(name, "-"), REFUSED_BY[name]] for name, least in LEAST.items()],
    )


def _ran(rows: dict[str, Any]) -> list[str]:
    names = ("python", "torch", "cuda", "numpy", "transformers", "triton")
    header = ["combination", "Python", "PyTorch", "CUDA", "NumPy", "transformers", "Triton", "outcome", "seconds", "at commit"]
    return table(header, [[code(name), *(row["versions"].get(one, "-") for one in names), *_outcome(row)] for name, row in rows.items()])


def _outcome(row: dict[str, Any]) -> list[str]:
    tests = row["tests"]
    if "stopped" in tests:
        return [f"stopped after {tests['stopped']} seconds", "-", row["commit"]]
    counts = [tests[room] for room in TESTS]
    passed, failed = sum(one["passed"] for one in counts), sum(len(one["failed"]) for one in counts)
    skipped = sum(sum(one["skipped"].values()) for one in counts)
    more = f", **{failed} failed**" if failed else ""
    return [f"{passed} passed, {skipped} skipped{more}", str(tests["seconds"]), row["commit"]]


def _failed(rows: dict[str, Any]) -> list[str]:
    return [
        f"- {code(name)}, {room}: {', '.join(map(code, row['tests'][room]['failed']))}"
        for name, row in rows.items()
        for room in TESTS
        if row["tests"].get(room, {}).get("failed")
    ]


def _skipped(rows: dict[str, Any]) -> list[str]:
    return [
        f"- {code(name)}, {room}: {count} ({why})"
        for name, row in rows.items()
        for room in TESTS
        for why, count in row["tests"].get(room, {}).get("skipped", {}).items()
    ]


def _more(title: str, lines: list[str]) -> list[list[str]]:
    return [[title], lines] if lines else []


def _compiled(rows: dict[str, Any]) -> list[str]:
    found = [(row["versions"].get("nvidia-cuda-nvrtc") or row["versions"].get(NVRTC_12, "-"), name, row) for name, row in rows.items()]
    header = ["NVRTC", "combination", "cuda-bindings", "kernels", "outcome"]
    order = sorted(found, key=lambda one: [int(part) for part in re.findall(r"\d+", one[0])])
    return table(
        header,
        [[nvrtc, code(name), row["versions"].get("cuda-bindings", "-"), *_complaints(row["compiled"])] for nvrtc, name, row in order],
    )


def _complaints(compiled: dict[str, Any] | None) -> list[str]:
    if compiled is None:
        return ["-", "no NVRTC, or no bindings of its CUDA"]
    complaints = compiled["complaints"]
    return [str(compiled["kernels"]), "; ".join(map(code, complaints)) if complaints else "all compile, and none spills"]
