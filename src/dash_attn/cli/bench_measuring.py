"""The measuring part of `dash-attn bench`: here or in fresh processes, with results on disk as they come."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..tools.bench.suites import DECODE_SUITES, EQUAL_HEADS_SUITES, FLEX_SUITES, HOST_SUITE, Shape, choose
from .devices import gpu_trouble
from .files import check_folder


def candidates(arguments: argparse.Namespace) -> tuple[list[Any], dict[str, str]]:
    """Everybody who is installed, and why the others are not."""
    mine, others, missing = _ours_and_others(arguments)
    from ..tools.bench.flex import FLEX

    left_out = set(arguments.without)
    unknown = left_out - {candidate.name for candidate in others} - {*missing, FLEX}  # which few suites have; nobody minds its absence
    if unknown:
        raise ValueError(f"--without: no such kernel: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in others)}")
    missing |= dict.fromkeys(left_out, "--without")
    kept = [*mine, *(c for c in others if c.name not in left_out)]
    timed = [replace(c, passes=tuple(name for name in c.passes if name in arguments.passes)) for c in kept]
    return [c for c in timed if c.passes], missing


def _ours_and_others(arguments: argparse.Namespace) -> tuple[list[Any], list[Any], dict[str, str]]:
    if arguments.suite in DECODE_SUITES:
        if arguments.backend not in ("auto", "hopper"):
            raise ValueError(f"--suite {arguments.suite}: backend {arguments.backend!r} has no cache of keys and values; 'hopper' has")
        from ..tools.bench.decode import decode_candidates

        (own, *others), missing = decode_candidates(not arguments.no_peers)
        return [own], others, missing
    from ..tools.bench.candidates import ours
    from ..tools.bench.peers import peers

    others, missing = ([], {}) if arguments.no_peers else peers(arguments.suite in FLEX_SUITES)
    return ours(arguments.schedules, arguments.suite in EQUAL_HEADS_SUITES, arguments.backend), others, missing


def measure_here(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Run the suite; results are on disk after every shape."""
    check_folder("--output", arguments.output)
    host = arguments.suite == HOST_SUITE
    shapes = [] if host else choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    require_gpu(arguments.backend)
    from ..tools.bench.results import FORMAT, save
    from ..tools.machine import gpu_environment, short_name

    where = gpu_environment(arguments.backend)
    kind = ("" if arguments.backend == "auto" else f"-{arguments.backend}") + ("" if arguments.sustained is None else "-sustained")
    path = arguments.output / f"{short_name(where['gpu'])}-{arguments.suite}{kind}.json"
    results: dict[str, Any] = {"format": FORMAT, "suite": arguments.suite, "repeats": arguments.repeats, "environment": where, "rows": []}
    if host:
        _measure_host(results)
    else:
        for rows in _measured_shapes(arguments, shapes, results):
            results["rows"] += rows
            save(results, path)
    save(results, path)
    return path, results


def measure_anew(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Run the suite in fresh processes; results are on disk after every process."""
    from ..tools.bench.processes import measured_anew
    from ..tools.bench.results import save

    check_folder("--output", arguments.output)
    choose(arguments.suite, arguments.seqlens, arguments.head_dims, arguments.masks)
    require_gpu(arguments.backend)
    path, results = arguments.output, dict[str, Any]()
    for name, results in measured_anew(words_of(arguments), arguments.processes):
        path = arguments.output / name
        save(results, path)
    return path, results


def words_of(arguments: argparse.Namespace) -> list[str]:
    """The options of one of several processes: those that say what is measured, and how."""
    lists = {"--seqlens": arguments.seqlens, "--head-dims": arguments.head_dims, "--masks": arguments.masks, "--passes": arguments.passes}
    lists["--without"] = arguments.without
    flags = {"--schedules": arguments.schedules, "--no-peers": arguments.no_peers, "--no-energy": not arguments.energy}
    words = ["--suite", arguments.suite, "--repeats", str(arguments.repeats)]
    words += [] if arguments.backend == "auto" else ["--backend", arguments.backend]
    words += [word for flag, values in lists.items() if values for word in (flag, ",".join(map(str, values)))]
    words += [flag for flag, given in flags.items() if given]
    return words if arguments.sustained is None else [*words, "--sustained", str(arguments.sustained)]


def _measure_host(results: dict[str, Any]) -> None:
    import torch

    from ..tools.bench.host import SHAPE, measure_host

    results["host_shape"] = str(SHAPE)
    results["host"] = measure_host(_device(), torch.cuda.synchronize)


def _measured_shapes(arguments: argparse.Namespace, shapes: list[Shape], results: dict[str, Any]) -> Any:
    """Rows of one shape after the other."""
    import torch

    from ..tools.bench.energy import NoCounter
    from ..tools.bench.measure import measure
    from ..tools.bench.peers import who_runs
    from ..tools.bench.timing import CudaStopwatch

    kernels, results["missing"] = candidates(arguments)
    results["cases"] = [who_runs(shape, kernels) for shape in shapes]
    scale, results["energy"] = _scale(arguments)
    for number, shape in enumerate(shapes, start=1):
        print(f"[{number}/{len(shapes)}] {shape}", file=sys.stderr, flush=True)
        try:
            rows = measure(shape, kernels, arguments.repeats, CudaStopwatch, _device(), scale)
        except NoCounter as error:
            raise _unweighed(error) from None
        yield rows
        torch.cuda.empty_cache()


def _device() -> Any:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _scale(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """What weighs each kernel: the GPU's energy counter, or why there is none. A sustained run does not go without."""
    from ..tools.bench.energy import SECONDS, NoCounter, gpu_meter
    from ..tools.bench.sustained import gpu_endurance

    if arguments.sustained is not None:
        try:
            return gpu_endurance(arguments.sustained), {"seconds": arguments.sustained}
        except NoCounter as error:
            raise _unweighed(error) from None
    if not arguments.energy:
        return None, {"missing": "--no-energy"}
    try:
        return gpu_meter(), {"seconds": SECONDS}
    except NoCounter as error:
        return None, {"missing": str(error)}


def _unweighed(error: Exception) -> ValueError:
    return ValueError(f"--sustained needs the GPU's energy counter and its clock (NVML): {error}")


def require_gpu(backend: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA GPU of compute capability 8.0 or later; PyTorch finds none here. `--from FILE` needs none")
    trouble = gpu_trouble(backend)
    if trouble is not None:
        raise ValueError(trouble)
