"""`make tables`: every table and figure of a finished run, made again from its W&B runs alone.

    python -m entmtp.from_logs experiment=main                          from the offline run folders in logs/wandb
    python -m entmtp.from_logs experiment=main tracking=online          from the project on a W&B server
    python -m entmtp.from_logs experiment=main --compare                and held against results/main, byte by byte
    python -m entmtp.from_logs --sweep outputs/sweep/2026-11-29/21-00   rows and heat maps of that sweep

The logs hold each policy's steps (history), each prompt's counts and seconds (a table), and the small files that tables
and figures read beside them (`entmtp.tracking`). They are restored into a folder of the form of a run folder, in which
the functions of the pipeline then make summary.json, the tables, the figures and, where their records were tracked,
those of `snakemake scheduling` and of the second method. The W&B runs of one finished run share the SHA-256 of its
summary.json; a summary made from them with another hash is said to differ. What is not logged, prompts and texts, is
not restored.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from entmtp.config import BenchConfig, Config, PlotConfig, compose, from_plain
from entmtp.errors import EntmtpError
from entmtp.evaluation.make import make_figures, make_summary, make_tables
from entmtp.evaluation.records import make_confadapt, make_scheduling
from entmtp.io import atomic, check_name, read_json, sha256_file, write_json, write_parquet
from entmtp.layout import reports_scheduling, run_folder
from entmtp.tracking import BATCH, FOLDER, STEPS
from entmtp.wandb_runs import LoggedRun, offline_runs, server_runs

MARK = "from_logs.json"  # which W&B runs a folder was made from; only a folder that has it is made anew
CARRIED = re.compile(rf"{FOLDER}/((?:\w[\w.-]*/){{0,4}}\w[\w.-]*\.(?:json|yaml|parquet))", re.ASCII)
PROMPTS = re.compile(r"media/table/prompts_\d+_[0-9a-f]+\.table\.json")  # W&B's name of the table `prompts`
RECORDS: dict[str, Callable[[dict, PlotConfig, Path], None]] = {
    "scheduling": make_scheduling,
    "confadapt": make_confadapt,
}
PRODUCTS = ("summary.json", "tables/*", "figures/*", *(f"{name}/*" for name in RECORDS))
SHOWN = {".md", ".csv", ".tex", ".png", ".svg"}  # what people read of these folders, beside data that it is made of
Chosen = dict[tuple[str, str], LoggedRun]  # by job and name


def choose(runs: Iterable[LoggedRun], experiment: str) -> Chosen:
    """The W&B runs of the experiment's newest finished run; of a run tracked twice the newer one.

    Raises EntmtpError when there is none, or when a task or policy of it is missing.
    """
    own = [run for run in runs if run.group == experiment and run.job in ("task", "bench", "record")]
    tracked = [run for run in own if run.config.get(BATCH)]
    if not tracked:
        raise EntmtpError(
            f"{len(own)} W&B runs of experiment '{experiment}', none of which says what finished run it is of: run "
            f"`snakemake --cores all --config experiment={experiment} --forcerun track`, or name another experiment="
        )
    batch = max(tracked, key=lambda run: run.created).config[BATCH]
    of_batch = sorted((run for run in tracked if run.config[BATCH] == batch), key=lambda run: run.created)
    chosen = {(run.job, run.name): run for run in of_batch if run.finished}
    config, jobs = of_batch[-1].config, {run.job for run in of_batch}
    expected = [("task", task) for task in config["tasks"]]
    expected += [("bench", f"{task}/{policy}") for task in config["tasks"] for policy in config["policies"]]
    if jobs == {"record"}:  # a run that ends without a bench of draft trees
        expected = []
    expected += [("record", run.name) for run in of_batch if run.job == "record"]
    if config.get("confadapt", {}).get("enabled"):
        expected.append(("record", "confadapt"))
    if expected and reports_scheduling(config):
        expected.append(("record", "scheduling"))
    missing = [name for job, name in dict.fromkeys(expected) if (job, name) not in chosen]
    if missing:
        raise EntmtpError(
            f"the W&B runs of experiment '{experiment}' are incomplete, {', '.join(missing[:6])}"
            f"{f' and {len(missing) - 6} more' if len(missing) > 6 else ''} missing or cut short: let "
            f"`snakemake --cores all --config experiment={experiment} --forcerun track` end"
        )
    return chosen


def bench_rows(run: LoggedRun) -> list[dict]:
    """Bench rows of one policy (without their tokens): its table of prompts, each with its steps from the history."""
    names = [name for name in run.files() if PROMPTS.fullmatch(name)]
    if len(names) != 1:
        raise EntmtpError(f"{run.where}: {len(names)} tables of prompts, 1 is needed")
    try:
        table = json.loads(run.read(names[0]))
        rows = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
        steps = _steps(run, len(rows))
        for row, own in zip(rows, steps, strict=True):
            if row["steps"] != len(own["step_ms"]):
                raise EntmtpError(f"{run.where}: the history has {len(own['step_ms'])} of the {row['steps']} steps of "
                                  f"prompt {row['prompt_id']}")  # fmt: skip
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EntmtpError(f"{run.where}: not a bench as this version tracks it ({error!r:.100})") from error
    return [row | own for row, own in zip(rows, steps, strict=True)]


def _steps(run: LoggedRun, prompts: int) -> list[dict[str, list]]:
    """The step columns of each prompt."""
    found: list[dict[str, list]] = [{column: [] for column in STEPS.values()} for _ in range(prompts)]
    for logged in sorted(run.history(), key=lambda logged: logged["_step"]):
        if "accept_length" not in logged:
            continue
        own = found[int(logged["prompt"])]
        own["step_accepted"].append(int(logged["accept_length"]) - 1)
        own["step_tree"].append(int(logged["tree"]))
        own["step_nodes"].append(int(logged["nodes"]))
        own["step_ms"].append(float(logged["ms"]))
        signal = logged.get("signal")  # left out where the policy looked at none
        own["step_signal"].append(None if signal is None else float(signal))
    return found


def restore(chosen: Chosen, out: Path) -> None:
    """Write what the logs hold of the run folder into `out`. Raises EntmtpError for names that lead elsewhere."""
    for (job, _), run in chosen.items():
        if job == "bench":
            continue
        for name in (name for name in run.files() if name.startswith(f"{FOLDER}/")):
            carried = CARRIED.fullmatch(name)
            if carried is None:
                raise EntmtpError(f"{run.where}: '{name}' is no file of a run folder")
            with atomic(out / carried[1]) as partial:
                partial.write_bytes(run.read(name))
    for task in [check_name("task", name) for job, name in chosen if job == "task"]:
        policies = [run for (job, name), run in chosen.items() if job == "bench" and name.rpartition("/")[0] == task]
        rows = sorted((row for run in policies for row in bench_rows(run)), key=lambda row: row["place"])
        own = [{key: value for key, value in row.items() if key not in ("place", "steps")} for row in rows]
        write_parquet(out / "bench" / f"{task}.parquet", own)


def regenerate(chosen: Chosen, out: Path, plot: PlotConfig | None = None) -> bool:
    """Restore the run into `out` and make its products there. False where summary.json is not the one that was logged.

    `plot` replaces the run's own looks of figures.
    """
    _fresh(out)
    restore(chosen, out)
    config = next(reversed(chosen.values())).config
    plot = plot or from_plain(PlotConfig, config["plot"])
    tasks, same = list(config["tasks"]), True
    if any(job == "task" for job, _ in chosen):
        make_summary(out, tasks, list(config["policies"]), from_plain(BenchConfig, config["bench"]),
                     read_json(out / "provenance.json"))  # fmt: skip
        same = sha256_file(out / "summary.json") == config[BATCH]
        make_tables(out / "summary.json", out)
        heads = sorted({path.parts[-3] for path in (out / "trees").glob("*/*/bank.json")})
        make_figures(out, tasks, heads, plot, out)
    for record, make in RECORDS.items():
        if ("record", record) in chosen:
            make(read_json(out / f"{record}.json"), plot, out / record)
    made_from = [{"job": job, "name": name, "id": run.id, "where": run.where} for (job, name), run in chosen.items()]
    write_json(out / MARK, {BATCH: config[BATCH], "same_summary": same, "runs": made_from})
    return same


def regenerate_sweep(runs: Iterable[LoggedRun], sweep: str, out: Path, plot: PlotConfig) -> None:
    """Rows and heat maps of a multirun, named by its folder ("latest": the newest), as the sweep itself makes them."""
    from entmtp.sweep_gather import gather

    jobs = [run for run in runs if run.job == "sweep" and run.config.get("sweep")]
    known = list(dict.fromkeys(run.config["sweep"] for run in sorted(jobs, key=lambda run: run.created)))
    if not known or sweep not in ("latest", *known):
        raise EntmtpError(f"no W&B runs of a sweep '{sweep}'; those there are: {', '.join(known[-6:]) or 'none'}")
    chosen = known[-1] if sweep == "latest" else sweep
    _fresh(out)
    own = [run for run in sorted(jobs, key=lambda run: run.created) if run.config["sweep"] == chosen]
    newest = own[-1].config.get("sweep_started")  # an earlier sweep in the same folder is another one
    used = [run for run in own if run.finished and run.config.get("sweep_started") == newest]
    for run in used:
        write_json(out / str(int(run.config["job"])) / "row.json", json.loads(run.read(f"{FOLDER}/row.json")))
    write_json(out / MARK, {"sweep": chosen, "runs": [{"id": run.id, "where": run.where} for run in used]})
    gather(out, plot)


def differences(out: Path, reference: Path) -> list[str]:
    """Products of either folder that are not, byte for byte, in the other. Of runs without a bench of draft trees the
    logs hold records alone: then only those are looked at."""
    patterns = PRODUCTS if (out / "summary.json").is_file() else [f"{name}/*" for name in RECORDS]
    names = {path.relative_to(folder) for folder in (out, reference) for pattern in patterns
             for path in folder.glob(pattern) if path.suffix in SHOWN or path.name == "summary.json"}  # fmt: skip

    def content(folder: Path, name: Path) -> bytes | None:
        return (folder / name).read_bytes() if (folder / name).is_file() else None

    return [str(name) for name in sorted(names) if content(out, name) != content(reference, name)]


def _fresh(out: Path) -> None:
    """An empty folder, or one that an earlier call made."""
    if out.is_dir() and any(out.iterdir()):
        if not (out / MARK).is_file():
            raise EntmtpError(f"--out {out}: not empty, and not made by this command; choose another folder")
        shutil.rmtree(out)
    # the mark comes first: a folder that was cut short may be made anew
    write_json(out / MARK, {"runs": []})


def _runs(config: Config, sweep: bool) -> list[LoggedRun]:
    if config.tracking.mode == "online":
        return server_runs(config.tracking, {"jobType": "sweep"} if sweep else {"group": config.experiment})
    return offline_runs(Path(config.tracking.dir) / "wandb")


def _run(arguments: Any) -> int:
    config = compose(arguments.overrides)
    if arguments.sweep and arguments.compare:
        raise EntmtpError("--compare holds a run's tables and figures against its folder; a sweep (--sweep) has none")
    runs = _runs(config, bool(arguments.sweep))
    if arguments.sweep:
        out = Path(arguments.out or Path(config.results) / "sweep_from_logs")
        regenerate_sweep(runs, arguments.sweep, out, config.plot)
        return 0
    out = Path(arguments.out or run_folder(config) / "from_logs")
    own_looks = any(item.lstrip("+").startswith(("plot=", "plot.")) for item in arguments.overrides)
    chosen = choose(runs, config.experiment)
    same = regenerate(chosen, out, config.plot if own_looks else None)
    print(f"{len(chosen)} W&B runs -> {out}: " + ", ".join(
        f"{len(list(out.glob(pattern)))} files in {pattern.partition('/')[0]}" for pattern in PRODUCTS[1:]
        if any(out.glob(pattern))))  # fmt: skip
    if not same:
        print(f"{out / 'summary.json'} DIFFERS from the one that was logged (its SHA-256): other data, or other code")
    differing = differences(out, run_folder(config)) if arguments.compare else []
    if arguments.compare:
        print(f"compared with {run_folder(config)}: "
              + (f"DIFFERENT: {', '.join(differing)}" if differing else "all equal, byte for byte"))  # fmt: skip
    return 0 if same and not differing else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m entmtp.from_logs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value",
        help="experiment=NAME; tracking.dir=FOLDER (default logs); tracking=online with tracking.project= and "
        "tracking.entity=; plot.palette=… for figures in other looks",
    )  # fmt: skip
    parser.add_argument(
        "--out", help="folder to make (default results/<experiment>/from_logs; of a sweep, results/sweep_from_logs)"
    )
    parser.add_argument("--compare", action="store_true", help="exit with 1 unless equal to results/<experiment>")
    parser.add_argument("--sweep", metavar="FOLDER", help="a sweep instead of a run: its hydra.sweep.dir, or 'latest'")
    try:
        return _run(parser.parse_intermixed_args(arguments))
    except EntmtpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
