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
    by_name = {arm["policy"]: arm for arm in arms}
    tokens, seconds = 0, 0.0

    def run(name: str, prompt: dict, order: int) -> dict:
        generation = _run(by_name[name], decoders, policies, prompt, decoding)
        return make_row(task, by_name[name], prompt, generation, decoding.mode, dtype, order)

    def done(row: dict, number: int | None) -> None:
        nonlocal tokens, seconds
        on_row(row)
        if number is None:
            return
        tokens += row["new_tokens"]
        seconds += row["prefill_s"] + row["decode_s"]
        print(
            f"bench {task}: prompt {number + 1}/{len(prompts)} ({row['prompt_id']}), {row['policy']}: "
            f"{row['new_tokens']} tokens, {row['new_tokens'] / (row['prefill_s'] + row['decode_s']):.1f} tokens/s; "
            f"{tokens / seconds:.1f} tokens/s so far",
            flush=True,
        )

    warm = replace(decoding, max_new_tokens=min(config.warmup_tokens, decoding.max_new_tokens))
    return take_turns(list(by_name), prompts, Journal(journal_path, fingerprint), run,
                      lambda name, prompt: _run(by_name[name], decoders, policies, prompt, warm), done)  # fmt: skip


def take_turns(
    names: list[str], prompts: list[dict], journal: Journal, run: Callable[[str, dict, int], dict],
    warm: Callable[[str, dict], object], on_row: Callable[[dict, int | None], None] = lambda row, number: None,
) -> list[dict]:  # fmt: skip
    """Rows of `run(name, prompt, order)`, every name (a row's "policy") on every prompt: prompt by prompt in rotated
    order, after a warm-up of each name.

    Finished rows are journalled. A prompt that was cut short by an interruption is run again for all names, so that
    they always ran side by side. `on_row(row, number)` hears of every row; number is None for a journalled one.
    """
    whole = {p["id"] for p in prompts if {(p["id"], name) for name in names} <= journal.done(_key)}
    # a prompt run again keeps its last rows
    rows = list({_key(row): row for row in journal.rows if row["prompt_id"] in whole}.values())
    for row in rows:
        on_row(row, None)
    todo = [(number, prompt) for number, prompt in enumerate(prompts) if prompt["id"] not in whole]
    for name in names if todo else ():
        warm(name, todo[0][1])
    for number, prompt in todo:
        for order, name in enumerate(rotated(names, number)):
            row = run(name, prompt, order)
            journal.append(row)
            rows.append(row)
            on_row(row, number)
    rank = {prompt["id"]: number for number, prompt in enumerate(prompts)}
    return sorted(rows, key=lambda row: (names.index(row["policy"]), rank[row["prompt_id"]]))


def rotated(items: list, number: int) -> list:
    """The items in the order of turn `number`: nobody always goes first."""
    shift = number % len(items)
    return items[shift:] + items[:shift]


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
