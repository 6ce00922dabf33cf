"""`make test-slurm`: the smoke DAG through profiles/slurm, and sweeps through submitit, on a real Slurm of one node.

Run by hand: it needs Debian's slurmctld, slurmd, slurm-client and munge, and some minutes. `ENTMTP_SLURM_FOLDER` names
a folder for the run that is kept, so that an interrupted run goes on; `ENTMTP_SLURM_OVERRIDES` adds Hydra overrides,
such as "tasks=[sharegpt] policies=[ar,hydra,entmtp_tau]" for a shorter DAG.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest
import yaml

from .cluster import Slurm, missing_programs

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = os.environ.get("ENTMTP_SLURM_OVERRIDES", "")
EXCLUSIVE = [rule for rule, asked in
             yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())["set-resources"].items()
             if "--exclusive" in asked.get("slurm_extra", "")]  # fmt: skip


@pytest.fixture(scope="session")
def slurm():
    if missing := missing_programs():
        pytest.fail(f"{', '.join(missing)}: not here; apt-get install slurmctld slurmd slurm-client munge")
    folder = Path(tempfile.mkdtemp(prefix="entmtp-slurm-"))
    try:
        with Slurm(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    kept = os.environ.get("ENTMTP_SLURM_FOLDER")
    folder = Path(kept).resolve() if kept else tmp_path_factory.mktemp("slurm")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def snakemake(slurm: Slurm, work: Path, *arguments: str, overrides: str = "") -> subprocess.CompletedProcess:
    """As on a cluster, but for this node's size, a queue without accounts, and shorter waits."""
    command = [
        sys.executable, "-m", "snakemake", *arguments, "--nolock", "-s", str(ROOT / "Snakefile"),
        "--directory", str(work), "--workflow-profile", str(ROOT / "profiles/slurm"), "--jobs", "8",
        "--cores", str(slurm.cpus), "--max-threads", str(slurm.cpus), "--latency-wait", "10",
        "--default-resources", "mem_mb=2000", "runtime=30",
        "--slurm-no-account", "--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2",
        "--slurm-status-command", "squeue", "--config", "experiment=smoke",
        f"overrides=resources={ROOT / 'resources'} {OVERRIDES} {overrides}".strip(),
    ]  # fmt: skip
    return subprocess.run(command, env=slurm.env, capture_output=True, text=True)


@pytest.fixture(scope="session")
def finished(slurm, work):
    """The smoke run, every rule but the last copy a Slurm job."""
    done = snakemake(slurm, work)
    (work / "snakemake.log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, f"{done.stderr[-6000:]}\n{slurm.logs()}"
    return done


def rule_of(job: dict[str, str]) -> str:
    """The plugin's comment is rule_<name> or rule_<name>_wildcards_<values>."""
    return re.sub(r"_wildcards_.*", "", job.get("Comment", "")).removeprefix("rule_")


def test_smoke_dag_runs_through_the_profile(slurm, work, finished):
    for name in ("summary.json", "report.html", "tables/speed.md", "figures/speedup.png"):
        assert (work / "results" / name).stat().st_size > 0, name
    jobs = slurm.jobs()
    assert {job["JobState"] for job in jobs} == {"COMPLETED"}
    assert {job["NodeList"] for job in jobs} == {slurm.node}
    if not os.environ.get("ENTMTP_SLURM_FOLDER"):  # an earlier run may have made some of them
        assert {"prompts", "latency", "bench", "check_lossless", "check_replay", "summary"} <= {
            rule_of(job) for job in jobs
        }


def test_timed_jobs_had_the_node_to_themselves(slurm, finished):
    jobs = slurm.jobs()
    timed = [job for job in jobs if rule_of(job) in EXCLUSIVE]
    assert timed, "no timed job ran; empty the folder and run all again"
    for job in timed:
        assert job["OverSubscribe"] == "NO", "not submitted with --exclusive"
        beside = [rule_of(other) for other in jobs if other is not job
                  and other["StartTime"] < job["EndTime"] and job["StartTime"] < other["EndTime"]]  # fmt: skip
        assert not beside, f"{beside} ran beside {rule_of(job)}"
    shared = [job for job in jobs if rule_of(job) not in EXCLUSIVE]
    assert all(job["OverSubscribe"] == "OK" for job in shared)


def test_a_job_on_a_gpu_gets_one_and_a_failing_job_fails_the_run(slurm, work, finished):
    """The node's GPU is one in name only, so the job says that it sees none: allocation and failure are what counts."""
    known = {job["JobId"] for job in slurm.jobs()}
    text = "results-gpu/smoke/texts/sharegpt.calib.parquet"
    done = snakemake(slurm, work, text, overrides="device=cuda results=results-gpu")
    assert done.returncode != 0
    made, failed = (job for job in slurm.jobs() if job["JobId"] not in known)
    assert (rule_of(made), made["JobState"]) == ("prompts", "COMPLETED")
    assert (rule_of(failed), failed["JobState"]) == ("texts", "FAILED")
    assert "gpu" in f"{failed.get('TresPerJob')} {failed.get('TresPerNode')}"
    assert "gpu" not in f"{made.get('TresPerJob')} {made.get('TresPerNode')}"
    assert "sees no GPU" in (work / "logs/smoke/texts/sharegpt.log").read_text()


def sweep(slurm: Slurm, work: Path, *arguments: str) -> subprocess.CompletedProcess:
    places = [f"results={work / 'results'}", f"resources={ROOT / 'resources'}", "experiment=smoke", "tracking=disabled"]
    command = [sys.executable, "-m", "entmtp.sweep", "-m", *arguments, *places]
    return subprocess.run(command, env=slurm.env, capture_output=True, text=True, cwd=work)


GRID = ("task=sharegpt", "policy=entmtp_tau", "policy.tau_on=0.005,0.02", "policy.tau_off=0.001,0.01")
ON_SLURM = ("hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2")


def test_a_sweep_as_a_slurm_array_gives_the_same_rows(slurm, work, finished):
    frames = {}
    for name, launcher in (("slurm", ON_SLURM), ("here", ())):
        done = sweep(slurm, work, *GRID, *launcher, f"hydra.sweep.dir={work / name}")
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        frames[name] = pd.read_parquet(work / name / "rows.parquet")
    pd.testing.assert_frame_equal(frames["slurm"].drop(columns="overrides"), frames["here"].drop(columns="overrides"))
    array = [job for job in slurm.jobs() if job.get("JobName") == "entmtp-sweep"]
    assert len(array) == 4 and {job["JobState"] for job in array} == {"COMPLETED"}
    assert {job["ArrayTaskId"] for job in array} == {"0", "1", "2", "3"}


def test_a_measuring_sweep_gets_the_node(slurm, work, finished):
    done = sweep(
        slurm, work, "hydra/launcher=slurm_exclusive", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=2",
        "task=sharegpt", "policy=entmtp_tau", "policy.tau_on=0.02", "policy.tau_off=0.001,0.01", "sweep.engine=live",
        "sweep.prompts=1", f"hydra.sweep.dir={work / 'live'}",
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    rows = pd.read_parquet(work / "live" / "rows.parquet")
    assert list(rows["engine"]) == ["live", "live"] and (rows["tokens_per_s"] > 0).all()
    one, two = [job for job in slurm.jobs() if job.get("JobName") == "entmtp-sweep"][-2:]
    assert one["OverSubscribe"] == two["OverSubscribe"] == "NO"
    first, second = sorted((one, two), key=lambda job: job["StartTime"])
    assert first["EndTime"] <= second["StartTime"]


def test_a_mistake_in_a_slurm_job_is_said_here(slurm, work, finished):
    done = sweep(slurm, work, "task=gsm8k", "policy.tau_on=0.2,0.3", *ON_SLURM, f"hydra.sweep.dir={work / 'wrong'}")
    assert done.returncode == 1
    assert "the pipeline has not made it for task 'gsm8k'" in done.stderr.rstrip().splitlines()[-1]
    assert not (work / "wrong" / "rows.parquet").exists()
