"""Timed runs: order, journal and rows, with a decoder that only records; then once with the real one."""

import json

import pytest

from entmtp.config import BenchConfig, DecodingConfig
from entmtp.decoding.engine import Generation, Step
from entmtp.errors import EntmtpError
from entmtp.evaluation.bench import bench_task, make_row
from entmtp.policy.schedulers import Policy, TauPolicy
from entmtp.tree.topology import Tree

ARMS = [
    {"policy": "ar", "kind": "ar", "heads": None},
    {"policy": "medusa", "kind": "static", "heads": "medusa"},
    {"policy": "tau", "kind": "tau", "heads": "hydra"},
]
PROMPTS = [{"id": f"p{number}", "token_ids": [1] * (number + 2)} for number in range(5)]
POLICIES = {"medusa": Policy("medusa", [Tree.of([(0,)])]), "tau": Policy("tau", [Tree.of([(0,), (1,)])])}
DECODING = DecodingConfig(max_new_tokens=30)


class Recorder:
    """Stands for all decoders; `run` marks which process produced a text."""

    def __init__(self, run: int = 0):
        self.run, self.calls = run, []

    def _made(self, policy: str, decoding: DecodingConfig, prompt_id: str) -> Generation:
        self.calls.append((prompt_id, policy, decoding.max_new_tokens))
        step = Step(1, 3, 1, 2, 0.25 if policy == "tau" else float("nan"), 0.5, 0.125, 0.0625, [7, self.run])
        return Generation([7, self.run, 9], 0.25, 1.5, [step])

    def plain(self, prompt, decoding, prompt_id=""):
        return self._made("ar", decoding, prompt_id)

    def generate(self, prompt, policy, decoding, prompt_id=""):
        return self._made(policy.name, decoding, prompt_id)

    @property
    def timed(self) -> list[tuple[str, str]]:
        return [(prompt_id, policy) for prompt_id, policy, budget in self.calls if budget == 30]


def bench(path, recorder: Recorder, on_row=lambda row: None, fingerprint: str = "f", prompts=PROMPTS) -> list[dict]:
    decoders = dict.fromkeys([None, "medusa", "hydra"], recorder)
    return bench_task("t", ARMS, decoders, POLICIES, prompts, DECODING, BenchConfig(warmup_tokens=4), "float32",
                      path, fingerprint, on_row)  # fmt: skip


class Killed(Exception):
    pass


def kill_after(count: int):
    seen = []

    def on_row(row: dict) -> None:
        seen.append(row)
        if len(seen) == count:
            raise Killed

    return on_row


def test_policies_alternate_in_a_rotated_order_after_a_warm_up(tmp_path):
    recorder = Recorder()
    rows = bench(tmp_path / "j", recorder)
    assert recorder.calls[:3] == [("p0", name, 4) for name in ("ar", "medusa", "tau")]
    names = ["ar", "medusa", "tau"]
    assert recorder.timed == [(f"p{n}", names[(n + k) % 3]) for n in range(5) for k in range(3)]
    # rows come in table order, whatever the order of running
    assert [(row["policy"], row["prompt_id"]) for row in rows] == [(a, f"p{n}") for a in names for n in range(5)]
    assert {(row["prompt_id"], row["policy"]): row["order"] for row in rows}[("p1", "medusa")] == 0
    assert {(row["prompt_id"], row["policy"]): row["order"] for row in rows}[("p1", "ar")] == 2


def test_rows_hold_counts_and_seconds_not_ratios(tmp_path):
    row = next(row for row in bench(tmp_path / "j", Recorder(4)) if (row["policy"], row["prompt_id"]) == ("tau", "p2"))
    assert row | {"time": 0} == {
        "task": "t", "policy": "tau", "heads": "hydra", "kind": "tau", "mode": "greedy", "dtype": "float32",
        "prompt_id": "p2", "prompt_tokens": 4, "new_tokens": 3, "prefill_s": 0.25, "decode_s": 1.5,
        "scheduler_s": 0.125, "switch_s": 0.0625,
        "tokens": [7, 4, 9], "step_tree": [1], "step_nodes": [3], "step_accepted": [1],
        "step_signal": [0.25], "step_ms": [500.0], "order": 0, "time": 0,
    }  # fmt: skip
    static = make_row("t", ARMS[1], PROMPTS[0], Recorder()._made("medusa", DECODING, "p0"), "sample", "bfloat16", 1)
    assert static["step_signal"] == [None]
    json.dumps(static, allow_nan=False)
    with pytest.raises(EntmtpError, match="prompt p0, policy medusa: no token"):
        make_row("t", ARMS[1], PROMPTS[0], Generation([], 0.0, 0.0), "greedy", "float32", 0)


@pytest.mark.parametrize("rows_before", [1, 2, 3, 4, 8, 14])
def test_a_rerun_keeps_whole_prompts_and_times_a_half_finished_one_again(tmp_path, rows_before):
    path = tmp_path / "journal.jsonl"
    with pytest.raises(Killed):
        bench(path, Recorder(1), kill_after(rows_before))
    whole = rows_before // 3
    second, seen = Recorder(2), []
    rows = bench(path, second, seen.append)
    names = ["ar", "medusa", "tau"]
    assert second.timed == [(f"p{n}", names[(n + k) % 3]) for n in range(whole, 5) for k in range(3)]
    assert len(rows) == len(seen) == 15
    for row in rows:  # a prompt's policies ran side by side: all rows of a prompt come from one process
        assert row["tokens"][1] == (1 if int(row["prompt_id"][1:]) < whole else 2)
    third = Recorder(3)
    assert bench(path, third) == rows
    assert third.calls == []  # nothing left: not even a warm-up


def test_interrupted_twice_in_the_same_prompt(tmp_path):
    path = tmp_path / "j"
    with pytest.raises(Killed):
        bench(path, Recorder(1), kill_after(5))  # p0 whole, p1 with two of three
    with pytest.raises(Killed):
        bench(path, Recorder(2), kill_after(3 + 1))  # p0 from the journal, p1 begun again
    rows = bench(path, Recorder(3))
    marks = {(row["prompt_id"], row["policy"]): row["tokens"][1] for row in rows}
    assert {marks["p1", name] for name in ("ar", "medusa", "tau")} == {3}
    assert {marks["p0", name] for name in ("ar", "medusa", "tau")} == {1}


def test_another_job_starts_afresh(tmp_path):
    bench(tmp_path / "j", Recorder(1))
    second = Recorder(2)
    rows = bench(tmp_path / "j", second, fingerprint="g")
    assert len(second.timed) == 15
    assert {row["tokens"][1] for row in rows} == {2}


def test_a_failed_prompt_fails_the_job(tmp_path):
    class Broken(Recorder):
        def generate(self, prompt, policy, decoding, prompt_id=""):
            if prompt_id == "p1":
                raise EntmtpError("no room")
            return super().generate(prompt, policy, decoding, prompt_id)

    with pytest.raises(EntmtpError, match="no room"):
        bench(tmp_path / "j", Broken())


def test_with_real_decoders_every_policy_writes_the_same_text(tmp_path, traced, trees):
    hydra, medusa = traced("hydra", "sample"), traced("medusa", "sample")
    policies = {
        "medusa": Policy("medusa", [trees["mc_sim_7b_63"]]),
        "tau": TauPolicy("tau", [trees["empty"], trees["wide"], trees["full"]], 1, 1, 0.1, 0.05),
    }
    decoders = {None: hydra.decoder, "hydra": hydra.decoder, "medusa": medusa.decoder}
    rows = bench_task("t", ARMS, decoders, policies, hydra.prompts, hydra.decoding, BenchConfig(warmup_tokens=3),
                      "float32", tmp_path / "j", "f")  # fmt: skip
    assert len(rows) == 12
    for row in rows:
        assert row["tokens"] == hydra.texts[row["prompt_id"]]
        committed = sum(row["step_accepted"]) + len(row["step_accepted"])
        assert row["new_tokens"] - committed in (0, 1)
        assert row["decode_s"] * 1000 >= sum(row["step_ms"]) * 0.99
        assert row["prefill_s"] > 0
