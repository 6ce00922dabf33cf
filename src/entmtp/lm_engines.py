"""What answers the questions of `entmtp.lm_eval`: draft trees under a policy, or blocks of a self-distilled model.

An engine's `stream(ids, max_new_tokens, temperature, repeat)` yields (tokens, forwards): what was committed, and how
many target forwards it took, the prefill included. Plain decoding so makes one token a forward. `repeat`: how often the
same was asked before; sampled, it is another text then.
"""

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entmtp.config import Config, DecodingConfig, compose
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.engine import Decoder
from entmtp.decoding.lossless import SelfVerifier
from entmtp.errors import EntmtpError
from entmtp.io import sha256_file, sha256_json
from entmtp.policy.blocks import PricedBlocks
from entmtp.policy.schedulers import Policy
from entmtp.target.load import Target

BLOCKS = ("mtp", "threshold", "masks", "static", "k_max", "verify")  # options of ours beside the configuration's
SIZES = (1, 2, 4, 8)  # forwards whose milliseconds are measured before blocks are verified, and the largest


@dataclass
class TreeEngine:
    """Draft trees under a policy; plain decoding is the policy whose tree is empty."""

    decoder: Decoder
    policy: Policy
    decoding: DecodingConfig
    masked: int | None = None  # a token that is never said

    def stream(
        self, ids: list[int], max_new_tokens: int, temperature: float, repeat: int = 0
    ) -> Iterator[tuple[list[int], int]]:
        decoding = replace(self.decoding, max_new_tokens=max_new_tokens)
        if temperature:
            decoding = replace(decoding, mode="sample", temperature=temperature)
        elif decoding.mode == "sample":  # the request decides
            decoding = replace(decoding, mode="greedy")
        asked = sha256_json([ids, repeat] if repeat else ids)  # the same question again gets other noise
        for step in self.decoder.stream(ids, self.policy, decoding, asked):
            if step is None:
                yield [], 1
            else:
                yield step.tokens, int(step.nodes >= 0)  # the last root may need no forward


@dataclass
class BlockEngine:
    """Blocks of a self-distilled model: ConfAdapt or static ones, lossy but for blocks of one; or verified by the model
    itself. Greedy."""

    decoder: BlockDecoder
    rule: BlockRule | PricedBlocks

    @property
    def masked(self) -> int:
        return self.decoder.mask_id

    @property
    def verdict(self) -> str:
        """What the text is."""
        if isinstance(self.decoder, SelfVerifier):
            return "lossless"
        return "plain decoding" if self.rule.k_max == 1 else "lossy"

    def stream(
        self, ids: list[int], max_new_tokens: int, temperature: float, repeat: int = 0
    ) -> Iterator[tuple[list[int], int]]:
        if temperature:
            raise EntmtpError(f"temperature={temperature}: blocks are decoded greedily")
        for step in self.decoder.stream(ids, self.rule, max_new_tokens):
            yield step.tokens, 1


def open_engine(options: dict[str, Any], max_length: int) -> TreeEngine | BlockEngine:
    """The engine that options (Hydra overrides and `BLOCKS`) ask for, with room for `max_length` positions.

    Raises EntmtpError for options that do not go together, an unfitted policy, or a model without a mask token.
    """
    import torch

    own = {key: options[key] for key in BLOCKS if key in options}
    overrides = [f"{key}={value}" for key, value in options.items() if key not in BLOCKS]
    config = compose(overrides)
    if config.threads:
        torch.set_num_threads(config.threads)
    if "mtp" in own:
        return _open_blocks(own, config, max_length)
    if own:
        raise EntmtpError(f"{', '.join(own)}: only for a self-distilled model, whose folder mtp= names")
    return _open_trees(config, overrides, max_length)


def _open_trees(config: Config, overrides: list[str], max_length: int) -> TreeEngine:
    from entmtp.generate import open_policy
    from entmtp.layout import compose_heads, heads_folder, run_folder
    from entmtp.session import open_decoder, open_target

    policy = open_policy(config)  # before the target: a missing fit is said at once
    target = open_target(config.target, config.resources, config.dtype, config.device)
    heads = folder = None
    if config.policy.heads:
        rest = [item for item in overrides if not item.startswith("heads=")]
        heads = compose_heads(config, rest, config.policy.heads)
        folder = heads_folder(heads, config.target.name, config.resources, run_folder(config))
    length = min(max_length, target.max_positions)
    decoder = open_decoder(target, heads, folder, Decoder.room(length, 0, policy.max_nodes))
    return TreeEngine(decoder, policy, config.decoding)


def _open_blocks(own: dict[str, Any], config: Config, max_length: int) -> BlockEngine:
    said = str(own.get("verify", False)).lower()
    if said not in ("true", "false"):
        raise EntmtpError(f"verify={own['verify']}: true or false")
    verify = said == "true"
    if sum(key in own for key in ("threshold", "masks", "static")) + verify > 1:
        raise EntmtpError("threshold=, masks=, static= and verify=true exclude one another: ConfAdapt, the masks' "
                          "confidence alone, always as many tokens, or blocks that are verified")  # fmt: skip
    k_max = _number(int, own, "static" if "static" in own else "k_max", config.confadapt.k_max)
    asked = "masks" if "masks" in own else "threshold"
    rule = BlockRule(k_max, None if "static" in own else _number(float, own, asked, 0.9), first_free=asked == "masks")
    target, mask_id = _multi_token(own["mtp"], config)
    length = min(max_length, target.max_positions)
    if verify:
        return _verified(target, mask_id, k_max, length, config)
    return BlockEngine(BlockDecoder(target, mask_id, Decoder.room(length, 0, BlockDecoder.rows(k_max))), rule)


def _number(kind: type, own: dict[str, Any], key: str, default: float) -> Any:
    try:
        return kind(own.get(key, default))
    except ValueError as error:
        raise EntmtpError(f"{key}={own[key]}: must be a number") from error


def _verified(target: Target, mask_id: int, k_max: int, length: int, config: Config) -> BlockEngine:
    """Blocks as long as they are worth here: what forwards of this model cost is measured first."""
    from entmtp.calibration.latency import forward_table
    from entmtp.evaluation.lossless_blocks import self_verifier

    blocks = replace(config.confadapt, k_max=k_max)
    sizes = [size for size in SIZES if size <= blocks.max_nodes] + [blocks.max_nodes + 1]
    asked = replace(config.latency, sizes=sizes, contexts=[min(256, length)], repeats=5)
    with redirect_stdout(sys.stderr):  # standard output is the text's
        table = forward_table(target, asked, mask_id)
    capacity = Decoder.room(length, 0, max(blocks.max_nodes + 1, k_max))  # the root is a row too
    return BlockEngine(*self_verifier(target, mask_id, capacity, None, table, blocks))


def _multi_token(given: str, config: Config) -> tuple[Target, int]:
    """The multi-token model of a folder or of an adapter's (folded into the target, once, unless it acts on masks
    only)."""
    from entmtp.distill.adapter import TENSORS, apply_adapter, is_adapter, read_format
    from entmtp.distill.published import load_multi_token
    from entmtp.session import fetched

    folder = base = Path(given)
    if is_adapter(given):
        base = fetched(config.target, config.resources)
        if not read_format(base, given).masks_only:
            digest = sha256_file(Path(given) / TENSORS)[:12]
            folder = Path(config.resources) / "targets" / f"{config.target.name}-mtp-{digest}"
            if not folder.is_dir():
                apply_adapter(base, given, folder)
    mtp = replace(config.mtp, source="folder", path=str(folder))
    mtp.chat_template = mtp.chat_template or config.target.chat_template
    return load_multi_token(mtp, folder, config.dtype, config.device, base)
