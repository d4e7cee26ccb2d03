"""Calibrated machine constants, in microseconds: what the simulator needs to predict the backward kernel's time.

Fitted to 45 measured schedules a head dim; benchmarks/results/h200-prediction.json has the errors.
"""

from __future__ import annotations

from .simulate import Machine

# By head dim. A task is a tile of 64 queries (head dim 128) or 128 queries (head dim 64) by 128 keys.
H200 = {
    128: Machine(compute=1.93, reduce=0.58, overlap=2, latency=2.9, startup=3.85),
    64: Machine(compute=2.15, reduce=0.65, overlap=2, latency=2.58, startup=3.23),
}
