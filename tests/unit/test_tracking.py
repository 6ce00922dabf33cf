"""W&B as a mirror: offline runs whose file holds every step, nothing at all when disabled, a clear login error."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from entmtp.config import TrackingConfig
from entmtp.errors import EntmtpError
from entmtp.tracking import step_series, track_bench, track_sweep_job

SUMMARY = [
    {"task": "gsm8k", "policy": policy, "tokens_per_s": speed, "num_accepted": 0.5, "lossless": "exact", "ppl": None,
     "over_ar": {"ratio": speed / 30, "low": 0.9, "high": 1.4}, "over_hydra": None, "trees": {"0": 0.25, "8": 0.75}}
    for policy, speed in (("ar", 30.0), ("entmtp_tau", 42.0))
]  # fmt: skip
RUN_CONFIG = {"experiment": "smoke", "dtype": "float32", "task": {"name": "humaneval"}, "decoding": {"mode": "greedy"}}


@pytest.fixture(autouse=True)
def own_environment(tmp_path, monkeypatch):
    """No account, and nothing of the user's to read."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))


def bench_rows(policy: str, prompts: int = 2, steps: int = 3) -> list[dict]:
    """As pandas reads them from Parquet: arrays, and NaN or None where no signal was looked at."""
    signal = [None] * steps if policy == "ar" else [0.25, float("nan"), *[0.5] * (steps - 2)]
    return [
        {"task": "gsm8k", "policy": policy, "heads": None if policy == "ar" else "hydra", "kind": "tau",
         "dtype": "float32", "mode": "greedy", "prompt_id": f"p{prompt}", "step_accepted": np.arange(steps) % 3,
         "step_tree": np.zeros(steps, int), "step_nodes": np.full(steps, 8),
         "step_signal": np.array(signal, dtype=object), "step_ms": np.full(steps, 2.5)}
        for prompt in range(prompts)
    ]  # fmt: skip


def read_run(folder: str) -> list:
    """Records of an offline run's file: protobufs in a LevelDB log (32 KiB blocks; crc, length, part of record)."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # W&B's process writes the file to its end, as it does when a program exits
    (path,) = Path(folder).glob("*.wandb")
    data, at, whole, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, part = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def items(entries) -> dict:
    return {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def test_offline_run_holds_series_summary_table_and_figures(tmp_path):
    from PIL import Image

    figure = tmp_path / "speedup.png"
    Image.new("RGB", (8, 8), "white").save(figure)
    rows = bench_rows("ar") + bench_rows("entmtp_tau")
    runs = track_bench(TrackingConfig(dir=str(tmp_path / "logs")), "gsm8k", rows, SUMMARY, [figure], RUN_CONFIG)
    assert [(run["policy"], run["name"]) for run in runs] == [("ar", "gsm8k/ar"), ("entmtp_tau", "gsm8k/entmtp_tau")]
    assert json.dumps(runs), "the run list must be JSON"

    records = read_run(runs[1]["dir"])
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.display_name, run.run_group, run.job_type, run.project) == (
        "gsm8k/entmtp_tau", "smoke", "bench", "entmtp",
    )  # fmt: skip
    assert {"gsm8k", "entmtp_tau", "float32", "greedy"} <= set(run.tags)
    config = items(run.config.update)
    assert (config["task"], config["policy"], config["heads"]) == ("gsm8k", "entmtp_tau", "hydra")
    history = [items(r.history.item) for r in records if r.WhichOneof("record_type") == "history"]
    series = [row for row in history if "accept_length" in row]
    assert [row["_step"] for row in series] == list(range(6))
    assert [row["accept_length"] for row in series] == [1, 2, 3, 1, 2, 3]
    assert [row["prompt"] for row in series] == [0, 0, 0, 1, 1, 1]
    assert [row.get("signal") for row in series] == [0.25, None, 0.5] * 2
    assert series[0]["ms"] == 2.5 and series[0]["nodes"] == 8
    media = {key.rpartition("/")[0]: value for row in history for key, value in row.items() if key.endswith("/path")}
    assert set(media) == {"summary", "prompts", "figures/speedup"}
    assert all((Path(runs[1]["dir"]) / "files" / path).is_file() for path in media.values())
    summary = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    assert summary["tokens_per_s"] == 42.0 and summary["over_ar/ratio"] == pytest.approx(1.4)
    assert summary["lossless"] == "exact" and "ppl" not in summary

    plain = [items(r.history.item) for r in read_run(runs[0]["dir"]) if r.WhichOneof("record_type") == "history"]
    assert not any("signal" in row for row in plain)
    assert not (tmp_path / "home").exists(), "offline tracking must leave nothing in the user's home"


def test_offline_ignores_environment_and_netrc(tmp_path, monkeypatch):
    import netrc

    def refuse(*args):
        raise AssertionError("offline tracking must not read a netrc file")

    monkeypatch.setattr(netrc, "netrc", refuse)
    monkeypatch.setenv("WANDB_MODE", "online")
    row = {"task": "gsm8k", "policy": "entmtp_tau", "experiment": "smoke", "status": "ok", "trees": [0, 8],
           "tokens_per_s": 40.5, "reason": None}  # fmt: skip
    overrides = ["task=gsm8k", "policy=entmtp_tau", "policy.tau_on=0.3"]
    found = track_sweep_job(TrackingConfig(dir=str(tmp_path)), overrides, row)
    assert found["name"] == "gsm8k/entmtp_tau/policy.tau_on=0.3" and Path(found["dir"]).is_dir()
    run = next(r.run for r in read_run(found["dir"]) if r.WhichOneof("record_type") == "run")
    assert run.job_type == "sweep" and items(run.config.update)["overrides"] == overrides


def test_disabled_never_imports_wandb(tmp_path):
    code = (
        "import sys\nfrom entmtp.config import TrackingConfig\nfrom entmtp.tracking import *\n"
        f"off = TrackingConfig(mode='disabled', dir={str(tmp_path / 'no')!r})\n"
        "assert track_bench(off, 't', [{'policy': 'ar'}], [], [], {}) == []\n"
        "assert track_sweep_job(off, [], {}) is None\nassert 'wandb' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not (tmp_path / "no").exists()


def test_online_without_an_account_says_what_to_do(tmp_path):
    with pytest.raises(EntmtpError, match=r"tracking=online.*wandb login.*tracking=offline"):
        track_bench(TrackingConfig(mode="online", dir=str(tmp_path)), "gsm8k", bench_rows("ar"), [], [], RUN_CONFIG)


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EntmtpError, match=r"tracking\.dir=.*file/logs"):
        track_bench(TrackingConfig(dir=str(tmp_path / "file" / "logs")), "t", bench_rows("ar"), [], [], RUN_CONFIG)


def test_a_bench_of_4000_steps_takes_seconds(tmp_path):
    rows = bench_rows("entmtp_tau", prompts=40, steps=100)
    assert len(list(step_series(rows))) == 4000
    begin = time.process_time()  # not wall time: the machine may be busy
    track_bench(TrackingConfig(dir=str(tmp_path)), "gsm8k", rows, [], [], RUN_CONFIG)
    assert time.process_time() - begin < 10, "about 2 s"


def test_the_tokens_of_a_tie_stay_at_home(tmp_path):
    from entmtp.io import write_json
    from entmtp.stages.products import _without_tokens

    tie = {"prompt_id": "p", "position": 3, "margin": 1e-4, "expected": 17, "got": 99}
    check = {"task": "t", "policies": {"tau": {"verdict": "tie", "prompts": 1, "differences": [tie]}}}
    write_json(tmp_path / "lossless/t.json", check)
    sent = json.loads(_without_tokens(tmp_path / "lossless/t.json"))
    assert sent["policies"]["tau"]["differences"] == [{"prompt_id": "p", "position": 3, "margin": 1e-4}]
    check["policies"]["tau"]["differences"] = []
    for folder in ("lossless", "replay"):
        write_json(tmp_path / folder / "u.json", check)
        assert _without_tokens(tmp_path / folder / "u.json") == (tmp_path / folder / "u.json").read_bytes()
