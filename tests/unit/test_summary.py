import copy
import math
from itertools import pairwise

import eval_fixture as fixture
import pandas as pd
import pytest

from entmtp.errors import EntmtpError
from entmtp.evaluation.make import make_summary
from entmtp.evaluation.schema import check_schema
from entmtp.evaluation.summary import summarise, write_summary
from entmtp.io import read_json

ISSUE_KEYS = {
    *("task", "policy", "heads", "dtype", "prompts", "new_tokens", "seconds", "tokens_per_s"),
    *("over_ar", "over_hydra", "over_medusa", "num_accepted", "accept_length"),
    *("lossless", "scheduler_ms", "switch_ms", "ppl", "delta_nats"),
}


def rows_of(frame, policies=fixture.POLICIES, **verdicts):
    tasks = list(frame["task"].unique())
    checks = {task: fixture.lossless(task, policies, **verdicts) for task in tasks}
    perplexity = {task: fixture.perplexity(task, policies) for task in tasks}
    return summarise(frame, checks, perplexity, fixture.CONFIG, policies)


def test_rows_hold_the_issue_keys_in_task_and_policy_order():
    rows = fixture.summary()["rows"]
    assert [(row["task"], row["policy"]) for row in rows] == [
        (task, policy) for task in fixture.TASKS for policy in fixture.POLICIES
    ]
    for row in rows:
        assert set(row) >= ISSUE_KEYS


def test_numbers_are_totals_of_the_bench():
    frame = fixture.bench("humaneval")
    rows = {row["policy"]: row for row in rows_of(frame)}
    own, plain = frame[frame.policy == "entmtp_tau"], frame[frame.policy == "ar"]
    row = rows["entmtp_tau"]
    seconds = own.prefill_s.sum() + own.decode_s.sum()
    steps, accepted = own.step_accepted.map(len).sum(), own.step_accepted.map(sum).sum()
    assert (row["prompts"], row["new_tokens"], row["steps"], row["accepted"]) == (
        6,
        own.new_tokens.sum(),
        steps,
        accepted,
    )
    assert row["tokens_per_s"] == pytest.approx(own.new_tokens.sum() / seconds)
    plain_rate = plain.new_tokens.sum() / (plain.prefill_s.sum() + plain.decode_s.sum())
    assert row["over_ar"]["ratio"] == pytest.approx(row["tokens_per_s"] / plain_rate)
    assert row["over_ar"]["low"] <= row["over_ar"]["ratio"] <= row["over_ar"]["high"]
    assert row["num_accepted"] == pytest.approx(accepted / steps)
    assert row["accept_length"] == pytest.approx(1 + accepted / steps)
    assert row["scheduler_ms"] == pytest.approx(0.02)
    assert row["switch_ms"] == pytest.approx(0.01)
    nodes = [n for one in own.step_nodes for n in one]
    assert row["trees"] == pytest.approx({str(n): nodes.count(n) / len(nodes) for n in (4, 8)})
    assert row["trees"]["4"] != pytest.approx(row["trees"]["8"])
    switched = sum(a != b for trees in own.step_tree for a, b in pairwise(trees))
    assert switched and row["switches"] == pytest.approx(switched / steps)
    assert rows["ar"]["over_ar"] == pytest.approx({"ratio": 1, "low": 1, "high": 1})
    assert (rows["ar"]["num_accepted"], rows["ar"]["accept_length"], rows["ar"]["heads"]) == (0, 1, None)


def test_a_mean_of_ratios_would_give_another_number():
    frame = fixture.bench("humaneval")
    frame.loc[(frame.policy == "hydra") & (frame.prompt_id == "humaneval/0"), "decode_s"] = 50.0
    row = next(row for row in rows_of(frame) if row["policy"] == "hydra")
    seconds = frame.assign(s=frame.prefill_s + frame.decode_s, rate=lambda f: f.new_tokens / f.s)
    by_prompt = seconds.pivot(index="prompt_id", columns="policy", values="rate")
    assert abs(row["over_ar"]["ratio"] - (by_prompt["hydra"] / by_prompt["ar"]).mean()) > 0.2


def test_order_of_rows_does_not_matter():
    frame = fixture.bench("humaneval")
    assert rows_of(frame) == rows_of(frame.sample(frac=1, random_state=0))


def test_perplexity_and_its_difference_in_nats():
    row = next(row for row in fixture.summary()["rows"] if row["policy"] == "hydra")
    assert row["ppl"] == pytest.approx(math.exp(122 / 192))
    assert row["delta_nats"] == pytest.approx(2 / 192)


def test_a_reference_outside_the_run_is_null():
    policies = ["entmtp_star", "hydra"]
    rows = rows_of(fixture.bench("litbench", policies), policies)
    assert [row["policy"] for row in rows] == policies
    assert rows[0]["over_ar"] is None and rows[0]["over_medusa"] is None and rows[0]["over_hydra"]["ratio"] > 1
    assert rows[0]["delta_nats"] is None


def test_a_text_without_steps_counts_its_token_only():
    frame = fixture.bench("humaneval")
    short = (frame.policy == "ar") & (frame.prompt_id == "humaneval/0")
    index = frame.index[short][0]
    for column in ("step_tree", "step_nodes", "step_accepted", "step_signal", "step_ms"):
        frame.at[index, column] = []
    frame.loc[short, "new_tokens"] = 1
    row = rows_of(frame)[0]
    assert row["accept_length"] == 1 and row["steps"] < row["new_tokens"]


def broken_prompt(frame):
    return frame.drop(frame.index[(frame.policy == "hydra") & (frame.prompt_id == "humaneval/0")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken_prompt, "other prompts"),
        (lambda frame: pd.concat([frame, frame.tail(1)]), "a prompt twice"),
        (lambda frame: frame[frame.policy != "medusa"], "no rows of policy 'medusa'"),
        (lambda frame: frame.assign(mode=["greedy", "sample"] * (len(frame) // 2)), "mixes values of mode"),
    ],
)
def test_incomplete_bench_is_refused(change, message):
    with pytest.raises(EntmtpError, match=message):
        rows_of(change(fixture.bench("humaneval")))


def test_verdicts():
    rows = {row["policy"]: row for row in rows_of(fixture.bench("humaneval"), medusa="lossy", hydra="tie")}
    found = [rows[policy]["lossless"] for policy in ("ar", "medusa", "hydra", "entmtp_tau")]
    assert found == ["n/a", "lossy", "tie", "exact"]
    with pytest.raises(EntmtpError, match="'hydra' failed"):
        rows_of(fixture.bench("humaneval"), hydra="fail")
    with pytest.raises(EntmtpError, match="no verdict for policy 'medusa'"):
        summarise(fixture.bench("humaneval"), {}, {}, fixture.CONFIG, ["ar", "medusa"])


def test_schema_accepts_ours_and_refuses_changes(tmp_path):
    summary = fixture.summary()
    write_summary(tmp_path / "summary.json", summary)
    assert read_json(tmp_path / "summary.json") == summary

    for key in ISSUE_KEYS:
        broken = copy.deepcopy(summary)
        del broken["rows"][1][key]
        with pytest.raises(EntmtpError, match=rf"summary\.json, \$\.rows\[1\].*'{key}'"):
            write_summary(tmp_path / "broken.json", broken)
    for change in ({"extra": 1}, {"lossless": "fail"}, {"prompts": 0}, {"over_ar": {"ratio": 1.0}}, {"dtype": "int8"}):
        broken = copy.deepcopy(summary)
        broken["rows"][0] |= change
        with pytest.raises(EntmtpError, match=r"\$\.rows\[0\]"):
            write_summary(tmp_path / "broken.json", broken)
    assert not (tmp_path / "broken.json").exists()


def test_bank_and_policy_schemas():
    check_schema(fixture.bank("humaneval", "hydra"), "bank")
    check_schema(fixture.policy("entmtp_tau"), "policy")
    with pytest.raises(EntmtpError, match=r"bank\.json.*'star'"):
        check_schema({k: v for k, v in fixture.bank("humaneval", "hydra").items() if k != "star"}, "bank")
    with pytest.raises(EntmtpError, match=r"policy\.json, \$\.kind"):
        check_schema(fixture.policy("entmtp_tau") | {"kind": "magic"}, "policy")


def test_make_summary_reads_a_run_folder(tmp_path):
    fixture.write_run(tmp_path)
    made = make_summary(tmp_path, fixture.TASKS, fixture.POLICIES, fixture.CONFIG, fixture.PROVENANCE)
    assert read_json(tmp_path / "summary.json") == made
    # through Parquet and back the numbers are those of the frames in memory
    assert made["rows"] == fixture.summary()["rows"]
    assert made["checks"]["replay"]["litbench"]["hydra"] == {"verdict": "equal", "steps": 90}
    (tmp_path / "checks/replay/litbench.json").unlink()
    with pytest.raises(EntmtpError, match=r"replay/litbench\.json: no such file"):
        make_summary(tmp_path, fixture.TASKS, fixture.POLICIES, fixture.CONFIG, fixture.PROVENANCE)
