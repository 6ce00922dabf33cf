"""Overrides of one argument, values in Hydra's grammar, and files that rules follow from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.config import TaskConfig, compose
from entmtp.layout import compose_task, existing, literal, prompt_file, split_overrides


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", []),
        ("plot.dpi=300  bank.shortlist=8", ["plot.dpi=300", "bank.shortlist=8"]),
        ("tasks=[file] ++task_overrides.file.template='Say: {prompt}' seed=1",
         ["tasks=[file]", "++task_overrides.file.template='Say: {prompt}'", "seed=1"]),
        ('a="x \'y\'" b=2', ['a="x \'y\'"', "b=2"]),
        ("a='it\\'s one' b=2", ["a='it\\'s one'", "b=2"]),
        ("a='never closed b=2", ["a='never", "closed", "b=2"]),
    ],
)  # fmt: skip
def test_overrides_are_divided_at_spaces_outside_quotes(text, parts):
    assert split_overrides(text) == parts


def test_snakemakes_yaml_is_undone():
    text = "tasks=[file] ++task_overrides.file.template='Say it: now, {prompt}' seed=1"
    import yaml

    read = yaml.load(text, Loader=yaml.loader.BaseLoader)
    assert isinstance(read, dict)
    assert split_overrides(read) == split_overrides(text) and len(split_overrides(text)) == 3


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12))
def test_any_text_survives_hydras_grammar(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(f"task.template={literal(value)}").value()
    assert str(getattr(parsed, "text", parsed)) == value


def test_values_that_are_no_texts():
    assert literal({"a": [1, None, True], "b": "x y"}) == "{a:[1,null,true],b:'x y'}"


def test_what_an_experiment_changes_in_a_task_may_hold_anything():
    overrides = ["tasks=[file]", "++task_overrides.file={file:'my (own) prompts, é.jsonl',template:'Say: {prompt}',"
                 "where:{category:'a b'},scoring:null,calib:3}"]  # fmt: skip
    task = compose_task(compose(overrides), overrides, "file").task
    assert (task.file, task.template) == ("my (own) prompts, é.jsonl", "Say: {prompt}")
    assert (task.where, task.scoring, task.calib) == ({"category": "a b"}, None, 3)


def test_rules_follow_from_files_that_are_there(tmp_path):
    own = TaskConfig(name="file", source="file", file=str(tmp_path / "mine.jsonl"))
    assert existing(prompt_file(own, "resources"), None) == []
    (tmp_path / "mine.jsonl").write_text("{}")
    assert existing(prompt_file(own, "resources"), None) == [str(tmp_path / "mine.jsonl")]
    assert prompt_file(TaskConfig(source="shipped", file="a.jsonl"), "res").as_posix() == "res/prompts/a.jsonl"
    assert prompt_file(TaskConfig(source="humaneval"), "res") is None
