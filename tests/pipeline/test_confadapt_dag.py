"""The second method through the DAG: distil, decode, judge, beside lossless policies."""

import json

import pytest

from entmtp.evaluation.schema import check_schema

from .conftest import snakemake

OVERRIDES = (
    "confadapt.enabled=true tasks=[arithmetic,counting] policies=[ar,entmtp_star,entmtp_tau] distill.steps=4 "
    "distill.report_every=2 distill.checkpoint_every=2 distill.spacing=4 distill.batch=2 distill.k_max=3 "
    "distill.lora_rank=2 confadapt.thresholds=[0.05,1.0] confadapt.static=[2] confadapt.k_max=3"
)
METHODS = ["k=1", "static k=2", "confadapt 0.05", "confadapt 1", "ar", "entmtp_star", "entmtp_tau"]


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
    assert record["training"]["curve"][-1]["step"] == 4


def test_table_and_frontier_are_drawn(run):
    assert "paper: GSM8K" in (run / "confadapt/confadapt.md").read_text()
    assert (run / "confadapt/frontier.svg").stat().st_size > 0


def test_the_model_is_an_ordinary_folder(run):
    config = json.loads((run / "distill/short/config.json").read_text())
    assert config["mtp_k_max"] == 3 and config["mtp_mask_id"] == config["vocab_size"] - 1
    assert not list((run / "distill").glob("*.checkpoint.pt"))
