"""What every rule's job does around its stage: threads, log, one message for a mistake; and how a check fails."""

import os
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from entmtp.errors import EntmtpError
from entmtp.io import read_json, write_json
from entmtp.stages.common import read_trees, run_rule, write_verdicts
from entmtp.tree.topology import Tree


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # run_rule puts the interpreter's own back
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    return SimpleNamespace(
        rule="bench", wildcards=["hydra", "humaneval"], log=[str(tmp_path / "logs/x.log")], threads=1, input="in",
        output="out", params={"threads": None},
    )  # fmt: skip


def test_progress_goes_to_the_terminal_with_its_rule_and_to_the_log(job, tmp_path, capfd):
    def stage(inp, out, params) -> None:
        assert (inp, out, params) == ("in", "out", {"threads": None})
        assert os.environ["OMP_NUM_THREADS"] == "1"
        print("prompt 1/2, ", end="")
        print("9 tokens/s\nprompt 2/2")

    run_rule(job, stage)
    assert (tmp_path / "logs/x.log").read_text() == "prompt 1/2, 9 tokens/s\nprompt 2/2\n"
    assert capfd.readouterr().err == (
        "[bench hydra/humaneval] prompt 1/2, 9 tokens/s\n[bench hydra/humaneval] prompt 2/2\n"
    )
    assert sys.stdout is sys.__stdout__


def test_configured_threads_count_more_than_the_jobs(job):
    job.threads, job.params = 64, {"threads": 1}
    seen = []
    run_rule(job, lambda inp, out, params: seen.append(os.environ["OMP_NUM_THREADS"]))
    assert seen == ["1"]


def test_a_mistake_of_the_users_is_one_line_and_status_1(job, tmp_path, capfd):
    def stage(inp, out, params) -> None:
        raise EntmtpError("my.jsonl, line 3: not valid JSON")

    with pytest.raises(SystemExit) as ended:
        run_rule(job, stage)
    assert ended.value.code == 1
    assert (tmp_path / "logs/x.log").read_text() == "error: my.jsonl, line 3: not valid JSON\n"
    assert capfd.readouterr().err == "[bench hydra/humaneval] error: my.jsonl, line 3: not valid JSON\n"
    assert sys.stdout is sys.__stdout__


def test_a_mistake_of_ours_keeps_its_traceback(job):
    def stage(inp, out, params) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_rule(job, stage)
    assert sys.stdout is sys.__stdout__


def test_a_rule_without_wildcards_or_log_has_both_by_its_name(job, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    job.rule, job.wildcards, job.log = "target", [], []
    run_rule(job, lambda inp, out, params: print("done"))
    assert (tmp_path / "logs/target.log").read_text() == "done\n"
    assert capfd.readouterr().err == "[target] done\n"


def verdicts(**names: str) -> dict:
    return {"task": "gsm8k", "policies": {name: {"verdict": verdict} for name, verdict in names.items()}}


def test_verdicts_without_a_failure_are_written(tmp_path):
    result = verdicts(ar="n/a", hydra="exact", entmtp_tau="tie")
    write_verdicts(str(tmp_path / "gsm8k.json"), result, "differ")
    assert read_json(tmp_path / "gsm8k.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["gsm8k.json"]


def test_a_failed_check_has_no_product_but_keeps_what_it_found(tmp_path):
    result = verdicts(ar="n/a", hydra="fail", entmtp_tau="fail", medusa="exact")
    with pytest.raises(EntmtpError, match=r"task gsm8k: hydra, entmtp_tau differ; see .*gsm8k\.failed\.json"):
        write_verdicts(str(tmp_path / "gsm8k.json"), result, "differ")
    assert read_json(tmp_path / "gsm8k.failed.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["gsm8k.failed.json"]


def test_trees_of_a_frontier_are_read_in_order(tmp_path):
    paths = [[[0]], [[1], [0], [0, 0]]]
    write_json(tmp_path / "frontier.json", {"trees": [{"paths": tree, "score": 1.0} for tree in paths]})
    assert read_trees(str(tmp_path / "frontier.json")) == [Tree.of([(0,)]), Tree.of([(0,), (1,), (0, 0)])]


@pytest.mark.parametrize("key", ["decoding", "dtype", "device", "kinds", "arms"])
def test_rows_timed_under_other_circumstances_are_not_resumed(tmp_path, monkeypatch, key):
    from entmtp.stages.online import bench_identity

    (tmp_path / "a").write_text("x")
    base = dict.fromkeys(("decoding", "dtype", "device", "kinds", "arms"), "x")
    same = bench_identity([tmp_path / "a"], base, 2)
    assert same == bench_identity([tmp_path / "a"], dict(base), 2)
    assert same != bench_identity([tmp_path / "a"], {**base, key: "y"}, 2)
    assert same != bench_identity([tmp_path / "a"], base, 3)
    monkeypatch.setattr("entmtp.stages.online.decoding_code", lambda: "other code")
    assert same != bench_identity([tmp_path / "a"], base, 2)
    monkeypatch.undo()
    (tmp_path / "a").write_text("y")
    assert same != bench_identity([tmp_path / "a"], base, 2)


def test_perplexity_is_judged_in_float32_whatever_the_run_decodes_in(monkeypatch):
    from entmtp.stages import online

    class Seen(Exception):
        pass

    def open_block(params, *_):
        raise Seen(params["dtype"])

    monkeypatch.setattr(online, "open_block", open_block)
    monkeypatch.setattr("entmtp.tasks.read_prompts", lambda *_: [])
    monkeypatch.setattr(online, "read_parquet", lambda _: pd.DataFrame({"tokens": []}))
    with pytest.raises(Seen, match="float32"):
        online.perplexity(SimpleNamespace(prompts="p", bench="b"), None, {"dtype": "bfloat16", "task": "t"})
