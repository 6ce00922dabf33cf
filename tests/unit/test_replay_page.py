"""The page that replays a generation, read without a browser: its texts, its numbers, and no way to break out."""

import json
import shlex

import pytest
from html_page import Page, addresses

from entmtp.errors import EntmtpError
from entmtp.evaluation.make import make_replay_page
from entmtp.evaluation.page import json_block, read_captions
from entmtp.evaluation.replay_page import PARTS, page_steps, verdict, visible, write_replay_page
from entmtp.io import write_json
from entmtp.layout import split_overrides

HOSTILE = "</script><script>alert(1)</script><!--"


def step(position: int, parents: list[int], labels: list[str], accepted: list[int], committed: int, **more) -> dict:
    seen = {"signal": 0.5, "entropy": 0.25, "path_values": [0.9, 0.5, 0.125], "ms": 30.5}
    return {"position": position, "tree": 0, "parents": parents, "tokens": list(range(len(labels))), "labels": labels,
            "accepted": accepted, "committed": committed, **seen, **more}  # fmt: skip


def record(**changes) -> dict:
    """Six tokens in three steps and a last root: a tree, plain decoding, and a draft that the budget cuts."""
    steps = [
        step(0, [-1, 0, 0, 1], ["def", " f", HOSTILE, "\n"], [0, 1], 2),
        step(2, [-1], ["<b>"], [0], 1, path_values=None, entropy=None, signal=None, ms=None),
        step(3, [-1, 0, 1, 2], [" x", "&", "=", "1"], [0, 1, 2], 2),
    ]
    return {
        "experiment": "unit",
        "task": "humaneval",
        "policy": "entmtp_tau",
        "kind": "tau",
        "mode": "greedy",
        "dtype": "float32",
        "prompt_id": "HumanEval/1",
        "heads": "hydra",
        "depth": 1,
        "thresholds": {"τ_on": 0.6, "τ_off": 0.3},
        "prompt": "Write <code> & more",
        "pieces": ["def", " f", "<b>", " x", "&", ""],
        "stop": "<|im_end|>",
        "equal": True,
        "equal_steps": 3,
        "tokens_per_s": 41.25,
        "steps": steps,
        **changes,
    }


@pytest.fixture
def page(tmp_path) -> Page:
    write_json(tmp_path / "generation.json", record())
    said = {"experiment": "main", "overrides": ["dtype=bfloat16", "task.template='{prompt} please'"]}
    write_json(tmp_path / "config.yaml", said)  # JSON is YAML
    make_replay_page(tmp_path, tmp_path)
    return Page((tmp_path / "replay_generation.html").read_text(encoding="utf-8"))


def test_the_command_shows_this_very_generation(page, tmp_path):
    (command,) = (one.text for one in page.root.all("pre") if one.text.startswith("snakemake"))
    words = shlex.split(command)
    assert words[:5] == ["snakemake", "--cores", "all", f"{tmp_path.as_posix()}/replay_generation.html", "--config"]
    assert words[5] == "experiment=main" and words[6].startswith("overrides=")
    overrides = split_overrides(words[6].removeprefix("overrides="))
    assert overrides == ["dtype=bfloat16", "task.template='{prompt} please'", "replayed.task='humaneval'",
                         "replayed.policy='entmtp_tau'", "replayed.prompt_id='HumanEval/1'"]  # fmt: skip


def test_it_is_well_formed_and_loads_nothing(page):
    assert addresses(page.root) == ["data:,", "report.html", "#steps", "#step-1", "#step-2", "#step-3"]
    assert page.root.id("steps")
    scripts = page.root.all("script")
    assert len(scripts) == 3 and all("src" not in script.attributes for script in scripts)
    policy = next(one for one in page.root.all("meta") if one.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"].startswith("default-src 'none'; img-src data:")


def test_the_text_is_the_pieces_and_knows_its_steps(page):
    text = page.root.id("text")
    spans = text.all("span", "step")
    assert [span.text for span in spans] == ["def f", "<b>", " x&"]
    assert [span.attributes.get("data-step") for span in spans] == ["1", "2", "3"]
    assert [[name for name in span.classes if name[0] == "a"] for span in spans] == [["a1"], ["a0"], ["a1"]]
    assert [[root.text for root in span.all("span", "root")] for span in spans] == [["def"], ["<b>"], [" x"]]
    assert text.text == "def f<b> x&<|im_end|>" and text.all("span", "stop")[0].text == "<|im_end|>"
    assert page.root.all("pre", "prompt")[0].text == "Write <code> & more"


def test_a_last_root_without_a_step_stands_behind_the_steps(tmp_path):
    write_replay_page(tmp_path / "p.html", record(pieces=["def", " f", "<b>", " x", "&", " end"], stop=None),
                      read_captions(list(PARTS)))  # fmt: skip
    text = Page((tmp_path / "p.html").read_text(encoding="utf-8")).root.id("text")
    assert [span.text for span in text.all("span", "tail")] == [" end"] and not text.all("span", "stop")
    assert text.text == "def f<b> x& end"


def test_the_table_holds_every_step(page):
    rows = page.root.id("steps").all("tr")
    assert [cell.text for cell in rows[0].all("th")] == [
        "step", "tree nodes", "num_accepted", "committed", "path value, depth 1", "entropy (nats)", "ms"
    ]  # fmt: skip
    assert [[cell.text for cell in row.all("td")] for row in rows[1:]] == [
        ["1", "3", "1", "def␣f", "0.500", "0.250", "30.5"],
        ["2", "0", "0", "<b>", "–", "–", "–"],
        ["3", "3", "1", "␣x&", "0.500", "0.250", "30.5"],
    ]
    assert [cell.attributes.get("data-value") for cell in rows[1].all("td")] == [
        "1", "3", "1", None, "0.5", "0.25", "30.5"
    ]  # fmt: skip
    assert [cell.attributes.get("data-value") for cell in rows[2].all("td")][4:] == [None] * 3


def test_the_data_is_what_the_script_needs_and_text_cannot_end_it(page):
    block = page.root.id("data")
    assert not any(character in block.text for character in "<>&")
    data = json.loads(block.text)
    assert [one["sentence"] for one in data["steps"]] == [
        "Step 1 of 3, root “def”. 3 drafted tokens: 1 accepted, 2 rejected. Next root: “<b>”.",
        "Step 2 of 3, root “<b>”. Nothing is drafted: plain decoding. Next root: “␣x”.",
        "Step 3 of 3, root “␣x”. 3 drafted tokens: 1 accepted, 1 rejected, 1 accepted past the text's end. "
        "Next root: “<|im_end|>”.",
    ]
    assert data["steps"][0]["labels"] == ["def", "␣f", HOSTILE, "⏎"]
    assert [(one["kept"], one["cut"]) for one in data["steps"]] == [([0, 1], []), ([0], []), ([0, 1], [2])]
    assert data["steps"][0]["facts"] == [
        ["tree nodes", "3"], ["num_accepted", "1"], ["path value, depth 1", "0.500 (τ_on = 0.600, τ_off = 0.300)"],
        ["entropy (nats)", "0.250"], ["ms, timed", "30.5"],
    ]  # fmt: skip
    assert data["thresholds"] == {"τ_on": 0.6, "τ_off": 0.3}


def test_every_part_has_its_caption(page):
    captions = [figure.text for figure in page.root.all("figcaption")]
    assert sorted(captions) == sorted(read_captions(list(PARTS)).values())
    assert all(len(caption) > 80 for caption in captions)


def test_it_says_how_the_record_stands_to_the_timed_run(page):
    assert page.root.id("verdict").text == "Text and all 3 steps equal those of the timed run (41.2 tokens/s)."
    parted = verdict(record(equal=False, equal_steps=2))
    assert "the first 2 of 3 steps are equal" in parted


def test_without_a_policys_own_depth_the_deepest_path_value_is_shown():
    steps = page_steps(record(depth=None))
    assert [one["path_value"] for one in steps] == [0.125, None, 0.125]
    assert steps[0]["facts"][2][0] == "path value, depth 2"
    assert page_steps(record())[0]["path_value"] == 0.5


def test_a_text_that_needed_no_step_makes_a_page_too(tmp_path):
    write_replay_page(tmp_path / "p.html", record(steps=[], pieces=[""], equal_steps=0), read_captions(list(PARTS)))
    page = Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert page.root.id("text").text == "<|im_end|>" and json.loads(page.root.id("data").text)["steps"] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a\n", "␣a⏎"), ("\t\r", "⇥␍"), ("", "∅"), ("\x00\x1b", "\\x00\\x1b"), ("é🦊", "é🦊"), ("\u200b", "\\x200b")],
)
def test_white_space_and_control_characters_are_seen(text, shown):
    assert visible(text) == shown


def test_json_in_a_page_reads_back():
    value = {"a": [HOSTILE, "é & ü", 1.5, None]}
    assert json.loads(json_block(value)) == value
    with pytest.raises(ValueError, match="Out of range"):
        json_block(float("nan"))


def test_a_record_of_another_form_is_named(tmp_path):
    write_json(tmp_path / "generation.json", record(mode="magic"))
    with pytest.raises(EntmtpError, match=r"generation\.json, \$\.mode"):
        make_replay_page(tmp_path, tmp_path)
    with pytest.raises(EntmtpError, match=r"nothing\.rst: no such file; every figure and table has a caption"):
        read_captions(["nothing"])
    assert not (tmp_path / "replay_generation.html").exists()
