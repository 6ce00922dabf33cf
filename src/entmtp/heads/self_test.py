"""A quick look whether draft heads belong to the target that they are used with."""

import sys
from pathlib import Path

from entmtp.calibration.replay import Trace, self_rollout
from entmtp.calibration.traces import trace_text
from entmtp.config import DecodingConfig, HeadsConfig
from entmtp.decoding.engine import Decoder, make_chooser
from entmtp.heads.held_out import fixed_tree
from entmtp.tasks.prompts import encode

PROMPT = "Count from one to thirty, in words, separated by commas."
TOKENS = 40
# Heads for the target accept one drafted token or more a step of such text. Heads of another model, or fed hidden
# states of another layer or position, guess: their candidates match by chance.
IMPLAUSIBLE = 0.3


def accepted_on_known_text(target, drafter) -> float:
    """Drafted tokens accepted a step by the fixed 16-node tree on the target's own answer to an easy prompt."""
    import pandas as pd

    prompt = encode(target.tokenizer, [{"role": "user", "content": PROMPT}])
    decoding = DecodingConfig(max_new_tokens=TOKENS)
    decoder = Decoder(target, None, Decoder.room(len(prompt), TOKENS, 0))
    text = decoder.plain(prompt, decoding).tokens
    rows = trace_text(target, drafter, decoder.cache, "known", prompt, text, make_chooser(target, decoding, "known"))
    run = self_rollout(Trace.from_frame(pd.DataFrame(rows)), fixed_tree(drafter.depth, drafter.width))
    return run.accepted / run.steps if run.steps else 0.0


def check_heads(target, drafter, heads: HeadsConfig, folder: Path) -> None:
    """Warn about heads that somebody brought. Shipped ones name their target, random ones are bad by design."""
    if heads.source not in ("random", "shipped"):
        warn_if_implausible(target, drafter, f"{heads.name} heads ({folder})")


def warn_if_implausible(target, drafter, name: str) -> float:
    """Print a warning when the heads draft as badly as heads of another model would. Returns the figure."""
    accepted = accepted_on_known_text(target, drafter)
    if accepted < IMPLAUSIBLE:
        print(
            f"warning: {name} accept only {accepted:.2f} drafted tokens a step on an easy text of this target "
            f"(heads that fit it accept 1 or more). Are they for another target or fine-tune, is the chat template "
            f"(target.chat_template) theirs, or do they expect hidden states of another layer?",
            file=sys.stderr,
            flush=True,
        )
    return accepted
