"""Stages that people read: summary, tables, figures, report, tracking."""

import json
import shutil
from pathlib import Path

from omegaconf import OmegaConf

from entmtp.config import BenchConfig, PlotConfig, TaskConfig, TrackingConfig, from_plain
from entmtp.io import atomic, read_json, read_parquet, sha256_file, write_json, write_text
from entmtp.provenance import provenance

# of a rank trace, what figures read
TRACE_COLUMNS = ["prompt_id", "position", "ranks", "gaps", "path_values", "entropy"]


def summary(inp, out, params) -> None:
    from entmtp.evaluation.make import make_summary
    from entmtp.tasks import hub_commit, prompts_hash, read_prompts

    prompts = {
        Path(path).stem: {split: prompts_hash(read_prompts(path), split) for split in ("calib", "test")}
        for path in inp.prompts
    }
    commits = {task: hub_commit(from_plain(TaskConfig, block)) for task, block in params["tasks_config"].items()}
    measured = [read_json(path) for path in inp.latency]
    run, timed = Path(params["run"]), [*inp.bench, *inp.latency]
    hashes = {str(Path(path).relative_to(run)): sha256_file(path) for path in timed}
    record = provenance(params["config"], prompts_sha256=prompts, hub_commits=commits, timed_sha256=hashes)
    if measured:  # this job computes nothing: the threads that count are those of the timed rules
        record["threads"] = measured[0]["threads"]
    make_summary(params["run"], list(params["tasks"]), list(params["policies"]),
                 from_plain(BenchConfig, params["bench"]), record, out.summary)  # fmt: skip


def resolved_config(inp, out, params) -> None:
    whole = {
        **params["config"],
        "overrides": list(params["overrides"]),
        "resolved": {
            "tasks": params["tasks_config"],
            "policies": params["policies_config"],
            "heads": params["heads_config"],
        },
    }
    write_text(out.config, OmegaConf.to_yaml(OmegaConf.create(whole)))


def tables(inp, out, params) -> None:
    from entmtp.evaluation.make import make_tables

    make_tables(inp.summary, params["run"])


def figures(inp, out, params) -> None:
    from entmtp.evaluation.make import make_figures

    plot = from_plain(PlotConfig, params["plot"])
    make_figures(params["run"], list(params["tasks"]), list(params["heads"]), plot, params["run"])


def report(inp, out, params) -> None:
    from entmtp.evaluation.make import make_report

    make_report(params["run"], params["run"])


def replay_generation(inp, out, params) -> None:
    from entmtp.evaluation.make import make_replay_page

    make_replay_page(params["run"], params["run"])


def publish(inp, out, params) -> None:
    """Copy the final products of this run to where every run's newest ones lie."""
    run, results = Path(params["run"]), Path(params["results"])
    for path in out:
        source = run / Path(path).relative_to(results)
        with atomic(path) as partial:
            shutil.copyfile(source, partial)
    pages = f"{results / 'report.html'}, {results / 'replay_generation.html'}"
    print(f"results: {results / 'tables'}, {results / 'figures'}, {pages}", flush=True)


def track(inp, out, params) -> None:
    """One W&B run a policy, and one with the files that the task's tables and figures are made of."""
    from entmtp.tracking import track_bench, track_files

    task, config = params["task"], from_plain(TrackingConfig, params["tracking"])
    summary, batch = read_json(inp.summary), sha256_file(inp.summary)
    rows = read_parquet(inp.bench).to_dict("records")
    table = [row for row in summary["rows"] if row["task"] == task]
    runs = track_bench(config, task, rows, table, list(inp.figures), params["config"], batch)
    files = {_within(path, params["run"]): _without_tokens(Path(path)) for path in inp.files}
    # without the column `token`: texts are not logged
    files |= {_within(path, params["run"]): read_parquet(path)[TRACE_COLUMNS].to_parquet(index=False)
              for path in inp.traces}  # fmt: skip
    files["provenance.json"] = json.dumps(summary["provenance"]).encode()
    shared = track_files(config, "task", task, files, params["config"], batch)
    write_json(out.tracking, {"task": task, "mode": config.mode, "runs": runs, "files": shared,
                              "bench_sha256": sha256_file(inp.bench)})  # fmt: skip


def _without_tokens(path: Path) -> bytes:
    """A file's content. Of the check that names the two tokens of a tie, without them: texts are not logged."""
    if path.parent.name != "lossless":
        return path.read_bytes()
    check = read_json(path)
    differences = [difference for entry in check["policies"].values() for difference in entry["differences"]]
    for difference in differences:
        difference.pop("expected", None)
        difference.pop("got", None)
    return json.dumps(check, indent=1).encode() if differences else path.read_bytes()


def track_record(inp, out, params) -> None:
    """A W&B run with a record of the finished run: scheduling.json, confadapt.json."""
    from entmtp.tracking import track_files

    path, config = Path(inp.record), from_plain(TrackingConfig, params["tracking"])
    files = {path.name: path.read_bytes()}
    where = track_files(config, "record", path.stem, files, params["config"], sha256_file(inp.summary))
    write_json(out.tracking, {"record": path.stem, "mode": config.mode, "run": where})


def _within(path: str, run: str) -> str:
    return Path(path).relative_to(run).as_posix()
