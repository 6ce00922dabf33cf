"""How near a growing policy's decision was: the relative error of probabilities that would have grown another tree."""

from dataclasses import replace

import numpy as np

from entmtp.calibration.growth import decision_margin, join
from entmtp.policy.growing import Calibration, GrowingPolicy


def test_the_margin_is_the_error_that_grows_another_tree():
    """Two heads by hand: .6/.3 under the root; the first of them is expanded into .5 and .2 of it."""
    trace = join([{
        "probability": np.array([[0.6, 0.3, 0.3, 0.12, 0.15, 0.06]]),
        "depth": np.array([[1, 1, 2, 2, 2, 2]], dtype=np.int8),
        "parent": np.array([[-1, -1, 0, 0, 1, 1]], dtype=np.int16),
        "on_path": np.zeros((1, 6), dtype=bool),
    }], beam=2, children=2)  # fmt: skip
    policy = GrowingPolicy("d", [], nodes=2, beam=2, children=2, max_depth=2, expand=0.35)
    # seen: .6 .3 | .3 .12 (only .6 is expanded); kept .6 and the shallower .3: the next is equally likely
    assert decision_margin(trace, policy, 0) == 1e-6
    assert decision_margin(trace, replace(policy, nodes=3), 0) == 1.0  # .3 against expand: a seventh
    assert decision_margin(trace, replace(policy, nodes=3, expand=0.305), 0) == 1e-1
    assert decision_margin(trace, replace(policy, nodes=1, expand=0.3001), 0) == 1e-3
    assert decision_margin(trace, replace(policy, nodes=1, expand=0.2, beam=1), 0) == 1.0

    def priced(edges: list[list[float]], values: list[list[float]], rate: float) -> GrowingPolicy:
        return replace(policy, nodes=4, expand=0.35, rate=rate, step_ms=[10.0, 11.0, 12.0, 13.0, 14.0],
                       calibration=Calibration(edges, values))  # fmt: skip

    # a node costs .2 tokens: .6 (worth .7), the shallower .3 (worth .4), and .3 below .6 (worth .05 or .25)
    far = priced([[0.5], [0.2]], [[0.4, 0.7], [0.05, 0.25]], 0.2)
    assert far.size([(0.6, 1), (0.3, 1), (0.3, 2), (0.12, 2)]) == 3
    assert decision_margin(trace, far, 0) == 1.0  # .3 against .2, and against expand
    near = priced([[0.5], [0.2999]], [[0.4, 0.7], [0.05, 0.25]], 0.2)
    assert decision_margin(trace, near, 0) == 1e-3  # below the edge it is not worth its node
    # as near, but on either side of the edge it is worth its node
    assert decision_margin(trace, priced([[0.5], [0.2999]], [[0.4, 0.7], [0.22, 0.25]], 0.2), 0) == 1.0
    # an edge of the other depth is none of its business
    assert decision_margin(trace, priced([[0.5, 0.6001], [0.2]], [[0.4, 0.7, 0.8], [0.05, 0.25]], 0.2), 0) == 1.0
