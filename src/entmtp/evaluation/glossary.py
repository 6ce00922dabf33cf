"""What a run's names stand for, for somebody who meets them in the report for the first time."""

from typing import Any

import yaml

KINDS = {
    "ar": "plain decoding: one token per forward of the target. The baseline of every speedup.",
    "static": "the published 63-node tree of Medusa and Hydra at every step, whatever the text and the machine.",
    "star": "the best static tree: at every step the one tree that was fastest on this task's calibration prompts.",
    "ladder": "the paper's ladder: the higher the path value, the larger the tree, by fitted thresholds.",
    "tau": "the paper's hysteresis: one tree up when the path value exceeds τ_on, one down at τ_off or below.",
    "cost_aware": "the bank's tree whose expected tokens are worth most beyond what its milliseconds cost.",
    "adaptive": "cost_aware that corrects its expectations while it decodes.",
    "bandit": "tries the bank's trees while it decodes and learns which is fastest, without any calibration.",
    "dynamic": "grows its tree anew at every step: always as many nodes, the likeliest ones (EAGLE-2, OPT-Tree).",
    "marginal": "grows its tree anew at every step: as many of the likeliest nodes as are worth their milliseconds.",
}

SOURCES = {
    "humaneval": "HumanEval's own programming problems",
    "gsm_symbolic": "generated grade-school mathematics (reasoning-gym's gsm_symbolic), a stand-in for GSM8K",
    "synthetic": "generated exercises with right answers",
    "shipped": "prompts written for this project, a stand-in for the published set",
    "hub": "the published set, from the Hub",
    "file": "prompts of a file",
}


def glossary(config_yaml: str, rows: list[dict]) -> dict[str, list[tuple[str, str]]]:
    """{"tasks" | "policies": [(name, what it is)]} of a summary's rows, by the run's resolved configuration.

    Names that the configuration does not resolve are left out.
    """
    resolved: dict[str, Any] = (yaml.safe_load(config_yaml) or {}).get("resolved") or {}
    tasks, policies = resolved.get("tasks", {}), resolved.get("policies", {})
    return {
        "tasks": [
            (name, _task(tasks[name])) for name in dict.fromkeys(row["task"] for row in rows) if name in tasks
        ],
        "policies": [
            (name, _policy(policies[name])) for name in dict.fromkeys(row["policy"] for row in rows) if name in policies
        ],
    }  # fmt: skip


def _task(task: dict[str, Any]) -> str:
    source = SOURCES.get(task["source"], task["source"])
    named = f" {task['repo'] or task['file']}" if task["source"] in ("hub", "file") else ""
    return f"{source}{named}; {task['calib']} calibration and {task['test']} test prompts."


def _policy(policy: dict[str, Any]) -> str:
    heads = f" Drafts with {policy['heads']} heads." if policy["heads"] else ""
    return KINDS.get(policy["kind"], policy["kind"]) + heads
