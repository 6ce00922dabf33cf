"""`scheduling.json` from the tasks' parts, and the same as Markdown that a person reads."""

import numpy as np

from entmtp.evaluation.stats import geometric_mean_of_ratios
from entmtp.evaluation.tables import markdown_table
from entmtp.science.headroom import REFERENCES, STAR, prediction_errors

JOINED = ("banks", "ceiling", "bank_ceiling", "signals")  # rows of every task side by side


def combine(parts: list[dict], transfer: list[dict], provenance: dict, bootstrap: int, seed: int) -> dict:
    """Parts of all tasks as one record (schema `scheduling`)."""
    rows = [row for part in parts for row in part["policies"]]
    return {
        "rows": [{key: value for key, value in row.items() if key != "prompts"} for row in rows],
        "geometric_mean_over_static": over_static(rows, bootstrap, seed),
        "prediction": prediction_errors(rows),
        **{key: [row for part in parts for row in part[key]] for key in JOINED},
        "transfer": transfer,
        "forwards": [part["forwards"] for part in parts],
        "provenance": provenance,
    }


def over_static(rows: list[dict], bootstrap: int, seed: int) -> dict[str, dict]:
    """Per policy over tasks: the live and the replayed ratio to the static optimum with intervals, and the least live
    ratio of a task. `rows` with `prompts` (headroom_rows)."""
    found, static = {}, {row["task"]: row["prompts"] for row in rows if row["policy"] == STAR}
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = {row["task"]: row["prompts"] for row in rows if row["policy"] == name}
        live = [(made["new_tokens"], made["decode_s"], static[task]["new_tokens"], static[task]["decode_s"])
                for task, made in own.items()]  # fmt: skip
        replayed = [(made["tokens"], made["replayed_ms"], made["tokens"], made["static_ms"])
                    for made in own.values() if "replayed_ms" in made]  # fmt: skip
        found[name] = {
            "live": geometric_mean_of_ratios(live, bootstrap, seed),
            "worst": min(row["over_static"]["ratio"] for row in rows if row["policy"] == name),
            "replayed": geometric_mean_of_ratios(replayed, bootstrap, seed) if replayed else None,
        }
    return found


def markdown(record: dict) -> str:
    """Tables of the record, percentages against the static optimum."""
    parts = [
        "# Scheduling\n",
        "Test split, with 95% intervals over prompts. *live*: decoding seconds of the timed runs; *replayed*: the same "
        "decisions at predicted step times. Everything is relative to the task's static optimum, `entmtp_star`, "
        "the tree that was fastest on the calibration split; *on calibration texts*: replayed where it was fitted. "
        "*Best tree in hindsight*: the single tree that is fastest on the test texts themselves, of all that the "
        "search found. *Captured*: of the bank's oracle's gain, by replay.\n",
        _policies(record),
        "## Banks\n\nReplayed, fitted on the calibration split: *scheduler* is `cost_aware` on the first heads' "
        "certainty and the running mean of what was accepted, *ladder* the best threshold ladder. What a bank's best "
        "single tree gains is no gain of switching.\n",
        _banks(record["banks"]),
        "## Is there more in the signals?\n\nGrowing policies whose expectations of each candidate come from a boosted "
        "model of every signal, fitted on the calibration split: replayed speed on test texts against the same "
        "policy's own. Candidates are ranked as the policy ranks them, or by the model. Below, the bank's trees chosen "
        "by such a model of what each accepts, at no cost for looking.\n",
        _ceiling(record["ceiling"], record["bank_ceiling"]),
        "## What predicts num_accepted\n\nSteps of the 16-node tree: correlation on the calibration texts → on the "
        "test texts / mutual information there, in nats / AUC there, for accepting anything.\n",
        _signals(record["signals"]),
        "## Transfer\n\nReplayed speed of what was fitted on one task (rows) on another's test texts (columns).\n",
        _transfer(record["transfer"]),
        "## Target forwards of the offline stages\n\n" + _forwards(record["forwards"]),
        _prediction(record["prediction"]),
    ]
    return "\n".join(parts)


def percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


def gained(found: dict[str, float] | None, key: str = "ratio") -> str:
    """A ratio, or a gain over one, with its interval in per cent."""
    if found is None:
        return "–"
    one = 1 if key == "ratio" else 0
    return f"{percent(found[key] - one)} [{100 * (found['low'] - one):+.1f}, {100 * (found['high'] - one):+.1f}]"


COLUMNS = ["task", "policy", "live", "replayed", "on calibration texts", "best tree in hindsight", "bank's oracle",
           "oracle of all trees", "captured", "scheduler ms"]  # fmt: skip


def shown(row: dict) -> list[str]:
    """A row of the record under COLUMNS."""
    captured, calib = row["captured"], row["calib_over_static"]
    share = captured and f"{100 * captured['share']:.0f}% [{100 * captured['low']:.0f}, {100 * captured['high']:.0f}]"
    return [
        row["task"],
        row["policy"],
        gained(row["over_static"]),
        gained(row["replayed_over_static"]),
        "–" if calib is None else percent(calib - 1),
        gained(row["hindsight_headroom"], "gain"),
        gained(row["oracle_headroom"], "gain"),
        gained(row["frontier_headroom"], "gain"),
        share or "–",
        f"{row['scheduler_ms']:.2f}",
    ]


def _policies(record: dict) -> str:
    rows = [[task, f"`{name}`", *rest] for task, name, *rest in map(shown, record["rows"]) if name not in REFERENCES]
    means = [[f"`{name}`", gained(mean["live"]), percent(mean["worst"] - 1), gained(mean["replayed"])]
             for name, mean in record["geometric_mean_over_static"].items() if name not in REFERENCES]  # fmt: skip
    heads_of_means = ["policy", "live, geometric mean", "worst task", "replayed, geometric mean"]
    return markdown_table(COLUMNS, rows) + "\n" + markdown_table(heads_of_means, means, names=1)


def _banks(rows: list[dict]) -> str:
    heads = ["task", "bank", "nodes", "scheduler, calibration", "scheduler, test", "ladder, calibration",
             "ladder, test", "its best single tree, test", "oracle, test"]  # fmt: skip
    keys = ("calib_over_static", "test_over_static", "ladder_calib_over_static", "ladder_test_over_static",
            "single_over_static", "oracle_over_static")  # fmt: skip
    return markdown_table(heads, [[row["task"], row["bank"], " ".join(map(str, row["nodes"])),
                                   *(percent(row[key]) for key in keys)] for row in rows], names=3)  # fmt: skip


def _ceiling(rows: list[dict], banks: list[dict]) -> str:
    growing = markdown_table(
        ["task", "policy", "ranked as before", "ranked by the model"],
        [[row["task"], f"`{row['policy']}`", percent(row["same_order"] - 1), percent(row["own_order"] - 1)]
         for row in rows],
        names=2,
    )  # fmt: skip
    over_bank = markdown_table(
        ["task", "the bank's trees by the model, over the static optimum"],
        [[row["task"], percent(row["over_static"] - 1)] for row in banks], names=1,
    )  # fmt: skip
    return growing + "\n" + over_bank


def _signals(rows: list[dict]) -> str:
    names, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("signal", "task"))
    by_key = {(row["task"], row["signal"], row["split"]): row for row in rows}

    def cell(task: str, signal: str) -> str:
        row, calib = (by_key.get((task, signal, split)) for split in ("test", "calib"))
        if row is None:
            return "–"
        before = f"{calib['r']:+.2f}" if calib else "–"
        return f"{before} → {row['r']:+.2f} / {row['mutual_information']:.3f} / {row['auc']:.2f}"

    def information(name: str) -> float:
        found = [row["mutual_information"] for row in rows if row["signal"] == name and row["split"] == "test"]
        return float(np.mean(found)) if found else 0.0

    ordered = sorted(names, key=lambda name: -information(name))
    heads = ["signal", *tasks]
    return markdown_table(heads, [[name, *(cell(task, name) for task in tasks)] for name in ordered], names=1)


def _transfer(rows: list[dict]) -> str:
    tasks = list(dict.fromkeys(row["used_on"] for row in rows))
    found = {(row["policy"], row["fitted_on"], row["used_on"]): row["over_own_static"] for row in rows}
    keys = dict.fromkeys((row["policy"], row["fitted_on"]) for row in rows)
    return markdown_table(
        ["policy", "fitted on", *tasks],
        [[f"`{name}`", fitted, *(gained(found[name, fitted, used]) for used in tasks)]
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
