"""The second method on the same axes: accuracy against acceleration, for thresholds, static blocks and EntMTP."""

import math

import pandas as pd

from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.evaluation.answers import correct
from entmtp.evaluation.stats import ratio_of_totals
from entmtp.io import Journal

OWN = "k=1"  # the distilled model's own plain decoding: what its blocks are compared with


def rules_of(k_max: int, thresholds: list[float], static: list[int]) -> dict[str, BlockRule]:
    """Names to rules, plain decoding of the distilled model first."""
    named = {OWN: BlockRule(1, None)}
    named |= {f"static k={k}": BlockRule(k, None) for k in static}
    return named | {f"confadapt {threshold:g}": BlockRule(k_max, threshold) for threshold in thresholds}


def decode_all(
    decoder: BlockDecoder, rules: dict[str, BlockRule], prompts: list[dict], max_new_tokens: int, journal: Journal
) -> list[dict]:
    """A row per rule and prompt, all rules side by side in rotated order after a warm-up; finished prompts are kept."""
    done = {row["prompt_id"] for row in journal.rows if row["last"]}
    kept = {(row["prompt_id"], row["policy"]): row for row in journal.rows if row["prompt_id"] in done}  # the newest
    rows, names = list(kept.values()), list(rules)
    todo = [(number, prompt) for number, prompt in enumerate(prompts) if prompt["id"] not in done]
    for rule in rules.values() if todo else ():
        decoder.generate(todo[0][1]["token_ids"], rule, min(8, max_new_tokens))
    for number, prompt in todo:
        shift = number % len(names)
        for order, name in enumerate(names[shift:] + names[:shift]):
            run = decoder.generate(prompt["token_ids"], rules[name], max_new_tokens)
            row = {"prompt_id": prompt["id"], "policy": name, "tokens": run.tokens, "forwards": len(run.steps),
                   "seconds": run.prefill_seconds + run.decode_seconds, "last": order == len(names) - 1}  # fmt: skip
            journal.append(row)
            rows.append(row)
        print(f"confadapt: prompt {number + 1}/{len(prompts)} ({prompt['id']}), {row['forwards']} forwards for "
              f"{len(row['tokens'])} tokens under {name}", flush=True)  # fmt: skip
    return rows


def judged(
    rows: list[dict], prompts: list[dict], tokenizer, scoring: str, nll: dict[str, dict], bootstrap: int, seed: int
) -> list[dict]:
    """A row per rule: accuracy with its standard error, tokens a forward, tokens/s, ratio to the model's own k = 1,
    perplexity under the original model (`nll`, as of `policy_nll`), and how many texts equal the k = 1 ones."""
    frame, answers = pd.DataFrame(rows), {prompt["id"]: prompt["answer"] for prompt in prompts}
    own = frame[frame["policy"] == OWN].set_index("prompt_id")
    made = []
    for name, group in frame.groupby("policy", sort=False):
        group = group.set_index("prompt_id").loc[own.index]
        tokens, forwards = group["tokens"].map(len).to_numpy(), group["forwards"].to_numpy()
        right = [correct(scoring, tokenizer.decode(list(text), skip_special_tokens=True), answers[prompt_id])
                 for prompt_id, text in group["tokens"].items()]  # fmt: skip
        ratio = ratio_of_totals(tokens, group["seconds"], own["tokens"].map(len), own["seconds"], bootstrap, seed)
        made.append(
            {
                "method": name,
                "prompts": len(group),
                **accuracy(right),
                "tokens_per_forward": float(tokens.sum() / forwards.sum()),
                "tokens_per_s": float(tokens.sum() / group["seconds"].sum()),
                "over_plain": dict(zip(("ratio", "low", "high"), ratio, strict=True)),
                "ppl": math.exp(nll[name]["nll"] / nll[name]["tokens"]),
                "same_text": float((group["tokens"].map(list) == own["tokens"].map(list)).mean()),
            }
        )
    return made


def accuracy(right: list[bool]) -> dict[str, float]:
    """Share of right answers and its standard error (binomial)."""
    share = sum(right) / len(right)
    return {"accuracy": share, "standard_error": math.sqrt(share * (1 - share) / len(right))}


def entmtp_rows(bench: pd.DataFrame, summary: list[dict], prompts: list[dict], tokenizer, scoring: str) -> list[dict]:
    """The run's lossless policies in the same shape; plain decoding of the original model is among them."""
    answers, made = {prompt["id"]: prompt["answer"] for prompt in prompts}, []
    for row in summary:
        own = bench[bench["policy"] == row["policy"]]
        right = [correct(scoring, tokenizer.decode(list(text), skip_special_tokens=True), answers[prompt_id])
                 for prompt_id, text in zip(own["prompt_id"], own["tokens"], strict=True)]  # fmt: skip
        made.append(
            {
                "method": row["policy"],
                "prompts": row["prompts"],
                **accuracy(right),
                "tokens_per_forward": row["accept_length"],
                "tokens_per_s": row["tokens_per_s"],
                "over_plain": row["over_ar"],
                "ppl": row["ppl"],
                "same_text": 1.0 if row["lossless"] in ("exact", "n/a") else None,
            }
        )
    return made
