"""From raw prompts to prompts.jsonl: de-duplicated, drawn into two disjoint splits, encoded by the target's tokenizer.

A row of prompts.jsonl: {"id", "task", "split" (calib | test), "messages", "token_ids" (list of ints, the
encoded chat up to where the assistant starts), "sha256" (of messages and token_ids)}, and "answer" and "category" where
the source knows them.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from entmtp.config import TaskConfig
from entmtp.errors import EntmtpError
from entmtp.io import read_jsonl, sha256_json
from entmtp.tasks.pool import FilePool, MemoryPool, normalised, open_pool

SPLITS = ("calib", "test")
KEYS = ("id", "task", "split", "messages", "token_ids", "sha256")


def split_prompts(
    config: TaskConfig, rows: Iterable[dict] | FilePool | MemoryPool, fits: Callable[[dict], bool] = lambda row: True
) -> list[dict]:
    """Draw `config.calib` and `config.test` different prompts, by `config.seed`.

    `rows` have "id" and "messages"; the rows that come back have "task" and "split" too, calibration first. Prompts
    with the same text (white space and case apart) count once. `fits` is asked only about the prompts that are reached
    by the draw. Raises EntmtpError when there are too few prompts.
    """
    pool = rows if isinstance(rows, FilePool | MemoryPool) else MemoryPool(rows)
    queue = deque(random.Random(config.seed).sample(range(len(pool)), len(pool)))
    # the splits are taken from the two ends, so that another size of one leaves the other as it was
    drawn: dict[str, list[dict]] = {"calib": [], "test": []}
    unfit = 0
    for split, wanted, take in (("test", config.test, queue.pop), ("calib", config.calib, queue.popleft)):
        while queue and len(drawn[split]) < wanted:
            row = pool[take()]
            if fits(row):
                drawn[split].append({**row, "task": config.name, "split": split})
            else:
                unfit += 1
    found, needed = sum(map(len, drawn.values())), config.calib + config.test
    if found < needed:
        left = f" ({unfit} more left out: asked elsewhere, or over task.max_prompt_tokens={config.max_prompt_tokens})"
        raise EntmtpError(
            f"task {config.name}: {found} different prompts{left if unfit else ''}, but task.calib={config.calib} and "
            f"task.test={config.test} need {needed}; lower them or add prompts"
        )
    return drawn["calib"] + drawn["test"]


def encode(tokenizer: Any, messages: list[dict]) -> list[int]:
    """Token ids of a chat up to where the assistant's answer starts, by the tokenizer's chat template.

    Raises EntmtpError when the template refuses the chat (some know no system turn, for example).
    """
    from jinja2.exceptions import TemplateError

    if not tokenizer.chat_template:
        # a base model knows no turns: the contents become one plain text, and the model continues it
        return list(tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])
    try:
        # return_dict=False: transformers 5 otherwise returns a BatchEncoding
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise EntmtpError(f"the tokenizer's chat template refuses a chat with the roles {roles}: {error}") from error
    return list(ids)


def build_prompts(
    config: TaskConfig, target_tokenizer: Any, resources: str | Path, without: Iterable[dict] = ()
) -> list[dict]:
    """Rows of prompts.jsonl (see the module) for one task, none that asks (in its last turn) what a row of `without`
    does. Says on stderr how many prompts were too long."""
    token_ids: dict[str, list[int]] = {}
    known = {normalised(row)[-1] for row in without}
    too_long = 0

    def fits(row: dict) -> bool:
        # encoding is done inside the draw: a Hub source has tens of thousands of prompts and few are needed
        nonlocal too_long
        if normalised(row)[-1] in known:
            return False
        token_ids[row["id"]] = encode(target_tokenizer, row["messages"])
        long = len(token_ids[row["id"]]) > config.max_prompt_tokens
        too_long += long
        return not long

    drawn = split_prompts(config, open_pool(config, resources), fits)
    if too_long:
        print(
            f"task {config.name}: {too_long} of {too_long + len(drawn)} prompts looked at are longer than "
            f"task.max_prompt_tokens={config.max_prompt_tokens} and left out",
            file=sys.stderr,
        )
    rows = []
    for row in drawn:
        ids = token_ids[row["id"]]
        whole = {key: row[key] for key in ("id", "task", "split", "messages")}
        whole |= {"token_ids": ids, "sha256": _row_hash(row["messages"], ids)}
        rows.append(whole | {key: row[key] for key in ("answer", "category") if key in row})
    return rows


def read_prompts(path: str | Path, split: str | None = None) -> list[dict]:
    """Rows of a prompts.jsonl, of one split or of both. Raises EntmtpError that names file and row for a bad one."""
    if split not in (None, *SPLITS):
        raise EntmtpError(f"split '{split}' does not exist; choose one of {', '.join(SPLITS)}")
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        missing = [key for key in KEYS if key not in row]
        if missing:
            raise EntmtpError(
                f"{path}, row {number}: no key {', '.join(missing)}; it is no prompts file of this project"
            )
        if row["sha256"] != _row_hash(row["messages"], row["token_ids"]):
            raise EntmtpError(f"{path}, row {number} (id {row['id']}): changed since it was made; make the file again")
    chosen = [row for row in rows if split in (None, row["split"])]
    if not chosen:
        raise EntmtpError(f"{path}: no prompts" + (f" of split {split}" if split else ""))
    return chosen


def prompts_hash(rows: Iterable[dict], split: str | None = None) -> str:
    """SHA-256 over ids, texts and token ids of one split (or of both), in order, for provenance."""
    return sha256_json([[row["id"], row["sha256"]] for row in rows if split in (None, row["split"])])


def _row_hash(messages: list[dict], token_ids: list[int]) -> str:
    return sha256_json([messages, token_ids])
