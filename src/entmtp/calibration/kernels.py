"""Replay as array code, compiled by Numba (`make bench-replay` counts its steps a second).

Everything is flat over the positions of all texts of a task; text t holds positions [bounds[t], bounds[t + 1]), and a
step is taken at every position but a text's last, which needs no forward. `lengths` [N] (or [K, N] for K trees) is
num_accepted at every position.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from entmtp.tree.topology import Tree


def child_table(tree: Tree, width: int) -> NDArray[np.int32]:
    """[nodes + 1, width]: node reached from a node (0: root) by a rank, -1 where the tree has none."""
    table = np.full((tree.num_nodes + 1, width), -1, dtype=np.int32)
    for node, (path, parent) in enumerate(zip(tree.paths, tree.parents[1:], strict=True), 1):
        table[parent, path[-1]] = node
    return table


@njit(cache=True, nogil=True)
def follow(children, ranks, lengths, ends):
    """Walk every position's ranks [N, D] down the tree: num_accepted into `lengths`, the last node into `ends` [N]."""
    positions, depth = ranks.shape
    width = children.shape[1]
    for i in range(positions):
        node, length = 0, 0
        while length < depth:
            rank = ranks[i, length]
            if rank >= width or children[node, rank] < 0:
                break
            node = children[node, rank]
            length += 1
        lengths[i] = length
        ends[i] = node


@njit(cache=True, nogil=True)
def walk_cost(lengths, cost, bounds):
    """A run whose step at position i accepts lengths[i] and costs cost[i]: (steps, total cost)."""
    steps, total = 0, cost.dtype.type(0)
    for text in range(len(bounds) - 1):
        i, last = bounds[text], bounds[text + 1] - 1
        while i < last:
            total += cost[i]
            steps += 1
            i += lengths[i] + 1
    return steps, total


@njit(cache=True, nogil=True)
def walk(lengths, bounds):
    """One tree's own run over every text: (steps, accepted tokens)."""
    return walk_cost(lengths, lengths, bounds)


@njit(cache=True, nogil=True)
def walk_ends(lengths, ends, bounds, counts):
    """As `walk`, counting into `counts` [nodes + 1] the last accepted node of each step."""
    for text in range(len(bounds) - 1):
        i, last = bounds[text], bounds[text + 1] - 1
        while i < last:
            counts[ends[i]] += 1
            i += lengths[i] + 1


@njit(cache=True, nogil=True)
def walk_choices(lengths, choices, bounds, uses):
    """Steps with each tree, into `uses` [K], when position i always takes tree `choices[i]`."""
    for text in range(len(bounds) - 1):
        i, last = bounds[text], bounds[text + 1] - 1
        while i < last:
            tree = choices[i]
            uses[tree] += 1
            i += lengths[tree, i] + 1


@njit(cache=True, nogil=True)
def walk_levels(lengths, levels, tree_of, bounds, step_ms):
    """Milliseconds of all steps when a position of level `levels[i]` takes tree `tree_of[levels[i]]`."""
    total = 0.0
    for text in range(len(bounds) - 1):
        i, last = bounds[text], bounds[text + 1] - 1
        while i < last:
            tree = tree_of[levels[i]]
            total += step_ms[tree]
            i += lengths[tree, i] + 1
    return total


@njit(cache=True, nogil=True)
def walk_tau(lengths, signal, bounds, tau_on, tau_off, start, uses):
    """Steps with each tree, into `uses` [K], under hysteresis (TauPolicy's very rules, reset for each text)."""
    top = len(lengths) - 1
    for text in range(len(bounds) - 1):
        i, last, state = bounds[text], bounds[text + 1] - 1, start
        while i < last:
            if signal[i] > tau_on:
                state = min(state + 1, top)
            elif signal[i] <= tau_off:
                state = max(state - 1, 0)
            uses[state] += 1
            i += lengths[state, i] + 1


@njit(cache=True, nogil=True)
def sweep_tau(lengths, signal, bounds, pairs, start, uses):
    """`walk_tau` for every (tau_on, tau_off) of `pairs` [M, 2], into `uses` [M, K]."""
    for pair in range(len(pairs)):
        walk_tau(lengths, signal, bounds, pairs[pair, 0], pairs[pair, 1], start, uses[pair])


@njit(cache=True, nogil=True)
def interpolated(x, knots, values):
    """Piecewise linear, flat beyond the knots: Curve.add's very arithmetic, for one tree."""
    piece = min(max(np.searchsorted(knots, x, side="right") - 1, 0), len(knots) - 2)
    low = knots[piece]
    weight = min(max((x - low) / (knots[piece + 1] - low), 0.0), 1.0)
    return values[piece] + weight * (values[piece + 1] - values[piece])


@njit(cache=True, nogil=True)
def walk_cost_aware(lengths, estimates, last_knots, last_curve, mean_knots, mean_curve, step_ms, rate, start, window,
                    memory, bounds, chosen, history):  # fmt: skip
    """CostAwarePolicy's very rules (AdaptivePolicy's with `memory` > 0): the tree of every step into `chosen` [N], the
    last accept and its running mean as it saw them into `history` [N, 2]; other positions keep what they held.

    `estimates` [K, N]: of the position's own signals; the curves of the last accept and of the running mean [K, M] are
    empty where the policy has none.
    """
    for text in range(len(bounds) - 1):
        i, end = bounds[text], bounds[text + 1] - 1
        last, mean, got, promised, taken = start, start, start, start, (1 + start) / rate
        while i < end:
            factor, price = 1.0, rate
            if memory > 0:
                factor = got / promised if promised > 0 else 1.0
                price = (1 + got) / taken
            best, most, promise = 0, -np.inf, 0.0
            for tree in range(len(lengths)):
                estimate = estimates[tree, i]
                if len(last_knots):
                    estimate += interpolated(last, last_knots, last_curve[tree])
                if len(mean_knots):
                    estimate += interpolated(mean, mean_knots, mean_curve[tree])
                worth = factor * estimate - price * step_ms[tree]
                if worth > most:
                    best, most, promise = tree, worth, estimate
            chosen[i] = best
            history[i, 0], history[i, 1] = last, mean
            count = lengths[best, i]
            last = float(count)
            mean += (count - mean) / window
            if memory > 0:
                got += (count - got) / memory
                promised += (promise - promised) / memory
                taken += (step_ms[best] - taken) / memory
            i += count + 1


@njit(cache=True, nogil=True)
def shortest(lengths, step_ms, bounds, choices):
    """Fastest schedule with perfect foresight: milliseconds of all texts; each position's best tree into `choices` [N].

    From the end backwards, remaining[i] = min over trees k of step_ms[k, i] + remaining[i + lengths[k, i] + 1].
    `step_ms` [K, N].
    """
    total = 0.0
    trees = len(lengths)
    for text in range(len(bounds) - 1):
        first, last = bounds[text], bounds[text + 1] - 1
        remaining = np.zeros(last - first + 1)
        for i in range(last - 1, first - 1, -1):
            best, chosen = np.inf, 0
            for tree in range(trees):
                after = min(i + lengths[tree, i] + 1, last)
                cost = step_ms[tree, i] + remaining[after - first]
                if cost < best:
                    best, chosen = cost, tree
            remaining[i - first] = best
            choices[i] = chosen
        total += remaining[0]
    return total


@njit(cache=True, nogil=True)
def grow_all(order, probability, chance, depth, parent, on_path, expand, max_depth, most, rate, step_ms, nodes,
             accepted, rows):  # fmt: skip
    """GrowingPolicy's very rules at every position: nodes [N], accepted [N] and rows [N, D] of the grown trees.

    `rate` < 0 takes the `most` likeliest candidates; else as many as are worth their milliseconds. Of an unexpanded
    parent no child counts. Arrays as in GrowthTrace; `chance` [N, C]: what is expected of each candidate, by which it
    is weighed (unused with `rate` < 0).
    """
    positions, count = order.shape
    seen = np.zeros(count, dtype=np.bool_)  # candidates that a live step would have made
    grown = np.zeros(count, dtype=np.bool_)  # parents whose children have been counted as rows
    for i in range(positions):
        seen[:] = False
        grown[:] = False
        if expand <= 1.0 and max_depth > 0:
            rows[i, 0] = 1
        for column in range(count):  # in order of making
            above = parent[i, column]
            if depth[i, column] > max_depth or expand > 1.0:
                continue
            if above < 0:
                seen[column] = True
            elif seen[above] and probability[i, above] >= expand:
                seen[column] = True
                if not grown[above]:
                    grown[above] = True
                    rows[i, depth[i, column] - 1] += 1
        taken, best, hits, best_hits = 0, 0, 0, 0
        gained, value = 0.0, 0.0
        for place in range(count):
            column = order[i, place]
            if not seen[column]:
                continue
            if taken == most:
                break
            taken += 1
            hits += on_path[i, column]
            if rate < 0:
                best, best_hits = taken, hits
                continue
            gained += chance[i, column]
            worth = gained - rate * (step_ms[taken] - step_ms[0])
            if worth > value:
                value, best, best_hits = worth, taken, hits
        nodes[i] = best
        accepted[i] = best_hits
