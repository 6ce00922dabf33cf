"""Scheduling's analyses: signals against brute force, complementary banks, transfer, headroom."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import trace_fixture
from eval_fixture import bench as timed
from sklearn.metrics import roc_auc_score
from test_fit import STEP_MS, TREES, make_bank, make_latency, make_trace

from entmtp.calibration.oracle import oracle
from entmtp.calibration.replay import replay_policy, self_rollout
from entmtp.config import PlotConfig, PolicyConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation.figures_science import headroom, predicted_against_measured
from entmtp.evaluation.schema import check_schema
from entmtp.policy.fit import fit_policy, replayed_speed
from entmtp.policy.schedulers import Policy
from entmtp.science import banks, signals, transfer
from entmtp.science.cost import forward_counts
from entmtp.science.headroom import headroom_rows, prediction_errors
from entmtp.science.prices import Texts
from entmtp.science.report import combine, markdown
from entmtp.tree.topology import Tree

FRONTIER = [*TREES[1:], Tree.of([(0,)]), Tree.of([(0,), (1,)])]
CEILING = {"policy": "marginal", "same_order": 1.01, "own_order": 0.99}
CEILING_LINE = "| one | `marginal` | +1.0% | -1.0% |"


def fitted(kind: str, name: str = "x", bank=None, trace=None) -> dict:
    return fit_policy(PolicyConfig(name=name, kind=kind), bank or make_bank(), trace or make_trace(), make_latency())


def frame_of(trace) -> pd.DataFrame:
    rng = np.random.default_rng(5)
    entropies = rng.random((len(trace.ranks), trace.depth)).tolist()
    return pd.DataFrame({"choice_margin": rng.random(len(trace.ranks)), "head_entropy": entropies})


def tokens_before(trace) -> dict[str, int]:
    return {prompt.prompt_id: 10 * number for number, prompt in enumerate(trace.prompts, 1)}


def test_mutual_information_of_nothing_and_of_everything():
    rng = np.random.default_rng(0)
    x, y = rng.random(20000), rng.integers(0, 4, 20000).astype(float)
    assert signals.mutual_information(x, y) < 2e-3
    five = np.repeat(np.arange(5.0), 4000)  # bins of a tenth each cut at its steps
    assert signals.mutual_information(five + 0.1 * x, five) == pytest.approx(np.log(5), abs=0.02)
    half = np.where(rng.random(20000) < 0.5, y, rng.integers(0, 4, 20000))
    assert 0.1 < signals.mutual_information(half, y) < 0.6


@pytest.mark.parametrize("levels", [3, 1000])
def test_auc_is_scikit_learns(levels):
    rng = np.random.default_rng(1)
    x, positive = rng.integers(0, levels, 300).astype(float), rng.random(300) < 0.3
    assert signals.auc(x, positive) == pytest.approx(roc_auc_score(positive, x))
    assert signals.auc(x, np.ones(300, bool)) == 0.5


def test_step_tables_hold_what_was_known_before_each_step():
    trace, tree = make_trace(3, prompts=4), TREES[2]
    frame = frame_of(trace)
    table = signals.step_table(trace, frame, tree, tokens_before(trace))
    runs = replay_policy(trace, Policy("p", [tree]))
    assert table["accepted"].tolist() == [step.accepted for run in runs for step in run]
    assert table["position"].tolist() == [step.position for run in runs for step in run]
    at = 0
    for number, run in enumerate(runs):
        before: list[int] = []
        for step in run:
            row = table.iloc[at]
            flat = trace.bounds[number] + step.position
            assert row["path value 1"] == trace.prompts[number].path_values[step.position, 1]
            assert row["margin"] == frame["choice_margin"][flat]
            assert [row["head 1 entropy"], row["head 2 entropy"]] == frame["head_entropy"][flat]
            assert row["context"] == 10 * (number + 1) + step.position
            if before:
                weights = (1 - 1 / signals.WINDOW) ** np.arange(len(before))[::-1]
                assert row["last accepted"] == before[-1]
                assert row["mean accepted"] == pytest.approx(np.dot(weights, before) / weights.sum())
            else:
                assert np.isnan(row["last accepted"]) and np.isnan(row["mean accepted"])
            before.append(step.accepted)
            at += 1
    assert at == len(table)


def test_all_signals_together_are_judged_on_what_they_were_not_fitted_on():
    calib, test = (
        signals.step_table(trace, frame_of(trace), TREES[2], tokens_before(trace))
        for trace in (make_trace(0, 20), make_trace(1, 20))
    )
    rows = signals.signal_rows("t", calib, test)
    by_key = {(row["signal"], row["split"]): row for row in rows}
    assert by_key["path value 0", "test"]["r"] > 0.3  # the fixture's acceptance follows it
    assert by_key["all of them", "test"]["r"] > 0.3
    assert abs(by_key["position", "test"]["r"]) < 0.15
    assert by_key["all of them", "calib"]["r"] < 0.9  # cross-validated: a fit to its own rows would be near 1
    # noise tells nothing, not even on the split that the model was fitted on
    noise = calib.assign(accepted=np.random.default_rng(0).permutation(calib["accepted"]))
    rows = signals.signal_rows("t", noise, test)
    assert abs(next(row["r"] for row in rows if (row["signal"], row["split"]) == ("all of them", "calib"))) < 0.2


def test_complementary_banks_grow_by_the_best_tree():
    trace, bank, latency = make_trace(0, 12), make_bank(), make_latency()
    entries = banks.priced([Tree(()), *FRONTIER], trace, bank, latency, {})
    assert [entry.step_ms for entry in entries[:3]] == STEP_MS  # what the bank measured is kept
    clock = STEP_MS[1] / latency.step(TREES[1])  # others cost what the table says, on the bank's clock
    assert entries[-1].step_ms == pytest.approx(clock * latency.step(FRONTIER[-1])) and abs(clock - 1) > 0.05
    left_out = {FRONTIER[-1]: 77.0}  # timed, and not in the bank
    again = banks.priced([Tree(()), *FRONTIER], trace, bank, latency, left_out)
    assert [entry.step_ms for entry in again] == [*(entry.step_ms for entry in entries[:-1]), 77.0]
    made = banks.complementary(entries, trace, latency, 4, bank)
    assert [len(one.trees) for one in made] == [1, 2, 3, 4]
    sets = [{entry.tree for entry in one.trees} for one in made]
    assert all(small < large for small, large in pairwise(sets))
    first = max(entries, key=lambda entry: entry.tokens_per_s)
    assert sets[0] == {first.tree}
    pairs = [banks._bank([first, other], bank) for other in entries if other is not first]
    speeds = [banks._speed(pair, trace, trace, latency) for pair in pairs]
    assert banks._speed(made[1], trace, trace, latency) == max(speeds)


def test_bank_rows_are_relative_to_the_static_optimum_of_each_split():
    calib, test = make_trace(0, 12), make_trace(1, 12)
    rows = banks.bank_rows("t", make_bank(), FRONTIER, calib, test, make_latency(), 3, 10, {})
    assert [(row["bank"], row["trees"]) for row in rows] == [("pareto", 3), ("complementary", 2), ("complementary", 3)]
    assert all(row["oracle_over_static"] >= row["test_over_static"] for row in rows)
    assert all(row["oracle_over_static"] >= row["ladder_test_over_static"] for row in rows)
    assert all(row["oracle_over_static"] >= row["single_over_static"] for row in rows)
    assert rows[1]["calib_over_static"] > 0  # the fixture's stretches are worth switching for
    assert rows[1]["ladder_calib_over_static"] > 0


def test_transfer_is_one_at_home_for_the_static_optimum():
    bank, other = make_bank(), make_bank()
    for entry in other.trees:
        entry.step_ms *= 2
    homes = {
        "a": transfer.Fitted(bank, {"star": fitted("star"), "tau": fitted("tau")}, make_trace(2), {}),
        "b": transfer.Fitted(other, {"star": fitted("star", bank=other), "tau": fitted("tau", bank=other)},
                             make_trace(4), {}),
    }  # fmt: skip
    rows = transfer.transfer_rows(homes, make_latency(), "star", 50, 0)
    assert len(rows) == 2 * 2 * 2
    found = {(row["policy"], row["fitted_on"], row["used_on"]): row["over_own_static"] for row in rows}
    at_home = {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert found["star", "a", "a"] == found["star", "b", "b"] == at_home
    moved = transfer.moved_bank(bank, homes["b"], make_latency())
    assert [entry.step_ms for entry in moved.trees] == [2 * ms for ms in STEP_MS]
    assert found["star", "a", "b"] == pytest.approx(at_home)  # the same tree: only the clock differs
    assert found["tau", "a", "b"]["low"] <= found["tau", "a", "b"]["ratio"] <= found["tau", "a", "b"]["high"]
    homes["b"].timed[TREES[2]] = 99.0  # timed on that task, though not in its bank
    homes["b"].bank.trees.pop()
    moved = transfer.moved_bank(bank, homes["b"], make_latency())
    assert [entry.step_ms for entry in moved.trees] == [2 * STEP_MS[0], 2 * STEP_MS[1], 99.0]


def parts() -> list[dict]:
    made = []
    for number, task in enumerate(("one", "two")):
        calib, test, bank = make_trace(number, 10), make_trace(number + 7, 10), make_bank()
        policies = {name: fitted(kind, name) for name, kind in
                    (("ar", "ar"), ("entmtp_star", "star"), ("entmtp_tau", "tau"))}  # fmt: skip
        bench = timed(task)
        bench = bench[bench["policy"].isin([*policies, "medusa"])]
        rows = headroom_rows(task, policies, Texts.of(test, bank, make_latency(), {}), FRONTIER, bench,
                             {"bootstrap": 50, "seed": 0})  # fmt: skip
        tables = [signals.step_table(trace, frame_of(trace), TREES[2], tokens_before(trace)) for trace in (calib, test)]
        made.append({"task": task, "policies": rows, "banks": banks.bank_rows(task, bank, FRONTIER, calib, test,
                     make_latency(), 2, 10, {}), "ceiling": [CEILING | {"task": task}],
                     "bank_ceiling": [{"task": task, "over_static": 1.003}],
                     "signals": signals.signal_rows(task, *tables),
                     "forwards": forward_counts(task, FRONTIER, calib)})  # fmt: skip
    return made


def test_headroom_rows_and_the_record_of_all_tasks():
    made = parts()
    by_policy = {row["policy"]: row for row in made[0]["policies"]}
    star, tau, plain = (by_policy[name] for name in ("entmtp_star", "entmtp_tau", "ar"))
    assert star["over_static"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert star["captured"]["share"] == 0 and star["replayed_over_static"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    test, bank = make_trace(7, 10), make_bank()
    bound = oracle(test, TREES, STEP_MS).tokens_per_s / replayed_speed(fitted("star"), bank, test, make_latency()) - 1
    oracles, frontier, hindsight = (tau[f"{name}_headroom"]["gain"] for name in ("oracle", "frontier", "hindsight"))
    assert oracles == pytest.approx(bound)
    assert frontier >= oracles
    assert frontier >= hindsight >= -1e-12  # the star is one of the trees
    speed = replayed_speed(fitted("tau", "entmtp_tau"), bank, test, make_latency())
    assert tau["replayed_tokens_per_s"] == pytest.approx(speed)
    assert tau["captured"]["share"] == pytest.approx((tau["replayed_over_static"]["ratio"] - 1) / oracles)
    assert tau["captured"]["low"] <= tau["captured"]["share"] <= tau["captured"]["high"]
    policy = fitted("tau", "entmtp_tau")
    assert tau["calib_over_static"] == policy["calib_tokens_per_s"] / policy["star_tokens_per_s"]
    assert plain["captured"]["share"] < 0 and plain["calib_over_static"] is None
    other = by_policy["medusa"]  # on other heads: live figures alone
    assert other["over_static"]["ratio"] > 0 and other["replayed_over_static"] is other["captured"] is None
    record = combine(made, [], {"date": "today"}, 50, 0)
    check_schema(record, "scheduling")
    one = {"ratio": pytest.approx(1.0), "low": pytest.approx(1.0), "high": pytest.approx(1.0)}
    assert record["geometric_mean_over_static"]["entmtp_star"] == {"live": one, "worst": 1.0, "replayed": one}
    assert record["geometric_mean_over_static"]["medusa"]["replayed"] is None
    text = markdown(record)
    for piece in ("| one | `entmtp_tau` |", "## Banks", CEILING_LINE, "all of them", "## Transfer", "lie within 3%"):
        assert piece in text
    for figure in (headroom(record["rows"], PlotConfig()), predicted_against_measured(record["rows"], PlotConfig())):
        assert figure.get_axes()


def test_predictions_are_judged_in_the_clock_of_plain_decoding():
    def row(policy, live, replayed):
        return {"task": "t", "policy": policy, "live_tokens_per_s": live, "replayed_tokens_per_s": replayed}

    found = prediction_errors([row("ar", 20, 10), row("good", 60, 30.6), row("bad", 60, 24), row("none", 60, None)])
    errors = {entry["policy"]: entry["error"] for entry in found["rows"]}
    assert errors == pytest.approx({"ar": 0.0, "good": 0.02, "bad": -0.2})
    assert (found["within_3_percent"], found["largest"]) == (0.5, pytest.approx(0.2))


def test_a_missing_static_optimum_is_named():
    texts = Texts.of(make_trace(), make_bank(), make_latency(), {})
    with pytest.raises(EntmtpError, match="needs the policy entmtp_star"):
        headroom_rows("t", {}, texts, FRONTIER, timed("t"), {})


def test_forwards_of_the_paper_are_counted_by_replay():
    trace = trace_fixture.random_trace(np.random.default_rng(0), prompts=4, longest=20)
    trees = [Tree.of([(0,)]), Tree.of([(0,), (1,)])]
    counts = forward_counts("t", trees, trace)
    assert counts["paper"] == 2 * sum(self_rollout(trace, tree).steps for tree in trees)
    assert counts["here"] == len(trace.ranks) + 4
