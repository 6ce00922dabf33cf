"""The three steps of docs/own-model.md by its own commands, on a model that only the generic forward carries."""

import json
import subprocess
import sys

import pytest
from neox import make_neox

from .conftest import ROOT, snakemake


def prompts_file(path, numbers) -> str:
    path.write_text("".join(json.dumps({"prompt": f"Say {n} and {n + 1}."}) + "\n" for n in numbers))
    return str(path)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Folder and overrides of a finished run: what the page's two files say, smaller."""
    folder = tmp_path_factory.mktemp("mine")
    model = make_neox(folder / "model", ROOT / "resources/targets/tiny")
    said = [
        "target.name=mymodel", "target.source=folder", f"target.path={model}", "tasks=[file]", "heads_tasks=[file]",
        f"++task_overrides.file.file={prompts_file(folder / 'prompts.jsonl', range(100, 112))}",
        "heads.source=train", "heads_trained=[hydra]", "policies=[ar,entmtp_star,entmtp_tau]",
        f"corpus.prompts=[{{file:{prompts_file(folder / 'training.jsonl', range(105, 125))},column:prompt,samples:2}}]",
        "corpus.exclude=[]", "corpus.shards=1", "corpus.self_prompts=4", "corpus.self_prompt_tokens=30",
        "corpus.batch=4", "corpus.max_new_tokens=16", "corpus.held_out=0.3",
        "heads.train.draft_vocab=200", "heads.train.epochs=1", "heads.train.batch_positions=32",
    ]  # fmt: skip
    overrides = " ".join(said)
    for step in ("heads", "all"):
        done = snakemake(folder, step, overrides=overrides)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder, [f"resources={ROOT / 'resources'}", *said]


def test_heads_are_trained_on_other_prompts_than_those_that_measure(mine):
    folder, _ = mine
    card = json.loads((folder / "results/smoke/heads/hydra/card.json").read_text())
    used = {json.loads(line)["id"] for line in (folder / "results/smoke/prompts/file.jsonl").read_text().splitlines()}
    assert len(used) == 7  # smoke's 4 and 3
    assert card["text"]["prompts"]["excluded_exact"] + card["text"]["prompts"]["excluded_near"] > 0
    assert card["heads"]["target"].startswith("gpt_neox-")
    rows = json.loads((folder / "results/smoke/heads.json").read_text())["rows"]
    assert rows and all(row["live"] is None or row["live"]["prompts_that_differ"] == 0 for row in rows)


def test_trees_are_searched_and_every_policy_is_lossless(mine):
    summary = json.loads((mine[0] / "results/smoke/summary.json").read_text())
    rows = summary["rows"]
    assert [(row["task"], row["policy"]) for row in rows] == [
        ("file", name) for name in ("ar", "entmtp_star", "entmtp_tau")
    ]
    assert [row["lossless"] for row in rows] == ["n/a", "exact", "exact"]
    replayed = {policy: row["verdict"] for policy, row in summary["checks"]["replay"]["file"].items()}
    assert replayed == {"ar": "n/a", "entmtp_star": "equal", "entmtp_tau": "equal"}


def test_text_of_the_fitted_policy_is_plain_decodings(mine):
    folder, said = mine

    def text(policy: str) -> str:
        command = [sys.executable, "-m", "entmtp.generate", "Say 7 and 8.", "experiment=smoke", *said, "task=file",
                   f"policy={policy}"]  # fmt: skip
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert text("entmtp_tau") == text("ar") != ""
