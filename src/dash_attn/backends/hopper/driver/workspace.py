"""All scratch memory of a call in one allocation."""

import torch

ALIGNMENT = 256


class Workspace:
    """Named parts, each aligned; `bytes` of every part are known when the call is prepared."""

    def __init__(self, **sizes: int) -> None:
        self._offsets: dict[str, int] = {}
        self._last: tuple[int, dict[str, int]] = 0, {}
        self.bytes = 0
        for name, size in sizes.items():
            self._offsets[name] = self.bytes
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, dict[str, int]]:
        """The memory (keep it until the launches are done) and the address of every part. Where it is that of the last time, so are the
        addresses: the same dict, by which callers know that nothing has to be pointed to it again."""
        memory = torch.empty_strided((self.bytes,), (1,), dtype=torch.uint8, device=device)
        base, last = memory.data_ptr(), self._last
        if base != last[0] or not last[1]:
            last = self._last = base, {name: base + offset for name, offset in self._offsets.items()}
        return memory, last[1]
