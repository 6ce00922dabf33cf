"""Splits and encoding of prompts, and the shipped tasks. No network: the tokenizer is made here."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from task_fixture import RESOURCES, file_task, raw, texts

from entmtp.config import CONF, TargetConfig, TaskConfig, from_plain
from entmtp.errors import EntmtpError
from entmtp.io import write_jsonl
from entmtp.target.fetch import fetch_target
from entmtp.tasks import build_prompts, encode, prompts_hash, read_prompts, split_prompts


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("target") / "tiny"
    return AutoTokenizer.from_pretrained(fetch_target(TargetConfig(name="tiny", source="random"), folder))


# --- splits ---------------------------------------------------------------------------------------------------------


@given(
    count=st.integers(4, 40), calib=st.integers(1, 20), test=st.integers(1, 20), seed=st.integers(0, 5),
    repeats=st.lists(st.integers(0, 39), max_size=8),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_split_is_disjoint_and_exact(count, calib, test, seed, repeats):
    config = TaskConfig(name="t", calib=calib, test=test, seed=seed)
    words = [f"prompt {n}" for n in range(count)]
    rows = raw(*words, *(f"  PROMPT\n{n} " for n in repeats if n < count))
    if count < calib + test:
        with pytest.raises(EntmtpError, match=f"task t: {count} different prompts, .* need {calib + test}"):
            split_prompts(config, rows)
        return
    drawn = split_prompts(config, rows)
    assert [row["split"] for row in drawn] == ["calib"] * calib + ["test"] * test
    assert len({" ".join(text.split()).casefold() for text in texts(drawn)}) == calib + test
    assert drawn == split_prompts(config, rows)
    assert {row["task"] for row in drawn} == {"t"}


def test_split_depends_on_the_seed_and_one_split_not_on_the_size_of_the_other():
    rows = raw(*(f"prompt {n}" for n in range(50)))

    def draw(calib, test, seed, split):
        config = TaskConfig(calib=calib, test=test, seed=seed)
        return [row["id"] for row in split_prompts(config, rows) if row["split"] == split]

    assert draw(10, 10, 1, "test") != draw(10, 10, 2, "test")
    assert draw(10, 10, 1, "test") == draw(30, 10, 1, "test")
    assert draw(10, 10, 1, "calib") == draw(10, 30, 1, "calib")
    assert draw(10, 10, 1, "calib") == draw(12, 10, 1, "calib")[:10]


def test_duplicates_keep_the_first_row_and_differ_by_role():
    chat = {"id": "c", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}]}
    drawn = split_prompts(TaskConfig(calib=1, test=1), [*raw("a", "A ", "\ta"), chat])
    assert {row["id"] for row in drawn} == {"r/0", "c"}


def test_prompts_that_do_not_fit_are_replaced_and_counted():
    config = TaskConfig(name="t", calib=2, test=2, max_prompt_tokens=7)
    rows = raw(*(f"{'long ' * (n % 2)}{n}" for n in range(10)))
    drawn = split_prompts(config, rows, fits=lambda row: "long" not in row["messages"][0]["content"])
    assert len(drawn) == 4 and not any("long" in text for text in texts(drawn))
    config.test = 4
    with pytest.raises(EntmtpError, match=r"5 different prompts \(5 more .*max_prompt_tokens=7\).*need 6"):
        split_prompts(config, rows, fits=lambda row: "long" not in row["messages"][0]["content"])


# --- encoding and prompts.jsonl -------------------------------------------------------------------------------------


def test_encode_is_the_chat_template(tokenizer):
    ids = encode(tokenizer, [{"role": "user", "content": "Hi {x} ö"}])
    assert type(ids) is list and all(type(token) is int for token in ids)
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi {x} ö<|im_end|>\n<|im_start|>assistant\n"


def test_encode_without_a_template_joins_the_contents(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}]
    assert tokenizer.decode(encode(tokenizer, messages)) == "one\n\ntwo"


def test_encode_names_the_roles_that_a_template_refuses(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system turn here') }}")
    with pytest.raises(EntmtpError, match="roles system, user: no system turn here"):
        encode(tokenizer, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])


def test_build_write_read(tmp_path, tokenizer, capsys):
    lines = [{"prompt": f"question {n} " + "x" * (300 if n < 20 else 0), "answer": n} for n in range(30)]
    config = file_task(tmp_path / "p.jsonl", *lines, calib=4, test=5, max_prompt_tokens=120)
    rows = build_prompts(config, tokenizer, tmp_path)
    assert "longer than task.max_prompt_tokens=120" in capsys.readouterr().err
    assert all(len(row["token_ids"]) <= 120 for row in rows)
    assert all(row["token_ids"] == encode(tokenizer, row["messages"]) for row in rows)
    assert len({row["id"] for row in rows}) == 9
    assert set(rows[0]) == {"id", "task", "split", "messages", "token_ids", "sha256", "answer"}
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, rows)
    assert read_prompts(path) == rows == build_prompts(config, tokenizer, tmp_path)
    assert [len(read_prompts(path, split)) for split in ("calib", "test")] == [4, 5]
    assert prompts_hash(rows, "calib") == prompts_hash(read_prompts(path, "calib"))
    assert len({prompts_hash(rows, split) for split in ("calib", "test", None)}) == 3


def test_prompts_that_are_asked_elsewhere_are_left_out(tmp_path, tokenizer):
    config = file_task(tmp_path / "p.jsonl", *({"prompt": f"Question {n}"} for n in range(12)), calib=4, test=3)
    asked = build_prompts(config, tokenizer, tmp_path)
    other = replace(config, calib=5, test=0, seed=config.seed + 1)
    rows = build_prompts(other, tokenizer, tmp_path, without=asked)
    assert len(rows) == 5 and not {row["id"] for row in rows} & {row["id"] for row in asked}
    again = [{"messages": [{"role": "user", "content": f"question  {n}"}]} for n in range(12)]  # case and spaces apart
    with pytest.raises(EntmtpError, match=r"0 different prompts \(12 more left out: asked elsewhere"):
        build_prompts(other, tokenizer, tmp_path, without=again)


def test_read_prompts_refuses_what_it_did_not_write(tmp_path, tokenizer):
    config = file_task(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}, calib=1, test=1)
    rows = build_prompts(config, tokenizer, tmp_path)
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, [rows[0], {**rows[1], "token_ids": [1, 2]}])
    with pytest.raises(EntmtpError, match=r"prompts.jsonl, row 2 \(id mine/\d\): changed"):
        read_prompts(path)
    write_jsonl(path, [{"prompt": "a"}])
    with pytest.raises(EntmtpError, match="row 1: no key id, task, split"):
        read_prompts(path)
    write_jsonl(path, rows[:1])
    with pytest.raises(EntmtpError, match="no prompts of split test"):
        read_prompts(path, "test")
    with pytest.raises(EntmtpError, match="split 'train' does not exist"):
        read_prompts(path, "train")


# --- conf/task ------------------------------------------------------------------------------------------------------

SHIPPED = {"humaneval", "gsm8k", "sharegpt", "litbench", "file"}
SHIPPED |= {"humaneval_hub", "gsm8k_hub", "sharegpt_hub", "litbench_hub"}


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_conf_task(name):
    config = from_plain(TaskConfig, OmegaConf.to_container(OmegaConf.load(CONF / "task" / f"{name}.yaml")))
    assert config.name == name
    assert "{prompt}" in config.template
    assert config.source != "hub" or (config.repo and config.revision and config.column)


@pytest.mark.parametrize("name", ["gsm8k", "sharegpt", "litbench"])
def test_offline_tasks_build(name, tokenizer):
    config = from_plain(TaskConfig, OmegaConf.to_container(OmegaConf.load(CONF / "task" / f"{name}.yaml")))
    rows = build_prompts(config, tokenizer, RESOURCES)
    assert len(rows) == config.calib + config.test
    assert len({row["id"] for row in rows}) == len(rows)
