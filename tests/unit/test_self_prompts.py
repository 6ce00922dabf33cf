"""Training prompts that the target writes itself: where the user's turn opens, what is kept, resuming."""

import copy

import pytest

from entmtp.config import CorpusConfig
from entmtp.errors import EntmtpError
from entmtp.heads.self_prompts import finished, user_turn, write_self_prompts

CONFIG = CorpusConfig(self_prompts=40, self_prompt_tokens=30, self_temperature=1.5, batch=4, seed=3)


def with_template(tiny, template: str | None):
    target = copy.copy(tiny)
    target.tokenizer = copy.deepcopy(tiny.tokenizer)
    target.tokenizer.chat_template = template
    return target


def test_the_turn_opens_where_the_users_words_would_start(tiny):
    assert tiny.tokenizer.decode(user_turn(tiny.tokenizer)) == "<|im_start|>user\n"


@pytest.mark.parametrize(("template", "message"), [(None, "needs a chat template"), ("{{ messages[0]['content'] }}",
                         "opens no user's turn"), ("constant", "opens no user's turn")])  # fmt: skip
def test_templates_that_open_no_turn_are_refused(tiny, template, message):
    with pytest.raises(EntmtpError, match=message):
        write_self_prompts(with_template(tiny, template), CONFIG, None)


def test_turns_that_end_are_kept_in_order_and_follow_the_seed(tiny, tmp_path):
    journal = write_self_prompts(tiny, CONFIG, tmp_path / "j")
    assert len(journal.rows) == 40
    kept = finished(journal, CONFIG)
    assert 0 < len(kept) < 40  # some reached 30 tokens without an end
    numbers = [int(row["key"].split("/")[1]) for row in kept]
    assert numbers == sorted(numbers)
    assert all(row["prompt"] == row["prompt"].strip() != "" for row in kept)
    assert not any("<|im_end|>" in row["prompt"] for row in kept)
    assert finished(write_self_prompts(tiny, CONFIG, tmp_path / "again"), CONFIG) == kept
    other = CorpusConfig(**{**vars(CONFIG), "seed": 4})
    assert finished(write_self_prompts(tiny, other, tmp_path / "other"), other) != kept


def test_an_interrupted_call_resumes_without_loss(tiny, tmp_path, interrupted_batches):
    whole = finished(write_self_prompts(tiny, CONFIG, tmp_path / "whole"), CONFIG)
    with interrupted_batches(7):
        write_self_prompts(tiny, CONFIG, tmp_path / "j")
    journal = write_self_prompts(tiny, CONFIG, tmp_path / "j")
    assert len(journal.rows) == 40
    assert finished(journal, CONFIG) == whole
