"""The table of the second method: our rows, and the paper's beside them."""

from entmtp.evaluation.stats import share_interval
from entmtp.evaluation.tables import markdown_table

# arXiv 2602.06019 as quoted in the project's facts: GSM8K; accuracy and tokens a forward
PAPER = [
    ("Llama-3.1-8B", "k=1", 0.660, 1.0),
    ("Llama-3.1-8B", "confadapt 0.99", 0.660, 2.1),
    ("Llama-3.1-8B", "confadapt 0.9", 0.641, 3.3),
    ("Llama-3.1-8B", "confadapt 0.7", 0.550, 5.1),
    ("Llama-3.1-8B", "static k=3", 0.530, 3.0),
    ("Qwen3-4B", "k=1", 0.891, 1.0),
    ("Qwen3-4B", "confadapt 0.9", 0.836, 3.1),
]

COLUMNS = ["task", "method", "accuracy", "tokens a forward", "tokens/s", "over own plain decoding", "perplexity",
           "same text", "original's text", "lossless"]  # fmt: skip


def shown(row: dict) -> list[str]:
    """A row's cells, one for each of COLUMNS."""
    return [
        row["task"],
        row["method"],
        accuracy(row),
        forwards(row),
        f"{row['tokens_per_s']:.1f}",
        f"{row['over_plain']['ratio']:.2f} [{row['over_plain']['low']:.2f}, {row['over_plain']['high']:.2f}]",
        f"{row['ppl']:.2f}",
        *("–" if row[key] is None else f"{100 * row[key]:.0f}%" for key in ("same_text", "original_text")),
        row["lossless"],
    ]


def markdown(rows: list[dict]) -> str:
    """Our rows by task, then the paper's (another model, GSM8K: not comparable in absolute terms)."""
    ours = [shown(row) for row in rows]
    theirs = [["paper: GSM8K", f"{model}, {method}", f"{accuracy:.3f}", f"{tokens:.1f}", *["–"] * 6]
              for model, method, accuracy, tokens in PAPER]  # fmt: skip
    note = (
        "`k=1`, `static`, `confadapt` and `masks` run the self-distilled model; all but `k=1` are lossy. `confadapt` "
        "commits the longest prefix of predictions that are so sure; `masks` asks this of all but the first one, which "
        "is plain decoding's own and committed in any case. Where its adapters act on masks only, `k=1` is the "
        "original model. "
        "`lossless_self` verifies that model's blocks against its own `k=1` in the forward that drafts the next ones; "
        "`lossless_draft` verifies them with the original model, and its tokens a forward count that model's forwards, "
        "with the drafting model's beside them. The others run the original model alone (`original k=1`, timed beside "
        "`lossless_draft`; `ar`) or with draft heads, verified. Perplexity is the original model's. *Own plain "
        "decoding* and *same text*: of the model that wrote the text; *original's text*: as the original model writes "
        "it plainly. Intervals are of 95%, Wilson's for the accuracy. *lossless*: exact, or tie where every first "
        "difference is a numerical tie.\n"
    )
    return markdown_table(COLUMNS, [*ours, *theirs]) + "\n" + note + _unjudged(rows)


def accuracy(row: dict) -> str:
    """With its 95% interval, or a dash where answers were not judged."""
    if row["accuracy"] is None:
        return "–"
    low, high = share_interval(row["accuracy"], row["prompts"])
    return f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def forwards(row: dict) -> str:
    """Tokens a forward, of the model whose text it is; another model's forwards are named."""
    own = f"{row['tokens_per_forward']:.2f}"
    return own if row["drafter_forwards"] is None else f"{own} (+ {row['drafter_forwards']:.2f} of the drafting model)"


def _unjudged(rows: list[dict]) -> str:
    """Why some tasks have no accuracy."""
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["accuracy"] is None))
    if not tasks:
        return ""
    return (
        f"\n{', '.join(tasks)}: no accuracy. The answers are programs, and what a model wrote is executed on demand "
        "only (in a sandbox): `confadapt.execute_code=true`.\n"
    )
