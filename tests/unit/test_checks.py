"""Lossless and replay verdicts: what passes, what is a tie, and that tampering never passes."""

import copy

import pytest
import torch

from entmtp.config import DecodingConfig
from entmtp.decoding.engine import make_chooser
from entmtp.decoding.sampling import Chooser
from entmtp.evaluation.bench import make_row
from entmtp.evaluation.checks import choice_margin, lossless_verdicts, replay_verdict
from entmtp.evaluation.replay_check import _verdict
from entmtp.policy.schedulers import LadderPolicy, Policy, TauPolicy
from entmtp.tree.topology import Tree

AR = {"policy": "ar", "kind": "ar", "heads": None}
TAU = {"policy": "tau", "kind": "tau", "heads": "hydra"}


def tau_policy(trees) -> TauPolicy:
    return TauPolicy("tau", [trees["empty"], trees["wide"], trees["full"]], 1, 1, 0.1, 0.05)


def rows_of(case, arm: dict, policy: Policy | None) -> list[dict]:
    runs = (
        [case.decoder.plain(p["token_ids"], case.decoding, p["id"]) for p in case.prompts]
        if policy is None
        else case.live(policy)
    )
    return [
        make_row("t", arm, prompt, run, case.decoding.mode, "float32", 0)
        for prompt, run in zip(case.prompts, runs, strict=True)
    ]


@pytest.fixture(params=["greedy", "sample"])
def case(traced, request):
    return traced("hydra", request.param)


@pytest.fixture
def bench(case, trees) -> list[dict]:
    return rows_of(case, AR, None) + rows_of(case, TAU, tau_policy(trees))


def verdicts(case, bench: list[dict], tie_margin: float = 1e-3) -> dict:
    cache = case.target.new_cache(128)
    return lossless_verdicts(case.target, cache, bench, case.prompts, case.decoding, tie_margin)


def tamper(case, bench: list[dict], number: int, position: int) -> float:
    """Change one token of policy tau's text; returns how clearly the target prefers the true one."""
    row = bench[4 + number]
    assert row["policy"] == "tau"
    tokens = list(row["tokens"])
    true, tokens[position] = tokens[position], (tokens[position] + 1) % case.target.vocab_size
    prompt = case.prompts[number]["token_ids"]
    with torch.inference_mode():
        hidden = case.target.prefill(prompt + tokens[:position], case.target.new_cache(128))[-1:]
        chooser = make_chooser(case.target, case.decoding, row["prompt_id"])
        scores = chooser.scores(case.target.model.logits(hidden), [len(prompt) + position])[0]
    bench[4 + number] = row | {"tokens": tokens}
    return float(scores[true] - scores[tokens[position]])


def test_untouched_runs_are_exact(case, bench):
    assert verdicts(case, bench) == {
        "ar": {"verdict": "n/a", "prompts": 4, "differences": []},
        "tau": {"verdict": "exact", "prompts": 4, "differences": []},
    }


@pytest.mark.parametrize("position", [0, 7, -1])
def test_a_tampered_token_fails_and_the_first_difference_is_reported(case, bench, position):
    position %= len(case.texts["p1"])
    margin = tamper(case, bench, 1, position)
    assert margin > 0.01
    found = verdicts(case, bench)["tau"]
    assert found["verdict"] == "fail"
    (difference,) = found["differences"]
    text = case.texts["p1"]
    assert (difference["prompt_id"], difference["position"]) == ("p1", position)
    assert (difference["expected"], difference["got"]) == (text[position], (text[position] + 1) % 259)
    assert difference["margin"] == pytest.approx(margin, abs=1e-4)


def test_a_margin_below_the_resolution_is_a_tie_at_the_boundary_too(case, bench):
    margin = tamper(case, bench, 2, 3)
    measured = verdicts(case, bench)["tau"]["differences"][0]["margin"]
    assert measured == pytest.approx(margin, abs=1e-4)
    assert verdicts(case, bench, tie_margin=measured)["tau"]["verdict"] == "tie"
    assert verdicts(case, bench, tie_margin=measured * 0.999)["tau"]["verdict"] == "fail"


@pytest.mark.parametrize("swap", [False, True])
def test_a_tie_does_not_wash_out_a_failure(case, bench, swap):
    margins = [tamper(case, bench, 1, 5), tamper(case, bench, 2, 5)]
    between = sum(margins) / 2
    rows = bench[:4] + bench[4:][::-1] if swap else bench
    found = verdicts(case, rows, tie_margin=between)["tau"]
    assert found["verdict"] == "fail"
    assert len(found["differences"]) == 2
    assert verdicts(case, rows, tie_margin=2 * max(margins))["tau"]["verdict"] == "tie"


@pytest.mark.parametrize("cut", ["shorter", "longer"])
def test_a_text_that_ends_elsewhere_fails_however_wide_the_margin(case, bench, cut):
    row = bench[5]
    bench[5] = row | {"tokens": row["tokens"][:-3] if cut == "shorter" else [*row["tokens"], 7]}
    found = verdicts(case, bench, tie_margin=1e9)["tau"]
    assert found["verdict"] == "fail"
    assert found["differences"][0]["position"] == (len(row["tokens"]) - 3 if cut == "shorter" else len(row["tokens"]))
    assert found["differences"][0]["margin"] is None


def test_typical_acceptance_is_lossy_whatever_it_wrote(traced, trees):
    case = copy.copy(traced("hydra", "greedy"))
    ar = rows_of(case, AR, None)
    case.decoding = DecodingConfig(mode="typical", max_new_tokens=40, alpha=1.0, epsilon=0.001)
    typical = rows_of(case, TAU, Policy("tau", [trees["mc_sim_7b_63"]]))
    assert any(a["tokens"] != t["tokens"] for a, t in zip(ar, typical, strict=True))
    found = verdicts(case, [row | {"mode": "typical"} for row in ar] + typical)
    assert found["tau"]["verdict"] == "lossy"
    assert found["tau"]["differences"]
    assert found["ar"]["verdict"] == "n/a"
    same = [row | {"policy": "tau", "kind": "tau", "mode": "typical"} for row in ar]
    assert verdicts(case, ar + same)["tau"]["verdict"] == "lossy"


def test_choice_margin_is_a_difference_of_scores(tiny, prompts):
    ids = prompts[3]
    with torch.inference_mode():
        logits = tiny.model.logits(tiny.prefill([*ids, 9, 8], tiny.new_cache(32)))[-1]
    got = choice_margin(tiny, tiny.new_cache(32), ids, [9, 8], 20, 33, Chooser())
    assert got == pytest.approx(float(logits[20] - logits[33]), abs=1e-4)


# --- replay ---------------------------------------------------------------------------------------------------


def live_rows(case, policy: Policy) -> list[dict]:
    return rows_of(case, TAU, policy)


def test_live_rows_equal_replay(case, trees):
    policy = tau_policy(trees)
    rows = live_rows(case, policy)
    found = replay_verdict(case.trace, policy, rows, 1e-3)
    assert (found["verdict"], found["differences"]) == ("equal", [])
    assert found["prompts"] == 4
    assert found["steps"] == sum(len(row["step_tree"]) for row in rows)
    assert replay_verdict(case.trace, policy, rows[2:3], 1e-3)["prompts"] == 1  # any part of the prompts


def edited(rows: list[dict], number: int, **changes) -> list[dict]:
    return [row | changes if index == number else row for index, row in enumerate(rows)]


def test_a_tampered_num_accepted_fails(case, trees):
    policy = tau_policy(trees)
    rows = live_rows(case, policy)
    row, gaps = rows[2], case.trace.prompts[2].gaps
    # a step whose true draft tokens are in the draft vocabulary, so that their distance to a rival is known
    at, position = 0, 0
    while not gaps[position, : row["step_accepted"][at] + 2].max() < float("inf"):
        position += row["step_accepted"][at] + 1
        at += 1
    accepted = list(row["step_accepted"])
    accepted[at] += 1
    gap = float(gaps[position, : accepted[at] + 1].min())
    found = replay_verdict(case.trace, policy, edited(rows, 2, step_accepted=accepted), gap * 0.999)
    assert found["verdict"] == "fail"
    (difference,) = found["differences"]
    assert (difference["prompt_id"], difference["step"], difference["what"]) == ("p2", at, "num_accepted")
    assert difference["live"][1] == difference["replay"][1] + 1
    assert difference["distance"] == gap
    # a draft logit within the gap makes it a numerical tie
    assert replay_verdict(case.trace, policy, edited(rows, 2, step_accepted=accepted), gap)["verdict"] == "tie"


@pytest.mark.parametrize("change", ["fewer", "more"])
def test_missing_or_extra_steps_fail(case, trees, change):
    policy = tau_policy(trees)
    rows = live_rows(case, policy)
    row = rows[1]
    trees_, accepted = list(row["step_tree"]), list(row["step_accepted"])
    if change == "fewer":
        trees_, accepted = trees_[:-1], accepted[:-1]
    else:
        trees_, accepted = [*trees_, 0], [*accepted, 0]
    found = replay_verdict(case.trace, policy, edited(rows, 1, step_tree=trees_, step_accepted=accepted), 1e9)
    assert found["verdict"] == "fail"
    assert found["differences"][0]["what"] == "count"


@pytest.mark.parametrize("kind", ["tau", "ladder", "static"])
def test_another_tree_fails_unless_the_signal_lies_at_a_threshold(case, trees, kind):
    """A scheduler that went wrong (a state that survived its prompt, say) saw the right signal: that is no tie."""
    bank = [trees["empty"], trees["wide"], trees["full"]]
    policy = {
        "tau": tau_policy(trees),
        "ladder": LadderPolicy("tau", bank, 0, 1, [0.06, 0.09]),
        "static": Policy("tau", bank, 1),
    }[kind]
    rows = live_rows(case, policy)
    chosen = list(rows[3]["step_tree"])
    chosen[2] = (chosen[2] + 1) % 3
    signal = rows[3]["step_signal"][2]
    gap = 1e-4
    if signal is not None:  # far from every threshold
        assert min(abs(signal - threshold) for threshold in (0.05, 0.06, 0.09, 0.1)) > gap
    found = replay_verdict(case.trace, policy, edited(rows, 3, step_tree=chosen), gap)
    assert found["differences"][0]["what"] == "tree"
    assert found["verdict"] == "fail"


def test_another_tree_is_a_tie_when_the_signal_lies_at_a_threshold(case, trees):
    """Replay's signal is the threshold itself (the smaller tree), the live one was a hair above."""
    bank = [trees["empty"], trees["wide"], trees["full"]]
    probe = float(case.trace.prompts[0].path_values[0, 1])
    policy = LadderPolicy("tau", bank[:2], 0, 1, [probe])  # s == threshold: tree 0
    rows = live_rows(case, policy)
    chosen, signals = list(rows[0]["step_tree"]), list(rows[0]["step_signal"])
    chosen[0], signals[0] = 1, probe + 1e-7
    found = replay_verdict(case.trace, policy, edited(rows, 0, step_tree=chosen, step_signal=signals), 1e-5)
    assert found["verdict"] == "tie"


def test_a_tree_of_the_wrong_heads_fails(traced, trees):
    """Rows of Medusa heads against a trace of Hydra heads."""
    policy = Policy("tau", [Tree.of([(rank,) for rank in range(16)])])
    rows = live_rows(traced("medusa"), policy)
    assert replay_verdict(traced("hydra").trace, policy, rows, 1e-6)["verdict"] == "fail"


def test_a_text_that_a_tie_has_changed_is_left_out_and_counted(case, trees):
    """Replay follows plain decoding's text; of another one it knows nothing."""
    policy = tau_policy(trees)
    rows = live_rows(case, policy)
    reference = {row["prompt_id"]: list(row["tokens"]) for row in rows}
    found = _verdict(case.trace, policy, rows, reference)
    assert (found["verdict"], found["other_texts"], found["prompts"]) == ("equal", 0, len(rows))
    other = edited(rows, 1, tokens=[*rows[1]["tokens"][:-1], 7], step_tree=[0], step_accepted=[0])
    found = _verdict(case.trace, policy, other, reference)
    assert (found["verdict"], found["other_texts"], found["prompts"]) == ("tie", 1, len(rows) - 1)
    wrong = edited(other, 2, step_accepted=[9] * len(other[2]["step_accepted"]))
    assert _verdict(case.trace, policy, wrong, reference)["verdict"] == "fail"
