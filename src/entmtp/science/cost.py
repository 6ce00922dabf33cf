"""Target forwards that the offline stages need: the paper's re-running of the model, and one pass over known texts."""

from entmtp.calibration.replay import Trace, self_rollout
from entmtp.tree.topology import Tree


def forward_counts(task: str, frontier: list[Tree], trace: Trace) -> dict:
    """{"task", "paper", "here"} for one task and kind of heads.

    The paper's greedy construction runs the model over all calibration prompts for each tree on the search's way (the
    union with its candidates; FACTS 5), its recalibration once more for each tree: the steps of those runs are counted
    by replay, the union's as the tree's own, which it undercuts a little. Timing is left out on both sides. Here every
    calibration text takes one step a token to make and one pass to trace.
    """
    rollouts = sum(self_rollout(trace, tree).steps for tree in frontier)
    return {"task": task, "paper": 2 * rollouts, "here": int(trace.bounds[-1]) + len(trace.prompts)}
