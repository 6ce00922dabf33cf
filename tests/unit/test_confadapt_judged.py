"""What the second method is judged by: rules, resumption, accuracy, ratios to the model's own plain decoding."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest

from entmtp.config import ConfAdaptConfig, PlotConfig
from entmtp.decoding.confadapt import BlockDecoder
from entmtp.evaluation.confadapt import OWN, accuracy, block_arms, decode_all, entmtp_rows, judged, rules_of, setting
from entmtp.evaluation.confadapt_report import markdown
from entmtp.evaluation.figures_science import accuracy_frontier
from entmtp.evaluation.lossless_blocks import DRAFT, ORIGINAL, SELF
from entmtp.evaluation.schema import check_schema
from entmtp.io import Journal

RULES = rules_of(ConfAdaptConfig(k_max=3, thresholds=[0.5, 0.9], mask_thresholds=[0.9], static=[2]))
PROMPTS = [{"id": f"p{n}", "token_ids": [5, 6 + n], "answer": str(n)} for n in range(4)]


def test_rules_have_readable_names_and_own_decoding_first():
    assert list(RULES) == [OWN, "static k=2", "confadapt 0.5", "confadapt 0.9", "masks 0.9"]
    assert (RULES[OWN].k_max, RULES["static k=2"].k_max, RULES["confadapt 0.9"].k_max) == (1, 2, 3)
    assert RULES["static k=2"].threshold is None and RULES["confadapt 0.9"].threshold == 0.9
    assert RULES["masks 0.9"] == replace(RULES["confadapt 0.9"], first_free=True)


def test_a_row_has_its_rules_setting():
    for name, rule in RULES.items():
        fixed = rule.threshold is None
        assert setting(name) == {"k": rule.k_max if fixed else None, "threshold": rule.threshold}
    assert setting(ORIGINAL) == {"k": 1, "threshold": None}
    assert setting(SELF) == setting(DRAFT) == setting("ar") == {"k": None, "threshold": None}


def test_an_interrupted_run_resumes_with_whole_prompts(tiny, tmp_path):
    def run(name: str, journal=None):
        arms = block_arms(BlockDecoder(tiny, 250, 64), RULES)
        return decode_all(arms, PROMPTS, 10, journal or Journal(tmp_path / name, "x"))

    def essence(rows):
        return sorted((row["prompt_id"], row["policy"], tuple(row["tokens"]), row["forwards"]) for row in rows)

    whole = run("whole")
    assert len(whole) == len(RULES) * len(PROMPTS)
    broken = Journal(tmp_path / "broken", "x")
    by_prompt = sorted(whole, key=lambda row: row["prompt_id"])
    for row in by_prompt[: len(RULES) + 2]:  # one prompt, and half of another
        broken.append(row)
    resumed = run("broken", Journal(tmp_path / "broken", "x"))
    assert essence(resumed) == essence(whole)
    again = run("broken", Journal(tmp_path / "broken", "x"))  # the half prompt lies in the journal twice now
    assert essence(again) == essence(whole)
    first = [row for row in resumed if row["prompt_id"] == "p0"]
    assert [row["seconds"] for row in first] == [row["seconds"] for row in whole if row["prompt_id"] == "p0"]


def fake_rows() -> list[dict]:
    """k = 1 is right on three of four and takes two seconds; the block rule is right on one and takes one. Verified by
    itself it says what k = 1 says. The original model is always right, in four seconds, or in three with a drafter."""
    rows = []
    for n, prompt in enumerate(PROMPTS):
        own, right = [n if n else 9] * 6, [n] * 6
        for method, tokens, forwards, drafter, seconds in (
            (OWN, own, 6, 0, 2.0),
            ("confadapt 0.9", [1] * 6, 2, 0, 1.0),
            (SELF, own, 3, 0, 1.6),
            (ORIGINAL, right, 6, 0, 4.0),
            (DRAFT, right, 2, 1, 3.2),
        ):
            rows.append({"prompt_id": prompt["id"], "policy": method, "tokens": tokens, "forwards": forwards,
                         "drafter_forwards": drafter, "seconds": seconds})  # fmt: skip
    return rows


TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
NLL = {name: {"nll": 24.0, "tokens": 24} for name in (OWN, SELF, ORIGINAL, DRAFT)}
NLL["confadapt 0.9"] = {"nll": 48.0, "tokens": 24}
VERDICTS = {SELF: "exact", DRAFT: "tie"}


def all_judged() -> list[dict]:
    return judged(fake_rows(), PROMPTS, TOKENIZER, "number", NLL, 100, 0, VERDICTS)


def test_rows_say_what_speed_costs():
    own, block, *_ = all_judged()
    assert (own["method"], own["accuracy"], own["tokens_per_forward"], own["over_plain"]["ratio"]) == (
        OWN,
        0.75,
        1.0,
        1.0,
    )
    assert (block["accuracy"], block["tokens_per_forward"]) == (0.25, 3.0)
    assert block["over_plain"] == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert block["tokens_per_s"] == 6.0
    assert block["ppl"] == pytest.approx(2.718281828**2)
    assert (own["same_text"], block["same_text"]) == (1.0, 0.25)
    assert (own["lossless"], block["lossless"]) == ("n/a", "lossy")
    assert accuracy([True, False, False, False])["standard_error"] == pytest.approx((0.25 * 0.75 / 4) ** 0.5)


def test_verified_blocks_are_measured_against_the_model_whose_text_they_write():
    _, _, own, original, drafted = all_judged()
    assert (own["method"], own["accuracy"], own["tokens_per_forward"], own["lossless"]) == (SELF, 0.75, 2.0, "exact")
    assert own["over_plain"]["ratio"] == pytest.approx(1.25) and own["same_text"] == 1.0
    assert (original["accuracy"], original["over_plain"]["ratio"], original["lossless"]) == (1.0, 1.0, "n/a")
    assert (drafted["method"], drafted["accuracy"], drafted["lossless"]) == (DRAFT, 1.0, "tie")
    assert (drafted["tokens_per_forward"], drafted["drafter_forwards"]) == (3.0, 0.5)  # the original's forwards count
    assert drafted["over_plain"]["ratio"] == pytest.approx(1.25) and own["drafter_forwards"] is None


def test_lossless_policies_stand_beside_and_the_record_fits():
    bench = pd.DataFrame([{"policy": "ar", "prompt_id": p["id"], "tokens": [int(p["answer"])] * 3} for p in PROMPTS])
    summary = [{"policy": "ar", "prompts": 4, "new_tokens": 18, "steps": 8, "accept_length": 2.0,
                "tokens_per_s": 20.0, "lossless": "n/a",
                "over_ar": {"ratio": 1.0, "low": 1.0, "high": 1.0}, "ppl": 1.5}]  # fmt: skip
    rows = all_judged()
    rows += entmtp_rows(bench, summary, PROMPTS, TOKENIZER, "number")
    assert rows[-1]["accuracy"] == 1.0 and rows[-1]["method"] == "ar"
    assert rows[-1]["tokens_per_forward"] == 18 / (8 + 4)  # the prefills are forwards, as blocks count them
    rows = [{"task": "t", **row} for row in rows]
    model = {"name": "distilled", "source": "distilled", "repo": None, "revision": None}
    record = {"rows": rows, "model": model, "training": {"distill": {}, "texts": 1, "curve": []}, "provenance": {}}
    check_schema(record, "confadapt")
    check_schema({**record, "training": None}, "confadapt")
    text = markdown(rows)
    assert "| t | confadapt 0.9 | 0.250 [0.046, 0.699] | 3.00 |" in text and "paper: GSM8K" in text
    assert "| t | lossless_draft | 1.000 [0.510, 1.000] | 3.00 (+ 0.50 of the drafting model) |" in text
    assert text.count("\n| t | ") == len(rows) and "| exact |" in text and "| tie |" in text
    assert len(accuracy_frontier(rows, PlotConfig()).get_axes()) == 1
    five = [{**row, "task": f"t{number}"} for row in rows for number in range(5)]
    panels = accuracy_frontier(five, PlotConfig()).get_axes()
    assert [ax.get_title() for ax in panels] == ["t0", "t1", "t2", "t3", "t4", ""]
