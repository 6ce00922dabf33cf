"""Are trees and thresholds task-specific? What was fitted on one task, replayed on every other."""

from dataclasses import dataclass

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace
from entmtp.policy.fit import replayed_speed, step_times
from entmtp.tree.bank import Bank, BankTree


@dataclass
class Fitted:
    """A task's bank, its fitted policies by name, and its test texts."""

    bank: Bank
    policies: dict[str, dict]
    test: Trace


def transfer_rows(tasks: dict[str, Fitted], latency: LatencyTable, star: str) -> list[dict]:
    """A row per policy, task fitted on and task used on: {"policy", "fitted_on", "used_on", "over_own_static"}, the
    replayed speed over that of the used-on task's own static optimum, on its test texts and its clock."""
    rows = []
    for used, there in tasks.items():
        static = replayed_speed(there.policies[star], there.bank, there.test, latency)
        for fitted, here in tasks.items():
            moved = moved_bank(here.bank, there.bank, latency)
            for name, policy in here.policies.items():
                bank = there.bank if policy["growing"] else moved
                speed = replayed_speed(policy, bank, there.test, latency)
                rows.append({"policy": name, "fitted_on": fitted, "used_on": used, "over_own_static": speed / static})
    return rows


def moved_bank(bank: Bank, there: Bank, latency: LatencyTable) -> Bank:
    """`bank`'s trees at what they cost on the other task's clock; the static optimum stays the first task's choice."""
    times = step_times(there, latency, [entry.tree for entry in bank.trees], None)
    entries = [BankTree(entry.tree, entry.accept_length, entry.tokens_per_s, ms)
               for entry, ms in zip(bank.trees, times, strict=True)]  # fmt: skip
    return Bank(bank.task, bank.heads, bank.basis, entries)
