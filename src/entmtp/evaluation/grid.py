"""Tables as the HTML pages show them: what a cell says, what it sorts by, the task and policy a row belongs to."""

from dataclasses import dataclass

import pandas as pd

from entmtp.evaluation import confadapt_report, paper
from entmtp.evaluation.tables import ALL_TASKS, GEOMETRIC, MISSING, Table, label, number
from entmtp.science import report as scheduling_report
from entmtp.science.headroom import REFERENCES

EVERY = "*"  # a row that no filter on a task (or policy) alone can place: means over tasks, the paper's ranges
PAPER = "paper"  # stands for a policy in the filter

# what columns of the scheduling table sort by
GAINS = [("over_static", "ratio"), ("replayed_over_static", "ratio"), ("hindsight_headroom", "gain"),
         ("oracle_headroom", "gain"), ("frontier_headroom", "gain"), ("captured", "share")]  # fmt: skip

# columns of Table.data that the columns of Table.shown say in words; None: text only
KEYS = {
    "speed": ("task", "policy", "heads", "tokens_per_s", "over_ar", "over_hydra", "over_medusa"),
    "perplexity": ("task", "policy", "new_tokens", "ppl", "delta_nats", "lossless"),
    "trees": ("task", "policy", "accept_length", "num_accepted", None, "switches", "scheduler_ms", "switch_ms"),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """`text`, then an interval in small print. `value` is what a column of numbers sorts by; None: by the text."""

    text: str
    interval: str = ""
    value: float | None = None

    @property
    def is_missing(self) -> bool:
        return self.text == MISSING


@dataclass(frozen=True)
class Row:
    """`task` and `policy`: names that the filter knows, or EVERY, or PAPER."""

    task: str
    policy: str
    cells: list[Cell]


@dataclass(frozen=True)
class Grid:
    """`texts`: how many leading columns are words, not numbers."""

    name: str
    heads: list[str]
    rows: list[Row]
    texts: int = 2


def cell(text: str, value: object = None) -> Cell:
    """Text such as "1.47 [1.27, 1.82]" becomes text and interval. Without a number as `value` it sorts by its text."""
    main, bracket, rest = text.partition(" [")
    sortable = isinstance(value, int | float) and not pd.isna(value)
    return Cell(main, f"[{rest}" if bracket else "", float(value) if sortable else None)


def grid(table: Table) -> Grid:
    """A table of the run, a row's cells beside the numbers that its CSV holds."""
    keys = KEYS[table.name]
    rows = []
    for shown, data in zip(table.shown.values.tolist(), table.data.to_dict("records"), strict=True):
        cells = [cell(text, data[key] if key else None) for text, key in zip(shown, keys, strict=True)]
        theirs = data["source"] == paper.LABEL
        task = EVERY if data["task"] in (GEOMETRIC, ALL_TASKS) else data["task"]
        rows.append(Row(task, PAPER if theirs else data["policy"].removesuffix(" (lossy)"), cells))
    return Grid(table.name, list(table.shown.columns), rows, texts=3 if table.name == "speed" else 2)


def ratio_cell(value: dict | None) -> Cell:
    if value is None:
        return Cell(MISSING)
    return cell(f"{value['ratio']:.2f}× [{value['low']:.2f}, {value['high']:.2f}]", value["ratio"])


def headline_grid(rows: list[dict]) -> Grid:
    """`rows` of the summary, one a task (report.headlines)."""
    heads = ["task", "fastest policy", "tokens/s", "over plain decoding", "over hydra", "over medusa", "lossless"]
    made = [
        Row(
            row["task"],
            EVERY,
            [
                Cell(row["task"]),
                Cell(label(row)),
                cell(number(row["tokens_per_s"], 1), row["tokens_per_s"]),
                *(ratio_cell(row[key]) for key in ("over_ar", "over_hydra", "over_medusa")),
                Cell(row["lossless"]),
            ],
        )
        for row in rows
    ]
    return Grid("headlines", heads, made)


def second_grid(rows: list[dict], policies: list[str]) -> Grid:
    """The second method's rows (confadapt.json); only those of this run's `policies` have one for the filter."""
    made = []
    for row in rows:
        values = [None, None, row["accuracy"], row["tokens_per_forward"], row["tokens_per_s"],
                  row["over_plain"]["ratio"], row["ppl"], row["same_text"], row["original_text"], None]  # fmt: skip
        cells = [cell(text, value) for text, value in zip(confadapt_report.shown(row), values, strict=True)]
        made.append(Row(row["task"], row["method"] if row["method"] in policies else EVERY, cells))
    return Grid("confadapt", confadapt_report.COLUMNS, made)


def scheduling_grid(rows: list[dict]) -> Grid:
    """What scheduling is worth: rows of scheduling.json but for the two that others are compared with."""
    made = []
    for row in rows:
        if row["policy"] in REFERENCES:
            continue
        values = [None, None, *(row[key] and row[key][of] for key, of in GAINS[:2]), row["calib_over_static"],
                  *(row[key] and row[key][of] for key, of in GAINS[2:]), row["scheduler_ms"]]  # fmt: skip
        cells = [cell(text, value) for text, value in zip(scheduling_report.shown(row), values, strict=True)]
        made.append(Row(row["task"], row["policy"], cells))
    return Grid("scheduling", scheduling_report.COLUMNS, made)


def verdict_grid(verdicts: list[dict]) -> Grid:
    """Lossless and replay verdicts (report.verdicts), a row per task × policy."""
    heads = ["task", "policy", "lossless", "prompts", "differences", "replay", "steps"]
    rows = []
    for row in verdicts:
        counts = [row["lossless"]["prompts"], row["lossless"]["differences"], row["replay"]["steps"]]
        prompts, differences, steps = (cell(str(count), count) for count in counts)
        cells = [Cell(row["task"]), Cell(row["policy"]), Cell(row["lossless"]["verdict"]), prompts, differences,
                 Cell(row["replay"]["verdict"]), steps]  # fmt: skip
        rows.append(Row(row["task"], row["policy"], cells))
    return Grid("verdicts", heads, rows)
