"""A bank: the trees that a scheduler may choose from, smallest first, in a JSON that a person can read."""

from dataclasses import dataclass
from pathlib import Path

from entmtp.config import BankConfig
from entmtp.errors import EntmtpError
from entmtp.io import read_json, write_json
from entmtp.tree.topology import Tree


@dataclass
class BankTree:
    tree: Tree
    accept_length: float  # tokens a step on the calibration split (replayed self-rollout)
    tokens_per_s: float
    step_ms: float


@dataclass
class Bank:
    """`star` is the index of the best static tree."""

    task: str
    heads: str
    basis: str  # measured | predicted
    trees: list[BankTree]

    @property
    def star(self) -> int:
        return max(range(len(self.trees)), key=lambda index: self.trees[index].tokens_per_s)

    def to_json(self) -> dict:
        return {
            "task": self.task,
            "heads": self.heads,
            "basis": self.basis,
            "star": self.star,
            "trees": [
                {
                    "num_nodes": entry.tree.num_nodes,
                    "accept_length": round(entry.accept_length, 6),
                    "tokens_per_s": round(entry.tokens_per_s, 4),
                    "step_ms": round(entry.step_ms, 5),
                    "paths": [list(path) for path in entry.tree.paths],
                }
                for entry in self.trees
            ],
        }

    def save(self, path: str | Path, **extra: object) -> None:
        write_json(path, {**self.to_json(), **extra})

    @classmethod
    def load(cls, path: str | Path) -> "Bank":
        value = read_json(path)
        try:
            trees = [_read_tree(entry) for entry in value["trees"]]
            if not trees:
                raise EntmtpError(f"{path}: a bank needs at least one tree")
            return cls(value["task"], value["heads"], value["basis"], trees)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EntmtpError(f"{path}: not a bank file ({type(error).__name__}: {error})") from error


def _read_tree(entry: dict) -> BankTree:
    numbers = [entry["accept_length"], entry["tokens_per_s"], entry["step_ms"]]
    if not all(isinstance(n, int | float) and 0 < n < 1e30 for n in numbers):
        raise ValueError(f"accept_length, tokens_per_s and step_ms must be positive numbers, found {numbers}")
    if not all(isinstance(rank, int) for path in entry["paths"] for rank in path):
        raise ValueError(f"paths must be lists of ranks, found {entry['paths']!r:.60}")
    return BankTree(Tree.of(entry["paths"]), *numbers)


def strict_pareto(trees: list[BankTree], min_gain: float) -> list[BankTree]:
    """Sorted by nodes; a larger tree stays only if it is faster than every smaller one by more than `min_gain`.

    Of equally large trees the fastest counts (FACTS 5: strict improvements > 1e-9).
    """
    kept: list[BankTree] = []
    for entry in sorted(trees, key=lambda e: (e.tree.num_nodes, -e.tokens_per_s, e.tree.paths)):
        if not kept or entry.tokens_per_s > kept[-1].tokens_per_s + min_gain:
            kept.append(entry)
    return kept


def build_bank(rows: list[dict], config: BankConfig) -> list[BankTree]:
    """Strict Pareto set over (num_nodes, tokens/s) of the measured (or all predicted) trees.

    Measured throughput joins the live step time with the replayed accept length of the whole calibration split: the
    accept length on the few timed prompts is noise that replay need not suffer.
    """
    entries = []
    for row in rows:
        if row["num_nodes"] == 0 and not config.empty_tree:
            continue
        step_ms = row["measured_step_ms"] if config.basis == "measured" else row["predicted_step_ms"]
        if step_ms is None:
            continue
        speed = 1000 * row["accept_length"] / step_ms
        entries.append(BankTree(Tree.of(row["paths"]), row["accept_length"], speed, step_ms))
    return strict_pareto(entries, config.min_gain)
