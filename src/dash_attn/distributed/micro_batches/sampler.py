"""Which samples a rank gets: the global order is one for every number of ranks."""

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from ...call.tensor_checks import check_flags
from ...scheduling.problem import whole_number
from ..peers import Group, Peers
from .tree import share_of


class MicroBatchSampler(Sampler[list[int]]):
    """Gives each rank the micro-batches that its TreeAccumulator owns, as lists of indices: the `batch_sampler` of a DataLoader.

    An epoch is one order of all samples, cut into micro-batches of `size` and steps of `micro_batches`. Neither the order nor the
    cuts depend on the number of ranks. Samples at the end of an epoch that do not fill a step are left out; in a shuffled order
    they differ from epoch to epoch. No sample comes twice in an epoch.

    samples: how many there are.
    size: samples per micro-batch.
    micro_batches and group: as for TreeAccumulator.
    shuffle: False keeps the samples in order of their index.
    seed: of the shuffled orders; the same on every rank.
    """

    def __init__(self, samples: int, size: int, micro_batches: int, group: Group = None, shuffle: bool = True, seed: int = 0) -> None:
        check_flags(shuffle=shuffle)
        for name, value in (("samples", samples), ("size", size), ("micro_batches", micro_batches)):
            whole_number(name, value)
        whole_number("seed", seed, 0)
        if samples < size * micro_batches:
            raise ValueError(f"a step takes {micro_batches} micro-batches of {size} samples, {size * micro_batches} in all; got {samples}")
        peers = Peers.of(group)
        self._owned = share_of(peers.rank, peers.count, micro_batches)
        self._samples, self._size, self._micro_batches = samples, size, micro_batches
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._first_step = 0

    @property
    def steps(self) -> int:
        """Per epoch."""
        return self._samples // (self._size * self._micro_batches)

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Every iteration from now on is over this epoch and begins at this step: 0, or the steps that were done when training stopped."""
        whole_number("epoch", epoch, 0)
        whole_number("step", step, 0)
        if step > self.steps:
            raise ValueError(f"an epoch has {self.steps} steps; got step {step}")
        self._epoch, self._first_step = epoch, step

    def __len__(self) -> int:
        """Micro-batches of this rank in one iteration."""
        return (self.steps - self._first_step) * len(self._owned)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for step in range(self._first_step, self.steps):
            for micro_batch in self._owned:
                begin = (step * self._micro_batches + micro_batch) * self._size
                yield order[begin : begin + self._size].tolist()

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._samples)
        # Not seed + epoch: two runs with neighbouring seeds would share most of their orders.
        digest = hashlib.sha256(f"{self._seed} {self._epoch}".encode()).digest()
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1))
