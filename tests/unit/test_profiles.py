"""profiles/: the rules that they name exist, timed rules have their node to themselves, and a run composes on each."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("default", "kubernetes", "slurm")


def profile(name: str) -> dict:
    return yaml.safe_load((ROOT / "profiles" / name / "config.yaml").read_text())


def rules() -> dict[str, str]:
    """Name and text of every rule, conditional ones too."""
    files = [path for path in sorted((ROOT / "workflow/rules").glob("*.smk")) if path.name != "common.smk"]
    text = "\n".join(path.read_text() for path in [ROOT / "Snakefile", *files])
    parts = re.split(r"^ *rule (\w+):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


TIMED = sorted(name for name, text in rules().items() if re.search(r"^ +device=1,$", text, re.MULTILINE))


def dry_run(tmp_path: Path, *arguments: str, experiment: str = "paper") -> dict[str, list[str]]:
    """Text of each planned job, by rule."""
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--directory", str(tmp_path),
               "--dry-run", *arguments, "--config", f"experiment={experiment}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = re.split(r"^(?:local)?rule (\w+):$", done.stdout, flags=re.MULTILINE)
    jobs: dict[str, list[str]] = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        jobs.setdefault(name, []).append(text.split("\n\n")[0])
    return jobs


def asked(job: str) -> dict[str, str]:
    line = re.search(r"^ +resources: (.*)$", job, re.MULTILINE)[1]
    return dict(item.partition("=")[::2] for item in line.split(", "))


def test_timed_rules_are_known():
    assert TIMED == ["bench", "confadapt", "confadapt_latency", "heads_eval", "heads_vocabulary", "latency",
                     "throughput"]  # fmt: skip


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_name_only_rules_that_exist(name):
    named = {key: set(profile(name).get(key, {})) for key in ("set-resources", "set-threads", "groups")}
    assert not set.union(*named.values()) - set(rules())


def test_exactly_the_timed_rules_get_a_node_to_themselves_on_slurm():
    extra = {rule: given["slurm_extra"] for rule, given in profile("slurm")["set-resources"].items()
             if "slurm_extra" in given}  # fmt: skip
    assert sorted(extra) == TIMED and set(extra.values()) == {"'--exclusive'"}


@pytest.mark.parametrize("name", ["kubernetes", "slurm"])
def test_a_job_gets_as_many_threads_as_it_was_given_cores(name):
    assert profile(name)["cores"] == profile(name)["max-threads"]


def test_one_machine_times_one_job_and_uses_its_gpu_once_at_a_time():
    assert set(profile("default")["resources"]) == {"device=1", "gpu=1"}


def test_rules_that_open_the_target_ask_for_its_gpu():
    opening = {name for name, text in rules().items() if "base()" in text}
    asking = {name for name, text in rules().items() if "gpu=GPU" in text}
    assert asking == opening - {"convert_heads"}  # that one always runs on the CPU


def test_paper_experiment_is_planned_on_slurm(tmp_path):
    pytest.importorskip("snakemake_executor_plugin_slurm")
    jobs = dry_run(tmp_path, "--workflow-profile", str(ROOT / "profiles/slurm"))
    for rule in TIMED:
        for job in jobs.get(rule, []):
            assert asked(job)["slurm_extra"] == "--exclusive" and asked(job)["device"] == "1"
            assert "threads: 8" in job
    assert len(jobs["bench"]) == 4 and len(jobs["latency"]) == 2
    for rule in ("texts", "traces", "latency", "throughput", "bench", "check_lossless", "perplexity"):
        assert {asked(job).get("gpu") for job in jobs[rule]} == {"1"}, rule
    for rule in ("prompts", "recalibrate", "bank", "policy", "summary", "convert_heads"):
        assert not {"gpu", "slurm_extra"} & {key for job in jobs[rule] for key in asked(job)}, rule


def test_a_general_profile_beside_the_default_one_composes_too(tmp_path):
    """`--profile` instead of `--workflow-profile`: profiles/default then has the last word where both speak."""
    pytest.importorskip("snakemake_executor_plugin_slurm")
    jobs = dry_run(tmp_path, "--profile", str(ROOT / "profiles/slurm"), experiment="smoke")
    assert len(jobs["bench"]) == 2 and all(asked(job)["slurm_extra"] == "--exclusive" for job in jobs["bench"])
    assert not any("gpu" in asked(job) for job in jobs["bench"])  # device=cpu


def test_paper_experiment_is_planned_on_kubernetes(tmp_path):
    pytest.importorskip("snakemake_executor_plugin_cluster_generic")
    jobs = dry_run(tmp_path, "--workflow-profile", str(ROOT / "profiles/kubernetes"))
    assert {(asked(job)["device"], asked(job)["gpu"], asked(job)["runtime"]) for job in jobs["bench"]} == {
        ("1", "1", "480")
    }


@pytest.fixture(scope="module")
def kubernetes(module_at):
    return module_at(ROOT / "profiles/kubernetes/jobs.py")


def write_script(path: Path, **resources) -> Path:
    properties = {"rule": "bench", "threads": 8, "resources": {"tmpdir": "/tmp", **resources}}
    path.write_text(f"#!/bin/sh\n# properties = {json.dumps(properties)}\ntrue\n")
    return path


def test_a_timed_pod_shares_its_node_with_none_of_ours(kubernetes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = write_script(tmp_path / "job.sh", device=1, gpu=1, mem_mb=16000, runtime=480)
    job = kubernetes.manifest(
        kubernetes.read_properties(script), script, json.loads((ROOT / "profiles/kubernetes/job.json").read_text())
    )
    pod = job["spec"]["template"]["spec"]
    asks = pod["containers"][0]["resources"]
    assert asks["limits"] == asks["requests"] == {"cpu": "8", "memory": "16000M", "nvidia.com/gpu": "1"}
    assert pod["containers"][0]["command"] == ["/bin/sh", str(script)]
    assert pod["containers"][0]["workingDir"] == str(tmp_path) and pod["activeDeadlineSeconds"] == 480 * 60
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items(), "pods of ours carry what is kept away"
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted <= {volume["name"] for volume in pod["volumes"]}


def test_an_untimed_pod_on_a_cpu_asks_for_neither_node_nor_gpu(kubernetes, tmp_path):
    script = write_script(tmp_path / "job.sh", mem_mb=1000)
    template = json.loads((ROOT / "profiles/kubernetes/job.json").read_text())
    pod = kubernetes.manifest(kubernetes.read_properties(script), script, template)["spec"]["template"]["spec"]
    assert "affinity" not in pod and "activeDeadlineSeconds" not in pod
    assert pod["containers"][0]["resources"]["requests"] == {"cpu": "8", "memory": "1000M"}


def test_a_script_of_somebody_else_is_refused(kubernetes, tmp_path):
    (tmp_path / "other.sh").write_text("#!/bin/sh\ntrue\n")
    with pytest.raises(SystemExit, match="not a Snakemake job script"):
        kubernetes.read_properties(tmp_path / "other.sh")


# Stands for kubectl and the cluster behind it, which no test can have here: a Job runs when it is created.
KUBECTL = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
state = Path(os.environ["KUBE_STATE"])
if sys.argv[1] == "create":
    job = json.load(sys.stdin)
    name = f"entmtp-{{len(list(state.glob('*.json')))}}"
    container = job["spec"]["template"]["spec"]["containers"][0]
    with (state / f"{{name}}.log").open("w") as log:
        done = subprocess.run(container["command"], cwd=container["workingDir"], stdout=log, stderr=log)
    ended = {{"succeeded": 1}} if done.returncode == 0 else {{"failed": 1}}
    (state / f"{{name}}.json").write_text(json.dumps({{**job, "status": ended}}))
    print(name, end="")
elif sys.argv[1] == "get":
    path = state / f"{{sys.argv[3]}}.json"
    if not path.exists():
        sys.exit(f"Error from server (NotFound): jobs.batch {{sys.argv[3]}} not found")
    print(path.read_text())
elif sys.argv[1] == "delete":
    (state / "deleted").write_text(" ".join(name for name in sys.argv[2:] if name[0] != "-"))
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """A checkout's folder with a kubectl on the PATH; returns where that keeps its Jobs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl").write_text(KUBECTL)
    (tmp_path / "bin/kubectl").chmod(0o755)
    (tmp_path / "state").mkdir()
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def test_snakemake_submits_and_watches_pods(cluster, tmp_path):
    pytest.importorskip("snakemake_executor_plugin_cluster_generic")
    command = [
        sys.executable, "-m", "snakemake", "results/smoke/config.yaml", "-s", str(ROOT / "Snakefile"),
        "--workflow-profile", "profiles/kubernetes", "--seconds-between-status-checks", "1", "--cores", "2",
        "--config", "experiment=smoke", f"overrides=resources={ROOT / 'resources'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    logs = "\n".join(path.read_text() for path in cluster.glob("*.log"))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs}"
    assert "experiment: smoke" in (tmp_path / "results/smoke/config.yaml").read_text()
    job = json.loads((cluster / "entmtp-0.json").read_text())
    assert job["metadata"]["annotations"]["entmtp/rule"] == "resolved_config"
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "40000M"}


def test_status_and_cancel(kubernetes, cluster):
    for name, ended in (("a", {"succeeded": 1}), ("b", {"failed": 1}), ("c", {"active": 1}), ("d", {})):
        (cluster / f"{name}.json").write_text(json.dumps({"status": ended}))
    timed_out = {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}}
    (cluster / "e.json").write_text(json.dumps(timed_out))
    found = {name: kubernetes.status(name) for name in "abcdef"}
    assert found == {"a": "success", "b": "failed", "c": "running", "d": "running", "e": "failed", "f": "failed"}
    subprocess.run([str(Path("profiles/kubernetes/cancel")), "a", "c"], check=True)
    assert (cluster / "deleted").read_text() == "job a c"
