"""What a step costs, read off measured points: the model of time in every prediction."""

from dataclasses import dataclass

import numpy as np

from entmtp.tree.topology import Tree


def _on_line(x: float, known: list[int], ms: list[float]) -> float:
    """Beyond the largest size measured its last slope goes on (never downwards): more is not free there."""
    if x > known[-1] and len(known) > 1:
        slope = max(0.0, (ms[-1] - ms[-2]) / (known[-1] - known[-2]))
        return float(ms[-1] + slope * (x - known[-1]))
    return float(np.interp(x, known, ms))


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
    signal_ms: float = 0.0  # what a scheduler with a signal takes for itself, beyond a policy without: no head's time
    grow_ms: float = 0.0  # and one that grows its trees

    def forward(self, n: int) -> float:
        return _on_line(n, self.tokens, self.forward_ms)

    def propose(self, depth: int, rows: int) -> float:
        return _on_line(rows, self.rows, self.propose_ms[depth - 1])

    def step(self, tree: Tree, signal_depth: int | None = None) -> float:
        """Milliseconds of one step with `tree` under a policy that looks at the path value of `signal_depth`."""
        if tree.num_nodes == 0 and signal_depth is None:
            return self.plain_ms
        ms = self.forward(tree.num_nodes + 1) + self.overhead_ms + (0.0 if signal_depth is None else self.signal_ms)
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
            value["overhead_ms"], value["plain_ms"], value["arch"], value.get("signal_ms", 0.0),
            value.get("grow_ms", 0.0),
        )  # fmt: skip
