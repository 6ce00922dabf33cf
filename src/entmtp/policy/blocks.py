"""How long a block to draft with masks and how much of it to verify, when every drafted token is verified.

Both rules price a node as growing trees do (policy/growing.py): it is worth having while the tokens that it is expected
to bring exceed its milliseconds times the rate of tokens reached so far. What a drafted token is expected to bring is
the product of the block's own confidences down to it. What a mask will bring is not known before its block has been
read; it is forecast by a running mean of such products over the text's last blocks. Lengths change how fast a text is
written, never a token of it.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from entmtp.errors import EntmtpError
from entmtp.policy.growing import GrowingPolicy


@dataclass(frozen=True)
class BlockPlan:
    """One forward that verifies and drafts: `drafts` pending tokens after the root, and `masks[i]` masks after the
    place where the step ends if exactly i of them are accepted ([drafts + 1])."""

    drafts: int
    masks: list[int]

    @property
    def nodes(self) -> int:
        """Rows of the forward beside the root."""
        return self.drafts + sum(self.masks)


@dataclass
class FixedBlocks:
    """Always blocks of k tokens: k - 1 drafts verified, k - 1 masks wherever the step may end. The contrast to a
    priced length, and the widest forward that a block of k can need."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise EntmtpError(f"blocks of k={self.k} tokens: k must be at least 1")

    @property
    def k_max(self) -> int:
        return self.k

    @property
    def max_nodes(self) -> int:
        return self.k * self.k - 1

    def reset(self) -> None:
        """Called at the start of every prompt."""

    def plan(self, sure: list[float], left: int) -> BlockPlan:
        """The next forward of a model that verifies itself; see `PricedBlocks.plan`."""
        drafts = min(len(sure), left - 1)
        return BlockPlan(drafts, [max(0, min(self.k - 1, left - 2 - i)) for i in range(drafts + 1)])

    def ask(self, unread: int, left: int) -> int:
        """Tokens to ask a drafting model for; see `PricedBlocks.ask`."""
        return max(0, min(self.k - 1, left - 1))

    def keep(self, sure: list[float]) -> int:
        """How many of them to verify."""
        return len(sure)

    def note(self, sure: list[float], tokens: int, milliseconds: float) -> None:
        """What a step brought; see `PricedBlocks.note`."""

    def milliseconds(self, nodes: int, drafting_rows: int = 0) -> float:
        return 0.0


@dataclass
class PricedBlocks:
    """`step_ms[n]`: milliseconds of the verifying model's forward of n nodes beside the root; its length bounds the
    nodes. `draft_ms[n]`: of a drafting model's forward of n rows (for two models; empty for one that drafts itself).

    State is a prompt's own: the rate starts as plain decoding's, the forecast at `prior` to the power of the depth.
    """

    k_max: int
    step_ms: list[float]
    draft_ms: list[float] = field(default_factory=list)
    prior: float = 0.7  # chance that one more token of a block is right, before anything is known of the text
    memory: float = 0.25  # weight of the newest block in the forecast

    def __post_init__(self) -> None:
        if self.k_max < 1 or len(self.step_ms) < 1:
            raise EntmtpError(f"blocks of k_max={self.k_max} tokens need k_max >= 1 and the milliseconds of a step")
        self.price = GrowingPolicy("blocks", [], nodes=self.max_nodes, step_ms=self.step_ms)
        self.reset()

    @property
    def max_nodes(self) -> int:
        return len(self.step_ms) - 1

    def reset(self) -> None:
        """Called at the start of every prompt: no state survives from one to the next."""
        self.forecast = [self.prior**depth for depth in range(1, self.k_max + 1)]
        self.tokens, self.spent = 1.0, self.step_ms[0]
        self.price.rate = self.tokens / self.spent

    def plan(self, sure: list[float], left: int) -> BlockPlan:
        """The next forward. `sure[i]`: probability that the first i + 1 pending drafts are right; `left`: tokens that
        the text may still get, the one that this forward is certain to give among them.

        Drafts and masks are ranked together by the tokens they are expected to bring, a mask by the probability that
        the step ends before its block. Neither is ever ranked before the draft or mask that it stands on.
        """
        sure = sure[: left - 1]
        reached = [1.0, *sure]
        ends = [here - further for here, further in pairwise([*reached, 0.0])]
        worth = self._worth()
        ranked = [(value, place, 0) for place, value in enumerate(sure, 1)]
        for place, end in enumerate(ends):
            ranked += [(end * worth[i], place, i + 1) for i in range(min(self.k_max - 1, left - 2 - place))]
        ranked.sort(key=lambda node: (-node[0], node[1], node[2]))
        kept = ranked[: self.price.size([(value, mask) for value, _, mask in ranked])]
        drafts = sum(mask == 0 for _, _, mask in kept)
        masks = [0] * (drafts + 1)
        for _, place, mask in kept:
            masks[place] += mask > 0
        return BlockPlan(drafts, masks)

    def ask(self, unread: int, left: int) -> int:
        """Tokens to ask a drafting model for, 0: leave it out of this step. `unread`: rows that it has to read before
        it can draft; its forward of them gives the first token, a mask each further one."""
        worth, best, asked, gained = self._worth(), 0.0, 0, 0.0
        for k in range(1, min(self.k_max, left - 1) + 1):
            gained += worth[k - 1]
            value = gained - self.price.rate * self._drafting(unread + k - 1)
            if value > best:
                best, asked = value, k
        return asked

    def keep(self, sure: list[float]) -> int:
        """How many of a drafting model's tokens to verify."""
        return self.price.size([(value, depth) for depth, value in enumerate(sure, 1)])

    def note(self, sure: list[float], tokens: int, milliseconds: float) -> None:
        """After a step: what is sure of the block that it leaves, the tokens that it brought, and its time by the
        table (not by the clock: the same text is then always cut the same way)."""
        self.tokens += tokens
        self.spent += milliseconds
        self.price.rate = self.tokens / self.spent
        last = sure[-1] if sure else 1.0
        step = last ** (1 / len(sure)) if sure else self.prior  # beyond the block's end: as before it, on the whole
        for depth in range(self.k_max):
            seen = sure[depth] if depth < len(sure) else last * step ** (depth + 1 - len(sure))
            self.forecast[depth] += self.memory * (seen - self.forecast[depth])

    def milliseconds(self, nodes: int, drafting_rows: int = 0) -> float:
        """A step's time by the table."""
        return self.step_ms[nodes] + (self._drafting(drafting_rows) if drafting_rows else 0.0)

    def _drafting(self, rows: int) -> float:
        return self.draft_ms[min(rows, len(self.draft_ms) - 1)]

    def _worth(self) -> list[float]:
        """Tokens that each place of the next block is expected to bring, its verification paid; descending."""
        worth, least = [], 1.0
        for depth, expected in enumerate(self.forecast, 1):
            extra = self.step_ms[min(depth, self.max_nodes)] - self.step_ms[min(depth - 1, self.max_nodes)]
            least = max(0.0, min(least, expected - self.price.rate * extra))
            worth.append(least)
        return worth
