"""W&B: a mirror of finished results, offline unless told otherwise, never an input of anything.

The only module that may import wandb, and only when a run is tracked. Offline needs no account, no network and no
prompt: the runs lie under `tracking.dir` until `wandb sync` uploads them.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entmtp.config import TrackingConfig
from entmtp.errors import EntmtpError


def track_bench(
    config: TrackingConfig, task: str, rows: list[dict], table: list[dict], figures: list, run_config: dict
) -> list[dict]:
    """One W&B run a policy of a bench: configuration, per-step series, summary values, summary table, figures.

    `rows` are those of bench/<task>.parquet (one a policy and prompt), `table` this task's rows of summary.json.
    The step axis counts decoding steps over all prompts; the series are accept_length (tokens), tree (index), nodes,
    signal (path value), ms and prompt (index). Returns [{policy, id, name, dir or url}], empty when disabled. Raises
    EntmtpError when `online` cannot log in or `dir` cannot be written.
    """
    if config.mode == "disabled":
        return []
    shared = {key: value for key, value in run_config.items() if key not in ("task", "policy", "heads", "tracking")}
    experiment = str(run_config.get("experiment", ""))
    tracked = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        settings = {"task": task, "policy": policy, "heads": _plain(own[0].get("heads")), "kind": own[0].get("kind")}
        tags = ["bench", task, policy, str(own[0].get("dtype", "")), str(own[0].get("mode", ""))]
        with _run(config, f"{task}/{policy}", experiment, "bench", tags, {**shared, **settings}) as (run, where):
            for step, values in enumerate(step_series(own)):
                run.log(values, step=step)
            _log_results(run, policy, table, figures)
            tracked.append({"policy": policy, **where})
    return tracked


def track_sweep_job(config: TrackingConfig, overrides: list[str], row: dict) -> dict | None:
    """One W&B run for a sweep's job: its overrides as configuration, its row as summary. None when disabled."""
    if config.mode == "disabled":
        return None
    chosen = {key: row.get(key) for key in ("task", "policy", "heads", "experiment", "split", "engine")}
    rest = [override for override in overrides if override.partition("=")[0] not in chosen]
    name = "/".join([str(row["task"]), str(row["policy"]), *rest])[:128]  # W&B's limit of a name
    tags = ["sweep", str(row["task"]), str(row["policy"]), str(row["status"])]
    settings = {**chosen, "overrides": list(overrides)}
    with _run(config, name, str(row["experiment"]), "sweep", tags, settings) as (run, where):
        run.summary.update({key: value for key, value in _flat(row).items() if value is not None})
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


def _log_results(run: Any, policy: str, table: list[dict], figures: list) -> None:
    import wandb

    flat = [_flat(row) for row in table]
    for row in flat:
        if row.get("policy") == policy:
            run.summary.update({key: value for key, value in row.items() if value is not None})
    results: dict[str, Any] = {f"figures/{Path(path).stem}": wandb.Image(str(path)) for path in figures}
    if flat:
        columns = list(dict.fromkeys(key for row in flat for key in row))
        results["summary"] = wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in flat],
                                         allow_mixed_types=True)  # fmt: skip
    if results:
        run.log(results)


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

    quiet = {"silent": True, "console": "off"}
    if config.mode == "online":
        _login(wandb, quiet)
    settings = wandb.Settings(
        **quiet, mode=config.mode, project=config.project, entity=config.entity, root_dir=str(folder), run_name=name,
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


def _login(wandb: Any, quiet: dict) -> None:
    """Log in with the key that the user has, without asking for one."""
    wandb.setup(settings=wandb.Settings(**quiet))
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
