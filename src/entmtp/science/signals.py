"""What predicts acceptance: each signal a scheduler can see before a step, against the tokens that the step accepts.

Everything is read off the positions that a reference tree's own run visits, since a scheduler decides there and nowhere
else. Ranks and signals come from the rank traces; nothing is decoded.
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from entmtp.calibration.replay import Trace
from entmtp.errors import EntmtpError
from entmtp.tree.topology import Tree

WINDOW = 8  # steps that a running mean looks back on, by exponential weights
BINS = 10


def step_table(trace: Trace, frame: pd.DataFrame, tree: Tree, prompt_tokens: dict[str, int]) -> pd.DataFrame:
    """A row per step of the tree's own run: `accepted`, and every signal as it stood before the step.

    `frame` is the trace as stored, which `trace` was made from (it holds the target's margin and the heads' entropies
    too); `prompt_tokens`: by prompt id.
    """
    if "head_entropy" not in frame:
        raise EntmtpError("rank traces without 'head_entropy', of an earlier version: make them again (delete the "
                          "run's traces/ folder)")  # fmt: skip
    margins, of_heads = frame["choice_margin"].to_numpy(float), np.stack(frame["head_entropy"].to_list())
    accepted_at, decay = trace.accepted(tree), 1 - 1 / WINDOW
    rows = []
    for number, prompt in enumerate(trace.prompts):
        first, i, last = int(trace.bounds[number]), 0, len(prompt) - 1
        entropy_sum = entropy_weight = accepted_sum = accepted_weight = 0.0
        previous = np.nan
        while i < last:
            values = prompt.path_values[i]
            entropy_sum, entropy_weight = decay * entropy_sum + prompt.entropy[i], decay * entropy_weight + 1
            count = accepted_at[number][i]
            rows.append(
                {
                    "accepted": count,
                    **{f"path value {d}": values[d] for d in range(len(values))},
                    **{f"head {d} top-1": values[d] / max(values[d - 1], 1e-12) for d in range(1, len(values))},
                    "entropy": prompt.entropy[i],
                    **{f"head {d} entropy": value for d, value in enumerate(of_heads[first + i], 1)},
                    "mean entropy": entropy_sum / entropy_weight,
                    "margin": margins[first + i],
                    "last accepted": previous,
                    "mean accepted": accepted_sum / accepted_weight if accepted_weight else np.nan,
                    "position": i,
                    "context": prompt_tokens[prompt.prompt_id] + i,
                }
            )
            accepted_sum, accepted_weight = decay * accepted_sum + count, decay * accepted_weight + 1
            previous = count
            i += count + 1
    return pd.DataFrame(rows)


def signal_rows(task: str, calib: pd.DataFrame, test: pd.DataFrame) -> list[dict]:
    """Per signal and split: Pearson r, mutual information (nats) and AUC for accepting anything, with num_accepted.

    The last row, `all of them`, is a regression on every signal, fitted on the calibration steps.
    """
    signals = [column for column in calib if column != "accepted"]
    tables = {"calib": calib, "test": test}
    tables = {split: table.assign(**{"all of them": _joint(calib, table, signals)}) for split, table in tables.items()}
    return [
        {
            "task": task,
            "signal": signal,
            "split": split,
            "steps": len(known),
            **measures(known[signal], known["accepted"]),
        }
        for signal in [*signals, "all of them"]
        for split, table in tables.items()
        if len(known := table[["accepted", signal]].dropna())
    ]


def _joint(calib: pd.DataFrame, table: pd.DataFrame, signals: list[str]) -> NDArray[np.float64]:
    """Predictions of num_accepted from all signals; on the calibration steps by five-fold cross-validation."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.model_selection import KFold, cross_val_predict

    model = HistGradientBoostingRegressor(max_depth=4, learning_rate=0.05, max_iter=150, random_state=0)
    if table is calib:
        folds = KFold(min(5, len(calib)))  # in order: neighbours of a text stay together
        return cross_val_predict(model, calib[signals], calib["accepted"], cv=folds)
    return model.fit(calib[signals], calib["accepted"]).predict(table[signals])


def measures(signal: pd.Series, accepted: pd.Series) -> dict[str, float]:
    """{"r", "mutual_information", "auc"}; an AUC of 0.5 tells nothing, below it the signal falls with acceptance."""
    x, y = signal.to_numpy(float), accepted.to_numpy(float)
    varies = x.std() > 0 and y.std() > 0
    return {
        "r": float(np.corrcoef(x, y)[0, 1]) if varies else 0.0,
        "mutual_information": mutual_information(x, y) if varies else 0.0,
        "auc": auc(x, y > 0),
    }


def mutual_information(x: NDArray, y: NDArray) -> float:
    """Between x in ten quantile bins and the counts y, in nats, less the bias of so few samples (Miller and Madow)."""
    edges = np.unique(np.quantile(x, np.linspace(0, 1, BINS + 1)[1:-1]))
    joint = pd.crosstab(np.searchsorted(edges, x, side="left"), y).to_numpy(float)
    n = joint.sum()
    p = joint / n
    rows, columns = p.sum(axis=1, keepdims=True), p.sum(axis=0, keepdims=True)
    there = p > 0
    found = float((p[there] * np.log((p / (rows * columns))[there])).sum())
    bias = ((there.sum()) - (rows > 0).sum() - (columns > 0).sum() + 1) / (2 * n)
    return max(0.0, found - float(bias))


def auc(x: NDArray, positive: NDArray) -> float:
    """Chance that a positive's signal exceeds a negative's, ties half; 0.5 when one kind is missing."""
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return 0.5
    ranks = pd.Series(x).rank().to_numpy()
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
