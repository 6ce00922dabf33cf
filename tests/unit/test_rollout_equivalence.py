"""The live engine of the search sees what replay sees."""

import pytest

from entmtp.calibration.replay import ReplayObserver
from entmtp.calibration.rollout import LiveObserver
from entmtp.calibration.search import grow
from entmtp.tree.topology import Tree


@pytest.mark.parametrize(
    ("arch", "mode", "stop"),
    [
        ("medusa", "greedy", True),
        ("hydra", "greedy", False),
        ("hydra", "sample", False),
        ("hydra_plus", "greedy", False),
    ],
)
def test_live_and_replayed_observations_are_the_same(traced, trees, arch, mode, stop):
    case = traced(arch, mode, stop)
    live, replay = LiveObserver(case.decoder, case.prompts, case.decoding), ReplayObserver(case.trace)
    deepest = 0
    for name in ("empty", "chain_4", "full", "mc_sim_7b_63", "random_0"):
        tree = trees[name]
        counts = live.observe(tree)
        assert counts == replay.observe(tree)
        assert tree not in case.decoder.compiled  # a search sees hundreds of trees: none is kept
        assert all(path == () or path in tree.paths for path in counts)
        deepest = max(deepest, *map(len, counts))
    assert deepest > (arch != "hydra_plus") or stop


def test_live_and_replayed_searches_grow_the_same_trees(traced):
    case = traced("hydra")
    live = grow(LiveObserver(case.decoder, case.prompts[1:3], case.decoding), 2, 5, 4)
    trace = type(case.trace)(case.trace.prompts[1:3])
    assert live == grow(ReplayObserver(trace), 2, 5, 4)
    assert live[-1].tree != Tree.of([(0,)])
