"""Hashes of token-level results: equal for equal tokens, and the first stage that differs is named."""

import copy
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from entmtp import __version__, reproduction
from entmtp.config import BankConfig, compose, to_plain
from entmtp.errors import EntmtpError
from entmtp.io import read_json, write_json, write_jsonl, write_parquet
from entmtp.reproduction import STAGES, compare, run_hashes

ROOT = Path(__file__).resolve().parents[2]


def bench_rows(accepted: int) -> list[dict]:
    return [
        {"policy": policy, "kind": kind, "prompt_id": "p", "tokens": [3, 4], "step_nodes": [4], "step_ms": [20.0],
         "step_accepted": [accepted if kind == "tau" else 1], "time": 1.0}
        for policy, kind in (("ar", "ar"), ("hydra", "static"), ("entmtp_tau", "tau"))
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path) -> Path:
    run = tmp_path / "results" / "smoke"
    write_jsonl(run / "prompts" / "t.jsonl", [{"id": "p", "split": "test", "sha256": "ab"}])
    write_parquet(run / "texts" / "t.calib.parquet", [{"prompt_id": "p", "tokens": [3, 4]}])
    write_parquet(run / "traces" / "hydra" / "t.calib.parquet", [
        {"prompt_id": "p", "position": 0, "token": 3, "ranks": [0, 9], "path_values": [0.5]}])  # fmt: skip
    trees = run / "trees" / "hydra" / "t"
    write_json(trees / "frontier.json", {"trees": [{"paths": [[0]]}]})
    write_json(trees / "recalibrated.json", {"trees": [{"paths": [[0]], "accept_length": 1.5}]})
    write_json(trees / "bank.json", {"star": 0, "trees": [{"paths": [[0]], "tokens_per_s": 30.0}]})
    write_json(
        trees / "policy" / "entmtp_tau.json", {"kind": "tau", "tree": None, "tau_on": 0.4, "calib_tokens_per_s": 1}
    )
    write_parquet(run / "bench" / "t.parquet", bench_rows(1))
    return run


def test_seconds_and_floats_do_not_count(run):
    before = run_hashes(run)
    bank = run / "trees/hydra/t/bank.json"
    write_json(bank, {**read_json(bank), "trees": [{"paths": [[0]], "tokens_per_s": 99.0}]})
    policy = run / "trees/hydra/t/policy/entmtp_tau.json"
    write_json(policy, {**read_json(policy), "calib_tokens_per_s": 2})
    write_parquet(run / "bench" / "t.parquet", [{**row, "step_ms": [9.0], "time": 7.0} for row in bench_rows(1)])
    frame = pd.read_parquet(run / "traces/hydra/t.calib.parquet")
    write_parquet(run / "traces" / "hydra" / "t.calib.parquet", frame.assign(path_values=[[0.500001]]))
    assert run_hashes(run) == before and compare(before, before)


CHANGES = {
    "prompts": lambda run: write_jsonl(run / "prompts" / "t.jsonl", [{"id": "p", "split": "test", "sha256": "cd"}]),
    "texts": lambda run: write_parquet(run / "texts" / "t.calib.parquet", [{"prompt_id": "p", "tokens": [3, 5]}]),
    "traces": lambda run: write_parquet(run / "traces" / "hydra" / "t.calib.parquet", [
        {"prompt_id": "p", "position": 0, "token": 3, "ranks": [1, 9], "path_values": [0.5]}]),
    "frontier": lambda run: write_json(run / "trees/hydra/t/frontier.json", {"trees": [{"paths": [[1]]}]}),
    "recalibrated": lambda run: write_json(run / "trees/hydra/t/recalibrated.json", {"trees": []}),
    "bench texts": lambda run: write_parquet(run / "bench" / "t.parquet", [
        {**row, "tokens": [3, 9]} for row in bench_rows(1)]),
    "bench steps, fixed trees": lambda run: write_parquet(run / "bench" / "t.parquet", [
        {**row, "step_accepted": [0]} for row in bench_rows(1)]),
}  # fmt: skip


@pytest.mark.parametrize("stage", CHANGES)
def test_the_first_stage_that_differs_is_named(run, stage, capsys):
    recorded = run_hashes(run)
    CHANGES[stage](run)
    (run / "prompts" / "later.jsonl").write_text("")  # a file more differs too
    CHANGES["recalibrated"](run)  # and so does a later stage, perhaps
    assert not compare(recorded, run_hashes(run))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FIRST DIFFERENCE: prompts differs: prompts/later.jsonl")
    assert sum(line.startswith("FIRST") for line in lines) == 1
    assert any(line.startswith((f"{stage} differs", f"FIRST DIFFERENCE: {stage} differs")) for line in lines)


def test_what_follows_from_seconds_is_reported_and_no_failure(run, capsys):
    recorded = run_hashes(run)
    write_json(run / "trees/hydra/t/bank.json", {"star": 0, "trees": [{"paths": []}]})
    write_parquet(run / "bench" / "t.parquet", bench_rows(accepted=0))
    assert compare(recorded, run_hashes(run))
    out = capsys.readouterr().out
    assert "bank differs, as measured seconds do: trees/hydra/t/bank.json" in out
    assert "bench steps, fitted policies differs" in out and "FIRST" not in out


def test_the_command_writes_and_compares(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduction, "record_path", lambda experiment: tmp_path / f"{experiment}.json")
    arguments = ["experiment=smoke", f"results={tmp_path / 'results'}"]
    asked = []
    monkeypatch.setattr(reproduction, "rederived", lambda run, overrides: asked.append(overrides) or [])
    assert reproduction.main([*arguments, "--write"]) == 0
    assert reproduction.main(arguments) == 0
    assert "exact files equal to smoke.json" in capsys.readouterr().out and asked == [arguments]
    CHANGES["texts"](run)
    assert reproduction.main(arguments) == 1
    assert "FIRST DIFFERENCE: texts differs: texts/t.calib.parquet" in capsys.readouterr().out
    shutil.rmtree(run / "traces")
    with pytest.raises(EntmtpError, match="no files of stage traces; finish the run"):
        reproduction.main(arguments)


def test_banks_and_policies_are_made_again_from_the_runs_own_seconds(tmp_path, traced):
    """A run whose bank and thresholds were fitted by the stages themselves, and one that somebody edited."""
    from types import SimpleNamespace

    from entmtp.stages import offline

    run, case = tmp_path / "results" / "smoke", traced("hydra")
    write_parquet(run / "traces" / "hydra" / "t.calib.parquet", case.frame)
    write_json(run / "latency" / "hydra.json", {
        "forward": {"tokens": [1, 65], "ms": [10.0, 60.0]}, "propose": {"rows": [1, 16], "ms": [[0.5, 1.0]] * 4},
        "overhead_ms": 0.2, "plain_ms": 10.0, "arch": "hydra", "signal_ms": 0.1, "grow_ms": 0.1})  # fmt: skip
    timed = [([], 1.0, 10.0), ([[0], [0, 0]], 1.4, 12.0)]
    rows = [
        {"num_nodes": len(paths), "paths": paths, "accept_length": length, "measured_step_ms": ms}
        for paths, length, ms in timed
    ]
    trees = run / "trees" / "hydra" / "t"
    write_json(trees / "throughput.json", {"trees": rows})
    overrides = ["experiment=smoke", f"results={tmp_path / 'results'}"]
    offline.bank(SimpleNamespace(throughput=trees / "throughput.json"), SimpleNamespace(bank=trees / "bank.json"),
                 {"bank": to_plain(BankConfig()), "task": "t", "kind": "hydra"})  # fmt: skip
    inp = SimpleNamespace(bank=trees / "bank.json", latency=run / "latency/hydra.json",
                          traces=run / "traces/hydra/t.calib.parquet")  # fmt: skip
    for name in ("entmtp_tau", "entmtp_ladder", "entmtp_star", "hydra"):
        config = compose([*overrides, f"policy={name}"]).policy
        offline.policy(inp, SimpleNamespace(policy=trees / "policy" / f"{name}.json"), {"policy": to_plain(config)})
    assert reproduction.rederived(run, overrides) == []
    edited = trees / "policy" / "entmtp_tau.json"
    write_json(edited, {**read_json(edited), "tau_on": 0.987})
    assert reproduction.rederived(run, overrides) == ["trees/hydra/t/policy/entmtp_tau.json"]


def test_what_a_policy_learned_counts(run):
    policy = run / "trees/hydra/t/policy/entmtp_tau.json"
    fitted = {**read_json(policy), "kind": "cost_aware", "cost_aware": {"rate": 0.1, "cross_validation": {"auc": 0.7}}}
    write_json(policy, fitted)
    before = run_hashes(run)["policies"]
    write_json(policy, {**fitted, "cost_aware": {"rate": 0.1, "cross_validation": {"auc": 0.8}}})
    assert run_hashes(run)["policies"] == before
    write_json(policy, {**fitted, "cost_aware": {"rate": 0.2, "cross_validation": {"auc": 0.7}}})
    assert run_hashes(run)["policies"] != before


def test_stages_are_in_the_order_of_the_data_flow():
    names = [stage for stage, *_ in STAGES]
    assert names.index("prompts") < names.index("texts") < names.index("traces") < names.index("frontier")
    assert copy.copy(names) == list(dict.fromkeys(names))


def test_citation_names_this_version_and_its_papers():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", text, re.MULTILINE).group(1) == __version__
    assert "2606.27550" in text and "2602.06019" in text and "license: Apache-2.0" in text
