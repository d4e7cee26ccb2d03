"""Sampler and trainer of whole models: python -m benchmarks.rollouts [probes] [rows] [example] [speed] [--small] [--json FILE]

probes: how products of many shapes are computed by what the probe finds: with the switches, without them, and where a row's place matters.
rows: how many rows of logits and log-probabilities that `generate` and `generate_batch` sample with differ from those of training forwards,
alone, in a batch and packed; and the same without `dash_attn.invariance`. Weights are random.
example: examples/rollout.py twice, and without it.
speed: a training step, prefill, decode: without, inside `enable()`, and inside it with products of a Triton kernel with fixed tiles, as
others make them. Then steps whose gradients are summed sequence by sequence. `with_host` counts the host's time, `gpu` does not.
--models Llama,Qwen2: rows of these alone. A file that is there already keeps what a call does not measure, so parts can come one by one.
--small is for a look at the script on any machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from dash_attn import Unsupported, invariance
from dash_attn.distributed import TreeAccumulator
from dash_attn.integrations import huggingface
from dash_attn.invariance.probe import Product, _tried
from dash_attn.invariance.switches import SWITCHES
from dash_attn.tools.bench.candidates import first_line
from dash_attn.tools.bench.report import save

from .timing import LEAD_IN, WARM_UP, milliseconds, timed
from .training import surroundings

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
EXAMPLE = Path(__file__).parents[1] / "examples" / "rollout.py"
TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


WIDTHS = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
FEW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
REAL = SimpleNamespace(
    model={**WIDTHS, "vocab_size": 4096, "max_position_embeddings": 4096},
    window=300,
    batches={1: 4000, 2: 4000, 3: 3000, 7: 2000, 32: 1000, 100: 300},  # sequences, and the longest prompt among them
    new=16,  # tokens
    requests=[1, 2, 7, 64, 129, 513, 1000, 4000] * 4,  # lengths of the prompts of generate_batch
    at_once=512,  # tokens of one of its forwards, and of a prefill in chunks
    steps=(200, 10),  # of the example: with, and without
    timed={**WIDTHS, "num_hidden_layers": 24, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192},
    length=8192,
    decode=(1, 16, 64),  # batches
    runs=5,
    products=[(1024, 3072), (2048, 2048), (2048, 5504), (5504, 2048), (4096, 6144), (4096, 14336), (14336, 4096), (4096, 128256)],  # K, N
)
MODEL = {**FEW, "vocab_size": 64, "max_position_embeddings": 128}
LESS = {
    "batches": {1: 30, 3: 30},
    "new": 4,
    "requests": [1, 30],
    "at_once": 16,
    "steps": (1, 1),
    "length": 64,
    "decode": (1, 2),
    "runs": 1,
    "products": [(64, 24)],
}
SMALL = SimpleNamespace(model=MODEL, timed=MODEL, window=20, **LESS)
MICRO_BATCHES = (1, 2, 4, 8)  # sequences
NAMES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3Text", "Phi", "GPT2", "Olmo2", "Granite", "StableLm")
WITH_WINDOWS = ("Mistral", "Gemma2", "Gemma3Text")
WITHOUT_REQUESTS = ("GPT2", "StableLm")  # whose attention does not hand its arguments to the cache of generate_batch


def model_of(name: str, sizes: dict[str, int], window: int = 0) -> Any:
    torch.manual_seed(0)
    given = {**sizes, **({"sliding_window": window} if name in WITH_WINDOWS else {})}
    config = getattr(transformers, f"{name}Config")(**given, **TOKENS)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dash_attn", dtype=DTYPE).eval()
        for parameter in model.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)  # no bias is 0, no scale 1
    return model


# ---- probes


def probes(sizes: Any, _: Any) -> Iterator[dict[str, Any]]:
    linear = functional.linear

    def with_the_settings_of_before(*arguments: Any) -> Tensor:
        with SWITCHES.as_before():
            return linear(*arguments)

    def by_place(*arguments: Any) -> Tensor:
        out = linear(*arguments)
        return out + 1e-3 * torch.arange(len(out), device=DEVICE, dtype=DTYPE)[:, None]

    with invariance.enable():
        for k, n in sizes.products:
            for asked in (Product(DTYPE, (n, k), (k, 1), has_bias=False), Product(DTYPE, (n, k), (1, n), has_bias=True)):
                for kind, multiply in (("switches", linear), ("without", with_the_settings_of_before), ("by place", by_place)):
                    start = time.perf_counter()
                    with torch.no_grad():
                        way = way_in_words(multiply, asked)
                    yield {"product": str(asked), "kind": kind, "way": way, "seconds": time.perf_counter() - start}


def way_in_words(multiply: Callable[..., Tensor], asked: Product) -> str:
    try:
        return str(_tried(multiply, asked, torch.device(DEVICE)))
    except Unsupported as error:
        return f"raises: {error}"


# ---- rows


def differing_rows(some: Tensor, others: Tensor) -> int:
    return int((some.contiguous().view(torch.uint8) != others.contiguous().view(torch.uint8)).view(len(some), -1).any(-1).sum())


def trained(model: Any, sequences: list[Tensor], new: int, layout: str) -> list[Tensor]:
    """The logits of each sequence's last tokens, in one forward with gradients."""
    lengths = [len(sequence) for sequence in sequences]
    if layout == "packed":
        places = torch.cat([torch.arange(length, device=DEVICE) for length in lengths])
        logits = model(input_ids=torch.cat(sequences)[None], position_ids=places[None], use_cache=False).logits[0].split(lengths)
    else:
        mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
        logits = model(input_ids=pad_sequence(sequences, batch_first=True), attention_mask=mask, use_cache=False).logits
    return [rows[length - new - 1 : length - 1].detach() for rows, length in zip(logits, lengths, strict=True)]


def of_generate(model: Any, sizes: Any, packs: bool, batch: int, **choices: Any) -> dict[str, int]:
    chance = torch.Generator(DEVICE).manual_seed(batch)
    longest = sizes.batches[batch]
    tokens = torch.randint(1, sizes.model["vocab_size"], (batch, longest), generator=chance, device=DEVICE)
    padding = [(longest - 1) * row // max(batch - 1, 1) for row in range(batch)]  # prompts of 1 token up to the longest
    mask = (torch.arange(longest, device=DEVICE) >= torch.tensor(padding, device=DEVICE)[:, None]).long()
    choices = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "disable_compile": True, **choices}
    out = model.generate(tokens, attention_mask=mask, max_new_tokens=sizes.new, **choices)
    logits = torch.stack(out.logits, 1).to(DTYPE)
    sequences = [out.sequences[row, start:] for row, start in enumerate(padding)]
    alone = [trained(model, [sequence], sizes.new, "padded")[0] for sequence in sequences]
    chosen = out.sequences[:, -sizes.new :]
    sampled = invariance.log_probs(logits, chosen)
    found = {"rows": batch * sizes.new, "kinds_of_rows": kinds_of(logits.flatten(0, 1)), "alone": 0, "log_probs": 0}
    for row, rows in enumerate(alone):
        found["alone"] += differing_rows(logits[row], rows)
        found["log_probs"] += differing_rows(sampled[row], invariance.log_probs(rows, chosen[row]))
    for layout in ("padded", "packed")[: 1 + packs]:
        found[layout] = sum(map(differing_rows, logits, trained(model, sequences, sizes.new, layout)))
    return found


def kinds_of(rows: Tensor) -> int:
    return len({row.tobytes() for row in rows.float().cpu().numpy()})


def of_generate_batch(model: Any, sizes: Any, _: bool) -> dict[str, int]:
    """transformers returns the logarithm of a softmax."""
    chance = torch.Generator().manual_seed(9)
    asked = [torch.randint(1, sizes.model["vocab_size"], (length,), generator=chance).tolist() for length in sizes.requests]
    pages = transformers.ContinuousBatchingConfig(num_blocks=512, max_batch_tokens=sizes.at_once, return_logprobs=True)
    choices = transformers.GenerationConfig(max_new_tokens=sizes.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(inputs=asked, generation_config=choices, continuous_batching_config=pages, progress_bar=False)
    differ = 0
    for prompt, name in zip(asked, sorted(found, key=lambda name: int(name.split("_")[-1])), strict=True):
        sequence = torch.tensor(prompt + found[name].generated_tokens, device=DEVICE)
        (rows,) = trained(model, [sequence], sizes.new, "padded")
        scores = rows.float().softmax(-1).gather(1, sequence[-sizes.new :, None])[:, 0].log()
        differ += differing_rows(torch.tensor(found[name].logprobs), scores.cpu())
    return {"rows": len(asked) * sizes.new, "log_probs": differ}


def rows(sizes: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    """A call that fails does not keep others from being measured."""
    for name in names:
        model, packs = model_of(name, sizes.model, sizes.window), name != "GPT2"  # which has no documents
        for inside in (True, False):
            for call, measure in calls_of(name, sizes, inside):
                with invariance.enable() if inside else nullcontext():
                    yield {"model": name, "inside": inside, "call": call, **measured(measure, model, sizes, packs)}


def calls_of(name: str, sizes: Any, inside: bool) -> Iterator[tuple[str, Callable[..., dict[str, int]]]]:
    for batch in sizes.batches if inside else list(sizes.batches)[:3]:
        yield f"generate, {batch}", partial(of_generate, batch=batch)
    yield "generate, 3, prefill in chunks", partial(of_generate, batch=3, prefill_chunk_size=sizes.at_once)
    if name not in WITHOUT_REQUESTS:
        yield "generate_batch", of_generate_batch


def measured(measure: Callable[..., dict[str, int]], *given: Any) -> dict[str, Any]:
    try:
        return measure(*given)
    except Exception as error:  # whatever it is, the device is there now
        traceback.print_exc()
        return {"error": first_line(error)}


# ---- the example


def example(sizes: Any, _: Any) -> Iterator[dict[str, Any]]:
    """Processes side by side."""
    runs = [([], sizes.steps[0]), ([], sizes.steps[0]), (["--without"], sizes.steps[1])]
    commands = [[sys.executable, str(EXAMPLE), "--steps", str(steps), *words] for words, steps in runs]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    for (words, steps), process in zip(runs, processes, strict=True):
        said, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{EXAMPLE.name} {' '.join(words)} ended with {process.returncode}, behind {said[-300:]!r}")
        differ, count, weights = re.findall(r"^(\d+) of (\d+) log-probabilities differ\nweights (\w+)$", said, re.M)[0]
        yield {"flags": words, "steps": steps, "log_probs": int(count), "differ": int(differ), "weights": weights}


# ---- speed


def times(call: Callable[[], Any], runs: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each variant. They take turns."""
    variants: dict[str, Callable[[], AbstractContextManager[Any]]] = {"without": nullcontext, "enable": invariance.enable}
    if ON_GPU:
        from .fixed_tiles import products_replaced

        variants["fixed tiles"] = products_replaced

    def once(variant: str, lead_in: int) -> float:
        with variants[variant]():
            return timed(call, lead_in).gpu

    found = {}
    for kind, lead_in in (("with_host", 0), ("gpu", 60 * LEAD_IN)):
        spent = [{variant: once(variant, lead_in) for variant in variants} for _ in range(WARM_UP + runs)][WARM_UP:]
        found[kind] = {variant: median(one[variant] for one in spent) for variant in variants}
    return found


def speed(sizes: Any, _: Any) -> Iterator[dict[str, Any]]:
    model = model_of("Llama", sizes.timed)
    start = time.perf_counter()
    kinds = {finding.holds for finding in invariance.check(model).findings}
    yield {
        "what": "invariance.check of the model, with probes that were not on disk",
        "ms": 1e3 * (time.perf_counter() - start),
        "holds": sorted(kinds),
    }
    tokens = torch.randint(1, sizes.timed["vocab_size"], (max(8, *sizes.decode), sizes.length), device=DEVICE)

    def step(batch: Tensor) -> None:
        logits = model(input_ids=batch, use_cache=False).logits.flatten(0, 1)
        functional.cross_entropy(logits.float(), batch.flatten(), reduction="sum").backward()

    yield {"what": f"training step, 2 x {sizes.length}", **times(lambda: (model.zero_grad(), step(tokens[:2])), sizes.runs)}
    with torch.no_grad():
        yield {"what": f"prefill, 1 x {sizes.length}", **times(lambda: model(input_ids=tokens[:1], use_cache=False), sizes.runs)}
        for batch in sizes.decode:
            cache = model(input_ids=tokens[:batch, : sizes.length // 8], use_cache=True, logits_to_keep=1).past_key_values
            decode = times(lambda batch=batch, cache=cache: model(input_ids=tokens[:batch, :1], past_key_values=cache), 3 * sizes.runs)
            yield {"what": f"decode, batch {batch}, behind {sizes.length // 8} tokens", **decode}
    yield from micro_batches(model, step, tokens[:8, : sizes.length // 4], sizes.runs)


def micro_batches(model: Any, step: Callable[[Tensor], None], tokens: Tensor, runs: int) -> Iterator[dict[str, Any]]:
    def whole(size: int, per_sequence: bool) -> None:
        model.zero_grad()
        accumulator = TreeAccumulator(len(tokens))
        for batch in tokens.split(size):
            with invariance.per_sequence(model, accumulator, torch.ones(batch.shape)) if per_sequence else nullcontext():
                step(batch)
        if per_sequence:
            accumulator.finish(model, divide=False)

    with invariance.enable():
        for size in MICRO_BATCHES:
            for per_sequence in (False, True):
                if ON_GPU:
                    torch.cuda.reset_peak_memory_stats()
                (spent,) = milliseconds([lambda size=size, of=per_sequence: whole(size, of)], runs, 0)
                sums = hashlib.sha256(b"".join(x.grad.float().cpu().numpy().tobytes() for x in model.parameters())).hexdigest()[:16]
                peak = torch.cuda.max_memory_allocated() if ON_GPU else 0
                shown = {"what": f"8 sequences, {size} at once", "per_sequence": per_sequence, "ms": spent}
                yield {**shown, "gradients": sums, "peak_bytes": peak}


PARTS = {"probes": probes, "rows": rows, "example": example, "speed": speed}


ENVIRONMENT = ("gpu", "driver_version", "torch", "commit")  # that calls for one file share


def of_earlier_calls(file: Path | None, found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What a file has of the same machine and versions."""
    if file is None or not file.exists():
        return {}
    earlier = json.loads(file.read_text())
    if facts(earlier) != facts(found):
        raise SystemExit(f"{file} is of another machine, or of other versions: name another file")
    parts: dict[str, list[dict[str, Any]]] = earlier["parts"]
    return parts


def facts(found: dict[str, Any]) -> list[Any]:
    return [found["dtype"], found["transformers"], *map(found["environment"].get, ENVIRONMENT)]


def until_it_fails(part: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """So that the parts behind it are measured."""
    try:
        yield from part
    except Exception as error:
        traceback.print_exc()
        yield {"error": first_line(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="probes, rows, example, speed; all by default")
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if unknown := {*arguments.parts, *names} - {*PARTS, *NAMES}:
        parser.error(f"parts are {', '.join(PARTS)}, and models {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {"environment": surroundings(), "dtype": str(DTYPE), "transformers": transformers.__version__}
    parts = found["parts"] = of_earlier_calls(arguments.json, found)
    start = time.perf_counter()
    with huggingface.enable():
        for part in arguments.parts or PARTS:
            done = parts[part] = [row for row in parts.get(part, ()) if row.get("model") not in (None, *names)]
            for row in until_it_fails(PARTS[part](SMALL if arguments.small else REAL, names)):
                print(f"{time.perf_counter() - start:.0f} s", row, flush=True)
                done.append(row)
                if arguments.json:
                    save(found, arguments.json)
    if any("error" in row for part in arguments.parts or PARTS for row in parts[part]):
        raise SystemExit("some of it failed: see the errors")


if __name__ == "__main__":
    main()
