"""Values in the cache folder: made once for the same inputs, and never in the way."""

import shutil

import pytest

from entmtp import config
from entmtp import kept as module
from entmtp.config import CONF, choices, compose
from entmtp.kept import kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ENTMTP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counted(value):
    calls = []
    return calls, lambda: calls.append(1) or value


def test_a_value_is_made_once_for_the_same_inputs(folder):
    calls, make = counted({"a": [1, 2.5, None, "ä"]})
    assert [kept("k", [1, "x"], make) for _ in range(3)] == [{"a": [1, 2.5, None, "ä"]}] * 3
    assert len(calls) == 1
    kept("k", [2, "x"], make)
    assert len(calls) == 2
    assert len(list((folder / "k").iterdir())) == 2


@pytest.mark.parametrize("value", [{1: "a"}, (1, 2), float("nan"), object()])
def test_what_json_would_change_is_not_kept(folder, value):
    calls, make = counted(value)
    assert all(kept("k", [], make) is value for _ in range(2))
    assert len(calls) == 2


def test_damage_and_folders_that_cannot_be_written_cost_time_only(folder, monkeypatch):
    calls, make = counted([1])
    kept("k", [], make)
    (path,) = (folder / "k").iterdir()
    path.write_text("[1")
    assert kept("k", [], make) == [1]
    assert path.read_text().split() == ["[", "1", "]"]
    monkeypatch.setenv("ENTMTP_CACHE", "/proc/nowhere")
    assert kept("k", [], make) == [1]
    assert len(calls) == 3


def test_the_oldest_are_dropped(folder, monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    for number in range(6):
        kept("k", number, lambda number=number: number)
    assert sorted(int(path.read_text()) for path in (folder / "k").iterdir()) == [3, 4, 5]


def test_a_second_composition_asks_nobody(folder, monkeypatch):
    first = compose(["policy=ar"])
    monkeypatch.setattr(config, "_composed", None)
    assert compose(["policy=ar"]) == first


def test_what_asks_the_environment_is_asked_every_time(folder, monkeypatch):
    for place in ("/scratch/first", "/scratch/second"):
        monkeypatch.setenv("MY_SCRATCH", place)
        assert compose(["results=${oc.env:MY_SCRATCH}/r"]).results == f"{place}/r"


def test_a_configuration_is_composed_again_when_a_file_or_an_override_changes(folder, tmp_path, monkeypatch):
    copy = tmp_path / "conf"
    shutil.copytree(CONF, copy)
    monkeypatch.setattr(config, "CONF", copy)
    assert [compose(["plot.dpi=77"]).plot.dpi for _ in range(2)] == [77, 77]
    before = compose([])
    assert compose([]) == before != compose(["plot.dpi=77"])
    path = copy / "plot" / "default.yaml"
    path.write_text(path.read_text().replace("dpi: 150", "dpi: 99"))
    assert compose([]).plot.dpi == 99


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_a_kept_configuration_is_the_composed_one(folder, experiment):
    overrides = [f"experiment={experiment}", "corpus.prompts=[{file:a.jsonl,column:q}]", "policy.tau_on=0.5",
                 "+task_overrides.x={where:{a:[1,2]}}"]  # fmt: skip
    composed = config.validate(config.OmegaConf.create(config._composed(overrides)))
    assert [compose(overrides) for _ in range(2)] == [composed] * 2
    assert repr(compose(overrides)) == repr(composed)  # 1 and 1.0 are equal
