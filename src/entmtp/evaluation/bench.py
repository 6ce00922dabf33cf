"""Timed runs: all policies of a task in one process, alternating prompt by prompt in a rotated order (DESIGN 5)."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from entmtp.config import BenchConfig, DecodingConfig
from entmtp.decoding.engine import Decoder, Generation
from entmtp.errors import EntmtpError
from entmtp.io import Journal
from entmtp.policy.schedulers import Policy


def bench_task(
    task: str, arms: list[dict], decoders: dict[str | None, Decoder], policies: dict[str, Policy], prompts: list[dict],
    decoding: DecodingConfig, config: BenchConfig, dtype: str, journal_path: Path, fingerprint: str,
    on_row: Callable[[dict], None] = lambda row: None,
) -> list[dict]:  # fmt: skip
    """Rows of `bench/<task>.parquet`: one per policy and prompt, finished rows journalled so that a rerun resumes.

    `arms` are the policies' JSON (policy, kind, heads, …) in table order; `decoders` by kind of heads (None: any).
    A failed prompt fails the job. A prompt that was cut short by an interruption is timed again for all policies, so
    that its policies always ran side by side.
    """
    journal = Journal(journal_path, fingerprint)
    names = [arm["policy"] for arm in arms]
    whole = [p["id"] for p in prompts if {(p["id"], n) for n in names} <= journal.done(_key)]
    rows = [row for row in journal.rows if row["prompt_id"] in set(whole)]
    rows = list({_key(row): row for row in rows}.values())  # a prompt timed again keeps its last rows
    for row in rows:
        on_row(row)
    todo = [(number, prompt) for number, prompt in enumerate(prompts) if prompt["id"] not in set(whole)]
    if todo:
        warm = replace(decoding, max_new_tokens=min(config.warmup_tokens, decoding.max_new_tokens))
        for arm in arms:
            _run(arm, decoders, policies, todo[0][1], warm)
    tokens, seconds = 0, 0.0
    for number, prompt in todo:
        shift = number % len(arms)
        for order, arm in enumerate(arms[shift:] + arms[:shift]):
            run = _run(arm, decoders, policies, prompt, decoding)
            row = make_row(task, arm, prompt, run, decoding.mode, dtype, order)
            journal.append(row)
            rows.append(row)
            on_row(row)
            tokens += row["new_tokens"]
            seconds += row["prefill_s"] + row["decode_s"]
            print(
                f"bench {task}: prompt {number + 1}/{len(prompts)} ({prompt['id']}), {arm['policy']}: "
                f"{row['new_tokens']} tokens, {row['new_tokens'] / (row['prefill_s'] + row['decode_s']):.1f} tokens/s; "
                f"{tokens / seconds:.1f} tokens/s so far",
                flush=True,
            )
    rank = {prompt["id"]: number for number, prompt in enumerate(prompts)}
    return sorted(rows, key=lambda row: (names.index(row["policy"]), rank[row["prompt_id"]]))


def _key(row: dict) -> tuple[str, str]:
    return row["prompt_id"], row["policy"]


def _run(arm: dict, decoders: dict, policies: dict, prompt: dict, decoding: DecodingConfig) -> Generation:
    decoder = decoders[arm["heads"]]
    if arm["kind"] == "ar":
        return decoder.plain(prompt["token_ids"], decoding, prompt["id"])
    return decoder.generate(prompt["token_ids"], policies[arm["policy"]], decoding, prompt["id"])


def make_row(task: str, arm: dict, prompt: dict, run: Generation, mode: str, dtype: str, order: int) -> dict:
    if not run.tokens:
        raise EntmtpError(f"task {task}, prompt {prompt['id']}, policy {arm['policy']}: no token was generated")
    steps = run.steps
    return {
        "task": task,
        "policy": arm["policy"],
        "heads": arm["heads"],
        "kind": arm["kind"],
        "mode": mode,
        "dtype": dtype,
        "prompt_id": prompt["id"],
        "prompt_tokens": len(prompt["token_ids"]),
        "new_tokens": len(run.tokens),
        "prefill_s": run.prefill_seconds,
        "decode_s": run.decode_seconds,
        "scheduler_s": run.scheduler_seconds,
        "switch_s": run.switch_seconds,
        "tokens": run.tokens,
        "step_tree": [step.tree for step in steps],
        "step_nodes": [step.nodes for step in steps],
        "step_accepted": [step.accepted for step in steps],
        "step_signal": [None if step.signal != step.signal else step.signal for step in steps],
        "step_ms": [1000 * step.seconds for step in steps],
        "order": order,
        "time": time.time(),
    }
