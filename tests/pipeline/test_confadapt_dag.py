"""The second method through the DAG: distil, decode, verify, judge, beside lossless policies; and a published model."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from entmtp.config import TargetConfig
from entmtp.evaluation.schema import check_schema
from entmtp.target.fetch import fetch_target

from .conftest import snakemake
from .test_from_logs_dag import regenerate

OVERRIDES = (
    "confadapt.enabled=true tasks=[arithmetic,counting] policies=[ar,entmtp_star,entmtp_tau] distill.steps=4 "
    "+distill.prompts={arithmetic:6,counting:8,copying:3} distill.text_batch=5 distill.text_steps=2 distill.cooldown=1 "
    "distill.report_every=2 distill.checkpoint_every=2 distill.spacing=4 distill.batch=2 distill.k_max=3 "
    "distill.lora_rank=2 confadapt.thresholds=[0.05,1.0] confadapt.mask_thresholds=[0.05] confadapt.static=[2] "
    "confadapt.k_max=3"
)
METHODS = ["k=1", "static k=2", "confadapt 0.05", "confadapt 1", "masks 0.05", "lossless_self", "ar", "entmtp_star",
           "entmtp_tau"]  # fmt: skip
MERGED = ["k=1", "static k=2", "confadapt 0.05", "masks 0.05", "lossless_self", "original k=1", "lossless_draft", "ar"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("confadapt")
    done = snakemake(folder, overrides=OVERRIDES)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "results/smoke"


def test_confadapt_json_holds_a_row_per_task_and_method(run):
    record = json.loads((run / "confadapt.json").read_text())
    check_schema(record, "confadapt")
    assert [(row["task"], row["method"]) for row in record["rows"]] == [
        (task, method) for task in ("arithmetic", "counting") for method in METHODS
    ]
    by_method = {row["method"]: row for row in record["rows"] if row["task"] == "counting"}
    assert by_method["k=1"]["tokens_per_forward"] == by_method["confadapt 1"]["tokens_per_forward"] == 1.0
    assert by_method["confadapt 1"]["same_text"] == 1.0
    assert 1.5 < by_method["static k=2"]["tokens_per_forward"] <= 2.0
    free, strict = (by_method[f"{rule} 0.05"]["tokens_per_forward"] for rule in ("masks", "confadapt"))
    assert free >= strict
    check_verified(by_method["lossless_self"], by_method["k=1"])
    # adapters that act on masks only leave the text, verified blocks too, the original model's
    assert by_method["k=1"]["original_text"] == by_method["ar"]["original_text"] == 1.0
    assert by_method["lossless_self"]["original_text"] == by_method["lossless_self"]["same_text"]
    assert by_method["confadapt 1"]["lossless"] == by_method["static k=2"]["lossless"] == "lossy"
    assert record["model"]["source"] == "distilled"
    assert record["training"]["curve"][-1]["step"] == 4


def test_table_and_frontier_are_drawn(run):
    assert "paper: GSM8K" in (run / "confadapt/confadapt.md").read_text()
    assert (run / "confadapt/frontier.svg").stat().st_size > 0
    assert (run / "confadapt/training.svg").stat().st_size > 0


def test_the_report_and_the_logs_have_them_too(run, tmp_path):
    page = (run / "report.html").read_text()
    assert 'id="table-confadapt"' in page and 'id="figure-frontier"' in page and 'id="figure-training"' in page
    done = regenerate(run.parents[1], f"--out={tmp_path / 'out'}", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal, byte for byte" in done.stdout
    for name in ("confadapt.md", "frontier.png", "training.svg"):
        assert (tmp_path / "out/confadapt" / name).read_bytes() == (run / "confadapt" / name).read_bytes(), name


def check_verified(verified: dict, alone: dict) -> None:
    assert verified["lossless"] in ("exact", "tie") and alone["lossless"] == "n/a"
    assert verified["tokens_per_forward"] >= alone["tokens_per_forward"] == 1.0
    if verified["lossless"] == "exact":
        assert verified["same_text"] == 1.0 and verified["ppl"] == pytest.approx(alone["ppl"])


def test_the_model_is_an_adapter_that_other_runs_take(run, tmp_path):
    made = run / "distill/short"
    config = json.loads((made / "config.json").read_text())
    assert config["k_max"] == 3 and config["masks_only"] and (made / "adapter.safetensors").is_file()
    assert not list((run / "distill").glob("*.checkpoint.pt"))
    overrides = f"confadapt.enabled=true tasks=[counting] policies=[ar] mtp=adapter mtp.name=made mtp.path={made} "
    overrides += "confadapt.thresholds=[0.05] confadapt.mask_thresholds=[] confadapt.static=[] confadapt.k_max=3"
    done = snakemake(tmp_path, overrides=overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    used = tmp_path / "results/smoke/mtp/made"
    assert (used / "adapter.safetensors").read_bytes() == (made / "adapter.safetensors").read_bytes()
    record, trained = (json.loads((path / "confadapt.json").read_text()) for path in (tmp_path / "results/smoke", run))
    assert record["training"] is None and record["model"]["source"] == "adapter"
    wanted = "counting", "confadapt 0.05"
    ours, theirs = (
        [row["tokens_per_forward"] for row in one["rows"] if (row["task"], row["method"]) == wanted]
        for one in (record, trained)
    )
    assert ours == theirs and len(ours) == 1


def test_a_published_model_is_judged_without_training_or_draft_heads(tmp_path):
    """The way of experiment=paper_mtp: a multi-token model from elsewhere, plain decoding as the only policy."""
    config = TargetConfig(name="tiny", source="random")
    published = tmp_path / "published"
    shutil.copytree(fetch_target(config, tmp_path / "tiny"), published)
    tokenizer = AutoTokenizer.from_pretrained(published)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|mtp_special_token_{n}|>" for n in range(32)]})
    model = AutoModelForCausalLM.from_pretrained(published)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(published)
    tokenizer.save_pretrained(published)
    overrides = f"confadapt.enabled=true tasks=[counting] policies=[ar] mtp=folder mtp.path={published} "
    overrides += "confadapt.thresholds=[0.5] confadapt.mask_thresholds=[] confadapt.static=[] confadapt.k_max=3"
    done = snakemake(tmp_path, overrides=overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "results/smoke"
    record = json.loads((run / "confadapt.json").read_text())
    check_schema(record, "confadapt")
    methods = ["k=1", "confadapt 0.5", "lossless_self", "original k=1", "lossless_draft", "ar"]
    assert [row["method"] for row in record["rows"]] == methods
    assert record["training"] is None and record["model"]["name"] == "folder"
    assert not (run / "distill").exists() and (run / "tables/speed.md").exists()
    assert "Nothing to be done" in snakemake(tmp_path, overrides=overrides).stderr


def test_a_merged_adapter_is_the_model_that_it_was_trained_as(tmp_path):
    overrides = OVERRIDES.replace("[arithmetic,counting]", "[counting]").replace("[ar,entmtp_star,entmtp_tau]", "[ar]")
    overrides = f"{overrides} distill=merged".replace("[0.05,1.0]", "[0.05]")
    done = snakemake(tmp_path, overrides=overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "results/smoke"
    config = json.loads((run / "distill/merged/config.json").read_text())
    assert config["mtp_k_max"] == 3 and config["mtp_mask_id"] == config["vocab_size"] - 1
    by_method = {row["method"]: row for row in json.loads((run / "confadapt.json").read_text())["rows"]}
    assert list(by_method) == MERGED
    for method, plain in (("lossless_self", "k=1"), ("lossless_draft", "original k=1")):
        check_verified(by_method[method], by_method[plain])
    assert by_method["original k=1"]["ppl"] == pytest.approx(by_method["ar"]["ppl"])
    overrides += f" mtp=adapter mtp.name=made mtp.path={run}/distill/merged.adapter"
    done = snakemake(tmp_path, "adapted_model", overrides=overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    trained, shipped = (AutoModelForCausalLM.from_pretrained(run / path) for path in ("distill/merged", "mtp/made"))
    for (name, one), other in zip(trained.named_parameters(), shipped.named_parameters(), strict=True):
        assert torch.equal(one, other[1]), name


def test_what_is_learned_from_is_none_of_what_the_run_measures(run):
    measured = [json.loads(line) for path in (run / "prompts").glob("*.jsonl") for line in path.open()]
    learned = [json.loads(line) for path in (run / "distill/prompts").glob("*.jsonl") for line in path.open()]
    assert len(learned) == 6 + 8 + 3
    said = {json.dumps(row["messages"]).casefold() for row in measured}
    assert not said & {json.dumps(row["messages"]).casefold() for row in learned}
    record = json.loads((run / "distill/short.json").read_text())
    texts = [json.loads(line) for path in (run / "distill/texts").glob("*.jsonl") for line in path.open()]
    assert record["texts"] == len(texts) == len(learned)
    assert record["tokens"] == sum(len(row["tokens"]) for row in texts)
