"""`scheduling.json` from the tasks' parts, and the same as Markdown that a person reads."""

import numpy as np

from entmtp.evaluation.stats import geometric_mean
from entmtp.evaluation.tables import markdown_table
from entmtp.science.headroom import REFERENCES, prediction_errors


def combine(parts: list[dict], transfer: list[dict], forwards: list[dict], provenance: dict) -> dict:
    """Parts of all tasks as one record (schema `scheduling`)."""
    rows = [row for part in parts for row in part["policies"]]
    return {
        "rows": rows,
        "geometric_mean_over_static": over_static(rows),
        "prediction": prediction_errors(rows),
        "banks": [row for part in parts for row in part["banks"]],
        "ceiling": [row for part in parts for row in part["ceiling"]],
        "signals": [row for part in parts for row in part["signals"]],
        "transfer": transfer,
        "forwards": forwards,
        "provenance": provenance,
    }


def over_static(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Per policy over tasks: the live and the replayed ratio to the static optimum, and the worst live task."""
    found = {}
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        live = [row["over_static"]["ratio"] for row in own]
        found[name] = {"live": geometric_mean(live), "worst": min(live),
                       "replayed": geometric_mean([row["replayed_over_static"] for row in own])}  # fmt: skip
    return found


def markdown(record: dict) -> str:
    """Tables of the record, percentages against the static optimum."""
    parts = [
        "# Scheduling\n",
        "Test split. *live*: decoding seconds of the timed runs, with 95% intervals over prompts; *replayed*: the same "
        "decisions at predicted step times. Everything is relative to the task's static optimum, `entmtp_star`, "
        "the tree that was fastest on the calibration split. *Best tree in hindsight*: the single tree that is fastest "
        "on the test texts themselves, of all that the search found.\n",
        _policies(record),
        "## Banks\n\nBest threshold ladder over each bank, fitted on the calibration split (replayed).\n",
        _banks(record["banks"]),
        "## Is there more in the signals?\n\nGrowing policies whose expectations of each candidate come from a boosted "
        "model of every signal, fitted on the calibration split: replayed speed on test texts against the same "
        "policy's own. Candidates are ranked as the policy ranks them, or by the model.\n",
        _ceiling(record["ceiling"]),
        "## What predicts num_accepted\n\nTest split, steps of the 16-node tree. r: correlation; MI: mutual "
        "information in nats; AUC: for accepting anything.\n",
        _signals(record["signals"]),
        "## Transfer\n\nReplayed speed of what was fitted on one task (rows) on another's test texts (columns).\n",
        _transfer(record["transfer"]),
        "## Target forwards of the offline stages\n\n" + _forwards(record["forwards"]),
        _prediction(record["prediction"]),
    ]
    return "\n".join(parts)


def percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


def _policies(record: dict) -> str:
    rows = [
        [
            row["task"],
            f"`{row['policy']}`",
            f"{percent(row['over_static']['ratio'] - 1)} "
            f"[{percent(row['over_static']['low'] - 1)}, {percent(row['over_static']['high'] - 1)}]",
            percent(row["replayed_over_static"] - 1),
            percent(row["hindsight_headroom"]),
            percent(row["oracle_headroom"]),
            "–" if row["captured"] is None else f"{100 * row['captured']:.0f}%",
            f"{row['scheduler_ms']:.2f}",
        ]
        for row in record["rows"]
        if row["policy"] not in REFERENCES
    ]
    heads = [
        "task",
        "policy",
        "live",
        "replayed",
        "best tree in hindsight",
        "bank's oracle",
        "captured",
        "scheduler ms",
    ]
    means = [[f"`{name}`", percent(mean["live"] - 1), percent(mean["worst"] - 1), percent(mean["replayed"] - 1)]
             for name, mean in record["geometric_mean_over_static"].items() if name not in REFERENCES]  # fmt: skip
    heads_of_means = ["policy", "live, geometric mean", "worst task", "replayed, geometric mean"]
    return markdown_table(heads, rows) + "\n" + markdown_table(heads_of_means, means, names=1)


def _banks(rows: list[dict]) -> str:
    return markdown_table(
        ["task", "bank", "nodes", "calibration", "test", "oracle on test"],
        [[row["task"], row["bank"], " ".join(map(str, row["nodes"])), percent(row["calib_over_static"]),
          percent(row["test_over_static"]), percent(row["oracle_over_static"])] for row in rows],
        names=3,
    )  # fmt: skip


def _ceiling(rows: list[dict]) -> str:
    return markdown_table(
        ["task", "policy", "ranked as before", "ranked by the model"],
        [[row["task"], f"`{row['policy']}`", percent(row["same_order"] - 1), percent(row["own_order"] - 1)]
         for row in rows],
        names=2,
    )  # fmt: skip


def _signals(rows: list[dict]) -> str:
    test = [row for row in rows if row["split"] == "test"]
    names = list(dict.fromkeys(row["signal"] for row in test))
    tasks = list(dict.fromkeys(row["task"] for row in test))
    by_key = {(row["task"], row["signal"]): row for row in test}

    def cell(task: str, signal: str) -> str:
        row = by_key.get((task, signal))
        return "–" if row is None else f"{row['r']:+.2f} / {row['mutual_information']:.3f} / {row['auc']:.2f}"

    def information(name: str) -> float:
        return float(np.mean([row["mutual_information"] for row in test if row["signal"] == name]))

    ordered = sorted(names, key=lambda name: -information(name))
    heads = ["signal", *(f"{task} (r / MI / AUC)" for task in tasks)]
    return markdown_table(heads, [[name, *(cell(task, name) for task in tasks)] for name in ordered], names=1)


def _transfer(rows: list[dict]) -> str:
    tasks = list(dict.fromkeys(row["used_on"] for row in rows))
    found = {(row["policy"], row["fitted_on"], row["used_on"]): row["over_own_static"] for row in rows}
    keys = dict.fromkeys((row["policy"], row["fitted_on"]) for row in rows)
    return markdown_table(
        ["policy", "fitted on", *tasks],
        [[f"`{name}`", fitted, *(percent(found[name, fitted, used] - 1) for used in tasks)]
         for name, fitted in sorted(keys)],
    )  # fmt: skip


def _forwards(rows: list[dict]) -> str:
    return markdown_table(
        ["task", "the paper's procedure", "here", "ratio"],
        [[row["task"], f"{row['paper']:,}", f"{row['here']:,}", f"{row['paper'] / row['here']:,.0f}"] for row in rows],
        names=1,
    )


def _prediction(prediction: dict) -> str:
    return (
        "## Predicted against measured\n\n"
        f"With plain decoding's clock as the unit, predicted tokens/s lie within 3% of the measured ones in "
        f"{100 * prediction['within_3_percent']:.0f}% of the task × policy pairs (median error "
        f"{100 * prediction['median']:.1f}%, largest {100 * prediction['largest']:.1f}%).\n"
    )
