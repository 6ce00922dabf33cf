"""Frontier construction (paper stage 1): greedy growth of draft trees, one search per maximal depth.

The search asks an observer which rank path each step of a run with the *union* tree (current tree and all candidate
children) accepted, and scores every candidate post hoc inside it, as the paper does with the target. Whether the runs
are live or replayed is the observer's business.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from entmtp.calibration.replay import Trace, self_rollout
from entmtp.config import SearchConfig
from entmtp.tree.topology import Path, Tree


class Observer(Protocol):
    def observe(self, tree: Tree) -> Counter: ...


@dataclass(frozen=True)
class Grown:
    """A tree on a search's way and its first score: mean accept length (root included) inside the union's run."""

    tree: Tree
    score: float
    search_depth: int


def grow(observer: Observer, depth: int, max_nodes: int, max_children: int) -> list[Grown]:
    """All trees of one greedy search from {(0,)} of depth at most `depth`, smallest first.

    Each round adds the candidate with the best gain in mean accept length. Ties go to the smaller sum of child
    ranks, then to the shallower node, then to path order.
    """
    paths: list[Path] = [(0,)]
    grown: list[Grown] = []
    while True:
        candidates = candidate_children(paths, depth, max_children)
        counts = observer.observe(Tree.of(paths + candidates))
        steps = max(1, sum(counts.values()))
        tree = Tree.of(paths)
        inside = set(paths)
        accepted = sum(count * _longest_prefix(path, inside) for path, count in counts.items())
        grown.append(Grown(tree, 1 + accepted / steps, depth))
        if len(paths) >= max_nodes or not candidates:
            return grown
        # A candidate is a leaf below an accepted node: it gains one token at each step whose path leads through it.
        gain = dict.fromkeys(candidates, 0)
        for path, count in counts.items():
            for length in range(1, len(path) + 1):
                if path[:length] in gain:
                    gain[path[:length]] += count
        paths.append(min(candidates, key=lambda path: (-gain[path], sum(path), len(path), path)))


def candidate_children(paths: list[Path], depth: int, max_children: int) -> list[Path]:
    """The next-ranked child of every node (the root too) that may still have one."""
    children: Counter = Counter(path[:-1] for path in paths)
    return [
        (*node, children[node])
        for node in [(), *paths]
        if len(node) < depth and children[node] < max_children
    ]  # fmt: skip


def _longest_prefix(path: Path, inside: set[Path]) -> int:
    length = 0
    while length < len(path) and path[: length + 1] in inside:
        length += 1
    return length


def search_frontier(observer: Observer, config: SearchConfig, width: int) -> list[Grown]:
    """All depths' searches. Children are limited by what the heads propose (`width`)."""
    return [
        grown
        for depth in config.depths
        for grown in grow(observer, depth, config.max_nodes, min(config.max_children, width))
    ]


def keep_unbeaten(trees: list[tuple[Tree, float]]) -> list[tuple[Tree, float]]:
    """The frontier: trees that no smaller (or equally small) tree matches. Smallest first."""
    kept: list[tuple[Tree, float]] = []
    for tree, score in sorted(trees, key=lambda item: (item[0].num_nodes, -item[1], item[0].depth, item[0].paths)):
        if not kept or score > kept[-1][1]:
            kept.append((tree, score))
    return kept


def frontier_json(grown: list[Grown], config: SearchConfig) -> dict:
    """Content of `frontier.json`: every tree of every search with its first score."""
    return {
        "engine": config.engine,
        "trees": [
            {
                "num_nodes": item.tree.num_nodes,
                "depth": item.tree.depth,
                "search_depth": item.search_depth,
                "first_score": item.score,
                "paths": [list(path) for path in item.tree.paths],
            }
            for item in grown
        ],
    }


def recalibrated_json(frontier: dict, trace: Trace, task: str, heads: str) -> dict:
    """Paper stage 2: each tree's true self-rollout mean beside its first score; the frontier is marked.

    The first score is taken inside a larger tree's run and on its step starts: optimistic or not, that is a figure.
    """
    rows = []
    for row in frontier["trees"]:
        run = self_rollout(trace, Tree.of(row["paths"]))
        rows.append({**row, "accept_length": run.accept_length, "steps": run.steps, "tokens": run.tokens})
    unbeaten = {tree for tree, _ in keep_unbeaten([(Tree.of(row["paths"]), row["accept_length"]) for row in rows])}
    seen: set[Tree] = set()
    for row in rows:  # searches of several depths grow some trees in common: keep each once
        tree = Tree.of(row["paths"])
        row["duplicate"] = tree in seen
        row["frontier"] = tree in unbeaten and tree not in seen
        seen.add(tree)
    return {"task": task, "heads": heads, "trees": [row for row in rows if not row.pop("duplicate")]}
