"""Is there more in the signals than policies take? Their own rules, with acceptance estimated from all at once.

`marginal` expects of a candidate what its path probability and depth say. Here a boosted model is asked instead, which
also sees the candidate's own probability, its rank, the heads' best path so far, the target's top-1 probability and
entropy, the position in the text, and how often the first head was right at the positions before. That last signal is
more than any decoder has: at positions inside an accepted path no head is asked. The model is fitted on the calibration
texts and replayed on the test texts, like any policy; it is far too slow to decode with.

Policies over a bank have a ceiling of the same kind: `cost_aware`'s rule, with each tree's num_accepted estimated by a
boosted model of what its signals say, the entropies and the position among them, and nothing paid for looking.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from entmtp.calibration import kernels
from entmtp.calibration.growth import GrowthTrace
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace
from entmtp.policy.fit import build_policy, clock
from entmtp.policy.fit_growing import GrowthFitter
from entmtp.tree.bank import Bank

WINDOW = 8  # positions that the running share of the first head's hits looks back on, by exponential weights
TRUST = (0.0, 0.25, 0.5, 0.75, 1.0)  # how far a bank's ceiling follows the model's estimates
FACTORS = tuple(np.linspace(0.6, 1.6, 11))  # prices of time that it tries, about the fixed point's
LEAST = 0.003  # candidates below this path probability are never worth a node: left out of the fit


def ceiling_row(task: str, fitted: dict, bank: Bank, calib: Trace, test: Trace, latency: LatencyTable) -> dict:
    """Replayed speed on the test texts with boosted estimates over that of the fitted growing policy itself:
    {"task", "policy", "same_order", "own_order"}, candidates ranked as the policy ranks them or by the estimates."""
    policy, growth = build_policy(fitted, bank), test.growth
    model = fit_acceptance(signals(calib), calib.growth)
    expected = estimate(model, signals(test), growth)
    scale = clock(bank, latency)
    own = GrowthFitter(growth, latency, policy.nodes, scale).speed(policy)
    ranked = replace(growth, order=ranking(expected, growth.depth))
    speeds = {
        name: GrowthFitter(trace, latency, policy.nodes, scale).speed(policy, expected)
        for name, trace in {"same_order": growth, "own_order": ranked}.items()
    }
    return {"task": task, "policy": fitted["policy"], **{name: speed / own for name, speed in speeds.items()}}


def bank_ceiling_row(task: str, bank: Bank, calib: Trace, test: Trace) -> dict:
    """Replayed speed on the test texts of the bank's trees chosen by boosted estimates of all signals, over that of the
    static optimum: {"task", "over_static"}. The price of time, and how far the estimates are trusted, are fitted on
    the calibration texts, with estimates of models that did not see them."""
    trees = [entry.tree for entry in bank.trees]
    step_ms = np.array([entry.step_ms for entry in bank.trees])
    known = {split: bank_signals(trace) for split, trace in (("calib", calib), ("test", test))}
    lengths = calib.lengths(trees)
    seen = _estimates(known["calib"], lengths, known["calib"], calib.bounds)
    mean = lengths.mean(axis=1, keepdims=True)
    base = max(_rates(calib, trees, seen, step_ms))
    options = [(trust, factor * base) for trust in TRUST for factor in FACTORS]
    trust, rate = max(options, key=lambda option: _bank_speed(calib, trees, _shrunk(seen, mean, option[0]), step_ms,
                                                             option[1]))  # fmt: skip
    estimates = _shrunk(_estimates(known["calib"], lengths, known["test"]), mean, trust)
    speed = _bank_speed(test, trees, estimates, step_ms, rate)
    steps = kernels.walk(test.length(trees[bank.star]), test.bounds)[0]
    tokens = int(test.bounds[-1]) - len(test.prompts)
    return {"task": task, "over_static": float(speed * step_ms[bank.star] * steps / tokens)}


def _shrunk(estimates: NDArray, mean: NDArray, trust: float) -> NDArray[np.float64]:
    """Estimates between each tree's own mean (0 trust: always the same tree) and the model's."""
    return mean + trust * (estimates - mean)


def bank_signals(trace: Trace) -> NDArray[np.float64]:
    """What is known at every position [N, signals] before a tree is drafted, and the running share of the first head's
    hits, which is more than any decoder knows."""
    values = np.concatenate([prompt.path_values for prompt in trace.prompts])
    certain = values[:, 1:] / np.maximum(values[:, :-1], 1e-12)
    entropy = np.concatenate([prompt.entropy for prompt in trace.prompts])
    place = np.concatenate([np.arange(float(len(prompt))) for prompt in trace.prompts])
    shown = recent(trace.ranks[:, 0] == 0, trace.bounds)
    return np.column_stack([values, certain, entropy, place, shown])


def _estimates(
    known: NDArray, lengths: NDArray, asked: NDArray, bounds: NDArray | None = None
) -> NDArray[np.float64]:  # fmt: skip
    """num_accepted [trees, N] of the positions `asked`, by a model a tree fitted on `known` [M, signals] and `lengths`
    [trees, M]. With `bounds` (`asked` is `known`) each text's by models that were fitted on others."""
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.model_selection import GroupKFold, cross_val_predict

    model = HistGradientBoostingRegressor(max_iter=100, learning_rate=0.06, max_leaf_nodes=15, min_samples_leaf=60,
                                          random_state=0)  # fmt: skip
    if bounds is None or len(bounds) < 3:  # a single text must serve as both
        return np.stack([model.fit(known, own).predict(asked) for own in lengths])
    text = np.searchsorted(bounds, np.arange(len(known)), side="right")
    folds = GroupKFold(min(5, len(bounds) - 1))
    return np.stack([cross_val_predict(model, known, own, groups=text, cv=folds) for own in lengths])


def _rates(trace: Trace, trees: list, estimates: NDArray, step_ms: NDArray) -> list[float]:
    """Prices of time on the way to Dinkelbach's fixed point."""
    rates = [1 / float(step_ms.min())]
    for _ in range(12):
        rates.append(_bank_speed(trace, trees, estimates, step_ms, rates[-1]))
        if abs(rates[-1] - rates[-2]) < 1e-9:
            break
    return rates


def _bank_speed(trace: Trace, trees: list, estimates: NDArray, step_ms: NDArray, rate: float) -> float:
    """Replayed tokens a millisecond where each step takes the tree whose estimate is worth most at this price."""
    choices = np.argmax(estimates - rate * step_ms[:, None], axis=0)
    uses = np.zeros(len(trees), dtype=np.int64)
    kernels.walk_choices(trace.lengths(trees), choices, trace.bounds, uses)
    return (int(trace.bounds[-1]) - len(trace.prompts)) / float(uses @ step_ms)


def signals(trace: Trace) -> NDArray[np.float64]:
    """What is known of every candidate [N, C, signals]."""
    growth = trace.growth
    n, c = growth.depth.shape
    log_p = np.log(np.maximum(growth.probability, 1e-9))
    above = np.where(growth.parent >= 0, _of_parents(log_p, growth), 0.0)
    best = [np.max(growth.probability, axis=1, where=growth.depth == d, initial=0.0) for d in (1, 2)]
    of_position = [
        *best,
        np.concatenate([prompt.path_values[:, 0] for prompt in trace.prompts]),
        np.concatenate([prompt.entropy for prompt in trace.prompts]),
        np.concatenate([np.arange(float(len(prompt))) for prompt in trace.prompts]),
        recent_hits(growth),
    ]
    own = [log_p, log_p - above, growth.depth.astype(float), np.broadcast_to(np.arange(c) % growth.children, (n, c))]
    return np.stack([*own, *(np.broadcast_to(value[:, None], (n, c)) for value in of_position)], axis=-1)


def recent_hits(growth: GrowthTrace) -> NDArray[np.float64]:
    """Running share, before each position [N], of positions of its text where the first head's likeliest was right."""
    first = growth.depth == 1
    right = growth.on_path[np.arange(len(first)), np.argmax(np.where(first, growth.probability, -1.0), axis=1)]
    return recent(right, growth.bounds)


def recent(right: NDArray[np.bool_], bounds: NDArray) -> NDArray[np.float64]:
    """Running share of hits [N] before each position of its text, by exponential weights; a half where none is."""
    shown = np.full(len(right), 0.5)
    for start, end in pairwise(bounds.tolist()):
        for i in range(start + 1, end):
            shown[i] = shown[i - 1] + (right[i - 1] - shown[i - 1]) / WINDOW
    return shown


def fit_acceptance(known: NDArray, growth: GrowthTrace):
    """Classifier of "this candidate is accepted if verified" over the likely candidates of all positions."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    likely = growth.probability > LEAST
    model = HistGradientBoostingClassifier(max_iter=120, learning_rate=0.06, max_leaf_nodes=15, min_samples_leaf=80,
                                           l2_regularization=1.0, random_state=0)  # fmt: skip
    return model.fit(known[likely], growth.on_path[likely])


def estimate(model, known: NDArray, growth: GrowthTrace) -> NDArray[np.float64]:
    """Expected acceptance [N, C], of a child never above its parent's: what is accepted is accepted with its path."""
    likely = growth.probability > LEAST
    expected = np.zeros(likely.shape)
    expected[likely] = model.predict_proba(known[likely])[:, 1]
    for depth in range(2, int(growth.depth.max()) + 1):
        bounded = np.minimum(expected, _of_parents(expected, growth))
        expected = np.where(growth.depth == depth, bounded, expected)
    return expected


def ranking(expected: NDArray, depth: NDArray) -> NDArray[np.int16]:
    """Columns [N, C] by expected acceptance, parents before children."""
    column = np.broadcast_to(np.arange(depth.shape[1]), depth.shape)
    return np.lexsort((column, depth, -expected), axis=1).astype(np.int16)


def _of_parents(values: NDArray, growth: GrowthTrace) -> NDArray:
    return np.take_along_axis(values, np.maximum(growth.parent, 0).astype(np.int64), axis=1)
