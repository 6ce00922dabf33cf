"""Tables and figures from W&B runs alone: equal to those from files, offline and through the public API's objects."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace as Files

import eval_fixture as fixture
import pandas as pd
import pytest
from wandb_fixture import Fake

from entmtp import from_logs
from entmtp.config import PlotConfig, TrackingConfig, to_plain
from entmtp.errors import EntmtpError
from entmtp.evaluation.make import make_figures, make_summary, make_tables
from entmtp.io import read_json, write_json
from entmtp.sweep_gather import gather
from entmtp.tracking import track_sweep_job
from entmtp.wandb_runs import ServerRun, offline_runs, server_runs

POLICIES = ["ar", "hydra", "entmtp_tau"]
PLOT = PlotConfig(dpi=40)
RUN_CONFIG = {"experiment": "smoke", "tasks": fixture.TASKS, "policies": POLICIES, "bench": to_plain(fixture.CONFIG),
              "plot": to_plain(PLOT), "dtype": "float32", "task": {"name": "humaneval"}}  # fmt: skip


def track(run: Path, logs: Path) -> None:
    """As the rules `track` do, on a run folder of the synthetic fixture."""
    from entmtp.stages import products

    config = {**RUN_CONFIG, "tracking": to_plain(TrackingConfig(dir=str(logs)))}
    trees = ("recalibrated", "throughput", "bank", "policy/entmtp_tau")
    for task in fixture.TASKS:
        names = ["config.yaml", "latency/hydra.json", *(f"trees/hydra/{task}/{name}.json" for name in trees),
                 *(f"{kind}/{task}.json" for kind in ("checks/lossless", "checks/replay", "perplexity"))]  # fmt: skip
        inp = Files(bench=run / f"bench/{task}.parquet", summary=run / "summary.json",
                    figures=[run / "figures/speedup.png"], files=[str(run / name) for name in names],
                    traces=[str(run / f"traces/hydra/{task}.test.parquet")])  # fmt: skip
        products.track(inp, Files(tracking=run / f"tracking/{task}.json"),
                       {"task": task, "run": str(run), "tracking": config["tracking"], "config": config})  # fmt: skip


def end_of_program() -> None:
    """W&B's process writes its files to their end, as when a program exits."""
    import wandb

    wandb.teardown()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A finished run, made from files and tracked; `results` no longer holds it, only `files` and the logs do."""
    root = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(root / "home"))
        run = root / "results" / "smoke"
        fixture.write_run(run, policies=POLICIES)
        for path in (run / "traces" / "hydra").iterdir():  # as real traces, with the text
            pd.read_parquet(path).assign(token=7).to_parquet(path, index=False)
        make_summary(run, fixture.TASKS, POLICIES, fixture.CONFIG, fixture.PROVENANCE)
        make_tables(run / "summary.json", run)
        make_figures(run, fixture.TASKS, ["hydra"], PLOT, run)
        track(run, root / "logs")
        logged = TrackingConfig(dir=str(root / "logs"))
        rows = sweep_rows()
        earlier = {**rows[0], "job": 9, "tokens_per_s": 999.0}  # of a longer sweep in the same folder
        track_sweep_job(logged, [], earlier, "outputs/sweep/one", "on Monday")
        for row in rows:
            overrides = [f"task={row['task']}", f"policy.tau_on={row['tau_on']}", f"policy.tau_off={row['tau_off']}"]
            track_sweep_job(logged, overrides, row, "outputs/sweep/one", "on Tuesday")
        end_of_program()
        run.rename(root / "files")
        yield root


def sweep_rows() -> list[dict]:
    base = {"task": "humaneval", "policy": "entmtp_tau", "kind": "tau", "heads": "hydra", "experiment": "smoke",
            "split": "calib", "engine": "replay", "depth": 1}  # fmt: skip
    rows = []
    for job, (on, off) in enumerate([(0.2, 0.1), (0.2, 0.3), (0.4, 0.1), (0.4, 0.3)]):
        row = {**base, "tau_on": on, "tau_off": off, "job": job, "overrides": [f"policy.tau_on={on}"], "reason": None}
        done = {"status": "ok", "tokens_per_s": 40 + on + off / 3, "over_star": 1 + on / 7, "accept_length": 1.1 + off,
                "trees": [0, 4], "shares": [0.25, 0.75]}  # fmt: skip
        skipped = {"status": "skipped", "reason": f"tau_off={off} exceeds tau_on={on}"}
        rows.append(row | (skipped if off > on else done))
    return rows


def arguments(world: Path, out: Path, *more: str) -> list[str]:
    return ["experiment=smoke", f"results={world / 'results'}", f"tracking.dir={world / 'logs'}", f"--out={out}", *more]


def products(folder: Path) -> dict[str, bytes]:
    paths = [path for part in ("tables", "figures") for path in (folder / part).iterdir()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in [*paths, folder / "summary.json"]}


@pytest.fixture(scope="module")
def made(world) -> Path:
    """What the command makes, from the logs alone."""
    assert from_logs.main(arguments(world, world / "made")) == 0
    return world / "made"


def test_every_table_and_figure_is_the_one_from_files_byte_for_byte(world, made):
    expected, found = products(world / "files"), products(made)
    assert {name for name in expected if name.startswith("tables/")} >= {"tables/speed.csv", "tables/trees.tex"}
    assert len(expected) == 1 + 9 + 14
    assert found == expected
    record = read_json(made / from_logs.MARK)
    assert record["same_summary"] and [run["job"] for run in record["runs"]].count("bench") == 6


def exact(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Every value of every column to the last bit, NaN included."""
    return {column: [repr(value.tolist() if hasattr(value, "tolist") else value) for value in frame[column]]
            for column in sorted(frame.columns)}  # fmt: skip


def test_the_bench_and_what_stands_beside_it_are_restored(world, made):
    for task in fixture.TASKS:
        original = pd.read_parquet(world / "files" / "bench" / f"{task}.parquet")
        restored = pd.read_parquet(made / "bench" / f"{task}.parquet")
        assert exact(restored) == exact(original.drop(columns="tokens"))
        for name in ("bank.json", "policy/entmtp_tau.json"):
            path = f"trees/hydra/{task}/{name}"
            assert (made / path).read_bytes() == (world / "files" / path).read_bytes()


def test_texts_are_not_logged(world):
    for run in offline_runs(world / "logs" / "wandb"):
        assert not any("token_ids" in name or "prompts.jsonl" in name for name in run.files())
        for name in run.files():
            if name.endswith(".table.json"):
                assert "tokens" not in json.loads(run.read(name))["columns"]
            if name.endswith(".parquet"):
                assert "token" not in pd.read_parquet(io.BytesIO(run.read(name))).columns


def test_compare_names_what_differs(world, made, tmp_path):
    assert from_logs.differences(made, world / "files") == []
    other = tmp_path / "other"
    shutil.copytree(world / "files", other)
    (other / "tables" / "speed.csv").write_text("task\n")
    (other / "figures" / "speedup.svg").unlink()
    (other / "scheduling").mkdir()
    (other / "scheduling" / "scheduling.md").write_text("# Scheduling")  # made there, not tracked
    (other / "scheduling" / "humaneval.json").write_text("{}")  # what that is made of
    expected = ["figures/speedup.svg", "scheduling/scheduling.md", "tables/speed.csv"]
    assert from_logs.differences(made, other) == expected


def test_other_looks_change_figures_and_no_table(world, tmp_path, capsys):
    shutil.copytree(world / "files", world / "results" / "smoke")
    try:
        assert from_logs.main(arguments(world, tmp_path / "out", "--compare", "plot.palette=deep")) == 1
    finally:
        shutil.rmtree(world / "results" / "smoke")
    said = capsys.readouterr().out
    assert "8 W&B runs -> " in said and "9 files in tables, 14 files in figures" in said
    differing = said.partition("DIFFERENT: ")[2].strip().split(", ")
    assert "figures/speedup.png" in differing and all(name.startswith("figures/") for name in differing)


def logs_copy(world: Path, tmp_path: Path) -> Path:
    shutil.copytree(world / "logs", tmp_path / "logs", symlinks=True)
    return tmp_path


def run_named(root: Path, name: str):
    """Of the pipeline's own; a sweep's job may have the same name, and runs of one second lie in any order."""
    return next(run for run in offline_runs(root / "logs" / "wandb") if run.name == name and run.job != "sweep")


def test_a_changed_second_is_noticed(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(from_logs, "make_figures", lambda *arguments: None)  # slow, and not what is asked here
    root = logs_copy(world, tmp_path)
    run = run_named(root, "litbench/hydra")
    (name,) = [name for name in run.files() if from_logs.PROMPTS.fullmatch(name)]
    path = run.path.parent / "files" / name
    table = json.loads(path.read_text())
    table["data"][0][table["columns"].index("prefill_s")] *= 2
    path.write_text(json.dumps(table))
    assert from_logs.main(arguments(root, tmp_path / "out")) == 1
    assert "summary.json DIFFERS" in capsys.readouterr().out


def test_missing_and_cut_runs_are_named(world, tmp_path, capsys):
    root = logs_copy(world, tmp_path)
    shutil.rmtree(run_named(root, "litbench/ar").path.parent)
    cut = run_named(root, "humaneval").path
    cut.write_bytes(cut.read_bytes()[:-20])  # its process was killed: no exit is recorded
    assert from_logs.main(arguments(root, tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert "incomplete, humaneval, litbench/ar missing or cut short" in error
    assert not (tmp_path / "out").exists()


def test_a_lost_step_is_named(world, tmp_path):
    run = run_named(world, "humaneval/entmtp_tau")
    lost = Fake(files_={name: run.read(name) for name in run.files()}, steps=list(run.history())[:-3])
    with pytest.raises(EntmtpError, match=r"the history has \d+ of the \d+ steps of prompt humaneval/5"):
        from_logs.bench_rows(lost)


def test_damage_is_named_with_its_place(world, tmp_path, capsys):
    root = logs_copy(world, tmp_path)
    path = run_named(root, "humaneval/ar").path
    data = bytearray(path.read_bytes())
    data[data.index(b"accept_length", len(data) // 2)] ^= 1
    path.write_bytes(data)
    assert from_logs.main(arguments(root, tmp_path / "out")) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and path.name in error and "damaged at byte" in error
    path.write_bytes(b"not a log at all")
    assert from_logs.main(arguments(root, tmp_path / "out")) == 1
    assert "not a W&B run file" in capsys.readouterr().err


def test_a_folder_with_something_else_in_it_is_left_alone(world, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert from_logs.main(arguments(world, tmp_path)) == 1
    assert "not made by this command" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_without_runs_the_folder_is_named(tmp_path, capsys):
    assert from_logs.main(["experiment=smoke", f"tracking.dir={tmp_path}"]) == 1
    assert f"error: {tmp_path / 'wandb'}: no W&B runs" in capsys.readouterr().err


def test_help_says_how(capsys):
    with pytest.raises(SystemExit) as ended:
        from_logs.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(word in text for word in ("experiment=main", "tracking=online", "--compare", "--sweep", "tracking.dir="))


def test_a_sweep_comes_back_with_its_rows_and_heat_map(world, tmp_path, capsys):
    for row in sweep_rows():
        write_json(tmp_path / "files" / str(row["job"]) / "row.json", row)
    gather(tmp_path / "files", PlotConfig())
    assert from_logs.main(arguments(world, tmp_path / "out", "--sweep", "latest")) == 0
    for name in ("rows.csv", "heatmap_humaneval.png"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "files" / name).read_bytes(), name
    pd.testing.assert_frame_equal(*(pd.read_parquet(tmp_path / place / "rows.parquet") for place in ("out", "files")))
    assert from_logs.main(arguments(world, tmp_path / "none", "--sweep", "outputs/sweep/two")) == 1
    assert "no W&B runs of a sweep 'outputs/sweep/two'; those there are: outputs/sweep/one" in capsys.readouterr().err
    assert from_logs.main(arguments(world, tmp_path / "none", "--sweep", "latest", "--compare")) == 1
    assert "--compare holds a run's tables and figures against its folder" in capsys.readouterr().err


class Api:
    """Stands for `wandb.Api()`, without HTTP: wandb's own run objects, whose history and files come from a folder."""

    def __init__(self, folder: Path):
        from wandb.apis.public import Run

        class FolderRun(Run):
            def __init__(self, run):
                stamp = pd.Timestamp(int(run.created), unit="s").isoformat() + "Z"
                # as a server answers: the configuration is JSON of {key: {"value": …}}
                config = json.dumps({key: {"value": value} for key, value in run.config.items()})
                attrs = {"name": run.id, "displayName": run.name, "group": run.group, "jobType": run.job, "tags": [],
                         "createdAt": stamp, "config": config}  # fmt: skip
                attrs["state"] = "finished" if run.finished else "crashed"
                super().__init__(None, "me", "entmtp", run.id, attrs, lazy=False)
                self.offline = run

            def scan_history(self):
                return iter(reversed(list(self.offline.history())))

            def files(self):
                return [self.file(name) for name in self.offline.files()]

            def file(self, name):
                def download(root, replace):
                    path = Path(root) / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(self.offline.read(name))
                    return path.open()

                return Files(name=name, download=download)

        self.found, self.asked = [FolderRun(run) for run in offline_runs(folder)], []

    def runs(self, path, filters):
        self.asked.append((path, filters))
        return [run for run in self.found if run.group == filters["group"]]


def test_a_server_gives_the_same_tables(world, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    api = Api(world / "logs" / "wandb")
    runs = server_runs(TrackingConfig(mode="online", entity="me"), {"group": "smoke"}, api)
    assert api.asked == [("me/entmtp", {"group": "smoke"})]
    assert all(isinstance(run, ServerRun) for run in runs)
    assert from_logs.regenerate(from_logs.choose(runs, "smoke"), tmp_path / "out")
    assert products(tmp_path / "out") == products(world / "files")
    assert {run["where"].split("/")[0] for run in read_json(tmp_path / "out" / from_logs.MARK)["runs"]} == {"me"}


def test_what_a_server_says_is_one_message():
    def runs(path, filters):
        raise ValueError("Could not find\n project entmtp")

    with pytest.raises(EntmtpError, match="W&B, entmtp: Could not find project entmtp"):
        server_runs(TrackingConfig(mode="online"), {"group": "smoke"}, Files(runs=runs))


def test_online_without_an_account_says_what_to_do(monkeypatch, tmp_path, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert from_logs.main(["experiment=smoke", "tracking=online"]) == 1
    assert "wandb login" in capsys.readouterr().err
