"""Verified blocks beside ConfAdapt: who runs them, and whether they kept their promise."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from entmtp.config import ConfAdaptConfig, DecodingConfig
from entmtp.decoding.confadapt import BlockDecoder
from entmtp.decoding.engine import Decoder, Generation, Step
from entmtp.decoding.lossless import DraftedVerifier, SelfVerifier
from entmtp.errors import EntmtpError
from entmtp.evaluation.checks import lossless_verdicts
from entmtp.policy.blocks import PricedBlocks
from entmtp.target.load import Target

OWN = "k=1"  # the multi-token model's own plain decoding: what its blocks are compared with
ORIGINAL = "original k=1"  # the original model's, in the same process
SELF, DRAFT = "lossless_self", "lossless_draft"
FAMILIES = {SELF: OWN, DRAFT: ORIGINAL}  # whose text each must be


def milliseconds(table: dict, rows: int, config: ConfAdaptConfig) -> list[float]:
    """Milliseconds of forwards of 1, 2, … `rows` rows, between the measured sizes of a `forward` table."""
    if rows > table["tokens"][-1]:
        raise EntmtpError(
            f"confadapt.max_nodes={config.max_nodes}, k_max={config.k_max}: forwards of {rows} rows, but latency.sizes "
            f"ends at {table['tokens'][-1]}; add a larger size"
        )
    return np.interp(np.arange(1, rows + 1), table["tokens"], table["ms"]).tolist()


def self_arm(
    own: Target, mask_id: int, capacity: int, limit: int | None, latency: dict, config: ConfAdaptConfig
) -> Callable:
    """The multi-token model that verifies its own blocks; it says tokens below `limit`."""
    decoder, policy = self_verifier(own, mask_id, capacity, limit, latency["own"], config)
    return lambda prompt, max_new_tokens: decoder.generate(prompt, policy, max_new_tokens)


def self_verifier(
    own: Target, mask_id: int, capacity: int, limit: int | None, table: dict, config: ConfAdaptConfig
) -> tuple[SelfVerifier, PricedBlocks]:
    """Its decoder, and blocks as long as they are worth by the `forward` table of this model."""
    policy = PricedBlocks(config.k_max, milliseconds(table, config.max_nodes + 1, config))
    return SelfVerifier(own, mask_id, capacity, policy.max_nodes, limit), policy


def draft_arms(
    own: Target, mask_id: int, original: Target, capacity: int, latency: dict, config: ConfAdaptConfig
) -> dict[str, Callable]:
    """The original model's plain decoding, and the original model with the multi-token one as its drafter."""
    step_ms = milliseconds(latency["original"], config.k_max + 1, config)
    # what a drafter reads at once: the last step's tokens and the masks
    draft_ms = [0.0, *milliseconds(latency["own"], min(2 * config.k_max, latency["own"]["tokens"][-1]), config)]
    policy = PricedBlocks(config.k_max, step_ms, draft_ms)
    drafter = BlockDecoder(own, mask_id, capacity, limit=original.vocab_size)
    decoder, plain = DraftedVerifier(original, drafter, capacity, policy.max_nodes), Decoder(original, None, capacity)

    def plainly(prompt: list[int], max_new_tokens: int) -> Generation:
        made = plain.plain(prompt, DecodingConfig(max_new_tokens=max_new_tokens))
        prefill = Step(0, 0, 0, 0, float("nan"), made.prefill_seconds, 0.0, 0.0, made.tokens[:1])
        return replace(made, steps=[prefill, *made.steps])  # a step for every forward, as blocks have them

    return {ORIGINAL: plainly, DRAFT: lambda prompt, max_new_tokens: decoder.generate(prompt, policy, max_new_tokens)}


def verdicts_of(
    rows: list[dict], prompts: list[dict], targets: dict[str, Target | None], tie_margin: float
) -> dict[str, dict]:
    """Verdicts (see `lossless_verdicts`) of the verified methods in `rows`, each against plain decoding of its own
    model: `targets` by method."""
    found: dict[str, dict] = {}
    longest = max(len(prompt["token_ids"]) for prompt in prompts) + max(len(row["tokens"]) for row in rows)
    for method, reference in FAMILIES.items():
        family = [row for row in rows if row["policy"] in (method, reference)]
        if not any(row["policy"] == method for row in family):
            continue
        kinds = [{**row, "kind": "ar" if row["policy"] == reference else "blocks", "mode": "greedy"} for row in family]
        cache = targets[method].new_cache(longest)
        verdicts = lossless_verdicts(targets[method], cache, kinds, prompts, DecodingConfig(), tie_margin)
        found[method] = verdicts[method]
    return found
