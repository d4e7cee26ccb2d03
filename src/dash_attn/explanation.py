"""What a call would do, and what decides its bits: asked for without running it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Explanation:
    """`order_hash` and `kernels` together name the bits: equal on two machines, equal bits for equal inputs."""

    backend: str
    schedule: str
    accumulation: str
    guarantees: tuple[str, ...]  # none when sums are unordered
    order_hash: str
    backward_tiles: tuple[int, int]  # rows of a Q tile and of a KV tile
    forward_tiles: tuple[int, int]
    gang: int  # chains that must be resident together; 1 means none must
    workers: int
    plan_bytes: int
    workspace_bytes: int | None = None  # of the backward, beyond its gradients; None where the backend keeps no workspace
    kernels: dict[str, str] = field(default_factory=dict)  # name -> sha256 of the machine code
