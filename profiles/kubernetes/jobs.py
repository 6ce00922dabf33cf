"""Snakemake's jobs as Kubernetes Jobs, through kubectl: what profiles/kubernetes calls to submit, watch and cancel.

`submit JOBSCRIPT` prints the Job's name, `status NAME` one of running, success and failed, `cancel NAME…` deletes;
`manifest JOBSCRIPT` prints what would be created. The pod is job.json beside this file. What is filled in here comes
from the rule: cores and memory (request = limit, so that the pod is of the class Guaranteed), a GPU, the time limit,
and for a timed rule (resource `device`) a node on which no other pod of ours runs, nor starts while it is there.
"""

import json
import subprocess
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("job.json")
TIMED, GPU = "device", "nvidia.com/gpu"


def read_properties(jobscript: Path) -> dict:
    """What Snakemake says about a job in its script's `# properties = {…}` line."""
    for line in jobscript.read_text().splitlines():
        if line.startswith("# properties = "):
            return json.loads(line.removeprefix("# properties = "))
    raise SystemExit(f"error: {jobscript}: not a Snakemake job script (no line '# properties = …')")


def manifest(properties: dict, jobscript: Path, template: dict) -> dict:
    """The Kubernetes Job that runs a job script in the folder from which it was submitted."""
    asked, spec = properties["resources"], template["spec"]["template"]["spec"]
    amounts = {"cpu": str(properties["threads"])}
    if "mem_mb" in asked:
        amounts["memory"] = f"{asked['mem_mb']}M"
    if asked.get("gpu"):
        amounts[GPU] = str(asked["gpu"])
    spec["containers"][0] |= {
        "command": ["/bin/sh", str(jobscript.resolve())],
        "workingDir": str(Path.cwd()),
        "resources": {"requests": amounts, "limits": amounts},
    }
    if asked.get(TIMED):
        labels = template["spec"]["template"]["metadata"]["labels"]
        others = {"labelSelector": {"matchLabels": {"app": labels["app"]}}, "topologyKey": "kubernetes.io/hostname"}
        spec["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [others]}}
    if "runtime" in asked:
        spec["activeDeadlineSeconds"] = 60 * int(asked["runtime"])  # of the running pod, not of its time in the queue
    rule = properties.get("rule") or properties.get("groupid", "group")
    template["metadata"].setdefault("annotations", {})["entmtp/rule"] = rule
    return template


def kubectl(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True)


def submit(jobscript: Path) -> int:
    job = json.dumps(manifest(read_properties(jobscript), jobscript, json.loads(TEMPLATE.read_text())))
    done = kubectl("create", "-f", "-", "-o", "jsonpath={.metadata.name}", given=job)
    sys.stderr.write(done.stderr)
    print(done.stdout.strip())
    return done.returncode


def status(name: str) -> str:
    """running, success or failed. A Job that is gone has failed; an API server out of reach says nothing about it."""
    done = kubectl("get", "job", name, "-o", "json")
    if done.returncode:
        sys.stderr.write(done.stderr)
        return "failed" if "NotFound" in done.stderr else "running"
    found = json.loads(done.stdout).get("status", {})
    ended = {entry["type"] for entry in found.get("conditions") or [] if entry["status"] == "True"}
    if found.get("succeeded") or "Complete" in ended:
        return "success"
    return "failed" if found.get("failed") or "Failed" in ended else "running"


def main() -> int:
    commands = {"submit", "status", "cancel", "manifest"}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        print("usage: jobs.py submit|manifest JOBSCRIPT, jobs.py status NAME, jobs.py cancel NAME…", file=sys.stderr)
        return 2
    command, first = sys.argv[1], sys.argv[2]
    if command == "submit":
        return submit(Path(first))
    if command == "manifest":
        template = json.loads(TEMPLATE.read_text())
        print(json.dumps(manifest(read_properties(Path(first)), Path(first), template), indent=1))
        return 0
    if command == "status":
        print(status(first))
        return 0
    done = kubectl("delete", "job", "--ignore-not-found", "--wait=false", *sys.argv[2:])
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
