"""Is there more in the signals than `marginal` takes? Its own rule, with acceptance estimated from all of them at once.

`marginal` expects of a candidate what its path probability and depth say. Here a boosted model is asked instead, which
also sees the candidate's own probability, its rank, the heads' best path so far, the target's top-1 probability and
entropy, the position in the text, and how often the first head was right at the positions before. That last signal is
more than any decoder has: at positions inside an accepted path no head is asked. The model is fitted on the calibration
texts and replayed on the test texts, like any policy; it is far too slow to decode with.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from entmtp.calibration.growth import GrowthTrace
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.replay import Trace
from entmtp.policy.fit import build_policy, clock
from entmtp.policy.fit_growing import GrowthFitter
from entmtp.tree.bank import Bank

WINDOW = 8  # positions that the running share of the first head's hits looks back on, by exponential weights
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
    shown, first = np.full(len(growth.depth), 0.5), growth.depth == 1
    right = growth.on_path[np.arange(len(first)), np.argmax(np.where(first, growth.probability, -1.0), axis=1)]
    for start, end in zip(growth.bounds[:-1], growth.bounds[1:], strict=True):
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
