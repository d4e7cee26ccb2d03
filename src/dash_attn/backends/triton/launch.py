"""One kernel, its arguments and its grid: known without a GPU, so that tests can compile it for any."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...errors import Unsupported
from ..machine_code import machine_code_hash
from .support import check_programs
from .tiles import Tile

MODULES = {
    "attention_forward": "forward",
    "key_gradients": "backward",
    "query_gradients": "backward",
    "gradients": "backward",
    "row_statistics": "rows",
    "sink_gradient": "rows",
    "check_offsets": "rows",
}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}
SAME_ROUNDINGS = {"enable_fp_fusion": False}  # kernels say themselves where a product and a sum are rounded once


@dataclass(frozen=True, eq=False)
class Launch:
    """`numbers` are the kernel's arguments by name, tensors or numbers; `constants` those it is compiled for."""

    kernel: str
    programs: int
    numbers: dict[str, Any]
    constants: dict[str, Any]
    tile: Tile

    def __post_init__(self) -> None:
        check_programs(self.programs)

    @property
    def function(self) -> Any:
        return getattr(import_module(f"{__package__}.kernels.{MODULES[self.kernel]}"), self.kernel)

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages, **SAME_ROUNDINGS}

    def run(self) -> None:
        """On the current stream of the current device."""
        from triton.runtime.errors import OutOfResources

        try:
            self.function[(self.programs,)](**self.numbers, **self.constants, **self.options)
        except OutOfResources as error:
            raise Unsupported(self._too_little(error)) from error

    def _too_little(self, error: Any) -> str:
        dims = [f"{name.lower().replace('_', ' ')} {value}" for name, value in self.constants.items() if name.endswith("_DIM")]
        return (
            f"backend 'triton' needs {error.required} of this GPU's {error.name} for the kernel {self.kernel} ({', '.join(dims)}, tiles"
            f" {self.tile}), and there are {error.limit}. Smaller head dims or 16-bit tensors need less; CPU tensors run anywhere"
        )

    def source(self) -> Any:
        """For triton.compile: tensors are aligned to 16 bytes, numbers are not special."""
        from triton.compiler import ASTSource

        function, signature, constants, attributes = self.function, {}, {}, {}
        for place, name in enumerate(function.arg_names):
            value = self.constants[name] if name in self.constants else self.numbers[name]
            if name in self.constants or value is None:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
                attributes[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"
        return ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)

    def compile(self, target: Any) -> Any:
        """For a GPU that need not be here."""
        import triton

        debug = {"debug": True} if self.kernel == "check_offsets" else {}
        return triton.compile(self.source(), target=target, options={**self.options, **debug})

    def machine_code(self) -> str:
        """The hash of what runs on the current device. Compiles what is not compiled yet."""
        function, given = self.function, {**self.numbers, **self.constants}
        arguments = [given[name] for name in function.arg_names]  # by place: only so may a dtype stand for a tensor
        shapes = [value.dtype if isinstance(value, Tensor) else value for value in arguments]
        compiled = function.warmup(*shapes, **self.options, grid=(1,))
        binary = compiled.asm["hsaco" if "hsaco" in compiled.asm else "cubin"]
        return machine_code_hash(binary)
