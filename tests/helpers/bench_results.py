"""Made-up results for the tests of tables and pictures. They stand for no machine."""

from __future__ import annotations

from typing import Any

from benchmarks.suites import SUITES
from dash_attn.tools.bench.shape import Shape

RATIOS = {  # candidate: speed relative to cuDNN, whether it claims determinism
    "dash-attn": (1.1, True),
    "dash-attn unordered": (1.25, False),
    "cuDNN": (1.0, False),
    "PyTorch flash": (0.6, False),
    "PyTorch flash deterministic": (0.4, True),
}


def made_up_row(direction: str, shape: Shape, candidate: str, **changes: Any) -> dict[str, Any]:
    ratio, deterministic = RATIOS[candidate]
    row = {
        "pass": direction,
        "shape": shape.to_json(),
        "candidate": candidate,
        "deterministic": deterministic,
        "status": "ok",
        "reason": None,
    }
    times = {"median_ms": 2.0 / ratio, "p20_ms": 1.9 / ratio, "p80_ms": 2.1 / ratio, "tflops": 500 * ratio, "ratio_to_cudnn": ratio}
    return {**row, **times, **changes}


def made_up_results() -> dict[str, Any]:
    shapes = SUITES["paper"].shapes()
    rows = [made_up_row(d, shape, name) for shape in shapes for d in ("forward", "backward") for name in RATIOS]
    where = {"gpu": "NVIDIA Nonesuch", "torch": "0.0", "cudnn": 0}
    return {"format": 1, "suite": "paper", "repeats": 5, "environment": where, "missing": {"FlashAttention-4": "ImportError"}, "rows": rows}


def failed(row: dict[str, Any], status: str, reason: str) -> dict[str, Any]:
    kept = {key: row[key] for key in ("pass", "shape", "candidate", "deterministic")}
    return {**kept, "status": status, "reason": reason}
