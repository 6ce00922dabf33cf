"""What a step costs, read off measured points: the model of time in every prediction."""

from dataclasses import dataclass

import numpy as np

from entmtp.tree.topology import Tree


@dataclass
class LatencyTable:
    """Milliseconds, as in `latency.json`; sizes in between are interpolated linearly."""

    tokens: list[int]
    forward_ms: list[float]
    rows: list[int]
    propose_ms: list[list[float]]  # per depth, per rows
    overhead_ms: float
    plain_ms: float  # one step of plain decoding
    arch: str

    def forward(self, n: int) -> float:
        return float(np.interp(n, self.tokens, self.forward_ms))

    def propose(self, depth: int, rows: int) -> float:
        return float(np.interp(rows, self.rows, self.propose_ms[depth - 1]))

    def step(self, tree: Tree, signal_depth: int | None = None) -> float:
        """Milliseconds of one step with `tree` under a policy that looks at the path value of `signal_depth`."""
        if tree.num_nodes == 0 and signal_depth is None:
            return self.plain_ms
        ms = self.forward(tree.num_nodes + 1) + self.overhead_ms
        if self.arch == "medusa":  # one evaluation of all heads serves every tree and every signal
            return ms + self.propose(1, 1)
        reused = signal_depth or 0
        for depth, rows in enumerate(tree.widths, 1):
            greedy_only = {path[:-1] for path in tree.paths if len(path) == depth} == {(0,) * (depth - 1)}
            if not (depth <= reused and greedy_only):
                ms += self.propose(depth, rows)
        return ms + sum(self.propose(depth, 1) for depth in range(1, reused + 1))

    @classmethod
    def from_json(cls, value: dict) -> "LatencyTable":
        return cls(
            value["forward"]["tokens"], value["forward"]["ms"], value["propose"]["rows"], value["propose"]["ms"],
            value["overhead_ms"], value["plain_ms"], value["arch"],
        )  # fmt: skip
