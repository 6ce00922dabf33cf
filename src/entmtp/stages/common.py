"""Running a stage: `run_rule` for Snakemake jobs, and what several stages share.

A stage is a function `(inp, out, params)`: `inp` and `out` have the rule's files as attributes, `params` only that
rule's block of the configuration. Snakemake itself is not imported, so tests pass plain namespaces.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from entmtp.config import HeadsConfig, TargetConfig, from_plain
from entmtp.errors import EntmtpError
from entmtp.io import read_json, write_json


class _Tee:
    """Progress goes to the terminal, marked with its rule, and to the rule's log."""

    def __init__(self, name: str, log):
        self.name, self.log, self.fresh = name, log, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            sys.__stderr__.write(f"[{self.name}] {line}" if self.fresh else line)
            self.fresh = line.endswith("\n")
        self.log.write(text)
        return len(text)

    def flush(self) -> None:
        sys.__stderr__.flush()
        self.log.flush()


def run_rule(job, stage: Callable) -> None:
    """Run a stage for a Snakemake job: threads, log, one clear message and exit status 1 on an error of the user's."""
    log_path = Path(job.log[0]) if job.log else Path("logs") / f"{job.rule}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    wildcards = "/".join(str(value) for value in job.wildcards)
    with log_path.open("w", encoding="utf-8") as log:
        sys.stdout = _Tee(f"{job.rule}{' ' + wildcards if wildcards else ''}", log)
        try:
            _set_threads(job.params.get("threads") or job.threads)
            stage(job.input, job.output, job.params)
        except EntmtpError as error:
            print(f"error: {error}", flush=True)
            sys.exit(1)
        finally:
            sys.stdout.flush()
            sys.stdout = sys.__stdout__


def _set_threads(threads: int) -> None:
    """Before torch is imported: jobs that need no model are spared its two seconds."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def open_block(params, folder: str | None = None, capacity: int = 0):
    """Target of a rule's block, and a decoder with the heads of `folder`."""
    from entmtp.session import open_decoder, open_target
    from entmtp.target.precision import resolved

    device = params["device"]
    target = open_target(from_plain(TargetConfig, params["target"]), params["resources"],
                         resolved(params["dtype"], device), device)  # fmt: skip
    heads = from_plain(HeadsConfig, params["heads"]) if folder else None
    return target, open_decoder(target, heads, Path(folder) if folder else None, capacity)


def read_trees(path: str) -> list:
    from entmtp.tree.topology import Tree

    return [Tree.of(entry["paths"]) for entry in read_json(path)["trees"]]


def write_verdicts(path: str, result: dict, what: str) -> None:
    """Write a check's result, or, where a policy failed, keep it beside under another name and fail the rule."""
    failed = [name for name, entry in result["policies"].items() if entry["verdict"] == "fail"]
    if failed:
        kept = Path(path).with_suffix(".failed.json")
        write_json(kept, result)
        raise EntmtpError(f"task {result['task']}: {', '.join(failed)} {what}; see {kept}")
    write_json(path, result)
