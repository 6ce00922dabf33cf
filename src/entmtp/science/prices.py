"""What every step of a policy costs on each text: the bank's measured clock, carried to the text's own context.

Measured step times are those of the calibration prompts that were timed. A longer text makes attention dearer, for
many nodes more than for one, so each text has prices of its own wherever the latency table knows several contexts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from entmtp.calibration import kernels
from entmtp.calibration.growth import replay_growth
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace, replay_uses
from entmtp.errors import EntmtpError
from entmtp.policy.fit import build_policy, clock, step_times
from entmtp.policy.fit_growing import GrowthFitter
from entmtp.policy.growing import GrowingPolicy
from entmtp.tree.bank import Bank
from entmtp.tree.topology import Tree

Timed = dict[Tree, float]  # measured milliseconds of a step, of the trees that the throughput stage timed


def timed_steps(throughput: dict) -> Timed:
    """Of `throughput.json`: whether a tree then came into the bank or not."""
    return {Tree.of(row["paths"]): row["measured_step_ms"] for row in throughput["trees"] if row["measured_step_ms"]}


@dataclass
class Text:
    """One text with what steps cost on it."""

    trace: Trace
    bank: Bank
    latency: LatencyTable
    timed: Timed

    @property
    def tokens(self) -> int:
        return len(self.trace.ranks) - 1  # the last one needs no step

    def prices(self, trees: list[Tree]) -> NDArray[np.float64]:
        """Milliseconds of a step with each tree: as measured where it was, else the latency table's on this clock."""
        return np.array([self.timed.get(tree, ms) for tree, ms in
                         zip(trees, step_times(self.bank, self.latency, trees, None), strict=True)])  # fmt: skip


@dataclass
class Texts:
    """The texts of one split of a task, in the trace's order."""

    trace: Trace
    each: list[Text]

    @classmethod
    def of(
        cls, trace: Trace, bank: Bank, latency: LatencyTable, timed: Timed, prompt_tokens: dict[str, int] | None = None,
        measured_at: float | None = None,
    ) -> "Texts":  # fmt: skip
        """`prompt_tokens`: by prompt id; `measured_at`: context of the timed calibration prompts. Both are needed by a
        table of several contexts, unless prices are to be the same everywhere."""
        each = []
        for number, prompt in enumerate(trace.prompts):
            part, own = trace.part([number]), (bank, latency, timed)
            if prompt_tokens is not None and measured_at is not None:
                own = _moved(bank, latency, timed, measured_at, prompt_tokens[prompt.prompt_id] + len(prompt) / 2)
            each.append(Text(part, *own))
        return cls(trace, each)

    def milliseconds(self, fitted: dict) -> NDArray[np.float64]:
        """[texts]: all steps of a fitted policy by replay. Raises EntmtpError for one that grows without expansions."""
        policy = build_policy(fitted, self.each[0].bank)
        if isinstance(policy, GrowingPolicy):
            return self._growing(policy)
        return np.array([replay_uses(text.trace, policy) @ np.array(step_times(text.bank, text.latency, policy.trees,
                         policy.depth)) for text in self.each])  # fmt: skip

    def _growing(self, policy: GrowingPolicy) -> NDArray[np.float64]:
        growth, bounds = self.trace.growth, self.trace.bounds
        if growth is None:
            raise EntmtpError(f"policy {policy.name} grows its trees: replaying it needs a growth trace")
        grown, found = replay_growth(growth, policy), []
        for text, first, end in zip(self.each, bounds[:-1], bounds[1:], strict=True):
            own = GrowthFitter(growth, text.latency, policy.nodes, clock(text.bank, text.latency))
            cost = grown.milliseconds(own.step_ms, own.propose_ms)[first:end]
            found.append(kernels.walk_cost(grown.accepted[first:end], cost, np.array([0, end - first]))[1])
        return np.array(found)

    def oracle(self, trees: list[Tree]) -> NDArray[np.float64]:
        """[texts]: the fastest schedule from `trees` that perfect foresight could take."""
        found = []
        for text in self.each:
            lengths = text.trace.lengths(trees)
            prices = np.broadcast_to(text.prices(trees)[:, None], lengths.shape)
            found.append(kernels.shortest(lengths, prices, text.trace.bounds, np.zeros(lengths.shape[1], np.int64)))
        return np.array(found)

    def statics(self, trees: list[Tree]) -> NDArray[np.float64]:
        """[trees, texts]: each tree's own run."""
        steps = [[kernels.walk(text.trace.length(tree), text.trace.bounds)[0] for tree in trees] for text in self.each]
        return (np.array(steps) * np.stack([text.prices(trees) for text in self.each])).T

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.array([text.tokens for text in self.each])


def _moved(
    bank: Bank, latency: LatencyTable, timed: Timed, measured_at: float, context: float
) -> tuple[Bank, LatencyTable, Timed]:
    """Measured milliseconds at another context: as much longer as the table says."""
    before, here = latency.at(measured_at), latency.at(context)
    if before is here:
        return bank, latency, timed

    def there(tree: Tree, ms: float) -> float:
        return ms * here.step(tree) / before.step(tree)

    trees = [replace(entry, step_ms=there(entry.tree, entry.step_ms)) for entry in bank.trees]
    return replace(bank, trees=trees), here, {tree: there(tree, ms) for tree, ms in timed.items()}
