"""The ranks of a process group, and the few messages that they exchange. All messages are copies: nothing is summed on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .hosts import Hosts, Lost

Group = ProcessGroup | DeviceMesh | None
REACH_OTHERS = "reach the others"  # what a message is for, unless its sender says more
NOT_A_MEMBER = "only members of a group may use it; this process, global rank {}, is none"

_hosts: WeakKeyDictionary[ProcessGroup, Hosts] = WeakKeyDictionary()


@dataclass(frozen=True)
class Peers:
    """`group` None: this process is alone, and nothing is sent."""

    group: ProcessGroup | None
    rank: int
    count: int

    @classmethod
    def of(cls, group: Group) -> Peers:
        """None: all processes of torch.distributed, or this one alone where it is not initialised."""
        found = process_group(group)
        if found is None:
            return cls.alone()
        rank = dist.get_rank(found)
        if rank < 0:
            raise ValueError(NOT_A_MEMBER.format(dist.get_rank()))
        return cls(found, rank, dist.get_world_size(found))

    @classmethod
    def alone(cls) -> Peers:
        return cls(None, 0, 1)

    @classmethod
    def named(cls, name: str) -> Peers:
        """By the name of the group, which is what traced programs keep of it."""
        return cls.of(distributed_c10d._resolve_process_group(name))  # type: ignore[attr-defined, arg-type]

    @property
    def time_limit(self) -> timedelta:
        """How long a rank waits for another."""
        assert self.group is not None
        device = torch.device("cpu") if self._serves_hosts else self.group._device_types[0]
        limit: timedelta = self.group._get_backend(device).options._timeout
        return limit

    @property
    def _serves_hosts(self) -> bool:
        """Whether the group sends what is in the host's memory."""
        return self.group is not None and torch.device("cpu") in self.group._device_types

    def _meet(self) -> None:
        if self._serves_hosts:
            self.exchange([torch.zeros(1, dtype=torch.uint8, device="cpu")] * self.count, [1] * self.count)

    @property
    def hosts(self) -> Hosts:
        """What goes from host to host."""
        if self.group is None:
            return Hosts(None, timedelta(), self._meet)
        if self.group not in _hosts:
            _hosts[self.group] = Hosts(self.group, self.time_limit, self._meet)
        return _hosts[self.group]

    def gather(self, mine: Tensor) -> Tensor:
        """The flat tensors of all ranks, end to end. They have one shape."""
        return self.start_gather(mine, REACH_OTHERS).wait()

    def start_gather(self, mine: Tensor, purpose: str) -> Pending:
        """The same, on its way. purpose: what an error says could not be done."""
        if self.count == 1:
            return Pending(self, None, mine, mine.device, purpose)
        sent = self._reachable(mine)
        everything = sent.new_empty(self.count * sent.numel())
        into = list(_bytes(everything).chunk(self.count))
        with self.reaching(purpose):
            work = dist.all_gather(into, _bytes(sent), self.group, async_op=True)
        return Pending(self, work, everything, mine.device, purpose)

    def exchange(self, pieces: Sequence[Tensor], sizes: Sequence[int], purpose: str = REACH_OTHERS) -> list[Tensor]:
        """Piece r, of any length, goes to rank r. Of those that come, rank r sends `sizes[r]` numbers."""
        if self.count == 1:
            return list(pieces)
        flat = torch.cat(list(pieces))
        sent = self._reachable(flat)
        received = sent.new_empty(sum(sizes))
        taken, given = ([size * sent.element_size() for size in some] for some in (sizes, map(len, pieces)))
        with self.reaching(purpose):
            dist.all_to_all_single(_bytes(received), _bytes(sent), taken, given, group=self.group)
        return list(received.to(flat.device).split(list(sizes)))

    def send(self, flat: Tensor, to: int, tag: int) -> Any:
        """Begins to send to a rank; `wait` of the result ends it."""
        return dist.isend(_bytes(self._reachable(flat)), group=self.group, group_dst=to, tag=tag)

    def receive(self, flat: Tensor, source: int, tag: int) -> Any:
        """Begins to receive from a rank; `wait` of the result ends it."""
        memory = torch.empty_like(flat, device="cpu") if self._through_host(flat.device) else flat
        work = dist.irecv(_bytes(memory), group=self.group, group_src=source, tag=tag)
        return work if memory is flat else _ThroughHost(work, memory, flat)

    def _through_host(self, device: torch.device) -> bool:
        """Gloo sends and receives what is in the host's memory."""
        return self.group is not None and device.type != "cpu" and self.group._get_backend(device).name() == "gloo"

    def _reachable(self, flat: Tensor) -> Tensor:
        return flat.cpu() if self._through_host(flat.device) else flat

    @contextmanager
    def reaching(self, purpose: str) -> Iterator[None]:
        """Around what all ranks must do together."""
        try:
            yield
        except RuntimeError as error:  # what every backend raises
            raise Lost(
                f"rank {self.rank} of {self.count} could not {purpose}: another rank has ended, has not come within the group's "
                "time limit, or the backend does not serve the device of the tensors",
                error,
                missing=[] if self.group is None else dist.get_process_group_ranks(self.group),
                sure=False,
            ) from error


@dataclass(frozen=True)
class Pending:
    """A gather that is on its way."""

    peers: Peers
    work: Any
    result: Tensor
    device: torch.device  # where the result is wanted
    purpose: str

    def wait(self) -> Tensor:
        if self.work is not None:
            with self.peers.reaching(self.purpose):
                self.work.wait()
        return self.result.to(self.device)


@dataclass(frozen=True)
class _ThroughHost:
    """A message that arrives in the host's memory."""

    work: Any
    memory: Tensor
    flat: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.memory)


def _bytes(flat: Tensor) -> Tensor:
    """Backends need not know the dtype: they copy."""
    return flat.view(torch.uint8)


def process_group(group: Group) -> ProcessGroup | None:
    """None: there is no other process."""
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a mesh of one dimension; got {group.ndim} dimensions: pass mesh['name'] of one of them")
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to the others
            raise ValueError(NOT_A_MEMBER.format(dist.get_rank()))
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh of one dimension or None; got {type(group).__name__}")
    return group
