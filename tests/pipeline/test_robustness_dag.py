"""Faults around a whole run: a second one beside it, a kill without warning, damaged files between its rules."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from .conftest import ROOT, snakemake, snakemake_command

PROMPTS = "results/smoke/prompts/litbench.jsonl"


def own_resources(folder: Path) -> str:
    """So that a killed conversion leaves nothing in the checkout."""
    (folder / "resources").mkdir()
    (folder / "resources" / "prompts").symlink_to(ROOT / "resources" / "prompts")
    return f"resources={folder / 'resources'}"


def test_a_second_snakemake_is_told_of_the_first_and_a_killed_run_can_be_unlocked(tmp_path):
    overrides, locks = own_resources(tmp_path), tmp_path / ".snakemake" / "locks"
    with (tmp_path / "first.log").open("w") as output:
        first = subprocess.Popen(snakemake_command(tmp_path, overrides=overrides), stdout=output,
                                 stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            end = time.monotonic() + 120
            while not (locks.is_dir() and list(locks.iterdir())) and time.monotonic() < end:
                time.sleep(0.05)
            second = snakemake(tmp_path, PROMPTS, overrides=overrides)
            assert first.poll() is None, "the first run ended before the second one asked"
            assert second.returncode != 0 and "cannot be locked" in second.stderr + second.stdout
        finally:
            os.killpg(first.pid, signal.SIGKILL)  # as a power cut: the lock stays
            first.wait()
    third = snakemake(tmp_path, PROMPTS, overrides=overrides)
    assert third.returncode != 0 and "unlock" in third.stderr + third.stdout
    assert snakemake(tmp_path, "--unlock", overrides=overrides).returncode == 0
    done = snakemake(tmp_path, PROMPTS, "--rerun-incomplete", overrides=overrides)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len((tmp_path / PROMPTS).read_text().splitlines()) == 7


def test_damaged_files_between_rules_name_themselves(smoke, tmp_path):
    shutil.copytree(smoke / "results" / "smoke", tmp_path / "results" / "smoke")
    run = tmp_path / "results" / "smoke"
    for name, product in [
        ("traces/hydra/sharegpt.calib.parquet", "trees/hydra/sharegpt/frontier.json"),
        ("trees/hydra/sharegpt/bank.json", "trees/hydra/sharegpt/policy/entmtp_tau.json"),
        ("prompts/sharegpt.jsonl", "texts/sharegpt.calib.parquet"),
        ("heads/hydra/model.safetensors", "traces/hydra/litbench.calib.parquet"),
    ]:
        damaged = run / name
        whole, times = damaged.read_bytes(), damaged.stat()
        damaged.write_bytes(whole[: len(whole) // 2])
        done = snakemake(tmp_path, f"results/smoke/{product}", "--force", "--rerun-triggers", "mtime")
        assert done.returncode != 0, name
        assert [line for line in done.stderr.splitlines() if "error: " in line and damaged.name in line], name
        assert not (run / product).exists(), "nothing half-written is left"
        damaged.write_bytes(whole)
        os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
