"""Several ranks that share a sequence, in model time: when each of their units runs, what they send, and their peers.

`Cluster` in ../machines.py says what a cluster is, timeline.py runs a shared schedule on it by one of two models of a unit, peers.py has
ring attention and Ulysses. All of it is planning: nothing here was measured on several GPUs.
"""

from ..machines import Cluster, Widths
from .peers import PeerEstimate, ring_attention, ulysses
from .timeline import EXECUTIONS, MODELS, MOST_TASKS_OF_TILES, RankTimeline, simulate_ranks

__all__ = ["EXECUTIONS", "MODELS", "MOST_TASKS_OF_TILES", "Cluster", "PeerEstimate", "RankTimeline", "Widths"]
__all__ += ["ring_attention", "simulate_ranks", "ulysses"]
