"""A finished run in small: the tiny target in its resources folder, heads, a bank of three trees, fitted policies."""

import pytest
import torch
from train_fixture import CORPUS, texts
from transformers import AutoModelForCausalLM, AutoTokenizer

from entmtp import load
from entmtp.config import PolicyConfig
from entmtp.heads.features import Features, compute_shard
from entmtp.heads.model import save_heads
from entmtp.io import write_json
from entmtp.policy.fit import fit_policy
from entmtp.tree.bank import Bank, BankTree
from entmtp.tree.topology import Tree

TASK = "sharegpt"
TREES = [Tree(()), Tree.of([(0,), (0, 0)]), Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])]


@pytest.fixture(scope="session")
def world(tmp_path_factory, tiny_folder, tiny_heads):
    """Folder with `resources` (the tiny target) and `results/smoke` (heads, a bank of three trees, fitted policies)."""
    root = tmp_path_factory.mktemp("world")
    (root / "resources" / "targets").mkdir(parents=True)
    (root / "resources" / "targets" / "tiny").symlink_to(tiny_folder)
    run = root / "results" / "smoke"
    for kind, heads in tiny_heads.items():
        save_heads(heads, run / "heads" / kind)
    trees = run / "trees" / "hydra" / TASK
    bank = [BankTree(tree, 1.0 + 0.1 * index, 10.0 + index, 1.0) for index, tree in enumerate(TREES)]
    Bank(TASK, "hydra", "measured", bank).save(trees / "bank.json")
    base = fit_policy(PolicyConfig(name="x", kind="ar"), None, None, None)
    tau = {"depth": 2, "tau_on": 0.02, "tau_off": 0.01, "trees": [0, 1, 2], "start": 1}
    write_json(trees / "policy" / "entmtp_tau.json", {**base, "policy": "entmtp_tau", "kind": "tau", **tau})
    ladder = {"depth": 1, "thresholds": [0.01, 0.02], "trees": [0, 1, 2]}
    write_json(trees / "policy" / "entmtp_ladder.json", {**base, "policy": "entmtp_ladder", "kind": "ladder", **ladder})
    curve = {"signal": "draft_1", "knots": [0.01, 0.3], "accepted": [[0.0, 0.0], [0.1, 0.5], [0.1, 0.9]]}
    priced = {"floor": [0.0, 0.1, 0.1], "curves": [curve], "step_ms": [1.0, 1.1, 1.2], "rate": 1.0, "accepted": 0.1,
              "window": 8, "memory": 4, "cross_validation": []}  # fmt: skip
    adaptive = {"policy": "adaptive", "kind": "adaptive", "trees": [0, 1, 2], "depth": 1, "cost_aware": priced}
    write_json(trees / "policy" / "adaptive.json", {**base, **adaptive})
    return root


@pytest.fixture(scope="session")
def features(tiny) -> Features:
    """What `train_fixture.texts` have for heads to learn from."""
    return Features([compute_shard(tiny, texts(), CORPUS)])


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="module")
def run(world):
    return world / "results" / "smoke"


@pytest.fixture(scope="module")
def lm(model, tokenizer, run):
    return load(model, tokenizer=tokenizer, bank=run)
