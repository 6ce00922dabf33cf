"""Step-latency table: what a forward of n tokens and a draft-head evaluation of m rows cost on this machine.

A step's cost is predicted as forward(n) + Σ_d propose_d(rows at depth d) + overhead, where the overhead (acceptance,
commit, Python) is the median difference to live steps of a few trees; and under a policy with a signal, or one that
grows its trees, what the choice itself takes.
"""

from statistics import median

import numpy as np
import torch

from entmtp.calibration.latency_table import LatencyTable
from entmtp.config import DecodingConfig, LatencyConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.policy.growing import GrowingPolicy
from entmtp.policy.schedulers import LadderPolicy, Policy
from entmtp.target.cache import KVCache
from entmtp.timing import cold_ms, median_ms, waiting
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.topology import Tree

PROMPT = "Explain how a sailing boat moves against the wind."  # whose live steps show what the table leaves over


@torch.inference_mode()
def measure_latency(decoder: Decoder, config: LatencyConfig, prompt: list[int], decoding: DecodingConfig) -> dict:
    """Measure the table at the configured contexts (medians of `repeats`; the table is their mean over contexts).

    Returns the content of `latency.json`. `prompt` is a real one: the overhead is measured on live steps.
    """
    target, drafter, cache = decoder.target, decoder.drafter, decoder.cache
    forward = forward_ms(target, cache, config)
    hidden = target.prefill(prompt, cache)[-1:]  # any row will do: a prefix layer's cost is part of the live overhead
    propose = [
        [_propose_ms(drafter, depth, rows, hidden, config.repeats) for rows in config.widths]
        for depth in range(1, drafter.depth + 1)
    ]
    table = {
        "arch": drafter.arch,
        "contexts": config.contexts,
        "forward": {"tokens": config.sizes, "ms": forward.mean(axis=0).tolist()},
        "forward_by_context": forward.tolist(),
        "propose": {"rows": config.widths, "ms": propose},
        "overhead_ms": 0.0,
        "plain_ms": 0.0,
        "signal_ms": 0.0,
        "grow_ms": 0.0,
    }
    table["plain_ms"], table["overhead_ms"] = _live(decoder, LatencyTable.from_json(table), prompt, decoding)
    return table | _schedulers(decoder, prompt, decoding)


@torch.inference_mode()
def forward_ms(target, cache: KVCache, config: LatencyConfig, mask_id: int | None = None) -> np.ndarray:
    """Milliseconds [contexts, sizes] of a forward of n tokens with their logits: medians of `repeats`. With `mask_id`
    the second half of them are mask tokens."""
    last = target.max_positions - 2  # a tree of depth 1 is read behind the context
    if max(config.contexts) > last:
        raise EntmtpError(f"config key 'latency.contexts': {max(config.contexts)}, but the target has "
                          f"{target.max_positions} positions; {last} at most")  # fmt: skip
    if len(set(config.contexts)) < len(config.contexts):
        raise EntmtpError(f"config key 'latency.contexts': {config.contexts} names a context twice")
    forward = np.zeros((len(config.contexts), len(config.sizes)))
    for row, context in enumerate(config.contexts):
        for column, n in enumerate(config.sizes):
            # any topology of n tokens will do: the mask's values do not change its cost
            shape = Tree.of([(rank,) for rank in range(n - 1)])
            tree = CompiledTree(shape, target.mask_rows, cache.capacity, target.dtype, target.device)
            cache.length = context
            tokens = torch.arange(n, device=target.device) % target.vocab_size
            if mask_id is not None:
                tokens[(n + 1) // 2 :] = mask_id
            positions = tree.depths + context

            def step() -> None:
                rows = target.model.hidden(tokens, positions, cache, tree.mask_slice(context))  # noqa: B023
                target.model.logits(rows)

            forward[row, column] = median_ms(waiting(step, str(target.device)), config.repeats)
        cells = ", ".join(f"{n}: {ms:.1f} ms" for n, ms in zip(config.sizes, forward[row], strict=True))
        print(f"latency: context {context}: {cells}", flush=True)
    cache.reset()
    return forward


def forward_table(target, config: LatencyConfig, mask_id: int | None = None) -> dict[str, list]:
    """{"tokens", "ms"}: `forward_ms` in the mean over contexts, on a cache of its own."""
    cache = target.new_cache(max(config.contexts) + max(config.sizes))
    return {"tokens": config.sizes, "ms": forward_ms(target, cache, config, mask_id).mean(axis=0).tolist()}


def _propose_ms(drafter, depth: int, rows: int, hidden: torch.Tensor, repeats: int) -> float:
    """One head, as in a step: caches hold nothing but what the head before it left there."""

    def one_before() -> None:
        if depth > 1:
            _propose(drafter, depth - 1, 1, hidden)

    evaluate = waiting(lambda: _propose(drafter, depth, rows, hidden), str(hidden.device))
    return cold_ms(evaluate, repeats, before=one_before)


def _propose(drafter, depth: int, rows: int, hidden: torch.Tensor) -> None:
    if drafter.arch == "medusa":
        drafter.reset()
        drafter.start(hidden, 0)
        return
    paths = torch.zeros(rows, depth, dtype=torch.long, device=hidden.device)
    drafter.candidates(drafter.path_logits(depth, hidden, paths))


def _schedulers(decoder: Decoder, prompt: list[int], decoding: DecodingConfig) -> dict[str, float]:
    """signal_ms, grow_ms: what choosing takes by a signal, and by growing, beyond what a single tree's policy takes."""

    def taken(policy: Policy) -> float:
        steps = decoder.generate(prompt, policy, decoding).steps
        return 1000 * median(step.scheduler_seconds for step in steps) if steps else 0.0

    drafter, one = decoder.drafter, Tree.of([(0,)])
    signal = LadderPolicy("signal", [one, Tree.of([(0,), (1,)])], 0, min(2, drafter.depth), [0.5])
    grow = GrowingPolicy("grow", [], children=min(8, drafter.width), max_depth=drafter.depth)
    alone = taken(Policy("static", [one]))
    return {"signal_ms": max(0.0, taken(signal) - alone), "grow_ms": max(0.0, taken(grow) - alone)}


def _live(decoder: Decoder, table: LatencyTable, prompt: list[int], decoding: DecodingConfig) -> tuple[float, float]:
    """Milliseconds of a plain step, and the part of a live step that forward and propose do not explain, both carried
    from the live steps' own context to the table's."""
    here = table.at(len(prompt) + decoding.max_new_tokens / 2)
    plain = [step.seconds * 1000 for step in decoder.plain(prompt, decoding).steps]
    rest = []
    for depth in sorted({1, min(2, decoder.drafter.depth), decoder.drafter.depth}):
        tree = Tree.of([(0,) * d for d in range(1, depth + 1)])
        policy = Policy("overhead", [tree])
        steps = [step.seconds * 1000 for step in decoder.generate(prompt, policy, decoding).steps]
        if steps:
            rest.append(median(steps) - here.step(tree))
    plain_ms = median(plain) + table.forward(1) - here.forward(1) if plain else table.forward(1)
    return plain_ms, max(0.0, median(rest)) if rest else 0.0
