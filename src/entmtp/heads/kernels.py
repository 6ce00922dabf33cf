"""Choosing drafts on the CPU, one compiled kernel a decision: candidates of a head, growth of a tree.

Tensor operators would do each of these in several passes, and each pass runs cold after a step has streamed the
target's weights through all caches (docs/LOG.md).
"""

import numpy as np
from numba import njit

from entmtp.target.kernels import FAST, exp, largest, load

BLOCK = 64  # most blocks hold nothing that belongs to the best and are passed over by their largest value


@njit(cache=True, fastmath=FAST, nogil=True, error_model="numpy")
def best_of_rows(logits, ids, probability):
    """Columns and softmax probabilities of each row's largest logits, best first; of equals the lower column.

    logits [n, V] · ids [n, k] int64 · probability [n, k] float32.
    """
    rows, size = logits.shape
    count = ids.shape[1]
    values = np.empty(count, np.float32)
    for row in range(rows):
        found = 0
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            if found == count and not largest(logits, row, start, end) > values[count - 1]:
                continue
            for j in range(start, end):
                value = load(logits, row, j)
                if found == count and not value > values[count - 1]:
                    continue
                place = min(found, count - 1)
                while place > 0 and value > values[place - 1]:
                    values[place], ids[row, place] = values[place - 1], ids[row, place - 1]
                    place -= 1
                values[place], ids[row, place] = value, j
                found = min(found + 1, count)
        total = np.float32(0.0)
        for j in range(size):
            total += exp(load(logits, row, j) - values[0])
        for k in range(count):
            probability[row, k] = exp(values[k] - values[0]) / total


@njit(cache=True, nogil=True)
def next_parents(first, end, expand, probability, chosen):
    """The likeliest of candidates first..end whose probability is at least `expand`, into `chosen` [beam]: how many."""
    beam, rows = len(chosen), 0
    for node in range(first, end):
        p = probability[node]
        if p < expand or (rows == beam and p <= probability[chosen[beam - 1]]):
            continue
        place = min(rows, beam - 1)
        while place > 0 and p > probability[chosen[place - 1]]:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = node
        rows = min(rows + 1, beam)
    return rows


@njit(cache=True, nogil=True)
def extend(new_tokens, conditional, first, depth, expand, chosen, paths, tokens, probability, parent, depths):
    """Children of the parents in `chosen`, at `first` and on; then the next parents and their paths, root first.

    new_tokens, conditional [rows, children] · paths [beam, depth + 1 or more]. Returns (candidates, next rows).
    """
    rows, children = new_tokens.shape
    at = first
    for row in range(rows):
        above = chosen[row]
        for k in range(children):
            tokens[at], parent[at], depths[at] = new_tokens[row, k], above, depth
            probability[at] = probability[above] * conditional[row, k]
            at += 1
    found = next_parents(first, at, expand, probability, chosen)
    for row in range(found):
        node = chosen[row]
        for d in range(depth, -1, -1):
            paths[row, d] = tokens[node]
            node = parent[node]
    return at, found


@njit(cache=True, nogil=True)
def rank(count, most, probability, depths, order):
    """The `most` likeliest of candidates 1..count - 1 into `order`: how many. Of equals the shallower, then the first.

    A child never comes before its parent: it is no likelier, and deeper.
    """
    taken = 0
    for node in range(1, count):
        place = taken
        while place > 0:
            other = order[place - 1]
            if not (
                probability[node] > probability[other]
                or (probability[node] == probability[other] and depths[node] < depths[other])
            ):
                break
            if place < most:
                order[place] = other
            place -= 1
        if place < most:
            order[place] = node
            taken = min(taken + 1, most)
    return taken


@njit(cache=True, nogil=True)
def worthwhile(taken, rate, step_ms, edges, values, probability, depths, order):
    """How many of the ranked candidates are worth verifying (GrowingPolicy.size); all of them for a `rate` < 0.
    Without edges and values (of no depth) probabilities count as they are."""
    if rate < 0:
        return taken
    best, value, gained = 0, 0.0, 0.0
    for place in range(taken):
        node = order[place]
        if len(values):
            level = depths[node] - 1
            gained += values[level, np.searchsorted(edges[level], probability[node], side="right")]
        else:
            gained += probability[node]
        worth = gained - rate * (step_ms[place + 1] - step_ms[0])
        if worth > value:
            best, value = place + 1, worth
    return best


@njit(cache=True, nogil=True)
def keep(order, kept, tokens, parent, depths, kept_tokens, kept_parents, kept_depths):
    """The root and the first `kept` of `order` as a tree, in the order of making: parents first."""
    nodes = np.sort(order[:kept])
    kept_tokens[0], kept_parents[0], kept_depths[0] = tokens[0], -1, 0
    for place in range(kept):
        node = nodes[place]
        kept_tokens[place + 1], kept_depths[place + 1] = tokens[node], depths[node]
        above = parent[node]
        kept_parents[place + 1] = 0 if above == 0 else np.searchsorted(nodes, above) + 1
