"""The ceiling of growing policies: finds what path probabilities do not say, and nothing where they say everything."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from test_fit import STEP_MS, TREES, make_bank, make_trace

from entmtp.calibration.growth import GrowthTrace, columns, join
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.oracle import oracle
from entmtp.calibration.replay import PromptTrace, Trace
from entmtp.config import PolicyConfig
from entmtp.policy.fit import fit_policy
from entmtp.science.ceiling import (
    bank_ceiling_row,
    bank_signals,
    ceiling_row,
    estimate,
    fit_acceptance,
    ranking,
    recent_hits,
    signals,
)

BEAM, CHILDREN, DEPTH = 2, 2, 2
LAYOUT = [(-1, 1), (-1, 1), (0, 2), (0, 2), (1, 2), (1, 2)]  # parent, depth of a column
SIZES = [1, 2, 3, 6, 8]  # a node is dear: to verify one in vain costs a third of a step


def made_trace(seed: int, told_by_entropy: bool, prompts: int = 30, length: int = 60) -> Trace:
    """Texts whose next tokens are drafted with certainty .6 at each depth. They are right as often as that says; or,
    told by the entropy alone, in one half of the positions always and in the other hardly ever."""
    rng, parts, texts = np.random.default_rng(seed), [], []
    parent, depth = (np.array(column) for column in zip(*LAYOUT, strict=True))
    for number in range(prompts):
        entropy = rng.random(length)
        likely = np.where(entropy > 0.5, 0.97, 0.23) if told_by_entropy else np.full(length, 0.6)
        conditional = np.where(np.arange(len(LAYOUT)) % 2 == 0, 0.6, 0.3) * rng.uniform(0.9, 1.1, (length, len(LAYOUT)))
        probability, on_path = np.ones((length, len(LAYOUT))), np.zeros((length, len(LAYOUT)), bool)
        right = np.where(rng.random((length, DEPTH)) < likely[:, None], 0, 2)
        for column, (above, level) in enumerate(LAYOUT):
            before = probability[:, above] if above >= 0 else 1.0
            probability[:, column] = before * conditional[:, column]
            reached = on_path[:, above] if above >= 0 else True
            inside = np.arange(length) + level < length
            on_path[:, column] = reached & inside & (right[:, level - 1] == column % 2)
        parts.append({"probability": probability, "depth": np.tile(depth.astype(np.int8), (length, 1)),
                      "parent": np.tile(parent.astype(np.int16), (length, 1)), "on_path": on_path})  # fmt: skip
        values = np.full((length, DEPTH + 1), 0.5)
        texts.append(PromptTrace(f"p{number}", np.ones((length, DEPTH), np.int64), values, entropy,
                                 np.ones((length, DEPTH))))  # fmt: skip
    trace = Trace(texts)
    trace.growth = join(parts, BEAM, CHILDREN)
    return trace


def row_of(told_by_entropy: bool) -> dict:
    calib, test = made_trace(0, told_by_entropy), made_trace(1, told_by_entropy)
    bank = make_bank()
    latency = LatencyTable(SIZES, [8 + 3.0 * n for n in SIZES], [1, 4], [[0.5, 0.5]] * DEPTH, 0.3, 9.0, "hydra")
    fitted = fit_policy(PolicyConfig(name="marginal", kind="marginal", nodes=8), bank, calib, latency)
    return ceiling_row("t", fitted, bank, calib, test, latency)


def test_the_fixture_is_a_full_expansion():
    assert columns(BEAM, CHILDREN, DEPTH) == len(LAYOUT)


def test_a_signal_that_paths_do_not_show_is_found():
    row = row_of(told_by_entropy=True)
    assert (row["task"], row["policy"]) == ("t", "marginal")
    assert row["same_order"] > 1.03
    assert row["own_order"] > 1.03


def test_nothing_is_found_where_paths_say_everything():
    row = row_of(told_by_entropy=False)
    assert 0.97 < row["same_order"] < 1.01


def test_a_child_is_never_expected_to_be_accepted_more_often_than_its_parent():
    trace = made_trace(2, told_by_entropy=True)
    growth = trace.growth
    expected = estimate(fit_acceptance(signals(trace), growth), signals(trace), growth)
    assert ((expected >= 0) & (expected <= 1)).all()
    for column, (above, _) in enumerate(LAYOUT):
        if above >= 0:
            assert (expected[:, column] <= expected[:, above]).all()
    assert roc_auc_score(growth.on_path.ravel(), expected.ravel()) > 0.9
    order = ranking(expected, growth.depth)
    for i in range(0, len(order), 97):
        place = {column: at for at, column in enumerate(order[i].tolist())}
        assert sorted(place) == list(range(len(LAYOUT)))
        assert all(place[above] < place[column] for column, (above, _) in enumerate(LAYOUT) if above >= 0)
        assert (np.diff(expected[i, order[i]]) <= 0).all()


def test_recent_hits_know_only_the_past_of_their_own_text():
    def growth(right: list[bool], bounds: list[int]) -> GrowthTrace:
        n = len(right)
        return GrowthTrace(
            np.tile([0.6, 0.3], (n, 1)), np.ones((n, 2), np.int8), np.full((n, 2), -1, np.int16),
            np.array([[hit, False] for hit in right]), np.tile(np.arange(2, dtype=np.int16), (n, 1)),
            np.array(bounds), 1, 2,
        )  # fmt: skip

    shown = recent_hits(growth([True, True, False, True, True], [0, 3, 5]))
    assert shown.tolist() == pytest.approx([0.5, 0.5625, 0.6171875, 0.5, 0.5625])


def test_a_banks_ceiling_finds_what_its_signals_say_and_nothing_in_noise():
    bank, calib, test = make_bank(), make_trace(0, 60), make_trace(1, 60)  # acceptance follows the path value
    told = bank_ceiling_row("t", bank, calib, test)
    assert told["task"] == "t" and told["over_static"] > 1.005
    for trace in (calib, test):
        rng = np.random.default_rng(len(trace.prompts))
        for prompt in trace.prompts:  # the same acceptance, beside signals of nothing
            prompt.path_values = np.sort(rng.random(prompt.path_values.shape))[:, ::-1]
    untold = bank_ceiling_row("t", bank, Trace(calib.prompts), Trace(test.prompts))
    assert 0.985 < untold["over_static"] < told["over_static"] - 0.005
    best = oracle(test, TREES, STEP_MS)
    assert told["over_static"] <= best.tokens_per_s / best.static_tokens_per_s


def test_a_banks_signals_are_known_before_a_step():
    trace = make_trace(2)
    before = bank_signals(trace)
    at = 57
    trace.ranks[at:, 0] = 5  # what happens at a position and after it
    assert (bank_signals(trace)[: at + 1] == before[: at + 1]).all()
    assert before.shape[1] == 3 + 2 + 3
