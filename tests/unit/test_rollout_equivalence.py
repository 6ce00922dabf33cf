"""The live engine of the search sees what replay sees."""

import pytest

from entmtp.calibration.replay import ReplayObserver
from entmtp.calibration.rollout import LiveObserver
from entmtp.calibration.search import grow
from entmtp.tree.topology import Tree


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "sample"])
@pytest.mark.parametrize("arch", ["medusa", "hydra"])
def test_live_and_replayed_observations_are_the_same(traced, trees, arch, mode, stop):
    case = traced(arch, mode, stop)
    live, replay = LiveObserver(case.decoder, case.prompts, case.decoding), ReplayObserver(case.trace)
    deepest = 0
    for tree in trees.values():
        counts = live.observe(tree)
        assert counts == replay.observe(tree)
        assert all(path == () or path in tree.paths for path in counts)
        deepest = max(deepest, *map(len, counts))
    assert deepest > 1 or stop
    assert not case.decoder.compiled.keys() & {*trees.values()}  # a search sees hundreds of trees: none is kept


def test_live_and_replayed_searches_grow_the_same_trees(traced):
    case = traced("hydra")
    live = grow(LiveObserver(case.decoder, case.prompts[1:3], case.decoding), 2, 5, 4)
    trace = type(case.trace)(case.trace.prompts[1:3])
    assert live == grow(ReplayObserver(trace), 2, 5, 4)
    assert live[-1].tree != Tree.of([(0,)])
