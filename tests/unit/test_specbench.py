"""Spec-Bench: its questions as a task, and answer files that its speed script reads, computed anew here its way."""

import json
import sys

import numpy as np
import pytest
from eval_fixture import CONFIG, POLICIES, bench, lossless, perplexity

import entmtp.export as export
from entmtp.config import TaskConfig, compose
from entmtp.errors import EntmtpError
from entmtp.evaluation.summary import summarise
from entmtp.export import specbench_answers
from entmtp.io import read_jsonl, write_jsonl
from entmtp.tasks import build_prompts, load_source, read_prompts

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a post about Hawaii.", "Now as a limerick."]},
    {"question_id": 9, "category": "math_reasoning", "turns": ["What is 3 + 4?"]},
    {"question_id": 400, "category": "rag", "turns": ["Whose is the island?"], "reference": ["nobody's"]},
    {"question_id": 121, "category": "coding", "turns": ["Write a loop."]},
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return TaskConfig(name="spec_bench", source="file", file=str(path), column="turns", calib=1, test=3)


def test_the_question_file_is_a_task(questions, tiny, tmp_path):
    rows = list(load_source(questions, tmp_path))
    assert [(row["id"], row["category"]) for row in rows] == [
        ("81", "writing"), ("9", "math_reasoning"), ("400", "rag"), ("121", "coding"),
    ]  # fmt: skip
    assert rows[0]["messages"] == [{"role": "user", "content": "Write a post about Hawaii."}]
    write_jsonl(tmp_path / "prompts.jsonl", build_prompts(questions, tiny.tokenizer, tmp_path))
    read = read_prompts(tmp_path / "prompts.jsonl")
    assert {row["id"]: row["category"] for row in read} == {row["id"]: row["category"] for row in rows}
    assert len({row["split"] for row in read}) == 2


def test_question_ids_are_unique_and_an_own_id_comes_first(questions, tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps({**row, "question_id": 1}) + "\n" for row in QUESTIONS))
    with pytest.raises(EntmtpError, match=r"line 2: id '1' is also that of line 1"):
        list(load_source(questions, tmp_path))
    path.write_text(json.dumps({"id": "mine", "question_id": 1, "turns": ["x"]}) + "\n" + '{"turns": ["y"]}\n')
    rows = list(load_source(questions, tmp_path))
    assert [row["id"] for row in rows] == ["mine", "spec_bench/2"]
    assert not any("category" in row for row in rows)


def test_conf_names_the_task():
    task = compose(["task=spec_bench"]).task
    assert (task.name, task.source, task.column) == ("spec_bench", "file", "turns")
    assert task.file.endswith("spec_bench.jsonl")


def decode(tokens: list[int]) -> str:
    return " " + " ".join(map(str, tokens)) + "\n"


def as_speed_script(answers: list[dict], base: list[dict], count) -> tuple[float, float, float, float]:
    """What Spec-Bench's evaluation/speed.py prints: mean accepted tokens, tokens/s, the baseline's, their ratio."""
    lengths, speeds, base_speeds = [], [], []
    for answer in answers:
        choice = answer["choices"][0]
        lengths += choice["accept_lengths"]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
    for answer in base:
        choice = answer["choices"][0]
        base_speeds.append(sum(count(turn) for turn in choice["turns"]) / sum(choice["wall_time"]))
    mean, base_mean = float(np.mean(speeds)), float(np.mean(base_speeds))
    return float(np.mean(lengths)), mean, base_mean, mean / base_mean


def prompts_of(frame) -> list[dict]:
    return [{"id": prompt, "category": "qa"} for prompt in dict.fromkeys(frame["prompt_id"])]


def test_their_figures_are_ours():
    frame = bench("litbench")
    answers = specbench_answers(frame, prompts_of(frame), decode, "smollm2")
    assert list(answers) == POLICIES
    checks = {"litbench": lossless("litbench")}
    ours = summarise(frame, checks, {"litbench": perplexity("litbench")}, CONFIG, POLICIES)
    for row in ours:
        found = answers[row["policy"]]
        # their script counts the baseline from its text, less a start token: here as if the tokenizer added one
        length, speed, base, ratio = as_speed_script(found, answers["ar"], lambda turn: len(turn.split()) + 1 - 1)
        own = frame[frame["policy"] == row["policy"]]
        plain = frame[frame["policy"] == "ar"]
        assert length == pytest.approx(row["accept_length"])
        assert speed == pytest.approx(np.mean(own["new_tokens"] / (own["prefill_s"] + own["decode_s"])))
        assert base == pytest.approx(np.mean(plain["new_tokens"] / (plain["prefill_s"] + plain["decode_s"])))
        assert ratio == pytest.approx(speed / base)
    by_policy = {row["policy"]: row for row in ours}
    assert by_policy["ar"]["accept_length"] == 1.0
    assert by_policy["entmtp_tau"]["accept_length"] > 1.2


def test_the_form_is_theirs():
    frame = bench("humaneval", ["ar", "entmtp_tau"], 3)
    frame["time"] = 1700000000.0
    answers = specbench_answers(frame, prompts_of(frame), decode, "smollm2")["entmtp_tau"]
    for answer, row in zip(answers, frame[frame["policy"] == "entmtp_tau"].to_dict("records"), strict=True):
        assert list(answer) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
        assert (answer["question_id"], answer["category"]) == (row["prompt_id"], "qa")
        assert (answer["model_id"], answer["tstamp"]) == ("smollm2-entmtp_tau-float32", 1700000000.0)
        (choice,) = answer["choices"]
        assert choice["index"] == 0 and choice["turns"] == [decode(row["tokens"]).strip()]
        assert choice["new_tokens"] == [row["new_tokens"]]
        assert choice["wall_time"] == [row["prefill_s"] + row["decode_s"]]
        assert choice["decoding_steps"] == [len(choice["accept_lengths"])]
        # every second text of the fixture ends in a root that needed no forward
        assert row["new_tokens"] - sum(choice["accept_lengths"]) in (0, 1)
        json.dumps(answer, allow_nan=False)
    assert len({answer["answer_id"] for answer in answers}) == 3


def test_questions_are_in_order_and_known():
    frame = bench("humaneval", ["ar"], 4)
    frame["prompt_id"] = ["81", "9", "100", "12"]
    prompts = [{"id": name, "category": "qa"} for name in frame["prompt_id"]]
    (answers,) = specbench_answers(frame, prompts, decode, "m").values()
    assert [answer["question_id"] for answer in answers] == [9, 12, 81, 100]
    with pytest.raises(EntmtpError, match="prompt '81'"):
        specbench_answers(frame, prompts[1:], decode, "m")
    del prompts[0]["category"]
    (answers,) = specbench_answers(frame, prompts, decode, "m").values()
    assert {answer["question_id"]: answer["category"] for answer in answers}[81] == "humaneval"


@pytest.fixture
def finished(questions, tiny_folder, tiny, tmp_path):
    """A run folder with one task's prompts and bench rows, on the tiny target."""
    (tmp_path / "resources" / "targets").mkdir(parents=True)
    (tmp_path / "resources" / "targets" / "tiny").symlink_to(tiny_folder)
    run = tmp_path / "results" / "smoke"
    rows = build_prompts(questions, tiny.tokenizer, tmp_path)
    write_jsonl(run / "prompts" / "sharegpt.jsonl", rows)
    frame = bench("sharegpt", ["ar", "entmtp_tau"], 3)
    tests = [row["id"] for row in rows if row["split"] == "test"]
    frame["prompt_id"] = [tests[int(name.split("/")[1])] for name in frame["prompt_id"]]
    text = list(tiny.tokenizer("fine words")["input_ids"])
    frame["tokens"] = [[*text, 2] for _ in range(len(frame))]  # 2: the stop token
    (run / "bench").mkdir()
    frame.to_parquet(run / "bench" / "sharegpt.parquet", index=False)
    return [f"results={tmp_path / 'results'}", f"resources={tmp_path / 'resources'}", "experiment=smoke"]


def test_the_command_writes_a_file_a_policy(finished, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["export", "specbench", *finished])
    assert export.main() == 0
    paths = capsys.readouterr().out.split()
    folder = tmp_path / "results" / "smoke" / "specbench" / "sharegpt"
    assert paths == [str(folder / "ar.jsonl"), str(folder / "entmtp_tau.jsonl")]
    answers = read_jsonl(folder / "entmtp_tau.jsonl")
    known = {row["question_id"]: row["category"] for row in QUESTIONS}
    assert len(answers) == 3 and all(known[answer["question_id"]] == answer["category"] for answer in answers)
    assert answers[0]["choices"][0]["turns"] == ["fine words"], "special tokens are not part of the text"
    assert [answer["question_id"] for answer in answers] == sorted(answer["question_id"] for answer in answers)


def test_mistakes_are_named(finished, monkeypatch, capsys):
    for overrides, message in ((["task=litbench"], "no timed task among litbench"), (["experiment=x"], "experiment")):
        monkeypatch.setattr(sys, "argv", ["export", "specbench", *finished, *overrides])
        assert export.main() == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error
