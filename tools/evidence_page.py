"""The page docs/evidence.md: what tools/fuzz.py has run, how often and with which outcome, from the files that it wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fuzzing.record import Part, file_of, read
from page_parts import code, section, table

DEVICES = ("cpu", "cuda")
WANTED = 100_000  # calls on the CPU
TOP = """# Evidence

What has been run to find a defect of this library, how often, and what came of it. `tools/fuzz.py` ran it and wrote it down
(`benchmarks/results/evidence-*.json`), and `make pages` makes this page of it."""
CALLS = """A call is drawn from a seed: function, lengths around the edges of tiles, heads, head dims, dtype, memory layout, mask, softcap,
sinks, ALiBi, dropout, schedule, gradients of the LSE, pages, padding, rotary embedding. Its output, LSE and all gradients must be those of
dense attention in double precision, within a few roundings. It must have the same bits again, in other memory and when chains move
in another order. And each sequence must have the bits that `flash_attn_func` gives it alone, also where its tokens come through a cache.

A call may be refused, but only with an error of ours that calls of this kind are expected to get. Any other error counts as a failure."""
FAULTS = """The tool was also run on a library with a fault in it. The table says which call of seed 0 was the first that found it, and
within how many calls a test demands that (`tests/tools/test_fuzz.py`). Races in GPU kernels are planted by `tests/gpu/test_gpu_faults.py`,
faults of a training by `tests/ledgers/test_train_example.py`."""
FILES = """Bits, bytes and stretches of files are flipped, lost, doubled and swapped. Values of their JSON become huge, or change places or
types. Whoever reads such a file must get what it says, or an error of ours. A damaged ledger must not
agree with the whole one: where only its end is lost, it is incomplete."""
TRAINING = """`examples/train.py` in one go, and again in a run that is killed and resumed. `dash-attn diff` compares the ledgers: every
recorded tensor of every step."""
SOAK = "Tests that repeat a call and compare its bits: beside other work, in memory full of NaN, planned for fewer SMs than there are."
MENDED = """All of it is mended and has tests of its own.

- Random calls: where a sequence had more queries than keys in a cache, the CPU backend began its Q tiles elsewhere than
  `flash_attn_func`, so some rows differed in their last bits (call 4134 of seed 2).
- Damaged files: a certificate whose status was no text, and results whose identity was no object, raised a `TypeError`.
- Damaged files: a machine file that had lost a constant was read with the default of the paper's model.
- Damaged files: a schedule took the task `h0.q5.kv00` for `h0.q5.kv0`."""
MISSING = "Nothing below has been run at these sources yet. Each command adds what it found to this page."
COMMANDS = {
    ("calls", "cuda"): ("random calls on a GPU", "python tools/fuzz.py --device cuda --part 1 --minutes 9"),
    ("soak", "cuda"): (
        "all families x 1,000 repeats under load, with dirty memory and SMs taken away, and sequences to 256k;"
        " again and again until no test is left",
        "python tools/fuzz.py soak --device cuda --repeats 1000 --minutes 9",
    ),
    ("training", "cuda"): ("1,000 steps of training on a GPU, twice", "python tools/fuzz.py training --device cuda"),
}


def page() -> str:
    return made({device: read(file_of(device)) for device in DEVICES})


def made(files: dict[str, list[Part]]) -> str:
    parts = [part for found in files.values() for part in found]
    lines = [TOP]
    for device in DEVICES:
        if found := of(parts, "calls", device):
            lines += section(
                f"Random calls on {in_words(device)}", [CALLS], summary(found), by_function(found), *refusals(found), by_part(found)
            )
    if found := of(parts, "faults"):
        lines += section("What would have been seen", [FAULTS], planted(found[-1]))
    if found := of(parts, "files"):
        lines += section("Damaged files", [FILES], damaged(found))
    if found := of(parts, "training"):
        lines += section("A training, killed and resumed", [TRAINING], trainings(found))
    if found := of(parts, "soak"):
        lines += section("Repeats on a GPU", [SOAK], repeats(found))
    lines += section("What this has found", [MENDED])
    return "\n".join([*lines, *section("Not run yet", [MISSING], missing(parts))]) + "\n"


def of(parts: Sequence[Part], kind: str, device: str | None = None) -> list[Part]:
    return [part for part in parts if part["kind"] == kind and device in (None, part["device"])]


def in_words(device: str) -> str:
    return {"cpu": "the CPU", "cuda": "a GPU"}[device]


def summary(parts: Sequence[Part]) -> list[str]:
    calls, bad = sum(part["calls"] for part in parts), sum(len(part["failures"]) for part in parts)
    refused = sum(sum(part["refusals"].values()) for part in parts)
    lines = [f"**{calls:,} calls: {bad:,} failures.** {refused:,} were refused."]
    return lines + [f"- {code(failure)}" for part in parts for failure in part["failures"]]


def by_function(parts: Sequence[Part]) -> list[str]:
    total: dict[str, Counter[str]] = {}
    for part in parts:
        for name, counts in part["functions"].items():
            total.setdefault(name, Counter()).update(counts)
    names = sorted(total, key=lambda name: -sum(total[name].values()))
    cells = [[code(name), *(f"{total[name][what]:,}" for what in ("agreed", "refused", "failed"))] for name in names]
    return table(["function", "agreed", "refused", "failed"], cells)


def refusals(parts: Sequence[Part]) -> Iterator[list[str]]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part["refusals"])
    if total:
        yield table(["refused with", "calls"], [[message, f"{count:,}"] for message, count in total.most_common()])


def by_part(parts: Sequence[Part]) -> list[str]:
    header = ["seed", "calls", "numbers", "failed", "minutes", "commit", "on"]
    return table(header, [[*of_seed(part), f"{part['seconds'] / 60:.1f}", part["commit"][:9], where(part)] for part in parts])


def of_seed(part: Part) -> list[str]:
    last = part["first"] + part["calls"] - 1
    return [str(part["seed"]), f"{part['calls']:,}", f"{part['first']} to {last}", str(len(part["failures"]))]


def where(part: Part) -> str:
    machine, versions = part["machine"], part["versions"]
    return f"{machine['name']} ({machine['capability']}), PyTorch {versions['torch']}, Python {versions['python']}"


def planted(part: Part) -> list[str]:
    cells = [[name, str(call or "not found"), str(part["limits"][name])] for name, call in part["found"].items()]
    return table(["fault", "found by call", "limit"], cells)


def damaged(parts: Sequence[Part]) -> list[str]:
    total: dict[str, Counter[str]] = {}
    for part in parts:
        for name, counts in part["formats"].items():
            total.setdefault(name, Counter()).update(counts)
    cells = [[name, *(f"{counts[what]:,}" for what in ("read", "refused", "failed"))] for name, counts in total.items()]
    return table(["file", "read", "refused", "failed"], cells)


def trainings(parts: Sequence[Part]) -> list[str]:
    header = ["on", "steps", "killed after", "verdict of diff", "tensors compared", "weights", "commit"]
    return table(header, [[where(part), f"{part['steps']:,}", *outcome(part), part["commit"][:9]] for part in parts])


def outcome(part: Part) -> list[str]:
    one, other = part["weights"]
    weights = f"equal (`{one}`)" if one == other else f"`{one}` and `{other}`"
    return [" and ".join(f"step {step}" for step in part["killed_at"]), part["verdict"], f"{part['tensors']:,}", weights]


def repeats(parts: Sequence[Part]) -> list[str]:
    cells = []
    for part in parts:
        counts = Counter(part["tests"].values())
        figures = [f"{part['repeats']:,}", *(str(counts[name]) for name in ("passed", "failed", "skipped")), str(part["left"])]
        cells.append([where(part), *figures, f"{part['seconds'] / 60:.1f}", part["commit"][:9]])
    return table(["on", "repeats", "tests passed", "failed", "skipped", "left", "minutes", "commit"], cells)


def done(parts: Sequence[Part]) -> bool:
    """A soak is done where its last part has left no test."""
    return bool(parts) and not parts[-1].get("left", 0)


def missing(parts: Sequence[Part]) -> list[str]:
    lines = []
    calls = sum(part["calls"] for part in of(parts, "calls", "cpu"))
    if calls < WANTED:
        how = "python tools/fuzz.py --part 1 --minutes 20"
        lines.append([f"{WANTED - calls:,} of {WANTED:,} random calls on the CPU; each part has a seed of its own", code(how)])
    lines += [[what, code(how)] for (kind, device), (what, how) in COMMANDS.items() if not done(of(parts, kind, device))]
    return table(["what", "command"], lines) if lines else ["Nothing is left."]
