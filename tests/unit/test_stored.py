"""policy.json as it is read back: what does not fit is one message that names the key."""

import json
from functools import cache
from math import nan
from pathlib import Path

import pytest
from test_fit import make_bank, make_latency, make_trace

from entmtp.config import PolicyConfig
from entmtp.errors import EntmtpError
from entmtp.policy.fit import build_policy, fit_policy
from entmtp.policy.stored import check_stored

PATH = Path("policy.json")


@cache
def _fitted(kind: str) -> str:
    return json.dumps(fit_policy(PolicyConfig(name="x", kind=kind), make_bank(), make_trace(), make_latency()))


def fitted(kind: str) -> dict:
    return json.loads(_fitted(kind))


@pytest.mark.parametrize("kind", ["star", "ladder", "tau", "cost_aware", "adaptive", "bandit"])
def test_what_was_fitted_is_read(kind):
    value = fitted(kind)
    assert check_stored(value, PATH) == value
    assert build_policy(value, make_bank()).name == "x"


def change(value: dict, path: str, new: object) -> dict:
    *parts, last = path.split(".")
    inner = value
    for part in parts:
        inner = inner[part]
    inner[last] = new
    return value


@pytest.mark.parametrize(
    "kind, path, new, said",
    [
        ("cost_aware", "cost_aware", None, "needs 'cost_aware'"),
        ("adaptive", "cost_aware", None, "needs 'cost_aware'"),
        ("bandit", "bandit", None, "needs 'bandit'"),
        ("cost_aware", "cost_aware.window", 0, "key 'cost_aware'"),
        ("cost_aware", "cost_aware.rate", nan, "key 'cost_aware'"),
        ("cost_aware", "cost_aware.rate", 0.0, "key 'cost_aware'"),
        ("cost_aware", "cost_aware.step_ms", [1.0, 0.0, 2.0], "key 'cost_aware'"),
        ("cost_aware", "cost_aware.curves", [{"signal": 3}], "key 'cost_aware'"),
        ("adaptive", "cost_aware.memory", 0, "key 'cost_aware'"),
        ("bandit", "bandit.step_ms", [1.0, 0.0, 2.0], "key 'bandit'"),
        ("bandit", "bandit.explore", -1, "key 'bandit'"),
        ("ladder", "depth", None, "need the 'depth'"),
    ],
)
def test_what_does_not_fit_is_named(kind, path, new, said):
    with pytest.raises(EntmtpError, match=said):
        check_stored(change(fitted(kind), path, new), PATH)


def test_edges_of_a_calibration_must_ascend():
    growing = {"nodes": 2, "beam": 2, "children": 2, "max_depth": 1, "expand": 0.1, "rate": 0.1, "step_ms": [1, 2, 3],
               "calibration": {"edges": [[0.3, 0.2]], "values": [[0.1, 0.2, 0.3]]}}  # fmt: skip
    with pytest.raises(EntmtpError, match="key 'growing'"):
        check_stored({"policy": "m", "kind": "marginal", "growing": growing}, PATH)
    growing["calibration"]["edges"] = [[0.2, 0.3]]
    assert check_stored({"policy": "m", "kind": "marginal", "growing": growing}, PATH)["growing"] == growing


def test_a_ladder_of_one_tree_looks_at_no_signal():
    """Where one tree is best whatever the signal says, none is computed."""
    bank = make_bank()
    for entry in bank.trees[1:]:
        entry.step_ms *= 10  # plain decoding is best everywhere
    value = fit_policy(PolicyConfig(name="x", kind="ladder"), bank, make_trace(), make_latency())
    assert (value["depth"], value["thresholds"], value["trees"]) == (None, [], [0])
    star = {**value, "kind": "star", "trees": [0]}
    policy = build_policy(check_stored(json.loads(json.dumps(value)), PATH), bank)
    assert policy.decide([]) == 0 and policy.depth is None
    from entmtp.policy.fit import replayed_speed

    assert replayed_speed(value, bank, make_trace(), make_latency()) == replayed_speed(
        star, bank, make_trace(), make_latency()
    )
