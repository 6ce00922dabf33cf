"""Our decoding under EleutherAI's lm-evaluation-harness: the field's tasks, answered by draft trees or by ConfAdapt.

The harness is optional (`pip install lm-eval==0.4.13`; nothing else here needs it). With it:

    python -m entmtp.lm_eval gsm8k --limit 50 policy=entmtp_tau task=gsm8k experiment=main
    python -m entmtp.lm_eval gsm8k --chat policy=ar dtype=bfloat16
    python -m entmtp.lm_eval my_task --include my_tasks/ mtp=results/confadapt/distill/short threshold=0.9

The overrides are those of `entmtp.generate`: `policy` decides how text is generated, with the bank and thresholds of
`task` in run `experiment`. Under an exact policy every answer, hence every score, is plain decoding's; what changes is
the time. `mtp=FOLDER` takes a self-distilled model instead, decoded with `threshold=` (ConfAdapt, lossy) or `static=`
(always as many tokens), `k_max=` tokens a forward at most. Likelihoods are the model's own and know no policy. Beside
the harness' scores come tokens a forward and tokens/s. From Python:

    from lm_eval import simple_evaluate
    from entmtp.lm_eval import EntmtpLM
    lm = EntmtpLM(policy="entmtp_tau", task="gsm8k", experiment="main")
    print(simple_evaluate(lm, tasks=["gsm8k"], limit=50)["results"], lm.speed())

Importing this module registers the model as `entmtp`. Contexts longer than `max_length` (2,048 tokens, or the model's
positions) lose their beginning, as they do in the harness' own models, and are counted. Batch size is 1.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from entmtp.decoding.text_stream import special_ids
from entmtp.errors import EntmtpError
from entmtp.io import write_json
from entmtp.lm_engines import BlockEngine, TreeEngine, open_engine

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:  # the class works without it, for whoever calls it as the harness does
    LM = object

    def register_model(*names: str):
        return lambda cls: cls


MAX_LENGTH, NEW_TOKENS = 2048, 256


@register_model("entmtp")
class EntmtpLM(LM):
    """A harness model. `engine`, or the options of `open_engine` as keywords (`**{"policy.tau_on": 0.3}` too)."""

    def __init__(
        self, engine: TreeEngine | BlockEngine | None = None, max_length: int = MAX_LENGTH,
        batch_size: int | str | None = None, max_batch_size: int | None = None, **options,
    ):  # fmt: skip
        super().__init__()
        if str(batch_size or 1) not in ("1", "auto"):
            raise EntmtpError(f"batch_size={batch_size}: draft trees decode one sequence at a time")
        self.engine = engine or open_engine({key: value for key, value in options.items() if value is not None},
                                            int(max_length))  # fmt: skip
        self.target = self.engine.decoder.target
        self.tokenizer = self.target.tokenizer
        self.max_length = min(int(max_length), self.target.max_positions)
        self.tokens, self.forwards, self.seconds, self.shortened = 0, 0, 0.0, 0

    # what the harness asks

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Requests with `args` (context, {"until", "max_gen_toks", "do_sample", "temperature"}) -> texts, cut before
        the first stop string. Raises EntmtpError for ways of sampling that we do not have."""
        texts, asked = [], Counter()  # tasks of several samples (pass@k, a majority's vote) repeat their requests
        for request in _progress(requests, disable_tqdm):
            context, wishes = request.args
            text = self._generate(self._encode(context), *_read_wishes(wishes), asked[context])
            asked[context] += 1
            self._remember("generate_until", request.args, text)
            texts.append(text)
        return texts

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Requests with `args` (context, continuation) -> (ln p(continuation | context), whether it is greedy)."""
        scores = []
        for request in _progress(requests, disable_tqdm):
            score = self._score(*self._encode_pair(*request.args))
            self._remember("loglikelihood", request.args, score)
            scores.append(score)
        return scores

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Requests with `args` (text,) -> ln p(text), every token once, in windows of `max_length`."""
        scores = []
        for request in _progress(requests, disable_tqdm):
            windows = rolling_windows(self._encode(request.args[0]), self._first_token, self.max_length)
            score = sum(self._score(*window)[0] for window in windows)
            self._remember("loglikelihood_rolling", request.args, score)
            scores.append(score)
        return scores

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.tokenizer.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return self.target.fingerprint

    def speed(self) -> dict[str, float]:
        """Of all that was generated: tokens a target forward and tokens/s, prefills included in the time."""
        return {
            "tokens": self.tokens,
            "tokens_per_forward": self.tokens / self.forwards if self.forwards else 0.0,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else 0.0,
            "shortened_contexts": self.shortened,
        }

    # how it is done

    @property
    def _first_token(self) -> int:
        """Stands before a text that has no context."""
        known = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both; white space between them belongs to the continuation, where tokenizers expect it."""
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        before = self._encode(context)
        after = self._encode(context + continuation)[len(before) :] if before else self._encode(continuation)
        return before or [self._first_token], after

    def _shorten(self, ids: list[int], length: int) -> list[int]:
        if len(ids) > length:
            self.shortened += 1
        return ids[-length:]

    def _generate(self, ids: list[int], until: list[str], budget: int, temperature: float, repeat: int = 0) -> str:
        if budget < 1:
            raise EntmtpError(f"max_gen_toks={budget}: must be at least 1")
        if budget >= self.max_length:
            raise EntmtpError(f"max_gen_toks={budget} leaves no context in max_length={self.max_length}: raise it")
        ids = self._shorten(ids or [self._first_token], self.max_length - budget)
        tokens, text, ends = [], "", special_ids(self.tokenizer, until)
        begin = time.perf_counter()
        for step, forwards in self.engine.stream(ids, budget, temperature, repeat):
            tokens += list(takewhile(lambda token: token not in ends, step))
            self.forwards += forwards
            text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            whole = text.rstrip("\ufffd")  # what looks broken may be the first bytes of a character
            if ends.intersection(step) or any(stop in whole for stop in until):
                text = whole
                break
        self.seconds += time.perf_counter() - begin
        self.tokens += len(tokens) + bool(ends.intersection(step))  # the stop token was decoded too
        return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]

    @torch.inference_mode()
    def _score(self, before: list[int], after: list[int]) -> tuple[float, bool]:
        if len(after) > self.max_length:
            raise EntmtpError(f"a continuation of {len(after)} tokens exceeds max_length={self.max_length}")
        if not after:
            return 0.0, True
        ids = self._shorten(before + after, self.max_length + 1)
        cache = self.engine.decoder.cache
        cache.reset()
        hidden = self.target.prefill(ids[:-1], cache)[-len(after) :]
        logits = self.target.model.logits(hidden).float()
        if self.engine.masked is not None:
            logits[:, self.engine.masked : self.engine.masked + 1] = -torch.inf
        wanted = torch.tensor(after, device=logits.device)
        picked = logits.log_softmax(dim=-1).gather(1, wanted[:, None])
        return float(picked.double().sum()), bool((logits.argmax(dim=-1) == wanted).all())

    def _remember(self, kind: str, asked: tuple, answer: Any) -> None:
        """The harness' own cache of answers (`use_cache`)."""
        hook = getattr(self, "cache_hook", None)
        if hook is not None:
            hook.add_partial(kind, asked, answer)


def rolling_windows(tokens: list[int], first: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, predicted) pairs: every token is predicted once, with as much context as `size` inputs allow."""
    if tokens:
        yield [first], tokens[:size]
    for start in range(size, len(tokens), size):
        end = min(start + size, len(tokens))
        yield tokens[end - size - 1 : start], tokens[start:end]


def _read_wishes(wishes: dict[str, Any]) -> tuple[list[str], int, float]:
    """Stop strings, budget and temperature (0: greedy) of a request's generation arguments."""
    until = wishes.get("until") or []
    until = [until] if isinstance(until, str) else [stop for stop in until if stop]
    names = ("max_gen_toks", "max_new_tokens", "max_tokens")
    budget = next((wishes[key] for key in names if key in wishes), NEW_TOKENS)
    temperature = wishes.get("temperature")
    if not wishes.get("do_sample", bool(temperature)):
        temperature = 0.0
    temperature = 1.0 if temperature is None else float(temperature)  # do_sample alone
    for key, neutral in (("top_p", (None, 1, 1.0)), ("top_k", (None, 0, -1)), ("num_beams", (None, 1))):
        if (temperature or key == "num_beams") and wishes.get(key) not in neutral:
            raise EntmtpError(f"{key}={wishes[key]}: not offered, sampling is exact or greedy; leave it out")
    return until, int(budget), temperature


def _progress(requests: Iterable, silent: bool) -> Iterable:
    from tqdm import tqdm

    return tqdm(requests, desc="entmtp", disable=silent)


def evaluate(tasks: list[str], options: dict[str, Any], limit: float | None, chat: bool, include: str | None) -> dict:
    """Scores of the harness' tasks, and the speed at which they were answered."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EntmtpError(f"lm-evaluation-harness is missing ({error}): pip install lm-eval==0.4.13") from error
    lm = EntmtpLM(**options)
    done = simple_evaluate(
        lm, tasks=tasks, limit=limit, apply_chat_template=chat, task_manager=TaskManager(include_path=include)
    )
    numbers = {task: {key: value for key, value in scores.items() if isinstance(value, int | float) and isfinite(value)}
               for task, scores in done["results"].items()}  # fmt: skip
    return {"results": numbers, "speed": lm.speed(), "options": options}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m entmtp.lm_eval", description=__doc__.split("\n")[0])
    parser.add_argument("tasks", help="the harness' tasks, separated by commas")
    parser.add_argument("options", nargs="*", metavar="key=value", help="see the module's own documentation")
    parser.add_argument("--limit", type=float, help="first questions of each task, or a share below 1")
    parser.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template")
    parser.add_argument("--include", metavar="FOLDER", help="folder of further tasks (YAML)")
    parser.add_argument("--output", metavar="FILE", help="write scores and speed as JSON")
    arguments = parser.parse_intermixed_args()
    try:
        options = dict(item.split("=", 1) for item in arguments.options if "=" in item)
        if len(options) != len(arguments.options):
            raise EntmtpError(f"options are key=value, each once, found {' '.join(arguments.options)}")
        done = evaluate(arguments.tasks.split(","), options, arguments.limit, arguments.chat, arguments.include)
    except EntmtpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for task, scores in done["results"].items():
        shown = ", ".join(f"{key} {value:.4f}" for key, value in scores.items())
        print(f"{task}: {shown}")
    print(", ".join(f"{key} {value:.4g}" for key, value in done["speed"].items()))
    if arguments.output:
        write_json(Path(arguments.output), done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
