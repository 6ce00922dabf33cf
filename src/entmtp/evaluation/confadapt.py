"""The second method on the same axes: accuracy against acceleration, for thresholds, static blocks, verified blocks and
EntMTP."""

import math
from collections.abc import Callable, Iterable

import pandas as pd

from entmtp.config import ConfAdaptConfig
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.engine import Generation
from entmtp.evaluation.answers import correct
from entmtp.evaluation.bench import take_turns
from entmtp.evaluation.lossless_blocks import DRAFT, FAMILIES, ORIGINAL, OWN
from entmtp.evaluation.stats import ratio_interval
from entmtp.io import Journal

WARMUP = 8  # tokens
PLAIN = (OWN, ORIGINAL)
Arm = Callable[[list[int], int], Generation]  # prompt, max_new_tokens


def rules_of(config: ConfAdaptConfig) -> dict[str, BlockRule]:
    """Names to rules, plain decoding of the distilled model first."""
    named = {OWN: BlockRule(1, None)}
    named |= {f"static k={k}": BlockRule(k, None) for k in config.static}
    named |= {f"confadapt {threshold:g}": BlockRule(config.k_max, threshold) for threshold in config.thresholds}
    return named | {f"masks {threshold:g}": BlockRule(config.k_max, threshold, first_free=True)
                    for threshold in config.mask_thresholds}  # fmt: skip


def setting(method: str) -> dict[str, float | None]:
    """The static block length `k` or the `threshold` in a method's name (`rules_of`); null where it has none."""
    kind, _, value = method.rpartition(" ")
    threshold = float(value) if kind in ("confadapt", "masks") else None
    return {"k": int(value.removeprefix("k=")) if value.startswith("k=") else None, "threshold": threshold}


def block_arms(decoder: BlockDecoder, rules: dict[str, BlockRule]) -> dict[str, Arm]:
    """How `decode_all` runs each rule."""

    def arm(rule: BlockRule) -> Arm:
        return lambda prompt, max_new_tokens: decoder.generate(prompt, rule, max_new_tokens)

    return {name: arm(rule) for name, rule in rules.items()}


def decode_all(arms: dict[str, Arm], prompts: list[dict], max_new_tokens: int, journal: Journal) -> list[dict]:
    """A row per arm and prompt, all arms side by side; see `take_turns`. `forwards`: of the model whose text it is."""

    def run(name: str, prompt: dict, order: int) -> dict:
        made = arms[name](prompt["token_ids"], max_new_tokens)
        drafter = sum(getattr(step, "drafter_forwards", 0) for step in made.steps)
        return {"prompt_id": prompt["id"], "policy": name, "tokens": made.tokens, "forwards": len(made.steps),
                "drafter_forwards": drafter, "seconds": made.prefill_seconds + made.decode_seconds}  # fmt: skip

    def warm(name: str, prompt: dict) -> None:
        arms[name](prompt["token_ids"], min(WARMUP, max_new_tokens))

    def done(row: dict, number: int | None) -> None:
        if number is not None:
            print(f"confadapt: prompt {number + 1}/{len(prompts)} ({row['prompt_id']}), {row['policy']}: "
                  f"{len(row['tokens'])} tokens in {row['forwards']} forwards", flush=True)  # fmt: skip

    return take_turns(list(arms), prompts, journal, run, warm, done)


def judged(
    rows: list[dict], prompts: list[dict], tokenizer, scoring: str | None, nll: dict[str, dict], bootstrap: int,
    seed: int, verdicts: dict[str, str], original: dict[str, list[int]] | None = None,
) -> list[dict]:  # fmt: skip
    """A row per method: accuracy with its standard error (null without `scoring`), tokens a forward, tokens/s, ratio to
    plain decoding of the model whose text it is, perplexity under the original model (`nll`, as of `policy_nll`), how
    many texts equal plain decoding's, and the verdict on that where the method promises it (`verdicts`). `original`:
    the original model's plain text by prompt, to count the texts that equal it too."""
    frame = pd.DataFrame(rows)
    by_name = {name: group.set_index("prompt_id") for name, group in frame.groupby("policy", sort=False)}
    made = []
    for name, group in by_name.items():
        own = by_name[name if name in PLAIN else FAMILIES.get(name, OWN)]
        group = group.loc[own.index]
        tokens, forwards = group["tokens"].map(len).to_numpy(), group["forwards"].to_numpy()
        over = ratio_interval(tokens, group["seconds"], own["tokens"].map(len), own["seconds"], bootstrap, seed)
        made.append(
            {
                "method": name,
                **setting(name),
                "prompts": len(group),
                **accuracy(right_answers(group["tokens"].items(), prompts, tokenizer, scoring)),
                "tokens_per_forward": float(tokens.sum() / forwards.sum()),
                "drafter_forwards": float(group["drafter_forwards"].sum() / forwards.sum()) if name == DRAFT else None,
                "tokens_per_s": float(tokens.sum() / group["seconds"].sum()),
                "over_plain": over,
                "ppl": math.exp(nll[name]["nll"] / nll[name]["tokens"]),
                "same_text": float((group["tokens"].map(list) == own["tokens"].map(list)).mean()),
                "original_text": original
                and sum(list(tokens) == original[prompt] for prompt, tokens in group["tokens"].items()) / len(group),
                "lossless": "n/a" if name in PLAIN else verdicts.get(name, "lossy"),
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
        same = 1.0 if row["lossless"] in ("exact", "n/a") else None
        made.append(
            {
                "method": row["policy"],
                **setting(row["policy"]),
                "prompts": row["prompts"],
                **accuracy(right_answers(texts, prompts, tokenizer, scoring)),
                # the prefill is a forward here as it is for blocks: it gives a text's first token
                "tokens_per_forward": row["new_tokens"] / (row["steps"] + row["prompts"]),
                "drafter_forwards": None,
                "tokens_per_s": row["tokens_per_s"],
                "over_plain": row["over_ar"],
                "ppl": row["ppl"],
                "same_text": same,
                "original_text": same,
                "lossless": row["lossless"],
            }
        )
    return made
