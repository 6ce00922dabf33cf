"""What the project promises about itself: equal pins, experiments that compose, scripts that stay small."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from entmtp.config import choices, compose
from entmtp.errors import EntmtpError
from entmtp.layout import compose_task
from entmtp.tasks.synthetic import generate

ROOT = Path(__file__).resolve().parents[2]


def pins() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return {*project["dependencies"], *extras["dev"], *extras["cluster"]}


def normal(pin: str) -> str:
    return pin.lower().replace("_", "-")


def test_environment_and_pyproject_hold_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    listed = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert set(listed) == pins()
    assert "python=3.11" in environment["dependencies"]


def test_every_pin_is_exact_and_in_the_lock():
    lock = {normal(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if line[:1] != "#"}
    assert all("==" in pin for pin in pins())
    assert {normal(pin) for pin in pins()} <= lock


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_experiments_compose(experiment):
    config = compose([f"experiment={experiment}"])
    assert config.experiment == experiment
    assert config.policies[0] == "ar"


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_generated_tasks_have_the_prompts_that_experiments_ask_for(experiment):
    overrides = [f"experiment={experiment}"]
    config = compose(overrides)
    for task, wanted in config.distill.prompts.items():
        block = compose_task(config, overrides, task).task
        if block.source == "synthetic":
            there = len(list(generate(block.subset, 4 * wanted, block.seed + 1)))
            assert there - block.calib - block.test >= wanted, (task, there)


def test_yaml_names_are_the_configured_names():
    for policy in choices("policy"):
        assert compose([f"policy={policy}"]).policy.name == policy
    for heads in choices("heads"):
        assert compose([f"heads={heads}"]).heads.name == heads


def test_blocks_stand_beside_greedy_texts_only():
    with pytest.raises(EntmtpError, match=r"decoding\.mode': sample, but blocks are decoded greedily"):
        compose(["experiment=confadapt", "decoding=sample"])


def test_paper_experiment_plans_every_rule(tmp_path):
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--directory", str(tmp_path),
               "--cores", "1", "--dry-run", "--config", "experiment=paper"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for rule in ("target", "convert_heads", "prompts", "traces", "throughput", "bench", "check_lossless", "publish"):
        assert f"rule {rule}:" in done.stdout, rule
    assert "humaneval_hub" in done.stdout and "litbench_hub" in done.stdout


def test_published_multi_token_models_are_planned_without_training(tmp_path):
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--directory", str(tmp_path),
               "--cores", "1", "--dry-run", "--config", "experiment=paper_mtp"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for rule in ("target", "multi_token_model", "prompts", "bench", "confadapt_latency", "confadapt",
                 "confadapt_judged", "confadapt_report"):  # fmt: skip
        assert f"rule {rule}:" in done.stdout, rule
    for rule in ("distill", "texts", "train_heads", "latency", "figures"):
        assert f"rule {rule}:" not in done.stdout, rule
    assert "gsm8k_hub" in done.stdout


def test_scripts_are_one_library_call():
    for script in (ROOT / "workflow/scripts").glob("*.py"):
        assert len(script.read_text().splitlines()) <= 15, script.name
    assert len((ROOT / "Snakefile").read_text().splitlines()) <= 50
