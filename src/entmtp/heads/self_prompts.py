"""Training prompts that the target writes itself, from an opened user's turn of its chat template.

The idea is Magpie's (arXiv 2406.08464): a chat model that is given its template up to the user's words continues with
words that a user might say. Heads learn from the target's own continuations, so such prompts give as much training text
as one likes, of every kind that the target was tuned on, without a data set.
"""

import time
from pathlib import Path
from typing import Any

from entmtp.config import CorpusConfig
from entmtp.errors import EntmtpError
from entmtp.heads.text import Draw, Sequence, batch_decoder
from entmtp.io import Journal, sha256_json

MARK = "\u2063here\u2063"  # no template writes this itself


def user_turn(tokenizer: Any) -> list[int]:
    """Token ids of a chat that consists of an opened user's turn. Raises EntmtpError without a chat template."""
    if not tokenizer.chat_template:
        raise EntmtpError("corpus.self_prompts needs a chat template; this target has none: set it to 0")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    opening, found, _ = chat.partition(MARK)
    if not found or not opening:
        raise EntmtpError("corpus.self_prompts: the chat template opens no user's turn before the user's words")
    return list(tokenizer(opening, add_special_tokens=False)["input_ids"])


def write_self_prompts(target, config: CorpusConfig, journal_path: Path) -> Journal:
    """Sample `corpus.self_prompts` user's turns; a journal line each: {key, prompt}.

    A turn that does not end within `corpus.self_prompt_tokens` is kept as null: half a question is no prompt. An
    interrupted call resumes where it stopped.
    """
    opening = user_turn(target.tokenizer)
    fingerprint = sha256_json([target.fingerprint, target.dtype_name, opening, config.self_prompt_tokens,
                               config.self_temperature, config.seed])  # fmt: skip
    journal = Journal(journal_path, fingerprint)
    done = journal.done(lambda row: row["key"])
    keys = [f"self/{number}" for number in range(config.self_prompts)]
    source = (Sequence(key, opening, [], draw=Draw(config.self_temperature, config.seed, key))
              for key in keys if key not in done)  # fmt: skip
    decoder = batch_decoder(target, config.batch, len(opening) + config.self_prompt_tokens, config.self_prompt_tokens)
    start = time.monotonic()
    for count, sequence in enumerate(decoder.run(source), 1):
        ended = sequence.tokens[-1] in target.stop_ids
        text = target.tokenizer.decode(sequence.tokens[:-1], skip_special_tokens=True).strip() if ended else ""
        journal.append({"key": sequence.key, "prompt": text or None})
        if count % 200 == 0:
            rate = count / (time.monotonic() - start)
            print(f"prompts: {len(done) + count}/{len(keys)}, {rate:.1f} a second", flush=True)
    return journal


def finished(journal: Journal, config: CorpusConfig) -> list[dict]:
    """The whole prompts in their numbers' order, whatever order they ended in."""
    wanted = {f"self/{number}": number for number in range(config.self_prompts)}
    rows = [row for row in journal.rows if row["prompt"] and row["key"] in wanted]
    return sorted(rows, key=lambda row: wanted[row["key"]])
