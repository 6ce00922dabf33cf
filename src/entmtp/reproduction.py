"""`python -m entmtp.reproduction experiment=quick`: are a finished run's token-level results those that are committed?

A run's files are hashed stage by stage, by what they say in tokens: texts, ranks, trees, accepted counts. Seconds are
left out. Two groups are told apart:

- **exact** stages follow from code, weights and prompts alone: prompts, the target's texts, rank traces, the frontier,
  recalibrated accept lengths, the texts of the bench, and the steps of policies without a fit. They must be equal.
- **timed** stages follow from seconds that were measured on the way: which trees were timed and are in the bank, the
  thresholds, the steps of fitted policies. They are compared and reported, and a difference is no failure. But they
  must follow from *this* run's seconds: banks and policies are made again from its own measured files and held equal.

float32 on one kind of processor and the pinned versions; another processor may sum in another order, and a near tie
then falls the other way (docs/reproducibility.md). `--write` records the run instead of comparing it.
"""

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from entmtp.command import run_command
from entmtp.config import compose, shipped, to_plain
from entmtp.errors import EntmtpError
from entmtp.io import read_json, read_jsonl, read_parquet, sha256_json, write_json
from entmtp.layout import run_folder

FIXED_KINDS = ("ar", "static")
FITTED = ("depth", "tau_on", "tau_off", "thresholds", "trees", "start", "growing")
LEARNED = ("cost_aware", "bandit")  # of policies that have them


def _prompts(path: Path) -> Any:
    return [[row["id"], row["split"], row["sha256"]] for row in read_jsonl(path)]


def _texts(path: Path) -> Any:
    return [[row["prompt_id"], list(map(int, row["tokens"]))] for row in read_parquet(path).to_dict("records")]


def _traces(path: Path) -> Any:
    """Ranks are decisions; path values and entropies are floating-point numbers, and no token depends on them alone."""
    frame = read_parquet(path)
    return [[row["prompt_id"], int(row["position"]), int(row["token"]), list(map(int, row["ranks"]))]
            for row in frame[["prompt_id", "position", "token", "ranks"]].to_dict("records")]  # fmt: skip


def _json(path: Path) -> Any:
    return read_json(path)


def _bank(path: Path) -> Any:
    bank = read_json(path)
    return [bank["star"], [tree["paths"] for tree in bank["trees"]]]


def _policy(path: Path) -> Any:
    fitted = read_json(path)
    learned = {key: {name: value for name, value in fitted[key].items() if name != "cross_validation"}
               for key in LEARNED if fitted.get(key)}  # fmt: skip
    return [fitted["kind"], fitted["tree"], {key: fitted.get(key) for key in FITTED} | learned]


def _bench(path: Path, fixed: bool | None) -> Any:
    """Texts of every policy (`fixed` None), or the steps of those with or without a fit."""
    rows = read_parquet(path).to_dict("records")
    if fixed is None:
        return sorted([row["policy"], row["prompt_id"], list(map(int, row["tokens"]))] for row in rows)
    chosen = [row for row in rows if (row["kind"] in FIXED_KINDS) == fixed]
    return sorted(
        [row["policy"], row["prompt_id"], list(map(int, row["step_nodes"])), list(map(int, row["step_accepted"]))]
        for row in chosen
    )


# (stage, whether it is exact, files, what of a file is hashed), in the order of the data flow
STAGES = [
    ("prompts", True, "prompts/*.jsonl", _prompts),
    ("texts", True, "texts/*.parquet", _texts),
    ("traces", True, "traces/*/*.parquet", _traces),
    ("frontier", True, "trees/*/*/frontier.json", _json),
    ("recalibrated", True, "trees/*/*/recalibrated.json", _json),
    ("bench texts", True, "bench/*.parquet", lambda path: _bench(path, None)),
    ("bench steps, fixed trees", True, "bench/*.parquet", lambda path: _bench(path, True)),
    ("bank", False, "trees/*/*/bank.json", _bank),
    ("policies", False, "trees/*/*/policy/*.json", _policy),
    ("bench steps, fitted policies", False, "bench/*.parquet", lambda path: _bench(path, False)),
]


def run_hashes(run: Path) -> dict[str, dict[str, str]]:
    """{stage: {file: hash}} of a finished run."""
    found = {stage: {str(path.relative_to(run)): sha256_json(content(path)) for path in sorted(run.glob(pattern))}
             for stage, _, pattern, content in STAGES}  # fmt: skip
    missing = [stage for stage, files in found.items() if not files]
    if missing:
        raise EntmtpError(f"{run}: no files of stage {missing[0]}; finish the run first (`snakemake --cores all`)")
    return found


def differences(recorded: dict, found: dict) -> Iterator[tuple[str, bool, list[str]]]:
    """(stage, whether it is exact, files that differ or exist on one side only), in the order of the data flow."""
    for stage, exact, _, _ in STAGES:
        ours, theirs = found[stage], recorded.get(stage, {})
        files = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if files:
            yield stage, exact, files


def rederived(run: Path, overrides: list[str]) -> list[str]:
    """Banks and policies of a run that do not follow from its own traces, latencies and throughputs."""
    from entmtp.stages import offline

    wrong = []
    with TemporaryDirectory() as work, redirect_stdout(StringIO()):
        for trees in sorted(path.parent for path in run.glob("trees/*/*/throughput.json")):
            kind, task = trees.parts[-2:]
            made, block = Path(work) / "bank.json", to_plain(compose(overrides).bank)
            offline.bank(SimpleNamespace(throughput=trees / "throughput.json"), SimpleNamespace(bank=made),
                         {"bank": block, "task": task, "kind": kind})  # fmt: skip
            if _bank(made) != _bank(trees / "bank.json"):
                wrong.append(str((trees / "bank.json").relative_to(run)))
            files = SimpleNamespace(
                bank=trees / "bank.json", latency=run / "latency" / f"{kind}.json",
                traces=run / "traces" / kind / f"{task}.calib.parquet",
                growth=run / "traces" / kind / f"{task}.calib.growth.npz",
            )  # fmt: skip
            for path in sorted((trees / "policy").glob("*.json")):
                config = compose([*overrides, f"policy={path.stem}"]).policy
                offline.policy(files, SimpleNamespace(policy=Path(work) / path.name), {"policy": to_plain(config)})
                if _policy(Path(work) / path.name) != _policy(path):
                    wrong.append(str(path.relative_to(run)))
    return wrong


def record_path(experiment: str) -> Path:
    return shipped("reproduction", "docs/reproduction") / f"{experiment}.json"


def compare(recorded: dict, found: dict) -> bool:
    """Print a line a stage that differs. False where an exact one does; the first of them is where to look."""
    equal = True
    for stage, exact, files in differences(recorded, found):
        first = equal and exact
        equal = equal and not exact
        what = "differs" if exact else "differs, as measured seconds do"
        print(f"{'FIRST DIFFERENCE: ' if first else ''}{stage} {what}: {', '.join(files[:4])}"
              f"{f' and {len(files) - 4} more' if len(files) > 4 else ''}")  # fmt: skip
    return equal


def main(arguments: list[str]) -> int:
    """Exit status 0 when every exact stage is equal and the timed ones follow from the run's seconds, 1 otherwise."""
    from entmtp.provenance import provenance

    write = "--write" in arguments
    config = compose([item for item in arguments if item != "--write"])
    run, path = run_folder(config), record_path(config.experiment)
    found = run_hashes(run)
    if write:
        made = provenance({"experiment": config.experiment, "device": config.device, "dtype": config.dtype})
        kept = {key: made[key] for key in ("git", "date", "python", "packages", "cpu", "dtype")}
        write_json(path, {"experiment": config.experiment, "made": kept, "stages": found})
        print(f"wrote {path}")
        return 0
    recorded = read_json(path)
    equal = compare(recorded["stages"], found)
    wrong = rederived(run, [item for item in arguments if item != "--write"])
    if wrong:
        print(f"does not follow from this run's own seconds: {', '.join(wrong)}")
        equal = False
    exact = sum(len(found[stage]) for stage, is_exact, _, _ in STAGES if is_exact)
    print(f"{run}: {exact} exact files {'equal' if equal else 'NOT all equal'} to {path.name} "
          f"(made on {recorded['made']['cpu']}, commit {str(recorded['made']['git']['sha'])[:7]})")  # fmt: skip
    return 0 if equal else 1


if __name__ == "__main__":
    run_command(main, __doc__)
