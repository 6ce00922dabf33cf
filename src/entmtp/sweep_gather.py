"""What a multirun does before its first job and after its last: refuse what would mislead, gather the rows."""

import shutil
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from entmtp.errors import EntmtpError
from entmtp.io import atomic, read_json, write_json, write_parquet
from entmtp.sweep_figures import describe_optima, heat_maps, over_best

TABLE = ["task", "policy", "heads", "tau_on", "tau_off", "depth", "trees", "accept_length", "tokens_per_s", "over_star"]
STARTED = ".started.json"  # in a sweep's folder: when it was, which tells it from an earlier one there
SHOWN = 12  # rows of the closing table, shared by the tasks
# what decides how fast text can be at all: the best thresholds of the fastest would look like the best thresholds
ONE_OBJECTIVE = ("task", "experiment", "sweep.split", "sweep.engine")


def started(folder: str | Path) -> str:
    path = Path(folder) / STARTED
    return str(read_json(path)) if path.is_file() else ""


def own_rows(folder: Path) -> list[Path]:
    """Rows of the sweep in `folder`, without those of sweeps in folders below it."""
    below = [path.parent for path in folder.rglob(STARTED) if path.parent != folder]
    return [path for path in folder.rglob("row.json") if not any(other in path.parents for other in below)]


class GatherRows(Callback):
    """Rows of all jobs into one Parquet, one CSV, heat maps and a closing table on stdout."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        try:
            check_multirun(OmegaConf.to_container(config.hydra, resolve=False))
            for old in own_rows(folder):  # of an earlier sweep in the same folder
                old.unlink()
            write_json(folder / STARTED, datetime.now(UTC).isoformat())
        except EntmtpError as error:
            raise SystemExit(f"error: {error}") from error

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            gather(Path(config.hydra.sweep.dir), config.plot)
        except Exception as error:  # Hydra would turn it into a warning and end well
            if not isinstance(error, EntmtpError):
                traceback.print_exc()
            raise SystemExit(f"error: {error}") from error


def check_multirun(settings: dict) -> None:
    """Refuse timed jobs side by side, and one search over several objectives. `settings` is Hydra's own block."""
    given = dict(item.lstrip("+").partition("=")[::2] for item in settings["overrides"]["task"])
    launcher, sweeper = settings["launcher"], settings["sweeper"]["_target_"].rpartition(".")[2]
    kind = launcher["_target_"].rpartition(".")[2]
    if kind == "SlurmLauncher" and shutil.which("sbatch") is None:
        raise EntmtpError("the Slurm launcher finds no sbatch here: start the sweep on a login node of the cluster")
    alone = {
        "BasicLauncher": True,
        "JoblibLauncher": launcher.get("n_jobs") == 1,
        "SlurmLauncher": bool((launcher.get("additional_parameters") or {}).get("exclusive")),
    }
    if "live" in given.get("sweep.engine", "") and not alone.get(kind, False):
        raise EntmtpError(
            "sweep.engine=live measures, and jobs side by side would slow one another: leave hydra/launcher=basic, "
            "set hydra.launcher.n_jobs=1, or on a cluster use hydra/launcher=slurm_exclusive"
        )
    if sweeper == "OptunaSweeper":
        several = [key for key in ONE_OBJECTIVE if "," in given.get(key, "")]
        if several:
            raise EntmtpError(
                f"Optuna looks for the largest tokens/s, and {several[0]}={given[several[0]]} would let it take the "
                "fastest of them for the best thresholds: one search each"
            )


def gather(folder: Path, plot: Any) -> None:
    """rows.parquet, rows.csv and figures from the row.json files below `folder`. Raises EntmtpError without any."""
    import pandas as pd

    rows = sorted((read_json(path) for path in own_rows(folder)), key=lambda row: row["job"])
    if not rows:
        raise EntmtpError(f"{folder}: no job of this sweep wrote a row")
    frame = pd.DataFrame(rows)
    for key in ("tau_on", "tau_off", "depth", "tokens_per_s", "over_star", "accept_length"):
        frame[key] = frame[key].astype(float) if key in frame else float("nan")  # all rows may have been skipped
    frame["over_best"] = over_best(frame)
    write_parquet(folder / "rows.parquet", frame)
    with atomic(folder / "rows.csv") as partial:
        frame.to_csv(partial, index=False)
    for path in heat_maps(frame, folder, plot):
        print(f"heat map: {path}")
    done = frame[frame["status"] == "ok"].sort_values("tokens_per_s", ascending=False)
    if len(done):
        best = done.groupby("task", sort=False).head(max(1, SHOWN // done["task"].nunique()))
        shown = best.sort_values(["task", "tokens_per_s"], ascending=[True, False]).reindex(columns=TABLE)
        print(shown.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-"))
    for line in describe_optima(frame):
        print(line)
    print(f"{len(done)} rows, {len(frame) - len(done)} skipped (tau_off > tau_on)\nrows: {folder / 'rows.parquet'}")
