"""`report.html`: one self-contained page, results first, readable on a phone and without a network."""

import base64
from pathlib import Path
from typing import Any

from entmtp.errors import EntmtpError
from entmtp.evaluation import paper
from entmtp.evaluation.tables import Table, label
from entmtp.io import write_text

TEMPLATE = Path(__file__).with_name("report.html.j2")
CAPTIONS = Path(__file__).resolve().parents[3] / "workflow" / "report"

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


def read_captions() -> dict[str, str]:
    """Caption of every figure and table, from workflow/report/<name>.rst. Raises EntmtpError for a missing one."""
    captions = {}
    for name in [*FIGURES, *TABLES]:
        path = CAPTIONS / f"{name}.rst"
        if not path.exists():
            raise EntmtpError(f"{path}: no such file; every figure and table has a caption")
        # plain text; ``literal`` marks of reStructuredText are for Snakemake's own report
        captions[name] = " ".join(path.read_text(encoding="utf-8").replace("``", "").split())
    return captions


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


def flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested provenance as (dotted key, text) pairs."""
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in flat(inner, f"{prefix}.{key}" if prefix else str(key))]
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value))]


def embedded(png: str | Path) -> dict[str, Any]:
    """A PNG as {"src": data URI, "width": its inches in CSS pixels}: all figures then share one text size."""
    from PIL import Image

    try:
        data = Path(png).read_bytes()
        with Image.open(png) as image:
            width = round(96 * image.width / image.info.get("dpi", (96, 96))[0])
    except OSError as error:
        raise EntmtpError(f"{png}: no such figure or not a PNG ({error})") from error
    return {"src": "data:image/png;base64," + base64.b64encode(data).decode(), "width": width}


def write_report(
    path: str | Path,
    summary: dict[str, Any],
    tables: list[Table],
    figures: dict[str, str | Path],
    captions: dict[str, str],
    config_yaml: str,
) -> None:
    """Write the page. `figures` maps a name of FIGURES to its PNG, which is embedded; nothing is loaded from outside.

    Every value goes through Jinja's autoescape. Raises EntmtpError for a missing figure or caption.
    """
    from jinja2 import Environment, StrictUndefined

    missing = [name for name in [*figures, *(table.name for table in tables)] if name not in captions]
    if missing:
        raise EntmtpError(f"report: no caption for {', '.join(missing)}")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        rows=summary["rows"],
        headlines=headlines(summary["rows"]),
        verdicts=verdicts(summary["checks"]),
        provenance=flat(summary["provenance"]),
        tables={table.name: table for table in tables},
        table_titles=TABLES,
        figures={name: embedded(png) for name, png in figures.items()},
        figure_titles=FIGURES,
        captions=captions,
        config_yaml=config_yaml,
        paper=paper,
        label=label,
    )
    write_text(path, page)
