"""A generation's record: what every step drafted, kept and saw, for the page that replays it (`replay_page`).

The bench keeps of a step its tree, num_accepted, signal and seconds but no drafted tokens, whose bookkeeping would be
part of what it times. They are recorded here: the prompt is decoded once more, untimed, by the same policy, and held
against the timed row step for step. Entropy and path values of every position come from the rank trace.
"""

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pandas as pd

from entmtp.config import DecodingConfig, ReplayedConfig
from entmtp.decoding.engine import Decoder, Generation
from entmtp.decoding.text_stream import TextStream
from entmtp.errors import EntmtpError
from entmtp.evaluation.figure_data import pick_generation
from entmtp.policy.schedulers import Policy


def pick(bench: pd.DataFrame, wanted: ReplayedConfig) -> pd.Series:
    """The bench row that is shown: what `wanted` leaves open is chosen as for figure tree_choice, among generations
    that drafted anything. Raises EntmtpError for a task, policy or prompt that the bench lacks."""
    rows = bench
    for key in ("task", "policy", "prompt_id"):
        value = getattr(wanted, key)
        if value is None:
            continue
        known = list(dict.fromkeys(rows[key]))
        if value not in known:
            more = f", … ({len(known)} in all)" if len(known) > 12 else ""
            raise EntmtpError(
                f"config key 'replayed.{key}': the bench has no generation of '{value}'; "
                f"choose one of {', '.join(known[:12])}{more}"
            )
        rows = rows[rows[key] == value]
    drafting = rows[[max(nodes, default=0) > 0 for nodes in rows["step_nodes"]]]
    return pick_generation(drafting if len(drafting) else rows)


@dataclass
class Drafts:
    """A step's nodes, root first: parents (the root's is -1) and token ids [n]; which of them the target accepted."""

    parents: list[int]
    tokens: list[int]
    accepted: list[int] = field(default_factory=list)


class RecordingDecoder(Decoder):
    """A decoder that keeps what its steps drafted. Nothing that is timed runs through it."""

    def __init__(self, target, drafter, capacity: int):
        super().__init__(target, drafter, capacity)
        self.drafts: list[Drafts] = []

    def record(
        self, prompt: list[int], policy: Policy, decoding: DecodingConfig, prompt_id: str
    ) -> tuple[Generation, list[Drafts]]:
        self.drafts = []
        return self.generate(prompt, policy, decoding, prompt_id), self.drafts

    def _stays_on_device(self, *run) -> bool:
        return False  # there a step has no parts that could be seen

    def propose(self, tree, root):
        drafted = super().propose(tree, root)
        self.drafts.append(Drafts(list(tree.tree.parents), drafted.tolist()))
        return drafted

    def accept(self, tree, tokens, logits, chooser, decoding):
        nodes, root = super().accept(tree, tokens, logits, chooser, decoding)
        self.drafts[-1].accepted = list(nodes)
        return nodes, root


def record_generation(
    decoder: RecordingDecoder,
    policy: Policy,
    row: dict[str, Any],
    prompt: dict[str, Any],
    decoding: DecodingConfig,
    trace: pd.DataFrame | None,
    thresholds: dict[str, float],
) -> dict[str, Any]:
    """Content of `generation.json` (workflow/schemas/generation.schema.json), but for the experiment's name.

    `row`: the bench row that is shown; `trace`: rank trace of its task and heads, None for a policy without heads.
    A step's `ms` is the timed step's, as long as the steps are the same.
    """
    generation, drafts = decoder.record(prompt["token_ids"], policy, decoding, row["prompt_id"])
    target, tokens = decoder.target, generation.tokens
    equal = equal_steps(row, generation)
    signals = known_signals(trace, row["prompt_id"], tokens)
    steps, position = [], 0
    for number, (step, made) in enumerate(zip(generation.steps, drafts, strict=True)):
        entropy, path_values = signals[position] if position < len(signals) else (None, None)
        steps.append(
            {
                "position": position,
                "tree": step.tree,
                "parents": made.parents,
                "tokens": made.tokens,
                "labels": [token_label(target.tokenizer, token) for token in made.tokens],
                "accepted": made.accepted,
                "committed": len(step.tokens),
                "signal": None if step.signal != step.signal else step.signal,
                "entropy": entropy,
                "path_values": path_values,
                "ms": float(row["step_ms"][number]) if number < equal else None,
            }
        )
        position += len(step.tokens)
    same_text = tokens == [int(token) for token in row["tokens"]]
    return {
        **{key: str(row[key]) for key in ("task", "policy", "kind", "mode", "dtype", "prompt_id")},
        "heads": None if pd.isna(row["heads"]) else str(row["heads"]),
        "depth": policy.depth,
        "thresholds": thresholds,
        "prompt": target.tokenizer.decode(prompt["token_ids"], skip_special_tokens=False),
        "pieces": text_pieces(target.tokenizer, tokens),
        "stop": token_label(target.tokenizer, tokens[-1]) if tokens[-1] in target.stop_ids else None,
        "equal": same_text and equal == len(steps) == len(row["step_nodes"]),
        "equal_steps": equal,
        "tokens_per_s": float(row["new_tokens"] / (row["prefill_s"] + row["decode_s"])),
        "steps": steps,
    }


def equal_steps(row: dict[str, Any], generation: Generation) -> int:
    """How many leading steps have the timed row's tree sizes and accepted counts."""
    timed = zip(row["step_nodes"], row["step_accepted"])
    pairs = zip(((step.nodes, step.accepted) for step in generation.steps), timed)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == (int(pair[1][0]), int(pair[1][1])), pairs))


def known_signals(trace: pd.DataFrame | None, prompt_id: str, tokens: list[int]) -> list[tuple[float, list[float]]]:
    """(entropy in nats, path values s_0..s_D) by position, as far as the traced text is this one."""
    if trace is None:
        return []
    rows = trace[trace["prompt_id"] == prompt_id].sort_values("position").to_dict("records")
    same = takewhile(lambda pair: int(pair[0]["token"]) == pair[1], zip(rows, tokens))
    return [(float(row["entropy"]), [float(value) for value in row["path_values"]]) for row, _ in same]


def text_pieces(tokenizer, tokens: list[int]) -> list[str]:
    """What each token adds to the text; a token that ends amid a character adds nothing, the one that ends it all."""
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokens]
    pieces[-1] += stream.close()
    return pieces


def token_label(tokenizer, token: int) -> str:
    """A token by itself, special ones by name."""
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
