"""The whole DAG on the smoke experiment, interrupted on the way and finished: one run serves many tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .sweep_world import world  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def snakemake_command(folder: Path, *arguments: str, overrides: str = "") -> list[str]:
    return [
        sys.executable, "-m", "snakemake", *arguments, "-s", str(ROOT / "Snakefile"), "--directory", str(folder),
        "--cores", "2", "--config", "experiment=smoke", f"overrides=resources={ROOT / 'resources'} {overrides}",
    ]  # fmt: skip


def snakemake(folder: Path, *arguments: str, overrides: str = "", timeout: float = 900):
    command = snakemake_command(folder, *arguments, overrides=overrides)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def _heed_interrupts() -> None:
    """A background shell starts its children with Ctrl-C ignored; a terminal does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_when(folder: Path, marker: str, timeout: float = 600) -> str:
    """Start the DAG, send Ctrl-C (to the process group, as a terminal does) once `marker` is printed."""
    log = folder / "interrupted.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            snakemake_command(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        end = time.monotonic() + timeout
        while marker not in log.read_text() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=120)
    assert marker in log.read_text(), log.read_text()[-3000:]
    assert process.returncode != 0
    return log.read_text()


@pytest.fixture(scope="session")
def smoke(tmp_path_factory) -> Path:
    """A finished smoke run that was interrupted in a model rule and in the middle of the bench."""
    folder = tmp_path_factory.mktemp("smoke")
    interrupt_when(folder, "[traces ")
    interrupt_when(folder, "prompt 2/3")
    (journal,) = (folder / "results/smoke/bench").glob("*.journal.jsonl")  # in the middle of a bench, that is
    (folder / "kept.jsonl").write_text("".join(journal.read_text().splitlines(keepends=True)[1:]))
    done = snakemake(folder)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "finished.log").write_text(done.stderr)
    return folder
