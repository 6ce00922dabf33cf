"""Blocks of a multi-token model, verified: the very tokens of plain decoding, several a forward.

ConfAdapt (decoding/confadapt.py) commits what the masks say. Here it is only a draft, and the model that decides every
token reads it first, exactly as it reads a draft tree's:

- `SelfVerifier`: the multi-token model verifies itself. One forward reads the pending draft and, after every place
  where its acceptance can end, masks that already draft what comes next, so that drafting costs no forward of its own:

      root  d1  d2 | m m m   after the root, if d1 is wrong | m m after d1, if d2 is wrong | m m m after d2

  A real token sees the context and the drafts before it, a mask the drafts before its place and the masks of its own
  block: the ancestors in a tree, and what the model was trained on. The first mask stands where the next root, not
  known yet, will be.
- `DraftedVerifier`: another model (the one that the multi-token model was distilled from) verifies. Two forwards a
  step, one of each.

What is committed is what `accept_exact` finds: a draft survives while it is the verifying model's own choice. Tokens
are therefore those of k = 1 whatever was drafted, up to rounding between forwards of different size.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

import torch
from torch import Tensor

from entmtp.decoding.confadapt import BlockDecoder, check_room, timed
from entmtp.decoding.sampling import refuse_nan
from entmtp.decoding.steps import Generation, Step, cut
from entmtp.decoding.verify import accept_exact
from entmtp.errors import EntmtpError
from entmtp.policy.blocks import BlockPlan
from entmtp.tree.grown import GrownShape, MaskPool

NO_SIGNAL = float("nan")


class BlockPolicy(Protocol):
    """Who decides on lengths: see policy/blocks.py."""

    k_max: int
    max_nodes: int

    def reset(self) -> None: ...
    def plan(self, sure: list[float], left: int) -> BlockPlan: ...
    def ask(self, unread: int, left: int) -> int: ...
    def keep(self, sure: list[float]) -> int: ...
    def note(self, sure: list[float], tokens: int, milliseconds: float) -> None: ...
    def milliseconds(self, nodes: int, drafting_rows: int = 0) -> float: ...


@dataclass
class BlockStep(Step):
    """A step whose tokens are those that its forward decided. `drafter_forwards`: of another model, for the draft."""

    drafter_forwards: int = 0


def block_tree(plan: BlockPlan) -> tuple[GrownShape, list[range]]:
    """A plan's rows as a tree: the root, the drafts in a chain, then the masks after each place where acceptance can
    end; and the rows of the masks of every place."""
    parents, depths, groups = [-1, *range(plan.drafts)], list(range(plan.drafts + 1)), []
    for place, masks in enumerate(plan.masks):
        first = len(parents)
        groups.append(range(first, first + masks))
        parents += [place, *range(first, first + masks)][:masks]
        depths += range(place + 1, place + 1 + masks)
    return GrownShape(parents, depths), groups


def prefix_probabilities(confidence: list[float]) -> list[float]:
    """Probability that the first 1, 2, … tokens are all right, by their confidences."""
    return list(accumulate((min(1.0, p) for p in confidence), mul))


class Verifier:
    """One forward of the root, drafts and masks on a target's cache; what the target itself says there."""

    def __init__(self, target, cache, capacity: int, max_nodes: int):
        self.target, self.cache, self.capacity = target, cache, capacity
        self.pool = MaskPool(max_nodes, target.mask_rows, capacity, target.dtype, target.device)

    def logits(self, shape: GrownShape, tokens: list[int]) -> Tensor:
        """[n, V] after each node of the shape, whose tokens are given; the cache is not advanced."""
        target, context = self.target, self.cache.length
        # drafts past the model's last position can be read near the end, never committed
        depths = torch.tensor(shape.depths, device=target.device)
        positions = (depths + context).clamp_max(target.max_positions - 1)
        mask = None if len(tokens) == 1 else self.pool.fill(shape.parents)[:, self.capacity - context :]
        ids = torch.tensor(tokens, device=target.device)
        return target.model.logits(target.model.hidden(ids, positions, self.cache, mask))


class SelfVerifier(BlockDecoder):
    """A multi-token model that verifies the blocks that it drafts."""

    def __init__(self, target, mask_id: int, capacity: int, max_nodes: int, limit: int | None = None):
        super().__init__(target, mask_id, capacity, limit)
        self.verifier = Verifier(target, self.cache, capacity, max_nodes)

    @torch.inference_mode()
    def stream(self, prompt: list[int], policy: BlockPolicy, max_new_tokens: int) -> Iterator[Step]:
        """Every forward's tokens as they are decided; the first come with the prefill."""
        check_nodes(policy, self.verifier.pool)
        self.start(prompt, max_new_tokens, max(policy.max_nodes + 1, policy.k_max))
        policy.reset()
        begin = time.perf_counter()
        confidence, chosen = self.predict(prompt, policy.k_max)
        block, draft, sure = chosen[:1], chosen[1:], prefix_probabilities(confidence[1:])
        policy.note(sure, 0, 0.0)
        nodes, planning, count = len(draft), 0.0, 0
        while True:
            block = cut(block, self.target.stop_ids, max_new_tokens - count)
            count += len(block)
            yield _step(nodes, block, sure, time.perf_counter() - begin, planning, 0)
            if block[-1] in self.target.stop_ids or count == max_new_tokens:
                return
            begin = time.perf_counter()
            plan = policy.plan(sure, max_new_tokens - count)
            nodes, planning = plan.nodes, time.perf_counter() - begin
            block, draft, sure = self._verify(block[-1], draft[: plan.drafts], plan)
            policy.note(sure, len(block), policy.milliseconds(nodes))

    def _verify(self, root: int, drafts: list[int], plan: BlockPlan) -> tuple[list[int], list[int], list[float]]:
        """Commit the root and the drafts that are the model's own choices. Returns these drafts and the choice after
        them, the draft that its masks made for what follows, and how sure it is of it."""
        shape, groups = block_tree(plan)
        tokens = [root, *drafts, *[self.mask_id] * sum(plan.masks)]
        scores = self.scores(self.verifier.logits(shape, tokens))
        choices = scores.argmax(dim=-1).tolist()  # never the mask: no mask is ever accepted
        accepted = accept_exact(shape, tokens, choices)
        for node in accepted:
            refuse_nan(scores[node:], choices[node])
        self.cache.commit(accepted)  # a prefix of the rows: nothing moves, the masks' keys and values are overwritten
        rows = groups[len(accepted) - 1]
        confidence = scores[rows.start : rows.stop].softmax(dim=-1).amax(dim=-1).tolist()
        block = [tokens[node] for node in accepted[1:]] + [choices[accepted[-1]]]
        return block, [choices[row] for row in rows], prefix_probabilities(confidence)


class DraftedVerifier:
    """A target whose drafts are another model's blocks. `drafter` predicts only tokens that the target knows."""

    def __init__(self, target, drafter: BlockDecoder, capacity: int, max_nodes: int):
        if drafter.limit is None or drafter.limit > target.vocab_size:
            raise EntmtpError(f"the drafting model may say tokens from {target.vocab_size} on, which the target lacks")
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self.cache = target.new_cache(capacity)
        self.verifier = Verifier(target, self.cache, capacity, max_nodes)

    def generate(self, prompt: list[int], policy: BlockPolicy, max_new_tokens: int) -> Generation:
        """Decode one prompt greedily; steps are the target's forwards."""
        return timed(self.stream(prompt, policy, max_new_tokens))

    @torch.inference_mode()
    def stream(self, prompt: list[int], policy: BlockPolicy, max_new_tokens: int) -> Iterator[Step]:
        """Every target forward's tokens as they are decided; the first come with the prefill."""
        check_nodes(policy, self.verifier.pool)
        check_room(self.target, self.capacity, prompt, max_new_tokens, policy.max_nodes + 1)
        self.drafter.start(prompt, max_new_tokens, policy.k_max)
        self.cache.reset()
        policy.reset()
        begin = time.perf_counter()
        hidden = self.target.prefill(prompt, self.cache)
        logits = self.target.model.logits(hidden[-1:])
        block = logits.argmax(dim=-1).tolist()
        refuse_nan(logits, block[0])
        unread, nodes, sure, planning, forwards, count = list(prompt), 0, [], 0.0, 0, 0
        while True:
            block = cut(block, self.target.stop_ids, max_new_tokens - count)
            count += len(block)
            yield _step(nodes, block, sure, time.perf_counter() - begin, planning, forwards)
            if block[-1] in self.target.stop_ids or count == max_new_tokens:
                return
            begin = time.perf_counter()
            unread += block
            asked, planning = policy.ask(len(unread), max_new_tokens - count), time.perf_counter() - begin
            rows, drafts, sure = 0, [], []
            if asked:
                rows = len(unread) + asked - 1
                confidence, drafts = self.drafter.predict(unread, asked)
                unread, sure = [], prefix_probabilities(confidence)
            drafted = time.perf_counter()
            nodes, forwards = policy.keep(sure), int(asked > 0)
            planning += time.perf_counter() - drafted
            block = self._verify(block[-1], drafts[:nodes])
            policy.note(sure, len(block), policy.milliseconds(nodes, rows))

    def _verify(self, root: int, drafts: list[int]) -> list[int]:
        """Commit the root and the drafts that are the target's own choices; these drafts and the choice after them."""
        shape, _ = block_tree(BlockPlan(len(drafts), [0] * (len(drafts) + 1)))
        tokens = [root, *drafts]
        logits = self.verifier.logits(shape, tokens)
        choices = logits.argmax(dim=-1).tolist()
        accepted = accept_exact(shape, tokens, choices)
        for node in accepted:
            refuse_nan(logits[node:], choices[node])
        self.cache.commit(accepted)
        return [*tokens[1 : len(accepted)], choices[accepted[-1]]]


def check_nodes(policy: BlockPolicy, pool: MaskPool) -> None:
    """Masks are made before decoding: a step allocates none."""
    if policy.max_nodes >= len(pool.buffers):
        raise EntmtpError(
            f"this policy's forwards have up to {policy.max_nodes} nodes, the decoder's {len(pool.buffers) - 1}"
        )


def _step(nodes: int, block: list[int], sure: list[float], seconds: float, planning: float, forwards: int) -> BlockStep:
    signal, beyond = sure[0] if sure else NO_SIGNAL, len(block) - 1
    return BlockStep(nodes, nodes, beyond, beyond, signal, seconds, planning, 0.0, block, forwards)
