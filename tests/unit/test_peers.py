"""Comparison with peers: ratios, which of our policies runs, and workers that fail."""

import pytest

from entmtp.config import compose
from entmtp.errors import EntmtpError
from entmtp.peers.bench import BEST, PLAIN, Peer, compare, fastest, markdown, measure, prepare

RECORD = {"cpu": "some cpu", "threads": 2, "packages": {"torch": "1"}}


def run(peer: str, prompt: int, seconds: float, tokens: int = 10, first: int = 0) -> dict:
    return {"peer": peer, "task": "t", "prompt": prompt, "tokens": [first] + [1] * (tokens - 1), "seconds": seconds}


def test_ratios_are_of_totals_and_texts_are_compared_with_our_plain_ones():
    rows = [run(name, prompt, seconds, first=prompt if name == "slow" else 0)
            for name, seconds in ((PLAIN, 2.0), (BEST, 1.0), ("slow", 4.0)) for prompt in (0, 1)]  # fmt: skip
    made = {row["peer"]: row for row in compare(rows, "float32", 50, 0)}
    assert made["slow"]["tokens_per_s"] == 2.5
    assert made["slow"]["best_over"] == {"ratio": 4.0, "low": 4.0, "high": 4.0}
    assert made["slow"]["plain_over"]["ratio"] == 2.0
    assert made[BEST]["best_over"]["ratio"] == 1.0
    assert (made["slow"]["same_text"], made[BEST]["same_text"]) == (0.5, 1.0)
    text = markdown(list(made.values()), {"other": "not installed"}, RECORD)
    assert "| t | float32 | slow | 2.5 | 4.00 [4.00, 4.00] | 2.00 [2.00, 2.00] | 50% |" in text
    assert "Not measured: other (not installed)." in text


def test_the_fastest_lossless_policy_of_each_task_runs():
    def row(task, policy, speed, lossless="exact", heads="hydra"):
        return {"task": task, "policy": policy, "tokens_per_s": speed, "lossless": lossless, "heads": heads}

    summary = {"rows": [row("a", "ar", 99, heads=None), row("a", "x", 2), row("a", "y", 3), row("a", "z", 9, "lossy"),
                        row("b", "x", 5), row("b", "y", 4)]}  # fmt: skip
    assert fastest(summary, ["ar", "x", "y", "z"]) == {"a": ("hydra", "y"), "b": ("hydra", "x")}


def test_peers_take_turns_in_rotated_order():
    class Fake:
        def __init__(self, name):
            self.name = name

        def generate(self, task, prompt, budget):
            order.append(self.name)
            return {"tokens": [1], "seconds": 1.0}

    order: list[str] = []
    measure([Fake("a"), Fake("b")], {"t": [[1], [2]]}, 4)
    assert order == ["a", "b", "a", "b", "b", "a"]  # warm-up, then the two prompts


def test_a_run_that_is_not_there_is_named(tmp_path):
    config = compose([f"results={tmp_path}", "experiment=smoke"])
    with pytest.raises(EntmtpError, match=r"summary\.json: no such file; run `snakemake"):
        prepare(config, [])


def test_a_worker_says_why_it_cannot_take_part(tmp_path):
    peer = Peer("transformers eager", {"folder": str(tmp_path / "none"), "dtype": "float32", "threads": 1})
    assert "none" in peer.problem
    peer.process.wait(timeout=60)
