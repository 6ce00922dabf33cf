"""`make test-faults`: what takes too long for every test run. Run by hand, some twenty minutes.

The smoke DAG killed without warning in each of its rules and resumed; a results folder on a disk that is really full.
`ENTMTP_FAULTS_SEED` draws other moments of the kills.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from pipeline.conftest import ROOT, snakemake, snakemake_command
from pipeline.test_robustness_dag import own_resources

from entmtp import generate
from entmtp.config import compose
from entmtp.errors import EntmtpError
from entmtp.language_model import LanguageModel
from entmtp.policy.schedulers import Policy
from entmtp.reproduction import differences, run_hashes
from entmtp.session import open_target
from entmtp.tree.topology import Tree

SEED = int(os.environ.get("ENTMTP_FAULTS_SEED", "0"))
RULE = re.compile(r"^(?:local)?rule (\w+):", re.MULTILINE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[Path, list[str]]:
    """A whole run, and its rules in the order in which they began."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = snakemake(folder, overrides=own_resources(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, list(dict.fromkeys(RULE.findall(done.stdout + done.stderr)))


def kill_in(folder: Path, rule: str, delay: float, overrides: str) -> bool:
    """Start the DAG up to `rule` and kill all of it `delay` seconds after that began. False: it was done by then."""
    log = folder / "killed.log"
    with log.open("w") as output:
        run = subprocess.Popen(snakemake_command(folder, "--until", rule, "--rerun-incomplete", overrides=overrides),
                               stdout=output, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        end = time.monotonic() + 600
        while rule not in RULE.findall(log.read_text()) and run.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert rule in RULE.findall(log.read_text()), log.read_text()[-3000:]
        time.sleep(delay)
        if alive := run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    snakemake(folder, "--unlock", overrides=overrides)
    return alive


def assert_same_run(folder: Path, undisturbed: Path) -> None:
    """The same tokens, and the same files: nothing half-written is left."""
    ours, theirs = folder / "results" / "smoke", undisturbed / "results" / "smoke"
    assert not [stage for stage, exact, _ in differences(run_hashes(theirs), run_hashes(ours)) if exact]
    files, expected = ({str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
                       for run in (ours, theirs))  # fmt: skip
    assert files == expected


def test_killed_in_every_rule_and_resumed(undisturbed, tmp_path):
    whole, rules = undisturbed
    overrides, draw, killed = own_resources(tmp_path), random.Random(SEED), []
    for rule in rules:
        alive = kill_in(tmp_path, rule, draw.uniform(0, 4), overrides)
        killed += [rule] * alive
        print(f"{rule}: {'killed' if alive else 'done before'}", flush=True)
    done = snakemake(tmp_path, "--rerun-incomplete", overrides=overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_run(tmp_path, whole)
    assert len(killed) > 0.8 * len(rules), f"only {killed} were running when they were killed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_disk_is_said_and_a_larger_one_resumes(undisturbed, tmp_path):
    whole, _ = undisturbed
    overrides, disk = own_resources(tmp_path), tmp_path / "results"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], check=True)
    try:
        full = snakemake(tmp_path, overrides=overrides)
        said = [line for line in (full.stdout + full.stderr).splitlines() if "No space left on device" in line]
        assert full.returncode != 0
        assert any("error: cannot write" in line for line in said), (full.stdout + full.stderr)[-4000:]
        subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
        done = snakemake(tmp_path, "--rerun-incomplete", overrides=overrides)
        assert done.returncode == 0, done.stderr[-4000:]
        assert_same_run(tmp_path, whole)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a folder read-only")
def test_a_read_only_results_folder_is_said_before_any_work(undisturbed, tmp_path):
    results = tmp_path / "results"
    shutil.copytree(undisturbed[0] / "results", results)
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    subprocess.run(["mount", "--bind", results, results], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", results], check=True)
        done = snakemake(tmp_path, "--forceall", overrides=own_resources(tmp_path))
    finally:
        subprocess.run(["umount", results], check=True)
    assert done.returncode != 0
    assert "error: results=results: not a writable folder (Read-only file system); choose another one" in done.stderr
    assert not RULE.findall(done.stdout + done.stderr)
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before


def test_a_prompt_of_all_of_smollm2s_positions():
    """8,191 tokens and one more (of the small model: tests/unit/test_robustness.py)."""
    config = compose([f"resources={ROOT / 'resources'}"])
    lm = LanguageModel(open_target(config.target, config.resources, "float32", "cpu"), None, Policy("ar", [Tree(())]))
    ids = torch.randint(100, 40_000, (8192,), generator=torch.Generator().manual_seed(0)).tolist()
    made = generate(lm, ids[:-1], max_new_tokens=1)
    assert len(made.tokens) == 1
    with pytest.raises(EntmtpError, match="has 8192 tokens; with max_new_tokens=1 it exceeds the model's 8192"):
        generate(lm, ids, max_new_tokens=1)
