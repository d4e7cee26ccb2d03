"""The order in which the chains of packed sequences start, built from the schedules of each sequence alone."""

from __future__ import annotations

from dataclasses import replace

from dash_attn.scheduling import Schedule

Chain = tuple[int, int, int]  # part, sequence, KV tile


def starts_alone(number: int, schedule: Schedule) -> tuple[list[Chain], int, int]:
    """All chains of a sequence in no rounds; of how many heads that walk up, at its start, and that walk down, at its end, the
    chains may be shuffled with those of its neighbours."""
    placement = replace(schedule.placement, heads_in_round=0)
    chains = [(head, number, kv_tile) for _, head, kv_tile in placement.tickets(schedule.problem).tolist()]
    if len(placement.starts) == 1:
        return chains, 0, 0
    turns = placement._side_by_side(placement._instances(schedule.problem))
    return chains, len(turns[0][1]) * placement.segments[0], len(turns[-1][1]) * placement.segments[-1]


def laid_end_to_end(sequences: list[tuple[list[Chain], int, int]]) -> list[Chain]:
    laid: list[Chain] = []
    waiting: list[Chain] = []  # chains that end the sequence before
    for chains, first_up, last_down in sequences:
        laid += shuffled(chains[:first_up], waiting)
        end = len(chains) - last_down
        laid += chains[first_up:end]
        waiting = chains[end:]
    return laid + waiting


def shuffled(up: list[Chain], down: list[Chain]) -> list[Chain]:
    """Both in their order, in proportion, beginning with `up`."""
    merged: list[Chain] = []
    i = j = 0
    while i < len(up) or j < len(down):
        if j == len(down) or (i < len(up) and i * len(down) <= j * len(up)):
            merged.append(up[i])
            i += 1
        else:
            merged.append(down[j])
            j += 1
    return merged
