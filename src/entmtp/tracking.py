"""W&B: a mirror of finished results, offline unless told otherwise, never an input of a run.

Offline needs no account, no network and no prompt: the runs lie under `tracking.dir` until `wandb sync` uploads them.
What is logged suffices to make every table and figure again (`entmtp.from_logs`): each policy's steps as history and
its prompts as a table, and in one more run a task the small files that tables and figures read beside them. Texts are
not logged, neither prompts nor tokens. Only this module and `entmtp.wandb_runs` import wandb, and only when a run is
tracked or read.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entmtp.config import TrackingConfig
from entmtp.errors import EntmtpError

BATCH = "summary_sha256"  # key of the configuration: W&B runs of one finished run share the hash of its summary.json
FOLDER = "run"  # folder in a W&B run's files: what it carries of the run folder, under the same names
# logged name of a step's value: its column in bench/<task>.parquet
STEPS = {"accept_length": "step_accepted", "tree": "step_tree", "nodes": "step_nodes", "signal": "step_signal",
         "ms": "step_ms"}  # fmt: skip
NOT_SHARED = ("task", "policy", "heads", "tracking")  # blocks of the configuration that are not the bench's own
QUIET = {"silent": True, "console": "off"}


def track_bench(
    config: TrackingConfig, task: str, rows: list[dict], table: list[dict], figures: list, run_config: dict,
    batch: str = "",
) -> list[dict]:  # fmt: skip
    """One W&B run a policy of a bench: configuration, per-step series, prompts, summary values and table, figures.

    `rows` are those of bench/<task>.parquet (one a policy and prompt), `table` this task's rows of summary.json,
    `batch` that file's SHA-256. The step axis counts decoding steps over all prompts; the series are accept_length
    (tokens), tree (index), nodes, signal (path value), ms and prompt (index). Returns [{policy, id, name, dir or url}],
    empty when disabled. Raises EntmtpError when `online` cannot log in or `dir` cannot be written.
    """
    if config.mode == "disabled":
        return []
    tracked = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        places = [place for place, row in enumerate(rows) if row["policy"] == policy]
        own = [rows[place] for place in places]
        settings = {"task": task, "policy": policy, "heads": _plain(own[0].get("heads")), "kind": own[0].get("kind")}
        tags = ["bench", task, policy, str(own[0].get("dtype", "")), str(own[0].get("mode", ""))]
        values = {**_shared(run_config), **settings, BATCH: batch}
        with _run(config, f"{task}/{policy}", _experiment(run_config), "bench", tags, values) as (run, where):
            for step, logged in enumerate(step_series(own)):
                run.log(logged, step=step)
            _log_results(run, policy, table, figures, prompt_table(own, places))
            tracked.append({"policy": policy, **where})
    return tracked


def track_files(
    config: TrackingConfig, job: str, name: str, files: dict[str, bytes], run_config: dict, batch: str
) -> dict | None:
    """One W&B run that carries files of a finished run, by their paths in the run folder. None when disabled.

    `job` is "task" for what tables and figures read of a task beside its bench, and "record" for a record such as
    scheduling.json, of which others are made.
    """
    if config.mode == "disabled":
        return None
    values = {**_shared(run_config), BATCH: batch}
    with _run(config, name, _experiment(run_config), job, [job, name], values) as (run, where):
        for path, content in files.items():
            _save(run, path, content)
    return where


def track_sweep_job(
    config: TrackingConfig, overrides: list[str], row: dict, sweep: str = "", started: str = ""
) -> dict | None:
    """One W&B run for a sweep's job: its overrides as configuration, its row as summary and file. None when disabled.

    `sweep` names the multirun that the job is part of: its folder, and `started` when: of several in one folder.
    """
    if config.mode == "disabled":
        return None
    chosen = {key: row.get(key) for key in ("task", "policy", "heads", "experiment", "split", "engine")}
    rest = [override for override in overrides if override.partition("=")[0] not in chosen]
    name = "/".join([str(row["task"]), str(row["policy"]), *rest])[:128]  # W&B's limit of a name
    tags = ["sweep", str(row["task"]), str(row["policy"]), str(row["status"])]
    settings = {**chosen, "overrides": list(overrides), "sweep": sweep, "sweep_started": started, "job": row.get("job")}
    with _run(config, name, str(row["experiment"]), "sweep", tags, settings) as (run, where):
        run.summary.update({key: value for key, value in _flat(row).items() if value is not None})
        _save(run, "row.json", json.dumps(row, allow_nan=False).encode())
    return where


def step_series(rows: list[dict]) -> Iterator[dict]:
    """What each step of one policy logs, prompt after prompt. A signal that no policy looked at is left out."""
    for prompt, row in enumerate(rows):
        columns = (row["step_accepted"], row["step_tree"], row["step_nodes"], row["step_signal"], row["step_ms"])
        for accepted, tree, nodes, signal, ms in zip(*columns, strict=True):
            values = {"accept_length": int(accepted) + 1, "tree": int(tree), "nodes": int(nodes), "ms": float(ms),
                      "prompt": prompt}  # fmt: skip
            if _plain(signal) is not None:
                values["signal"] = float(signal)
            yield values


def prompt_table(rows: list[dict], places: list[int]) -> list[dict]:
    """A row a prompt of one policy: what its bench row holds but for the steps, which are the history, and the tokens;
    how many steps there are; and the row's place in the bench."""
    hidden = {"tokens", *STEPS.values()}
    return [
        {**{key: _plain(value) for key, value in row.items() if key not in hidden}, "steps": len(row["step_accepted"]),
         "place": place}
        for row, place in zip(rows, places, strict=True)
    ]  # fmt: skip


def _log_results(run: Any, policy: str, table: list[dict], figures: list, prompts: list[dict]) -> None:
    import wandb

    flat = [_flat(row) for row in table]
    for row in flat:
        if row.get("policy") == policy:
            run.summary.update({key: value for key, value in row.items() if value is not None})
    results: dict[str, Any] = {f"figures/{Path(path).stem}": wandb.Image(str(path)) for path in figures}
    for name, rows in (("summary", flat), ("prompts", prompts)):
        if rows:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[row.get(key) for key in columns] for row in rows]
            results[name] = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
    run.log(results)


def _save(run: Any, path: str, content: bytes) -> None:
    """A file of the W&B run, written into its own folder: nothing that is replaced later is linked to."""
    copy = Path(run.dir) / FOLDER / path
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(content)
    run.save(str(copy), base_path=run.dir, policy="now", glob=False)


def _shared(run_config: dict) -> dict:
    return {key: value for key, value in run_config.items() if key not in NOT_SHARED}


def _experiment(run_config: dict) -> str:
    return str(run_config.get("experiment", ""))


def _flat(row: dict, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as `over_ar/ratio`; lists as text; NaN as None."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = str(list(value)) if isinstance(value, list | tuple) else _plain(value)
    return flat


def _plain(value: Any) -> Any:
    """NaN, which Parquet makes of None, back to None."""
    return None if isinstance(value, float) and math.isnan(value) else value


@contextmanager
def _run(config: TrackingConfig, name: str, group: str, job: str, tags: list[str], values: dict) -> Iterator[tuple]:
    """A W&B run and where it is found: {id, name, dir} offline, {id, name, url} online. The block's end finishes it."""
    folder = Path(config.dir).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EntmtpError(f"tracking.dir={config.dir}: {error.strerror}; choose a writable folder") from error
    # wandb's caches stay beside the runs, and its crash reports stay at home; a user's own settings win
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
    os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb" / "data"))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    if config.mode == "online":
        login(wandb)
    settings = wandb.Settings(
        **QUIET, mode=config.mode, project=config.project, entity=config.entity, root_dir=str(folder), run_name=name,
        run_group=group or None, run_job_type=job, run_tags=tuple(dict.fromkeys(tag[:64] for tag in tags if tag)),
        reinit="create_new", symlink=False, disable_git=True, disable_code=True, x_disable_stats=True,
        x_disable_meta=True, x_save_requirements=False, init_timeout=60,
    )  # fmt: skip
    try:
        run = wandb.init(config=values, settings=settings)
    except wandb.errors.Error as error:
        raise EntmtpError(f"W&B could not start a run ({_line(error)}): use tracking=offline or disabled") from error
    with run:  # finishes the run, as failed when the block raises
        found = {"url": run.url} if config.mode == "online" else {"dir": _short(run.settings.sync_dir)}
        yield run, {"id": run.id, "name": name, **found}


def login(wandb: Any) -> None:
    """Log in with the key that the user has, without asking for one."""
    wandb.setup(settings=wandb.Settings(**QUIET))
    advice = "run `wandb login` or set WANDB_API_KEY (and unset WANDB_MODE), or use tracking=offline"
    try:
        logged_in = wandb.login(prompt=False)
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise EntmtpError(f"tracking=online: W&B refused the login ({_line(error)}): {advice}") from error
    if not logged_in:
        raise EntmtpError(f"tracking=online: no W&B account is configured: {advice}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _short(path: str) -> str:
    """Relative to the working folder where it lies inside."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
