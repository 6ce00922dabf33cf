"""Calibration texts are plain decoding's, however they are made, and a text that is not the target's is refused."""

import pytest

from entmtp.calibration.texts import calibration_texts, trace_rows
from entmtp.config import DecodingConfig, TargetConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.target.generic import GenericForward
from entmtp.target.load import load_target


def rows_of(prompts: list[list[int]]) -> list[dict]:
    return [{"id": f"p{number}", "token_ids": prompt} for number, prompt in enumerate(prompts)]


def plain_texts(target, prompts: list[dict], decoding: DecodingConfig) -> list[dict]:
    decoder = Decoder(target, None, 96)
    return [{"prompt_id": row["id"], "tokens": decoder.plain(row["token_ids"], decoding, row["id"]).tokens}
            for row in prompts]  # fmt: skip


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_batched_and_single_texts_are_plain_decodings(tiny, tiny_folder, prompts, mode):
    decoding = DecodingConfig(mode=mode, max_new_tokens=24, temperature=0.9, seed=5)
    rows = rows_of(prompts)
    expected = plain_texts(tiny, rows, decoding)
    assert calibration_texts(tiny, rows, decoding) == expected
    generic = load_target(TargetConfig(name="tiny", source="random", forward="generic"), tiny_folder, "float32")
    assert isinstance(generic.model, GenericForward)
    assert calibration_texts(generic, rows, decoding) == expected


def test_under_typical_acceptance_the_calibration_text_is_the_greedy_one(tiny, prompts):
    greedy = calibration_texts(tiny, rows_of(prompts), DecodingConfig(max_new_tokens=12))
    assert calibration_texts(tiny, rows_of(prompts), DecodingConfig(mode="typical", max_new_tokens=12)) == greedy


def test_what_cannot_be_read_or_does_not_fit_is_said_before_anything_is_generated(tiny):
    with pytest.raises(EntmtpError, match="exceeds the model's 1024 positions"):
        calibration_texts(tiny, rows_of([[5], [5] * 1020]), DecodingConfig(max_new_tokens=12))
    with pytest.raises(EntmtpError, match="token id 9999 is outside the target's vocabulary"):
        calibration_texts(tiny, rows_of([[5], [9999]]), DecodingConfig(max_new_tokens=12))


def test_traces_follow_the_prompts_that_have_a_text(traced):
    case = traced("hydra")
    texts = {key: text for key, text in case.texts.items() if key != "p1"}
    made = trace_rows(case.target, case.decoder, case.prompts, texts, case.decoding, 1e-3)
    assert [row["prompt_id"] for row in made] == [key for key, text in texts.items() for _ in text]
    assert made == [row for row in case.rows if row["prompt_id"] != "p1"]


def test_a_text_that_the_target_would_not_write_is_refused(traced):
    case = traced("hydra")
    key = max(case.texts, key=lambda name: len(case.texts[name]))
    changed = list(case.texts[key])
    changed[5] = (changed[5] + 1) % case.target.vocab_size
    texts = {**case.texts, key: changed}
    with pytest.raises(EntmtpError, match=f"prompt {key}: its text is not the target's own at position"):
        trace_rows(case.target, case.decoder, case.prompts, texts, case.decoding, 1e-3)


def test_no_text_at_all_is_an_error(traced):
    case = traced("hydra")
    with pytest.raises(EntmtpError, match="no prompt of this split has a text"):
        trace_rows(case.target, case.decoder, case.prompts, {"other": [1]}, case.decoding, 1e-3)
