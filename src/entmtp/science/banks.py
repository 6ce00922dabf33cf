"""Banks chosen for a scheduler: trees that complement one another, not trees that are fastest alone.

The paper's bank is the Pareto set of static trees. Here trees are added one at a time, each time the one with which the
best threshold ladder over the bank replays fastest on the calibration texts.
"""

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.oracle import oracle
from entmtp.calibration.replay import Trace, self_rollout
from entmtp.config import PolicyConfig
from entmtp.policy.fit import fit_policy, replayed_speed
from entmtp.science.headroom import Timed, step_prices
from entmtp.tree.bank import Bank, BankTree
from entmtp.tree.topology import Tree

LADDER = PolicyConfig(name="ladder", kind="ladder")


def priced(trees: list[Tree], trace: Trace, bank: Bank, latency: LatencyTable, timed: Timed) -> list[BankTree]:
    """Trees as entries of a bank, on the clock of `bank`."""
    entries = []
    for tree, step_ms in zip(trees, step_prices(bank, latency, trees, timed), strict=True):
        length = self_rollout(trace, tree).accept_length
        entries.append(BankTree(tree, length, 1000 * length / step_ms, step_ms))
    return entries


def shortlist(entries: list[BankTree], count: int) -> list[BankTree]:
    """The fastest tree of each size and then the fastest others, `count` in all: what is worth trying beside others."""
    by_speed = sorted(entries, key=lambda entry: -entry.tokens_per_s)
    best = list({entry.tree.num_nodes: entry for entry in reversed(by_speed)}.values())
    best.sort(key=lambda entry: -entry.tokens_per_s)
    others = [entry for entry in by_speed if entry not in best]
    return [*best, *others][:count]


def complementary(entries: list[BankTree], trace: Trace, latency: LatencyTable, size: int, bank: Bank) -> list[Bank]:
    """Banks of 1..`size` trees, each the one before with a tree more. The first is the static optimum."""
    chosen = [max(entries, key=lambda entry: entry.tokens_per_s)]
    banks = [_bank(chosen, bank)]
    while len(chosen) < min(size, len(entries)):
        rest = [entry for entry in entries if entry not in chosen]
        options = [_bank([*chosen, entry], bank) for entry in rest]
        speeds = [fit_policy(LADDER, option, trace, latency)["calib_tokens_per_s"] for option in options]
        best = max(range(len(rest)), key=speeds.__getitem__)
        chosen.append(rest[best])
        banks.append(options[best])
    return banks


def _bank(entries: list[BankTree], like: Bank) -> Bank:
    ordered = sorted(entries, key=lambda entry: (entry.tree.num_nodes, entry.tree.paths))
    return Bank(like.task, like.heads, "predicted", ordered)


def bank_rows(
    task: str, bank: Bank, frontier: list[Tree], calib: Trace, test: Trace, latency: LatencyTable, size: int,
    tries: int, timed: Timed,
) -> list[dict]:  # fmt: skip
    """A row per bank (the paper's, then complementary ones of 2..`size` trees): its best ladder's replayed speed over
    the run's static optimum (the bank's star) on both splits, and the bank's oracle on the test texts."""
    entries = priced([Tree(()), *frontier], calib, bank, latency, timed)
    banks = complementary(shortlist(entries, tries), calib, latency, size, bank)
    own = _bank(priced([entry.tree for entry in bank.trees], calib, bank, latency, timed), bank)
    named = [("pareto", own), *(("complementary", made) for made in banks[1:])]
    alone = {"policy": "star", "kind": "star", "trees": [bank.star], "depth": None}
    static = {split: replayed_speed(alone, bank, trace, latency) for split, trace in _splits(calib, test)}
    rows = []
    for name, made in named:
        fitted = fit_policy(LADDER, made, calib, latency)
        speeds = {split: replayed_speed(fitted, made, trace, latency) for split, trace in _splits(calib, test)}
        trees = [entry.tree for entry in made.trees]
        bound = oracle(test, trees, [entry.step_ms for entry in made.trees])
        rows.append(
            {
                "task": task,
                "bank": name,
                "trees": len(trees),
                "nodes": [tree.num_nodes for tree in trees],
                **{f"{split}_over_static": speed / static[split] - 1 for split, speed in speeds.items()},
                "oracle_over_static": bound.tokens_per_s / static["test"] - 1,
            }
        )
    return rows


def _splits(calib: Trace, test: Trace) -> list[tuple[str, Trace]]:
    return [("calib", calib), ("test", test)]
