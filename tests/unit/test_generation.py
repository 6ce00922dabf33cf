"""The record behind the replay page: what it says was drafted, accepted and seen is what decoding does."""

from dataclasses import replace

import eval_fixture
import pandas as pd
import pytest

from entmtp.config import ReplayedConfig
from entmtp.errors import EntmtpError
from entmtp.evaluation.bench import make_row
from entmtp.evaluation.generation import RecordingDecoder, known_signals, pick, record_generation, text_pieces
from entmtp.evaluation.schema import check_schema
from entmtp.policy.growing import GrowingPolicy
from entmtp.policy.schedulers import Policy, TauPolicy

ARM = {"policy": "it", "kind": "tau", "heads": "hydra"}


def policy_of(kind: str, trees) -> Policy:
    if kind == "tau":
        return TauPolicy("it", [trees["empty"], trees["wide"], trees["full"]], 1, 2, 0.02, 0.01)
    if kind == "growing":
        return GrowingPolicy("it", [], nodes=8, beam=4, children=8, max_depth=4, expand=0.02)
    return Policy("it", [trees["mc_sim_7b_63" if kind == "published" else "empty"]])


def record_of(case, policy: Policy, number: int = 3, change=lambda row: row) -> dict:
    """Record of one prompt, held against a bench row of a run of its own."""
    prompt = case.prompts[number]
    live = case.decoder.generate(prompt["token_ids"], policy, case.decoding, prompt["id"])
    row = change(make_row("sharegpt", ARM, prompt, live, case.decoding.mode, "float32", 0))
    decoder = RecordingDecoder(case.target, case.drafter, 160)
    record = record_generation(decoder, policy, row, prompt, case.decoding, case.frame, {"τ_on": 0.02})
    check_schema({"experiment": "unit", **record}, "generation")
    return record


def test_steps_are_recorded_where_others_would_stay_on_the_device(traced, trees):
    case = traced("hydra")
    decoder = RecordingDecoder(case.target, case.drafter, 160)
    decoder.graphs = True  # as on CUDA
    prompt = case.prompts[3]
    made, drafts = decoder.record(prompt["token_ids"], policy_of("tau", trees), case.decoding, prompt["id"])
    assert len(drafts) == len(made.steps) > 0
    assert [len(draft.accepted) for draft in drafts[:-1]] == [len(step.tokens) for step in made.steps[:-1]]


def tokens_of(record: dict) -> list[int]:
    return [step["tokens"][node] for step in record["steps"] for node in step["accepted"][: step["committed"]]]


@pytest.mark.parametrize("arch", ["medusa", "hydra", "hydra_plus"])
@pytest.mark.parametrize("kind", ["tau", "growing", "published", "empty"])
def test_every_step_is_the_text_its_trace_and_the_timed_run(traced, trees, arch, kind):
    case, policy = traced(arch), policy_of(kind, trees)
    record = record_of(case, policy)
    text, trace = case.texts["p3"], case.trace.prompts[3]
    committed = tokens_of(record)
    assert committed == text[: len(committed)] and len(text) - len(committed) in (0, 1)
    assert record["equal"] and record["equal_steps"] == len(record["steps"])
    for step in record["steps"]:
        at, nodes = step["position"], step["accepted"]
        assert [step["parents"][node] for node in nodes] == [-1, *nodes[:-1]], "accepted nodes are no path"
        assert step["committed"] <= len(nodes)
        assert step["entropy"] == trace.entropy[at] and step["path_values"] == list(trace.path_values[at])
        if policy.depth is not None:
            assert step["signal"] == pytest.approx(trace.path_values[at, policy.depth], abs=1e-5)
        if isinstance(policy, GrowingPolicy) or at + len(nodes) >= len(text):
            continue
        # what the rank trace foretells of this tree, and that no other child was right
        tree = policy.trees[step["tree"]]
        assert step["committed"] - 1 == case.trace.accepted(tree)[3][at]
        after = [child for child, parent in enumerate(step["parents"]) if parent == nodes[-1]]
        assert text[at + len(nodes)] not in [step["tokens"][child] for child in after]
    drafted = max(len(step["parents"]) - 1 for step in record["steps"])
    assert {"empty": drafted == 0, "published": drafted == 63}.get(kind, drafted > 0)


def test_sampled_text_is_recorded_with_the_same_noise(traced, trees):
    case = traced("hydra", "sample")
    record = record_of(case, policy_of("tau", trees))
    assert record["equal"] and record["mode"] == "sample"
    committed = tokens_of(record)
    assert committed == case.texts["p3"][: len(committed)]


def test_a_text_that_ends_at_a_stop_token_says_so(traced, trees):
    case = traced("hydra", stop=True)
    ended = [number for number, text in enumerate(case.texts.values()) if text[-1] in case.target.stop_ids]
    record, text = record_of(case, policy_of("published", trees), ended[-1]), case.texts[f"p{ended[-1]}"]
    assert record["stop"] == case.target.tokenizer.decode([text[-1]])
    assert len(record["pieces"]) == len(text)
    assert sum(step["committed"] for step in record["steps"]) in (len(text), len(text) - 1)
    assert record_of(traced("hydra"), policy_of("empty", trees))["stop"] is None


def test_timed_milliseconds_are_given_while_the_steps_are_the_same(traced, trees):
    def another_fourth_step(row):
        accepted = list(row["step_accepted"])
        accepted[3] += 1
        return row | {"step_accepted": accepted}

    record = record_of(traced("hydra"), policy_of("tau", trees), change=another_fourth_step)
    assert (record["equal"], record["equal_steps"]) == (False, 3)
    assert [step["ms"] is None for step in record["steps"][:5]] == [False, False, False, True, True]


@pytest.mark.parametrize("part", ["token", "missing step"])
def test_another_text_or_another_number_of_steps_is_not_equal(traced, trees, part):
    def changed(row):
        if part == "token":
            return row | {"tokens": [*row["tokens"][:-1], (row["tokens"][-1] + 1) % 259]}
        return row | {key: row[key][:-1] for key in ("step_nodes", "step_accepted", "step_ms")}

    record = record_of(traced("hydra"), policy_of("tau", trees), change=changed)
    assert not record["equal"]
    assert record["equal_steps"] == len(record["steps"]) - (part == "missing step")


def test_signals_end_where_the_traced_text_is_another(traced):
    case = traced("hydra")
    text = list(case.texts["p2"])
    assert len(known_signals(case.frame, "p2", text)) == len(text)
    text[5] = (text[5] + 1) % 259
    assert len(known_signals(case.frame, "p2", text)) == 5
    assert known_signals(None, "p2", text) == []


def test_pieces_hold_whole_characters_only(tiny):
    text = "naïve 🦊 x"
    tokens = tiny.tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    pieces = text_pieces(tiny.tokenizer, tokens)
    assert "".join(pieces) == text and "�" not in "".join(pieces)
    assert pieces[6:11] == [" ", "", "", "", "🦊"]
    assert text_pieces(tiny.tokenizer, tokens[:9])[-1] == "�"  # the text is over: half a character is all there is


def test_the_shown_generation_drafts_or_is_the_one_asked_for():
    bench = pd.concat([eval_fixture.bench(task) for task in eval_fixture.TASKS], ignore_index=True)
    shown = pick(bench, ReplayedConfig())
    assert shown["kind"] == "tau"
    idle = bench.copy()
    idle["step_nodes"] = [
        [0] * len(nodes) if kind == "tau" else nodes for kind, nodes in zip(idle["kind"], idle["step_nodes"])
    ]
    assert pick(idle, ReplayedConfig())["policy"] == "medusa"
    wanted = ReplayedConfig(task="litbench", policy="hydra", prompt_id="litbench/4")
    assert [pick(bench, wanted)[key] for key in ("task", "policy", "prompt_id")] == ["litbench", "hydra", "litbench/4"]
    assert pick(bench, ReplayedConfig(policy="ar"))["policy"] == "ar"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (ReplayedConfig(task="nowhere"), r"'replayed.task': .* 'nowhere'; choose one of humaneval, litbench"),
        (ReplayedConfig(policy="mystery"), r"'replayed.policy': .* 'mystery'; choose one of ar, medusa, hydra"),
        (ReplayedConfig(task="litbench", prompt_id="humaneval/1"), r"'replayed.prompt_id'.*choose one of litbench/0"),
    ],
)
def test_an_unknown_generation_is_named_with_those_there_are(wanted, message):
    bench = pd.concat([eval_fixture.bench(task) for task in eval_fixture.TASKS], ignore_index=True)
    with pytest.raises(EntmtpError, match=message):
        pick(bench, wanted)


def test_what_lies_past_the_budget_is_accepted_but_not_committed(traced, trees, oracle):
    """Drafts that are always right, in fours: 38 tokens are seven steps of five, and three of an eighth."""
    case = traced("hydra")
    prompt, text = case.prompts[3]["token_ids"], case.texts["p3"]
    drafter = oracle(wrong=0.0, top=1)
    decoder = RecordingDecoder(case.target, drafter, 160)
    drafter.attach(decoder, prompt, text)
    decoding = replace(case.decoding, max_new_tokens=38)
    generation, drafts = decoder.record(prompt, Policy("it", [trees["chain_4"]]), decoding, "p3")
    assert [len(step.tokens) for step in generation.steps] == [5] * 7 + [3]
    assert all(made.accepted == [0, 1, 2, 3, 4] for made in drafts)
    assert [token for made in drafts for token in made.tokens] == text[:40]
