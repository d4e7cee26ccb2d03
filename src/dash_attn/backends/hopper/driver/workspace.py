"""All scratch memory of a call in one allocation."""

import torch

ALIGNMENT = 256


class Workspace:
    """Named parts, each aligned; `bytes` of every part are known when the call is prepared."""

    def __init__(self, **sizes: int) -> None:
        self._offsets: dict[str, int] = {}
        self.bytes = 0
        for name, size in sizes.items():
            self._offsets[name] = self.bytes
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, dict[str, int]]:
        """The memory (keep it until the launches are done) and the address of every part."""
        memory = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        base = memory.data_ptr()
        return memory, {name: base + offset for name, offset in self._offsets.items()}
