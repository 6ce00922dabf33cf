"""What a step costs, read off measured points: the model of time in every prediction."""

from dataclasses import dataclass, field, replace

import numpy as np

from entmtp.errors import EntmtpError
from entmtp.tree.topology import Tree


def _on_line(x: float, known: list[int], ms: list[float]) -> float:
    """Beyond the largest size measured its last slope goes on (never downwards): more is not free there."""
    if x > known[-1] and len(known) > 1:
        slope = max(0.0, (ms[-1] - ms[-2]) / (known[-1] - known[-2]))
        return float(ms[-1] + slope * (x - known[-1]))
    return float(np.interp(x, known, ms))


def _at_context(context: float, contexts: list[int], ms: np.ndarray) -> list[float]:
    """`ms` [contexts, sizes] on the line through its two nearest contexts (attention's time is linear in them). Beyond
    the measured ones no size becomes cheaper with a longer context: that would be the two medians' noise."""
    place = int(np.clip(np.searchsorted(contexts, context), 1, len(contexts) - 1))
    low, high = contexts[place - 1], contexts[place]
    weight, rise = (context - low) / (high - low), ms[place] - ms[place - 1]
    if weight > 1:
        return (ms[place] + (weight - 1) * np.maximum(rise, 0.0)).tolist()
    if weight < 0:
        return np.maximum(ms[place - 1] + weight * np.maximum(rise, 0.0), 0.5 * ms[place - 1]).tolist()
    return (ms[place - 1] + weight * rise).tolist()


@dataclass
class LatencyTable:
    """Milliseconds, as in `latency.json`; sizes in between are interpolated linearly. Forwards are the mean over the
    measured contexts (tokens before the step); `at` gives those of another."""

    tokens: list[int]
    forward_ms: list[float]
    rows: list[int]
    propose_ms: list[list[float]]  # per depth, per rows
    overhead_ms: float
    plain_ms: float  # one step of plain decoding
    arch: str
    signal_ms: float = 0.0  # what a scheduler with a signal takes for itself, beyond a policy without: no head's time
    grow_ms: float = 0.0  # and one that grows its trees
    contexts: list[int] = field(default_factory=list)
    by_context: list[list[float]] = field(default_factory=list)  # forward_ms of each of them

    @property
    def mean_context(self) -> float | None:
        """Where the table itself is, of several contexts."""
        return float(np.mean(self.contexts)) if self.contexts else None

    def at(self, context: float) -> "LatencyTable":
        """The table for steps after `context` tokens; this very one where a single context was measured."""
        if len(self.contexts) < 2:
            return self
        here = _at_context(context, self.contexts, np.array(self.by_context))
        moved = replace(self, forward_ms=here, contexts=[], by_context=[])
        return replace(moved, plain_ms=self.plain_ms + moved.forward(1) - self.forward(1))

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
        """Raises EntmtpError for a table of an earlier version, which priced no scheduler."""
        if absent := [key for key in ("signal_ms", "grow_ms") if key not in value]:
            raise EntmtpError(f"latency table without '{absent[0]}', of an earlier version: measure it again "
                              "(delete the run's latency/ folder)")  # fmt: skip
        contexts, by_context = value.get("contexts", []), value.get("forward_by_context", [])
        order = sorted(range(len(contexts)), key=contexts.__getitem__)
        return cls(
            value["forward"]["tokens"], value["forward"]["ms"], value["propose"]["rows"], value["propose"]["ms"],
            value["overhead_ms"], value["plain_ms"], value["arch"], value["signal_ms"], value["grow_ms"],
            [contexts[i] for i in order], [by_context[i] for i in order],
        )  # fmt: skip
