"""Runs one random call and says what came of it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from random import Random
from typing import NamedTuple

import dash_attn
from dash_attn import DashAttnError
from dash_attn.execution.interleaving import interleaving
from dash_attn.tools.machine import deterministic_algorithms
from fuzzing.call import Call, Leaves, other_bits, too_far
from fuzzing.calls import draw

# What calls that are drawn may be refused for, and nothing else. Errors of a backend name it.
REFUSALS = (
    r"dropout needs a seed for each document",
    r"^\w+ serves (full|causal) masks only",
    r"backend '(hopper|triton)'",
)
ALONE = 0.4  # of all calls are also compared with their sequences alone
PACKAGE = str(Path(dash_attn.__file__).parent)


class Outcome(NamedTuple):
    function: str
    refusal: str = ""  # the error without its numbers
    failure: str = ""
    words: str = ""  # what was called


def attempt(seed: int, number: int, device: str) -> Outcome:
    """A call of which nothing is known is as much a failure as wrong numbers."""
    function, words = "drawing", ""
    try:
        call = draw(seed, number, device)
        function, words = call.function, call.words
        return Outcome(function, failure=judged(call, Random(f"judge {seed}/{number}"), device) or "", words=words)
    except Exception as error:  # of any kind
        refusal = documented(error)
        if refusal:
            return Outcome(function, refusal=refusal, words=words)
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(function, failure=f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})", words=words)


def documented(error: Exception) -> str:
    """The message of an error that is ours, was raised on purpose and is expected of some calls; without numbers."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = isinstance(error, (DashAttnError, ValueError)) and last.startswith(PACKAGE)
    message = str(error).splitlines()[0] if str(error) else ""
    if not ours or not any(re.search(refusal, message) for refusal in REFUSALS):
        return ""
    return re.sub(r"\d+(\.\d+)?", "N", message.partition("; got")[0])[:160]


def judged(call: Call, random: Random, device: str) -> str | None:
    """Against the definition, against itself, and against its sequences alone."""
    found = call.ours()
    problem = call.check()
    if problem is not None:
        return problem
    truth = call.truth()
    problem = too_far(found, truth, call.allowed(truth))
    if problem is not None or not call.ordered:
        return problem
    problem = repeated(call, found, random, device)
    if problem is not None:
        return problem
    if call.comparable and random.random() < ALONE:
        problem = other_bits(found, without_sums(call.alone()), zeros_alike=True)
        if problem is not None:
            return f"beside its sequences alone, {problem}"
    return None


def repeated(call: Call, found: Leaves, random: Random, device: str) -> str | None:
    """As it was; or on plain tensors: on the CPU while chains move in another order, on a GPU where new memory is full of NaN."""
    if random.random() < 0.5:
        problem = other_bits(call.ours(), found)
        return None if problem is None else f"repeated, {problem}"
    with deterministic_algorithms(fill=True) if device == "cuda" else interleaving(random.getrandbits(20)):
        problem = other_bits(call.elsewhere(), found)
    return None if problem is None else f"in other memory{' and another interleaving' * (device == 'cpu')}, {problem}"


def without_sums(found: Leaves) -> Leaves:
    """Gradients of sinks are sums over sequences, which PyTorch adds in an order of its own where each was a call."""
    return {name: x for name, x in found.items() if name != "gradient of sinks"}
