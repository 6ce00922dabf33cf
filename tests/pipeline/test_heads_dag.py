"""Training and judging draft heads through the DAG on the two-layer random model."""

import json

import pytest
from safetensors import safe_open

from entmtp.evaluation.schema import check_schema

from .conftest import snakemake

KINDS = ["hydra_plus", "medusa"]


def overrides(prompts) -> str:
    chosen = [
        "heads.source=train", f"heads_trained=[{','.join(KINDS)}]", "tasks=[sharegpt]", "heads_tasks=[sharegpt]",
        f"corpus.prompts=[{{file:{prompts},column:prompt,samples:2}}]", "corpus.exclude=[]", "corpus.shards=2",
        "corpus.self_prompts=12", "corpus.self_prompt_tokens=40",
        "corpus.batch=4", "corpus.max_new_tokens=12", "corpus.held_out=0.3", "corpus.dtype=float32",
        "heads.train.draft_vocab=64", "heads.train.epochs=2", "heads.train.batch_positions=32",
    ]  # fmt: skip
    return " ".join(chosen)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {word} {n} times"}) + "\n"
                               for n, word in enumerate(["yes", "no", "perhaps", "never", "always"] * 3)))  # fmt: skip
    done = snakemake(folder, "heads", overrides=overrides(prompts))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_heads_json_holds_a_row_per_heads_task_and_size(trained):
    report = json.loads((trained / "results/smoke/heads.json").read_text())
    check_schema(report, "heads")
    assert {(row["heads"], row["task"]) for row in report["rows"]} == {(kind, "sharegpt") for kind in KINDS}
    assert all(row["live"] is None or row["live"]["prompts_that_differ"] == 0 for row in report["rows"])
    assert list(report["geometric_mean_num_accepted"]) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_cards_say_what_the_heads_learned_from(trained, kind):
    folder = trained / "results/smoke/heads" / kind
    card = json.loads((folder / "card.json").read_text())
    assert card["text"]["texts"] == 30
    assert card["text"]["prompts"] == {"prompts": 15, "excluded_exact": 0, "excluded_near": 0, "duplicates": 0}
    assert card["text"]["tokens_by_task"] == {"prompts": card["text"]["tokens"]}
    assert card["text"]["sampled_texts"] >= 15
    assert len(card["training"]["curve"]) <= 2
    assert card["command"].startswith("snakemake heads --cores all --config experiment=smoke overrides=")
    assert (card["heads"]["prefix"] is not None) == (kind == "hydra_plus")
    assert "num_accepted" in (folder / "README.md").read_text()
    assert not (folder / "checkpoint.pt").exists()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert any(key.startswith("prefix.") for key in file.keys()) == (kind == "hydra_plus")  # noqa: SIM118


def test_shards_are_kept_and_their_journals_are_not(trained):
    folder = trained / "results/smoke/heads"
    assert sorted(path.name for path in (folder / "text").iterdir()) == ["000.jsonl", "001.jsonl"]
    assert sorted(path.name for path in (folder / "features").iterdir()) == ["000.safetensors", "001.safetensors"]
    keys = [json.loads(line)["key"] for path in (folder / "text").iterdir() for line in path.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 30


def test_another_learning_rate_makes_no_text_again(trained):
    prompts = trained / "prompts.jsonl"
    dry = snakemake(trained, "heads", "--dry-run", overrides=overrides(prompts) + " heads.train.learning_rate=0.01")
    text = dry.stdout + dry.stderr
    assert "rule train_heads:" in text
    assert "rule heads_text:" not in text
    assert "rule heads_features:" not in text


def test_the_vocabulary_curve(trained):
    done = snakemake(trained, "results/smoke/heads/vocabulary.png", overrides=overrides(trained / "prompts.jsonl"))
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads((trained / "results/smoke/heads/vocabulary.json").read_text())
    assert made["knee"] in [row["size"] for row in made["rows"]]
    assert (trained / "results/smoke/heads/vocabulary.png").stat().st_size > 0
