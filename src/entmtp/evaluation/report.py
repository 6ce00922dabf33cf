"""`report.html`: one self-contained page, results first, readable on a phone and without a network."""

from collections import Counter
from pathlib import Path
from typing import Any

from entmtp.errors import EntmtpError
from entmtp.evaluation import paper
from entmtp.evaluation.cite import bibtex, read_citation
from entmtp.evaluation.glossary import glossary
from entmtp.evaluation.grid import PAPER, grid, headline_grid, scheduling_grid, second_grid, verdict_grid
from entmtp.evaluation.page import embedded, write_page
from entmtp.evaluation.tables import Table

# name in workflow/report and in figures/ → heading, in reading order
FIGURES = {
    "speedup": "Speedup over plain decoding",
    "throughput_tree_size": "Throughput against tree size",
    "acceptance_frontier": "Acceptance frontier before and after recalibration",
    "step_latency": "Step latency",
    "accept_entropy": "Acceptance against entropy",
    "tree_choice": "Tree choice along one generation",
    "scheduler_overhead": "Scheduler overhead",
}
TABLES = {"speed": "Speed", "perplexity": "Quality", "trees": "Trees"}
# tables that only the page has
PAGE_TABLES = {"headlines": "Fastest policy of each task", "verdicts": "Verdicts", "provenance": "Provenance"}
# of a run with the scheduling analysis (scheduling.in_report)
SCHEDULING_FIGURES = {"headroom": "Gain over the best static tree", "prediction": "Predicted against measured speed"}
SCHEDULING_TABLES = {"scheduling": "What scheduling is worth"}
# of a run with the second method (confadapt.enabled)
SECOND_FIGURES = {"frontier": "Accuracy against speed", "training": "Training of the multi-token model"}
SECOND_TABLES = {"confadapt": "The second method"}
CAPTIONED = [*FIGURES, *TABLES, *PAGE_TABLES]
SCHEDULING = [*SCHEDULING_FIGURES, *SCHEDULING_TABLES]
SECOND = [*SECOND_FIGURES, *SECOND_TABLES]


def headlines(rows: list[dict]) -> list[dict]:
    """Per task the fastest policy whose text is plain decoding's (exact or tie), with its ratios."""
    best: dict[str, dict] = {}
    for row in rows:
        if row["lossless"] == "lossy":
            continue
        if row["task"] not in best or row["tokens_per_s"] > best[row["task"]]["tokens_per_s"]:
            best[row["task"]] = row
    return list(best.values())


def verdicts(checks: dict[str, dict]) -> list[dict]:
    """Lossless and replay verdicts side by side, a row per task × policy."""
    rows = []
    for task, policies in checks["lossless"].items():
        for policy, lossless in policies.items():
            replay = checks["replay"].get(task, {}).get(policy, {"verdict": "n/a", "steps": 0})
            rows.append({"task": task, "policy": policy, "lossless": lossless, "replay": replay})
    return rows


def verdict_counts(rows: list[dict]) -> dict[str, dict[str, int]]:
    """{"lossless" | "replay": {verdict: how many of `verdicts`' rows}}; n/a (plain decoding itself) is left out."""
    counted = {check: Counter(row[check]["verdict"] for row in rows) for check in ("lossless", "replay")}
    return {
        check: {name: count for name, count in counts.items() if name != "n/a"} for check, counts in counted.items()
    }


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested provenance as (dotted key, text) pairs."""
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value))]


def commit_of(provenance: dict[str, Any]) -> str | None:
    """Short commit, marked where the checkout was changed; None for a run outside a checkout."""
    git = provenance.get("git")
    if not isinstance(git, dict) or not git.get("sha"):
        return None
    return git["sha"][:10] + (" (changed)" if git.get("dirty") else "")


def made_by(provenance: dict[str, Any]) -> list[str]:
    """The few facts of the provenance that a result is read with: machine, threads, day, commit."""
    commit, date = commit_of(provenance), provenance.get("date")
    known = [
        provenance.get("device") or provenance.get("cpu"),
        provenance.get("threads") and f"{provenance['threads']} threads",
        date and str(date)[:10],
        commit and f"commit {commit}",
    ]
    return [str(fact) for fact in known if fact]


def write_report(
    path: str | Path,
    summary: dict[str, Any],
    tables: list[Table],
    figures: dict[str, str | Path],
    captions: dict[str, str],
    config_yaml: str,
    replay: bool = True,
    command: str = "",
    second: list[dict] | None = None,
    scheduling: list[dict] | None = None,
) -> None:
    """Write the page. `figures` maps a name of FIGURES (of SCHEDULING_FIGURES and SECOND_FIGURES, where the run has
    them) to its PNG, which is embedded; nothing is loaded from outside. `second`: rows of confadapt.json, `scheduling`:
    of scheduling.json.

    `replay`: whether replay_generation.html will lie beside it, to be linked. `command` repeats the run. Raises
    EntmtpError for a missing figure or caption.
    """
    needed = [*figures, *(table.name for table in tables), *PAGE_TABLES, *(SECOND_TABLES if second else ()),
              *(SCHEDULING_TABLES if scheduling else ())]  # fmt: skip
    missing = [name for name in needed if name not in captions]
    if missing:
        raise EntmtpError(f"report: no caption for {', '.join(missing)}")
    rows, provenance = summary["rows"], summary["provenance"]
    checked = verdicts(summary["checks"])
    grids = [headline_grid(headlines(rows)), *(grid(table) for table in tables), verdict_grid(checked)]
    tasks, policies = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "policy"))
    if scheduling:
        grids.append(scheduling_grid(scheduling))
    if second:
        grids.append(second_grid(second, policies))
    filters = {"task": [(name, name) for name in tasks],
               "policy": [*((name, name) for name in policies), (PAPER, "the paper's figures")]}  # fmt: skip
    write_page(
        path,
        "report.html.j2",
        rows=rows,
        grids={made.name: made for made in grids},
        verdicts=verdict_counts(checked),
        steps=sum(row["replay"]["steps"] for row in checked),
        made_by=made_by(provenance),
        experiment=provenance.get("experiment"),
        command=command,
        provenance=flat(provenance),
        glossary=glossary(config_yaml, rows),
        bibtex=bibtex(read_citation(), commit_of(provenance)),
        figures={name: embedded(png) for name, png in figures.items()},
        titles={
            **FIGURES,
            **TABLES,
            **PAGE_TABLES,
            **SCHEDULING_FIGURES,
            **SCHEDULING_TABLES,
            **SECOND_FIGURES,
            **SECOND_TABLES,
        },
        captions=captions,
        config_yaml=config_yaml,
        paper=paper,
        filters=filters,
        replay=replay,
    )
