"""Calibration texts and their traces."""

from entmtp.calibration.traces import trace_text
from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder, make_chooser
from entmtp.errors import EntmtpError
from entmtp.heads.text import BatchDecoder, Sequence
from entmtp.target.llama import FusedLlama

BATCH = 16


def calibration_texts(target, prompts: list[dict], decoding: DecodingConfig) -> list[dict]:
    """The target's continuation of every prompt: rows {prompt_id, tokens}, in the order of `prompts`.

    Batched with the fused forward, one by one with the generic one. Under typical acceptance the text would depend on
    the tree; calibration then uses the greedy text, as the rank trace needs a fixed one.
    """
    for prompt in prompts:
        target.check_room(len(prompt["token_ids"]), decoding.max_new_tokens)
        target.check_tokens(prompt["token_ids"])
    longest = max(len(prompt["token_ids"]) for prompt in prompts)
    made: dict[str, list[int]] = {}
    if isinstance(target.model, FusedLlama):
        batch = BatchDecoder(target.model, min(BATCH, len(prompts)), longest + decoding.max_new_tokens,
                             target.stop_ids, decoding.max_new_tokens)  # fmt: skip
        source = (Sequence(p["id"], p["token_ids"], [], make_chooser(target, decoding, p["id"])) for p in prompts)
        for sequence in batch.run(source):
            made[sequence.key] = sequence.tokens
            print(f"text {len(made)}/{len(prompts)} ({sequence.key}): {len(sequence.tokens)} tokens", flush=True)
    else:
        decoder = Decoder(target, None, Decoder.room(longest, decoding.max_new_tokens, 0))
        for prompt in prompts:
            made[prompt["id"]] = decoder.plain(prompt["token_ids"], decoding, prompt["id"]).tokens
            print(f"text {len(made)}/{len(prompts)} ({prompt['id']})", flush=True)
    return [{"prompt_id": prompt["id"], "tokens": made[prompt["id"]]} for prompt in prompts]


def trace_rows(
    target, decoder: Decoder, prompts: list[dict], texts: dict[str, list[int]], decoding: DecodingConfig, tie: float
) -> list[dict]:
    """Trace rows of every prompt that has a text. In float32 a text that the target would not choose is an error.

    `tie`: the score margin up to which a differing choice is a numerical tie; only float32 is held to it, since in
    half precision a text made in a batch flips in near ties and is calibration text all the same.
    """
    rows = []
    for prompt in prompts:
        if prompt["id"] not in texts:
            continue
        chooser = make_chooser(target, decoding, prompt["id"])
        made = trace_text(target, decoder.drafter, decoder.cache, prompt["id"], prompt["token_ids"],
                          texts[prompt["id"]], chooser)  # fmt: skip
        worst = min(made, key=lambda row: row["choice_margin"])
        if target.dtype_name == "float32" and decoding.mode != "typical" and worst["choice_margin"] < -tie:
            raise EntmtpError(
                f"prompt {prompt['id']}: its text is not the target's own at position {worst['position']} "
                f"(score margin {worst['choice_margin']:.4g}); delete the texts and make them again"
            )
        rows.extend(made)
        print(f"trace {prompt['id']}: {len(made)} positions", flush=True)
    if not rows:
        raise EntmtpError("no prompt of this split has a text")
    return rows
