"""The three tables, from summary rows, as CSV (plain numbers), Markdown and LaTeX (booktabs)."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from entmtp.evaluation import paper
from entmtp.evaluation.stats import geometric_mean
from entmtp.evaluation.summary import REFERENCES
from entmtp.io import atomic, write_text

MISSING = "–"
MEASURED = "measured"
GEOMETRIC = "geometric mean"
ALL_TASKS = "all tasks"

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "×": r"$\times$",
    "τ": r"$\tau$",
    "Δ": r"$\Delta$",
    "–": "--",
    "−": r"$-$",
}


def markdown_table(heads: list[str], rows: list[list[str]], names: int = 2) -> str:
    """A Markdown table whose first `names` columns are names, the rest figures."""
    rule = ["---" if i < names else "---:" for i in range(len(heads))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:])) + "\n"


@dataclass(frozen=True)
class Table:
    """`data` holds numbers for the CSV; `shown` the same rows as text, its columns are the headings."""

    name: str
    caption: str
    data: pd.DataFrame
    shown: pd.DataFrame

    def markdown(self) -> str:
        return markdown_table(list(self.shown.columns), [list(row) for row in self.shown.itertuples(index=False)])

    def latex(self) -> str:
        """A table environment for `\\usepackage{booktabs}`."""
        columns = "".join("l" if i < 2 else "r" for i in range(len(self.shown.columns)))
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{latex_escape(self.caption)}}}"]
        lines += [rf"\label{{tab:{self.name}}}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        lines += [_latex_row(list(self.shown.columns)), r"\midrule"]
        task = None
        for row in self.shown.itertuples(index=False):
            if task is not None and row[0] != task:
                lines.append(r"\addlinespace")
            lines.append(_latex_row(list(row)))
            task = row[0]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    def write(self, folder: str | Path) -> None:
        folder = Path(folder)
        with atomic(folder / f"{self.name}.csv") as partial:
            self.data.to_csv(partial, index=False)
        write_text(folder / f"{self.name}.md", self.markdown())
        write_text(folder / f"{self.name}.tex", self.latex())


def latex_escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_row(cells: list[str]) -> str:
    # braces: a cell that starts with [ would be read as an argument of the \\ before it
    return " & ".join(("{" + latex_escape(c) + "}") if c.startswith("[") else latex_escape(c) for c in cells) + r" \\"


def number(value: float | None, digits: int) -> str:
    return MISSING if value is None or pd.isna(value) else f"{value:.{digits}f}"


def label(row: dict) -> str:
    """The policy's name; a lossy policy is labelled wherever it appears (DESIGN 4)."""
    return row["policy"] + (" (lossy)" if row["lossless"] == "lossy" else "")


def _ratio(value: dict | None) -> str:
    return MISSING if value is None else f"{value['ratio']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _in_task_order(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows))


def speed_table(rows: list[dict]) -> Table:
    """(a) tokens/s and speedups with intervals; the paper's figures in own rows; geometric means over tasks."""
    data, shown = [], []

    def add(task: str, policy: str, heads: str | None, source: str, speed: float | None, ratios: dict, cells: dict):
        entry = {"task": task, "policy": policy, "heads": heads, "source": source, "tokens_per_s": speed}
        for key in REFERENCES:
            value = ratios.get(key) or {}
            entry |= {key: value.get("ratio"), f"{key}_low": value.get("low"), f"{key}_high": value.get("high")}
        data.append(entry)
        name = policy if source == MEASURED else f"{policy}, {source}"
        shown.append([task, name, heads or MISSING, number(speed, 1), *(cells.get(key, MISSING) for key in REFERENCES)])

    for task in _in_task_order(rows):
        for row in (row for row in rows if row["task"] == task):
            cells = {key: _ratio(row[key]) for key in REFERENCES}
            add(task, label(row), row["heads"], MEASURED, row["tokens_per_s"], row, cells)
        theirs = paper.BY_TASK.get(paper.TASKS.get(task, ""))
        if theirs:
            ratio = theirs["over_hydra"]
            add(
                task,
                paper.POLICY,
                "hydra",
                paper.LABEL,
                theirs["tokens_per_s"],
                {"over_hydra": {"ratio": ratio}},
                {"over_hydra": f"{ratio:.2f}"},
            )
    for entry in _geometric_means(rows):
        cells = {key: number(entry[key]["ratio"], 2) for key in REFERENCES if entry[key]}
        add(GEOMETRIC, entry["policy"], entry["heads"], MEASURED, entry["tokens_per_s"], entry, cells)
    ranges = {key: {"low": low, "high": high} for key, (low, high) in paper.OVER_TASKS.items()}
    cells = {
        key: f"up to {high:.2f}" if low is None else f"{low:.2f}–{high:.2f}"
        for key, (low, high) in paper.OVER_TASKS.items()
    }
    add(ALL_TASKS, paper.POLICY, "hydra", paper.LABEL, None, ranges, cells)
    heads = ["task", "policy", "heads", "tokens/s", "× plain decoding", "× hydra", "× medusa"]
    caption = (
        "Tokens per second and speedups (ratios of totals over the test prompts, 95% bootstrap interval over prompts). "
        f"Rows marked {paper.LABEL} are the paper's own figures ({paper.SOURCE}): another model on another machine."
    )
    return Table("speed", caption, pd.DataFrame(data), pd.DataFrame(shown, columns=heads))


def _geometric_means(rows: list[dict]) -> list[dict]:
    """Per policy over tasks; null where a task lacks the value. One task is its own mean and gets no row."""
    tasks = _in_task_order(rows)
    if len(tasks) < 2:
        return []
    means = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        if len(own) < len(tasks):
            continue
        lossy = any(row["lossless"] == "lossy" for row in own)
        mean = {"policy": policy + (" (lossy)" if lossy else ""), "heads": own[0]["heads"]}
        mean["tokens_per_s"] = geometric_mean([row["tokens_per_s"] for row in own])
        for key in REFERENCES:
            values = [row[key]["ratio"] for row in own if row[key]]
            mean[key] = {"ratio": geometric_mean(values)} if len(values) == len(own) else None
        means.append(mean)
    return means


def perplexity_table(rows: list[dict]) -> Table:
    """(b) perplexity of each policy's text under the target, difference to plain decoding, lossless verdict."""
    keys = ["task", "policy", "new_tokens", "ppl", "delta_nats", "lossless"]
    data = [{**{key: row[key] for key in keys}, "policy": label(row), "source": MEASURED} for row in rows]
    shown = [
        [
            row["task"],
            label(row),
            str(row["new_tokens"]),
            number(row["ppl"], 3),
            MISSING if row["delta_nats"] is None else f"{row['delta_nats']:+.4f}".replace("-", "−"),
            row["lossless"],
        ]
        for row in rows
    ]
    data.append({"task": ALL_TASKS, "policy": paper.POLICY, "delta_nats": paper.DELTA_NATS, "source": paper.LABEL})
    within = f"within {paper.DELTA_NATS}"
    shown.append([ALL_TASKS, f"{paper.POLICY}, {paper.LABEL}", MISSING, MISSING, within, MISSING])
    heads = ["task", "policy", "new tokens", "perplexity", "Δ nats/token", "lossless"]
    caption = (
        "Perplexity of each policy's text under the target, its difference to plain decoding's in nats per token, and "
        "the verdict of the comparison with plain decoding's text (exact, tie: numerical ties only, lossy)."
    )
    return Table("perplexity", caption, pd.DataFrame(data), pd.DataFrame(shown, columns=heads))


def tree_shares(shares: dict[str, float]) -> str:
    """ "4: 62%, 8: 38%": nodes of a tree, share of steps."""
    return ", ".join(f"{size}: {100 * shares[size]:.0f}%" for size in sorted(shares, key=int))


def trees_table(rows: list[dict]) -> Table:
    """(c) accept length, num_accepted, shares of trees by size, switches, scheduler and switch time."""
    data, shown = [], []
    for row in rows:
        interval = row["num_accepted_interval"]
        entry = {key: row[key] for key in ("task", "steps", "accept_length", "num_accepted")}
        entry |= {"policy": label(row), "num_accepted_low": interval["low"], "num_accepted_high": interval["high"]}
        entry |= {"tree_shares": tree_shares(row["trees"]), "switches": row["switches"]}
        entry |= {"scheduler_ms": row["scheduler_ms"], "switch_ms": row["switch_ms"]}
        data.append(entry | {"source": MEASURED})
        accepted = f"{row['num_accepted']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"
        shown.append(
            [
                row["task"],
                label(row),
                f"{row['accept_length']:.2f}",
                accepted,
                tree_shares(row["trees"]),
                f"{row['switches']:.2f}",
                f"{row['scheduler_ms']:.3f}",
                f"{row['switch_ms']:.3f}",
            ]
        )
    data.append({"task": ALL_TASKS, "policy": paper.POLICY, "switch_ms": paper.SWITCH_MS, "source": paper.LABEL})
    shown.append([ALL_TASKS, f"{paper.POLICY}, {paper.LABEL}", *[MISSING] * 5, f"< {paper.SWITCH_MS}"])
    heads = [
        "task",
        "policy",
        "accept length",
        "num_accepted",
        "tree nodes: share",
        "switches/step",
        "scheduler ms/step",
        "switch ms/step",
    ]
    caption = (
        "Accept length (committed tokens per step, root included), accepted draft tokens per step (num_accepted, root "
        "excluded, 95% interval over prompts), share of steps by tree size, tree switches, scheduler time "
        "(signal, choice and switch) and switch time (choice and switch alone) per step."
    )
    frame = pd.DataFrame(data)
    order = ["task", "policy", *(column for column in frame.columns if column not in ("task", "policy"))]
    return Table("trees", caption, frame[order], pd.DataFrame(shown, columns=heads))


def build_tables(rows: list[dict]) -> list[Table]:
    """The three tables of a summary's rows: speed, perplexity, trees."""
    return [speed_table(rows), perplexity_table(rows), trees_table(rows)]
