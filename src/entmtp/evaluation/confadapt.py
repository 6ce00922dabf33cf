"""The second method on the same axes: accuracy against acceleration, for thresholds, static blocks and EntMTP."""

import math
from collections.abc import Iterable

import pandas as pd

from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.evaluation.answers import correct
from entmtp.evaluation.bench import take_turns
from entmtp.evaluation.stats import ratio_interval
from entmtp.io import Journal

WARMUP = 8  # tokens
OWN = "k=1"  # the distilled model's own plain decoding: what its blocks are compared with


def rules_of(k_max: int, thresholds: list[float], static: list[int]) -> dict[str, BlockRule]:
    """Names to rules, plain decoding of the distilled model first."""
    named = {OWN: BlockRule(1, None)}
    named |= {f"static k={k}": BlockRule(k, None) for k in static}
    return named | {f"confadapt {threshold:g}": BlockRule(k_max, threshold) for threshold in thresholds}


def decode_all(
    decoder: BlockDecoder, rules: dict[str, BlockRule], prompts: list[dict], max_new_tokens: int, journal: Journal
) -> list[dict]:
    """A row per rule and prompt, all rules side by side; see `take_turns`."""

    def run(name: str, prompt: dict, order: int) -> dict:
        made = decoder.generate(prompt["token_ids"], rules[name], max_new_tokens)
        return {"prompt_id": prompt["id"], "policy": name, "tokens": made.tokens, "forwards": len(made.steps),
                "seconds": made.prefill_seconds + made.decode_seconds}  # fmt: skip

    def warm(name: str, prompt: dict) -> None:
        decoder.generate(prompt["token_ids"], rules[name], min(WARMUP, max_new_tokens))

    def done(row: dict, number: int | None) -> None:
        if number is not None:
            print(f"confadapt: prompt {number + 1}/{len(prompts)} ({row['prompt_id']}), {row['policy']}: "
                  f"{len(row['tokens'])} tokens in {row['forwards']} forwards", flush=True)  # fmt: skip

    return take_turns(list(rules), prompts, journal, run, warm, done)


def judged(
    rows: list[dict], prompts: list[dict], tokenizer, scoring: str | None, nll: dict[str, dict], bootstrap: int,
    seed: int,
) -> list[dict]:  # fmt: skip
    """A row per rule: accuracy with its standard error (null without `scoring`), tokens a forward, tokens/s, ratio to
    the model's own k = 1, perplexity under the original model (`nll`, as of `policy_nll`), and how many texts equal
    the k = 1 ones."""
    frame = pd.DataFrame(rows)
    own = frame[frame["policy"] == OWN].set_index("prompt_id")
    made = []
    for name, group in frame.groupby("policy", sort=False):
        group = group.set_index("prompt_id").loc[own.index]
        tokens, forwards = group["tokens"].map(len).to_numpy(), group["forwards"].to_numpy()
        over = ratio_interval(tokens, group["seconds"], own["tokens"].map(len), own["seconds"], bootstrap, seed)
        made.append(
            {
                "method": name,
                "prompts": len(group),
                **accuracy(right_answers(group["tokens"].items(), prompts, tokenizer, scoring)),
                "tokens_per_forward": float(tokens.sum() / forwards.sum()),
                "tokens_per_s": float(tokens.sum() / group["seconds"].sum()),
                "over_plain": over,
                "ppl": math.exp(nll[name]["nll"] / nll[name]["tokens"]),
                "same_text": float((group["tokens"].map(list) == own["tokens"].map(list)).mean()),
            }
        )
    return made


def right_answers(texts: Iterable[tuple], prompts: list[dict], tokenizer, scoring: str | None) -> list[bool] | None:
    """Whether each (prompt id, tokens) gives its prompt's answer; None without `scoring`: they are not judged."""
    if scoring is None:
        return None
    answers = {prompt["id"]: prompt["answer"] for prompt in prompts}
    return [correct(scoring, tokenizer.decode(list(tokens), skip_special_tokens=True), answers[prompt_id])
            for prompt_id, tokens in texts]  # fmt: skip


def accuracy(right: list[bool] | None) -> dict[str, float | None]:
    """Share of right answers and its standard error (binomial). Of programs, one to a prompt, this is pass@1."""
    if right is None:
        return {"accuracy": None, "standard_error": None}
    share = sum(right) / len(right)
    return {"accuracy": share, "standard_error": math.sqrt(share * (1 - share) / len(right))}


def entmtp_rows(
    bench: pd.DataFrame, summary: list[dict], prompts: list[dict], tokenizer, scoring: str | None
) -> list[dict]:
    """The run's lossless policies in the same shape; plain decoding of the original model is among them."""
    made = []
    for row in summary:
        own = bench[bench["policy"] == row["policy"]]
        texts = zip(own["prompt_id"], own["tokens"], strict=True)
        made.append(
            {
                "method": row["policy"],
                "prompts": row["prompts"],
                **accuracy(right_answers(texts, prompts, tokenizer, scoring)),
                "tokens_per_forward": row["accept_length"],
                "tokens_per_s": row["tokens_per_s"],
                "over_plain": row["over_ar"],
                "ppl": row["ppl"],
                "same_text": 1.0 if row["lossless"] in ("exact", "n/a") else None,
            }
        )
    return made
