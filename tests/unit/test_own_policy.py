"""docs/own-policy.md, executed: its policy is lossless, replay takes its live steps, and it is judged as is said."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from entmtp.calibration.replay import replay_policy
from entmtp.io import write_json, write_parquet
from entmtp.tree.bank import Bank, BankTree

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-policy.md"


@pytest.fixture(scope="module")
def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def finished(tmp_path, traced, trees):
    """What the page reads of a finished run: bank, latency table and traces of the test texts."""
    run, case = tmp_path / "results" / "quick", traced("hydra_plus")
    listed = [("empty", 100.0, 10.0), ("chain_4", 110.0, 12.0), ("full", 90.0, 14.0)]
    entries = [BankTree(trees[name], 1.1, speed, ms) for name, speed, ms in listed]
    Bank("humaneval", "hydra_plus", "measured", entries).save(run / "trees" / "hydra_plus" / "humaneval" / "bank.json")
    write_json(run / "latency" / "hydra_plus.json", {
        "forward": {"tokens": [1, 65], "ms": [10.0, 60.0]}, "propose": {"rows": [1, 16], "ms": [[0.5, 1.0]] * 4},
        "overhead_ms": 0.2, "plain_ms": 10.0, "arch": "hydra", "signal_ms": 0.1, "grow_ms": 0.1})  # fmt: skip
    write_parquet(run / "traces" / "hydra_plus" / "humaneval.test.parquet", case.frame)
    return case


def test_the_page_works(examples, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "page"}
    exec(examples[0], names)
    exec(examples[1], names)
    assert re.fullmatch(r"[\d.]+ tokens/s, best static tree [\d.]+, at most [\d.]+\n", capsys.readouterr().out)
    policy, bound = names["policy"], names["bound"]
    assert 0 < names["speed"] <= bound.tokens_per_s * (1 + 1e-12)
    assert policy.start == 1 and policy.depth is None and names["step_ms"] == [10.0, 12.0, 14.0]
    used = set()
    for prompt, run, steps in zip(
        finished.prompts, finished.live(policy), replay_policy(finished.trace, policy), strict=True
    ):
        assert run.tokens == finished.texts[prompt["id"]]
        assert [(s.tree, s.accepted) for s in run.steps] == [(s.tree, s.accepted) for s in steps]
        for before, after in pairwise(steps):
            assert after.tree == (1 if before.accepted == 0 else 2)
        used |= {step.tree for step in steps}
    assert used == {1, 2}
    spent = sum(names["step_ms"][step.tree] for steps in replay_policy(finished.trace, policy) for step in steps)
    assert names["speed"] == pytest.approx(1000 * names["tokens"] / spent)
