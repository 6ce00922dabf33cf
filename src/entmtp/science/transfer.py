"""Are trees and thresholds task-specific? What was fitted on one task, replayed on every other."""

from dataclasses import dataclass, replace

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace
from entmtp.evaluation.stats import ratio_interval
from entmtp.science.banks import priced
from entmtp.science.prices import Texts, Timed
from entmtp.tree.bank import Bank


@dataclass
class Fitted:
    """A task's bank, its fitted policies by name, its test texts, and the step times that were measured on it."""

    bank: Bank
    policies: dict[str, dict]
    test: Trace
    timed: Timed


def transfer_rows(
    tasks: dict[str, Fitted], latency: LatencyTable, star: str, bootstrap: int, seed: int
) -> list[dict]:  # fmt: skip
    """A row per policy, task fitted on and task used on: {"policy", "fitted_on", "used_on", "over_own_static"}, the
    replayed speed over that of the used-on task's own static optimum, on its test texts and its clock, as {"ratio",
    "low", "high"}."""
    rows = []
    for used, there in tasks.items():
        at_home = Texts.of(there.test, there.bank, latency, there.timed)
        static, tokens = at_home.milliseconds(there.policies[star]), at_home.tokens
        for fitted, here in tasks.items():
            moved = Texts.of(there.test, moved_bank(here.bank, there, latency), latency, there.timed)
            for name, policy in here.policies.items():
                ms = (at_home if policy["growing"] else moved).milliseconds(policy)
                over = ratio_interval(tokens, ms, tokens, static, bootstrap, seed)
                rows.append({"policy": name, "fitted_on": fitted, "used_on": used, "over_own_static": over})
    return rows


def moved_bank(bank: Bank, there: Fitted, latency: LatencyTable) -> Bank:
    """`bank`'s trees at what they cost on the other task: as measured there, else by the table on its clock. The static
    optimum stays the first task's choice."""
    times = priced([entry.tree for entry in bank.trees], there.test, there.bank, latency, there.timed)
    entries = [replace(entry, step_ms=time.step_ms) for entry, time in zip(bank.trees, times, strict=True)]
    return Bank(bank.task, bank.heads, bank.basis, entries)
