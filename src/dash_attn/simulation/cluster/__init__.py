"""Several ranks that share a sequence, in model time: when each of their units runs, what they send, and their peers.

`Cluster` in ../machines.py says what a cluster is, timeline.py runs a shared schedule on it by one of two models of a unit, peers.py has
ring attention and Ulysses. All of it is planning: nothing here was measured on several GPUs.
"""

from ..machines import Cluster as Cluster
from ..machines import Widths as Widths
from .peers import PeerEstimate as PeerEstimate
from .peers import ring_attention as ring_attention
from .peers import ulysses as ulysses
from .timeline import EXECUTIONS as EXECUTIONS
from .timeline import MODELS as MODELS
from .timeline import MOST_TASKS_OF_TILES as MOST_TASKS_OF_TILES
from .timeline import RankTimeline as RankTimeline
from .timeline import simulate_ranks as simulate_ranks
