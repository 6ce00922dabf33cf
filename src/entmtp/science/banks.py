"""Banks chosen for a scheduler: trees that complement one another, not trees that are fastest alone.

The paper's bank is the Pareto set of static trees. Here trees are added one at a time, each time the one with which a
scheduler over the bank replays fastest on the calibration texts: `cost_aware` on what the heads' greedy drafts say.
"""

from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.oracle import oracle
from entmtp.calibration.replay import Trace, self_rollout
from entmtp.config import PolicyConfig
from entmtp.policy.cost_aware import CostAwarePolicy
from entmtp.policy.fit import fit_policy, replayed_speed, step_times
from entmtp.policy.fit_cost_aware import CostAwareFitter, fitted_json
from entmtp.science.prices import Timed
from entmtp.tree.bank import Bank, BankTree
from entmtp.tree.topology import Tree

LADDER = PolicyConfig(name="ladder", kind="ladder")
SCHEDULER = PolicyConfig(name="cost_aware", kind="cost_aware", bins=8)


def priced(trees: list[Tree], trace: Trace, bank: Bank, latency: LatencyTable, timed: Timed) -> list[BankTree]:
    """Trees as entries of a bank, on the clock of `bank`: a step takes what was measured, else what the table says."""
    entries = []
    for tree, predicted in zip(trees, step_times(bank, latency, trees, None), strict=True):
        length, step_ms = self_rollout(trace, tree).accept_length, timed.get(tree, predicted)
        entries.append(BankTree(tree, length, 1000 * length / step_ms, step_ms))
    return entries


def shortlist(entries: list[BankTree], count: int) -> list[BankTree]:
    """The fastest tree of each size and then the fastest others, `count` in all: what is worth trying beside others."""
    by_speed = sorted(entries, key=lambda entry: -entry.tokens_per_s)
    best = list({entry.tree.num_nodes: entry for entry in reversed(by_speed)}.values())
    best.sort(key=lambda entry: -entry.tokens_per_s)
    others = [entry for entry in by_speed if entry not in best]
    return [*best, *others][:count]


def signals_of(trace: Trace) -> list[str]:
    """What the scheduler looks at: the first two heads' certainty, and how much was accepted lately."""
    return [*(f"draft_{depth}" for depth in range(1, min(2, trace.depth) + 1)), "mean"]


def scheduled(bank: Bank, trace: Trace, latency: LatencyTable) -> CostAwarePolicy:
    return CostAwareFitter(SCHEDULER, bank, latency).fit(trace, signals_of(trace))


def complementary(entries: list[BankTree], trace: Trace, latency: LatencyTable, size: int, bank: Bank) -> list[Bank]:
    """Banks of 1..`size` trees, each the one before with a tree more. The first is the static optimum."""
    chosen = [max(entries, key=lambda entry: entry.tokens_per_s)]
    banks = [_bank(chosen, bank)]
    while len(chosen) < min(size, len(entries)):
        options = [_bank([*chosen, entry], bank) for entry in entries if entry not in chosen]
        banks.append(max(options, key=lambda option: _speed(option, trace, trace, latency)))
        chosen = banks[-1].trees
    return banks


def _speed(bank: Bank, fitted_on: Trace, trace: Trace, latency: LatencyTable) -> float:
    """Tokens a millisecond of the scheduler over a bank."""
    fitter = CostAwareFitter(SCHEDULER, bank, latency)
    return fitter.speed(trace, fitter.fit(fitted_on, signals_of(trace)))


def _bank(entries: list[BankTree], like: Bank) -> Bank:
    ordered = sorted(entries, key=lambda entry: (entry.tree.num_nodes, entry.tree.paths))
    return Bank(like.task, like.heads, "predicted", ordered)


def bank_rows(
    task: str, bank: Bank, frontier: list[Tree], calib: Trace, test: Trace, latency: LatencyTable, size: int,
    tries: int, timed: Timed,
) -> list[dict]:  # fmt: skip
    """A row per bank (the paper's, then complementary ones of 2..`size` trees). Replayed speeds over the run's static
    optimum (the bank's star): of the scheduler and of the best ladder, fitted on the calibration split, on both; and
    on the test texts of the bank's best single tree there and of its oracle."""
    entries = priced([Tree(()), *frontier], calib, bank, latency, timed)
    banks = complementary(shortlist(entries, tries), calib, latency, size, bank)
    own = _bank(priced([entry.tree for entry in bank.trees], calib, bank, latency, timed), bank)
    named = [("pareto", own), *(("complementary", made) for made in banks[1:])]
    alone = {"policy": "star", "kind": "star", "trees": [bank.star], "depth": None}
    splits = {"calib": calib, "test": test}
    static = {split: replayed_speed(alone, bank, trace, latency) for split, trace in splits.items()}
    rows = []
    for name, made in named:
        ladder, scheduler = fit_policy(LADDER, made, calib, latency), scheduled(made, calib, latency)
        fitted = {**ladder, "kind": "cost_aware", "depth": scheduler.depth, "trees": list(range(len(made.trees))),
                  "start": scheduler.start, "cost_aware": fitted_json(scheduler, [])}  # fmt: skip
        trees = [entry.tree for entry in made.trees]
        bound = oracle(test, trees, [entry.step_ms for entry in made.trees])
        rows.append(
            {
                "task": task,
                "bank": name,
                "trees": len(trees),
                "nodes": [tree.num_nodes for tree in trees],
                **{f"{split}_over_static": replayed_speed(fitted, made, trace, latency) / static[split] - 1
                   for split, trace in splits.items()},
                **{f"ladder_{split}_over_static": replayed_speed(ladder, made, trace, latency) / static[split] - 1
                   for split, trace in splits.items()},
                "single_over_static": bound.static_tokens_per_s / static["test"] - 1,
                "oracle_over_static": bound.tokens_per_s / static["test"] - 1,
            }
        )  # fmt: skip
    return rows
