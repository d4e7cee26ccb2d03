"""Schedules of the attention backward pass, drawn step by step: mask -> problem -> schedule -> simulate -> picture.

It draws its pictures into the current folder. Cells start with `# %%`, so editors run it as a notebook; `make pages` turns it
into schedules.md and draws the pictures, and tests run it.
"""

# %% [markdown]
# # Drawing schedules
#
# Why does deterministic attention wait, and what does DASH ([arXiv 2601.21824](https://arxiv.org/abs/2601.21824)) do about it? This page
# draws the answer, from the mask to the picture. It needs no GPU and no PyTorch. All times are exact, in the simulator's units.

# %% [markdown]
# ## From a mask to a problem
#
# Attention runs in tiles. A tile of queries (Q tile) and a tile of keys (KV tile) that attend to each other are one **task**. In the
# backward pass a task computes five matrix products (compute) and then adds its share to dQ (reduce). All tasks of one KV tile form a
# **chain**: one SM, a **worker**, runs them one after another, because dK and dV of that tile stay in its registers.
#
# Eight Q tiles, eight KV tiles, a causal mask and four heads. `#` is a task, a row is a Q tile, a column is a chain:

# %%
import json
from pathlib import Path

from dash_attn import Causal
from dash_attn.scheduling import Problem, generate, lower
from dash_attn.simulation import Machine, simulate
from dash_attn.simulation.machines import H200
from dash_attn.viewing.gantt import gantt

causal = Problem.from_tiles("causal", q_tiles=8, kv_tiles=8, heads=4)
for row in causal.kept:
    print(" ".join("#" if kept else "." for kept in row))
print(f"{causal.tasks} tasks in {causal.chains} chains")

# %% [markdown]
# ## Why order costs time
#
# dK and dV of a KV tile come from one chain, in one order. dQ of a Q tile is a sum over chains on different workers. For the same bits in
# every run, they must add in a fixed order: each task has its **turn**. A worker whose turn has not come waits.
#
# First the machine of the paper: a compute takes 3 units, a reduce takes 1, and the worker does both. There are eight workers.

# %%
paper = Machine(compute=3, reduce=1)
ascending = simulate(generate("ascending", causal, workers=8), paper)
print(f"makespan {ascending.makespan:g}, lower bound {ascending.lower_bound:g}, stalled {ascending.stalled:.0%}")
gantt([ascending], "ascending.png")

# %% [markdown]
# ![Ascending](ascending.png)
#
# A row is a worker. The number in a bar is the Q tile, the darker end of it is the reduce. Hatched red is waiting, grey is idle. The
# dashed line is a lower bound: no schedule ends left of it.
#
# `ascending` was FlashAttention-3's first deterministic mode. Every chain walks its Q tiles upward, and chains add in the order of their
# KV tiles. Under a causal mask chain i starts at Q tile i. So chain 7 starts with the tile that all others reach last, and its first
# reduce has to wait for seven chains. Every head begins with this staircase.
#
# ## DASH on causal masks
#
# `descending` walks down from the last Q tile, which all chains share. They meet there once, at the start, queue up one reduce apart, and
# stay apart.
#
# `symmetric_shift` goes further. It pairs the longest chain with the shortest, KV tile i with KV tile 7 - i, on one worker: all workers
# get equal work. The walks are laid out so that in every step the workers of a head are at different Q tiles. Nobody waits.

# %%
runs = [simulate(generate(name, causal, workers=8), paper) for name in ("descending", "symmetric_shift")]
for run in runs:
    print(f"{run.schedule.name}: makespan {run.makespan:g}, stalled {run.stalled:.0%}")
gantt(runs, "dash-causal.png")

# %% [markdown]
# ![Descending and symmetric shift](dash-causal.png)
#
# The makespan of the second is the lower bound. In this model it cannot be beaten.
#
# ## DASH on full masks
#
# Without a mask all chains have the same length, and all would start at the same Q tile. `shift` lets chain i start at Q tile i and go
# around. It is a Latin square: in every step each worker is at a different Q tile.

# %%
full = Problem.from_tiles("full", q_tiles=8, kv_tiles=8, heads=2)
runs = [simulate(generate(name, full, workers=8), paper) for name in ("ascending", "shift")]
for run in runs:
    print(f"{run.schedule.name}: makespan {run.makespan:g}, stalled {run.stalled:.0%}, gang {run.schedule.gang}")
gantt(runs, "dash-full.png")

# %% [markdown]
# ![Ascending and shift on a full mask](dash-full.png)
#
# The chains of `shift` wait for each other in a circle. All of them must run at once, or none ever ends: they are a **gang**. Every
# schedule is checked when it is built, and one that could hang raises an error that names the task.
#
# ## A machine with latency
#
# A GPU differs from that model in two ways. Reduces run in the background, during the next compute (`overlap`). And handing a dQ tile to
# the next turn takes time (`latency`): memory is written, a flag is set, another SM sees it. On an H200 that is about one and a half
# computes. A task whose turn comes one step after the one before it now waits.

# %%
late = Machine(compute=3, reduce=1, overlap=2, latency=4.5)
larger = Problem.from_tiles("causal", 10, 10, heads=4)
runs = [simulate(generate(name, larger, workers=10), late) for name in ("descending", "symmetric_shift", "alternating")]
for run in runs:
    print(f"{run.schedule.name}: makespan {run.makespan:g}, gap to the lower bound {run.gap:.0%}")
gantt(runs, "latency.png")

# %% [markdown]
# ![Three schedules on a machine with latency](latency.png)
#
# `alternating` is the symmetric idea without fixed pairs. Even heads walk up, the chain on the diagonal first; odd heads walk down, as
# their mirror image. A worker that finishes a short chain of one head takes a long chain of the next. Workers become free one after
# another, so the next chains start one after another, and follow each other at that distance to the end. No chain waits for one that
# starts later, so there is no gang and any number of workers will do. On square tiles like these, from 49 KV tiles on, it takes every
# second KV tile first, then the others, so that neighbours are two steps apart.
#
# ## Any mask
#
# `weave` makes a schedule for any mask; here three documents packed in one sequence, with Q tiles half as long as KV tiles. `auto`
# chooses by the kept tiles: `shift_blocks` for full masks (`alternating` for some of at most 8 KV tiles), `alternating` for causal masks
# and windows that end on the right, `weave` for the rest.

# %%
documents = Problem.from_tiles("documents:3,1,4", q_tiles=16, kv_tiles=8, heads=6)
runs = [simulate(generate(name, documents, workers=8), late) for name in ("descending", "auto")]
for run in runs:
    print(f"{run.schedule.name}: makespan {run.makespan:g}, gap to the lower bound {run.gap:.0%}")
gantt(runs, "documents.png")

# %% [markdown]
# ![Descending and weave on packed documents](documents.png)
#
# ## The real size
#
# The same simulator, with the constants of an H200 in microseconds, next to times measured there
# (`benchmarks/results/h200-prediction.json`): 4096 tokens, batch 4, 16 heads of 128, causal. If every worker waits, the model is off,
# because polling itself takes bandwidth.

# %%
results = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200-prediction.json").read_text())
measured = {(row["head_dim"], row["mask"], row["seqlen"], row["schedule"]): row["measured_us"] for row in results["rows"]}
real = Problem(Causal(), 4096, 4096, tile_q=64, tile_kv=128, heads=16, batch=4)
for name in ("ascending", "descending", "spt", "symmetric_shift", "alternating"):
    run = simulate(generate(name, real, workers=132), H200[128])
    print(f"{name:<16} predicted {run.makespan:6.0f} us   measured {measured[128, 'causal', 4096, name]:6.0f} us")

# %% [markdown]
# ## What decides the bits
#
# A backend gets the schedule as small tables, a **plan**. The hash of its order names the bits. It does not change with the batch or the
# number of workers:

# %%
for batch, workers in ((4, 132), (1, 78)):
    plan = lower(generate("auto", Problem(Causal(), 4096, 4096, heads=16, batch=batch), workers))
    print(f"batch {batch}, {workers} workers: order {plan.order_hash}, tables of {plan.tables_bytes} bytes")
