"""A draft tree as arrays: nodes, parents, depths, ancestor mask, children.

A tree is a prefix-closed set of rank paths such as (0,), (0, 0), (1,): path (1, 2) means "the third candidate of head
2 after the second candidate of head 1". Node 0 is the root, the token that the target has already chosen; node i + 1
is the i-th path in the order (depth, path).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from entmtp.errors import EntmtpError

Path = tuple[int, ...]


def normalise_paths(paths: Iterable[Iterable[int]]) -> tuple[Path, ...]:
    """Sorted by (depth, path). Raises EntmtpError for duplicates, negative ranks or a missing ancestor."""
    listed = [tuple(int(rank) for rank in path) for path in paths]
    unique = set(listed)
    if len(unique) != len(listed):
        raise EntmtpError("tree: a path is listed twice")
    for path in unique:
        if not path or min(path) < 0:
            raise EntmtpError(f"tree: {list(path)} is not a path of ranks >= 0")
        if len(path) > 1 and path[:-1] not in unique:
            raise EntmtpError(f"tree: path {list(path)} has no parent {list(path[:-1])}; trees are prefix-closed")
    return tuple(sorted(unique, key=lambda path: (len(path), path)))


def largest(trees: "Iterable[Tree]") -> int:
    """Nodes of the largest tree; 0 for none."""
    return max((tree.num_nodes for tree in trees), default=0)


class Topology:
    """What verification needs of a tree, from its nodes' `parents` (the root's is -1) and `depths`, root first.

    Parents come before their children, siblings in the order of their ranks.
    """

    parents: list[int]
    depths: list[int]

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, root excluded."""
        return len(self.parents) - 1

    @cached_property
    def children(self) -> list[list[int]]:
        """Child nodes of every node, by rank. [num_nodes + 1] lists"""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return children

    def ancestors(self) -> NDArray[np.bool_]:
        """[n, n]: row i is True at i and at its ancestors (Medusa's tree attention)."""
        n = len(self.parents)
        mask = np.zeros((n, n), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] = mask[parent]
            mask[node, node] = True
        return mask

    def path_nodes(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while nodes[-1] != 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]


@dataclass(frozen=True)
class Tree(Topology):
    """A normalised, hashable draft tree. `Tree(())` is the empty tree: plain decoding."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Iterable[Iterable[int]]) -> "Tree":
        return cls(normalise_paths(paths))

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, root excluded."""
        return len(self.paths)

    @cached_property
    def depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    @cached_property
    def max_rank(self) -> int:
        return max((rank for path in self.paths for rank in path), default=-1)

    @cached_property
    def parents(self) -> list[int]:
        """Parent node of every node; the root's is -1. [num_nodes + 1]"""
        index = {(): 0} | {path: i + 1 for i, path in enumerate(self.paths)}
        return [-1] + [index[path[:-1]] for path in self.paths]

    @cached_property
    def depths(self) -> list[int]:
        """Depth of every node, the root's is 0. [num_nodes + 1]"""
        return [0] + [len(path) for path in self.paths]

    @cached_property
    def widths(self) -> list[int]:
        """For each depth d = 1..depth: how many nodes of depth d - 1 have children (rows head d evaluates)."""
        return [len({path[:-1] for path in self.paths if len(path) == d}) for d in range(1, self.depth + 1)]

    def check_fits(self, depth: int, width: int, what: str = "tree") -> None:
        """Refuse a tree deeper than the heads or wider than the ranks that they propose."""
        if self.depth > depth:
            raise EntmtpError(
                f"{what}: depth {self.depth} exceeds the {depth} draft heads; use trees of depth <= {depth}"
            )
        if self.max_rank >= width:
            raise EntmtpError(
                f"{what}: rank {self.max_rank} is outside the {width} candidates that a head proposes "
                f"(heads.width, at most its draft vocabulary); use ranks < {width}"
            )
