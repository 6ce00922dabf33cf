"""A target, its draft heads and a policy, ready to generate text: what the library and the command line share.

Batch size is 1, and so is the number of texts at a time: a new generation ends the one before it.
"""

import operator
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder, Step, check_prompt
from entmtp.decoding.processors import Processor, checked_processors
from entmtp.decoding.text_stream import StopStrings, TextStream, special_ids
from entmtp.errors import EntmtpError
from entmtp.heads.drafter import Drafter
from entmtp.policy.schedulers import Policy
from entmtp.target.load import Target

ROWS = 512  # cache rows are added in such pieces
ENDED = object()


@dataclass(frozen=True)
class StepRecord:
    """One step of a generation: what the tree was, what it brought, what it cost."""

    tree: int  # index among the policy's trees; of a policy that grows trees, the nodes
    nodes: int  # drafted nodes; -1: the last root, which needed no step
    accepted: int  # drafted tokens that were committed beside the root
    tokens: list[int]
    text: str  # what could be shown after it; the steps' texts together are the text
    signal: float | None  # path value that the policy saw
    seconds: float
    scheduler_seconds: float


@dataclass
class Result:
    """A text and how it came about. `tokens` hold the stop token that ended it, `text` does not.

    With a stop string `text` ends before it and `tokens` with the token that completed it.
    """

    lossless: str  # exact | numerical ties | lossy
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None  # stop_token | stop_string | length; None while it runs
    steps: list[StepRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        return self.text

    @property
    def forwards(self) -> list[StepRecord]:
        """Steps that were a target forward."""
        return [step for step in self.steps if step.nodes >= 0]

    @property
    def accept_length(self) -> float | None:
        """Tokens a step; None where no step was needed."""
        steps = self.forwards
        return sum(step.accepted + 1 for step in steps) / len(steps) if steps else None

    @property
    def tokens_per_s(self) -> float:
        """Prefill included, what the caller does between pieces not."""
        seconds = self.prefill_seconds + self.decode_seconds
        return len(self.tokens) / seconds if seconds else 0.0


class Stream:
    """Iterate over it for pieces of text as they are committed; `result` is complete once it has ended."""

    def __init__(self, steps: Iterator[Step | None], text: TextStream, stops: StopStrings, stop_ids: set[int],
                 lossless: str):  # fmt: skip
        self.result = Result(lossless)
        self._text, self._stops, self._stop_ids = text, stops, stop_ids
        self._ends = special_ids(text.tokenizer, stops.strings)
        self._pieces = self._run(steps)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def _run(self, steps: Iterator[Step | None]) -> Iterator[str]:
        result, begin = self.result, time.perf_counter()
        for step in steps:
            seconds = time.perf_counter() - begin
            if step is None:
                result.prefill_seconds = seconds
            else:
                result.decode_seconds += seconds
                yield from self._show(self._take(step))
                if result.finish:
                    return
            begin = time.perf_counter()
        rest, stopped = self._stops.push(self._text.close())
        rest += "" if stopped else self._stops.close()
        result.finish = "stop_string" if stopped else self._plain_end()
        result.steps[-1] = replace(result.steps[-1], text=result.steps[-1].text + rest)
        yield from self._show(rest)

    def _plain_end(self) -> str:
        return "stop_token" if self.result.tokens and self.result.tokens[-1] in self._stop_ids else "length"

    def _take(self, step: Step) -> str:
        """Record a step and return what it lets be shown. Where a stop string may come, token by token: the text then
        ends with the same token whatever was committed together."""
        taken, shown = [], ""
        for tokens in [[token] for token in step.tokens] if self._stops.strings else [step.tokens]:
            taken += tokens
            visible = [token for token in tokens if token not in self._stop_ids]
            piece, stopped = self._stops.push(self._text.push(visible))
            shown += piece
            if not stopped and self._ends.intersection(tokens):
                rest, cut = self._stops.push(self._text.close())
                shown, stopped = shown + rest + ("" if cut else self._stops.close()), True
            if stopped:
                self.result.finish = "stop_string"
                break
        signal = step.signal if isfinite(step.signal) else None
        self.result.tokens += taken
        self.result.steps.append(StepRecord(step.tree, step.nodes, len(taken) - 1, taken, shown, signal, step.seconds,
                                            step.scheduler_seconds))  # fmt: skip
        return shown

    def _show(self, piece: str) -> Iterator[str]:
        self.result.text += piece
        if piece:
            yield piece


def _token_ids(prompt: Sequence) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]  # of a tensor or an array too; 1.9 is no token
    except TypeError as error:
        raise EntmtpError(
            "the prompt must be a string, a chat ({role, content} dicts), or one list of token ids (batch size 1 only)"
        ) from error


class LanguageModel:
    """See `entmtp.load`, which makes one."""

    def __init__(self, target: Target, drafter: Drafter | None, policy: Policy, source: Any = None):
        """`source`: the transformers model that the target was made from, where there is one."""
        self.target, self.drafter, self.policy, self.source = target, drafter, policy, source
        self._decoder: Decoder | None = None
        self._lock, self._turn = threading.Lock(), 0
        self._holder: int | None = None  # thread that holds the lock

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def encode(self, prompt: str | Sequence[dict] | Sequence[int], chat: bool | None = None) -> list[int]:
        """Token ids of a user's turn, of a chat ({role, content} dicts), or of ids themselves.

        `chat` False continues a string as it is; None takes the chat template where the tokenizer has one.
        """
        from entmtp.tasks.prompts import encode
        from entmtp.tasks.sources import check_messages, check_text

        if isinstance(prompt, str):
            check_text(prompt, "the prompt")
            if chat is False or (chat is None and not self.tokenizer.chat_template):
                ids = list(self.tokenizer(prompt)["input_ids"])
            else:
                ids = encode(self.tokenizer, [{"role": "user", "content": prompt}])
        elif len(prompt) and isinstance(prompt[0], dict):
            ids = encode(self.tokenizer, check_messages(list(prompt), "messages"))
        else:
            ids = _token_ids(prompt)
        return ids

    def steps(
        self,
        ids: list[int],
        decoding: DecodingConfig,
        prompt_id: str = "",
        stop_ids: set[int] | None = None,
        processors: Iterable[Processor] | None = None,
    ) -> Iterator[Step | None]:
        """`Decoder.stream` of one text. What cannot work is said now, not at the first step."""
        checked = checked_processors(processors)
        check_prompt(self.target, ids, decoding.max_new_tokens)  # before another cache takes this one's place
        with self._alone():  # two threads must not get one turn: both would write into the one cache
            decoder = self.decoder(Decoder.room(len(ids), decoding.max_new_tokens, self.policy.max_nodes))
            self._turn += 1
            turn = self._turn
        steps = decoder.stream(ids, self.policy, decoding, prompt_id, stop_ids=stop_ids, processors=checked)
        return self._in_turn(steps, turn)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time, which must not come again from within: a logits processor runs inside a step."""
        if self._holder == threading.get_ident():
            raise EntmtpError("a logits processor asks the very model whose step it is called in, and would wait for "
                              "itself: load another one for it")  # fmt: skip
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def decoder(self, capacity: int = 1) -> Decoder:
        """The decoder, with a cache of at least `capacity` rows."""
        if self._decoder is None or self._decoder.capacity < capacity:
            self._decoder = Decoder(self.target, self.drafter, -(-capacity // ROWS) * ROWS)
        return self._decoder

    def _in_turn(self, steps: Iterator[Step | None], turn: int) -> Iterator[Step | None]:
        """The steps of one text, unless another one has taken the cache."""
        while True:
            with self._alone():
                if turn != self._turn:
                    raise EntmtpError("another text has been started with this model, so this one cannot go on: use "
                                      "one stream at a time, or load another")  # fmt: skip
                step = next(steps, ENDED)
            if step is ENDED:
                return
            yield step

    def stream_ids(
        self,
        ids: list[int],
        decoding: DecodingConfig,
        *,
        prompt_id: str = "",
        stop: str | Iterable[str] = (),
        stop_ids: Iterable[int] | None = None,
        processors: Iterable[Processor] | None = None,
    ) -> Stream:
        """A text from token ids under a configured decoding."""
        stops = StopStrings(stop or ())
        ends = self.target.stop_ids if stop_ids is None else set(stop_ids)
        steps = self.steps(ids, decoding, prompt_id, ends, processors)
        return Stream(steps, TextStream(self.tokenizer), stops, ends, self._verdict(decoding))

    def _verdict(self, decoding: DecodingConfig) -> str:
        if decoding.mode == "typical" and self.policy.max_nodes:  # plain decoding is greedy then
            return "lossy"
        # the compiled engine's sums have one order however many rows a forward has; others' only nearly
        one_order = getattr(self.target.model, "native", None) is not None
        return "exact" if one_order and self.target.dtype_name == "float32" else "numerical ties"
