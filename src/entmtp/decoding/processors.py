"""Logits processors that keep decoding lossless.

A processor maps (tokens so far, scores) to scores. While it is a pure function of the two, the target's choice after a
prefix depends on that prefix alone, so applying it at every verified node with the node's own prefix gives the very
tokens of plain decoding under the same processor. It is asked along the accepted path only, once a committed token:
nothing off the path is looked at. A processor that counts its calls, keeps a cache of its own or draws random numbers
is another matter: its answer depends on how the text was reached.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from entmtp.decoding.sampling import Choices, Chooser, GumbelNoise, refuse_nan
from entmtp.errors import EntmtpError

Processor = Callable[[Tensor, Tensor], Tensor]  # (input_ids [1, n], scores [1, vocab]) -> scores [1, vocab]

MODULE = "transformers.generation.logits_process"
# By exact class: a subclass may keep state. Read in transformers 5.24: each is a function of its two arguments; what
# some of them store (a bias table, a device) is derived from the vocabulary's size.
STATELESS = frozenset(
    name + suffix
    for suffix, names in {
        "LogitsProcessor": ("MinLength", "MinNewTokensLength", "RepetitionPenalty", "NoRepeatNGram", "SequenceBias",
                            "NoBadWords", "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove", "SuppressTokens",
                            "SuppressTokensAtBegin"),
        "LogitsWarper": ("Temperature", "TopK", "TopP", "TopH", "MinP", "Typical", "Epsilon", "Eta"),
        "": ("ExponentialDecayLengthPenalty", "LogitNormalization"),
    }.items()
    for name in names
)  # fmt: skip


class Stateless:
    """A processor of one's own, promised to be a pure function of (input_ids, scores); see `stateless`."""

    def __init__(self, processor: Processor):
        self.processor, self.tried = processor, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.tried:
            return self.processor(input_ids, scores)
        # a promise is cheap to try: the same question, with another one between, must get the same answer
        first = self.processor(input_ids, scores.clone())
        self.processor(input_ids[:, : max(1, input_ids.shape[1] - 1)], scores.clone())
        again = self.processor(input_ids, scores.clone())
        if not torch.equal(first.nan_to_num(), again.nan_to_num()):
            raise EntmtpError(
                f"logits processor {name_of(self.processor)} answers the same question differently: it keeps state or "
                "draws random numbers, so no exact decoding is possible with it"
            )
        self.tried = True  # a broken promise is refused however often it is made
        return again


def stateless(processor: Processor) -> Stateless:
    """Promise that a processor's answer depends on its two arguments only, so that exact decoding may use it.

    `processor(input_ids [1, n], scores float32 [1, vocab]) -> scores`. The promise is tried once, on the first call.
    """
    return Stateless(processor)


def name_of(processor: object) -> str:
    return getattr(processor, "__qualname__", type(processor).__name__)


def checked_processors(processors: Iterable[Processor] | None) -> list[Processor]:
    """The processors as a list; EntmtpError for one that is neither known to be stateless nor promised to be."""
    found = list(processors or [])
    for processor in found:
        kind = type(processor)
        known = kind.__module__ == MODULE and kind.__name__ in STATELESS
        if not known and not isinstance(processor, Stateless):
            raise EntmtpError(
                f"logits processor {name_of(processor)} is not known to be a pure function of (input_ids, scores), so "
                "drafted tokens verified with it might differ from plain decoding's. Known ones: "
                f"{', '.join(sorted(STATELESS))}. If yours keeps no state, wrap it: entmtp.stateless(processor)"
            )
    return found


class ProcessedChooser(Chooser):
    """The target's choice from processed scores: argmax, or argmax of processed / T + noise.

    It keeps the text's tokens: what it chose at a position is the text's token there, so the prefix of every node on
    the accepted path is known without being told.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        prompt: Sequence[int],
        temperature: float = 0.0,
        noise: GumbelNoise | None = None,
    ):
        super().__init__(temperature, noise)
        self.processors, self.text = processors, list(prompt)

    def __call__(self, logits: Tensor, positions: list[int]) -> Choices:
        """logits [n, vocab] -> choices, each made when it is asked for: from the root down."""
        return Choices(self, logits, positions)

    def choose(self, logits: Tensor, position: int) -> int:
        """The token at `position`, which follows the last one chosen. logits [1, vocab]"""
        if position != len(self.text):
            raise ValueError(f"position {position} does not follow the {len(self.text)} tokens of the text")
        scores = logits.to(torch.float32, copy=True)  # some processors write in place
        tokens = torch.tensor([self.text], device=logits.device)
        for processor in self.processors:
            made = processor(tokens, scores)
            if not isinstance(made, Tensor) or made.shape != scores.shape:
                raise EntmtpError(f"logits processor {name_of(processor)} must return scores [1, {scores.shape[1]}]")
            scores = made
        scores = self.scores(scores, [position])
        token = int(scores.argmax())
        refuse_nan(scores, token)
        self.text.append(token)
        return token
