"""Execute code that a model wrote, where it can do no harm: `run(sources)`.

What it gets: an interpreter without site packages (`python -I -S`) and without an environment, one small folder in
memory that goes when it ends, CPU time, memory, file size, open files, processes and wall time within `Limits`. What
it does not get: a network, other processes to see or signal, files of the machine beside the interpreter and its
libraries (read-only), privileges. Its output is cut. `jail` says how.

There is no weaker mode: where the system permits no namespaces (Linux 5.12; root, or user namespaces for everybody),
`run` raises EntmtpError and nothing is executed. What is not covered: bugs of the kernel; memory counts per process
(so `processes` times as much), and kernel objects such as System V segments by wall time only; a program that sets out
to deceive its own tests (an object that equals everything) passes them, as it would anywhere in the same interpreter.
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from entmtp.errors import EntmtpError
from entmtp.evaluation.jail import FAILED

HERE = Path(__file__).parent
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


@dataclass(frozen=True)
class Limits:
    """Of one run. A timeout is a wrong answer, so the times are generous: HumanEval's own is 3 s."""

    wall_s: float = 20.0
    cpu_s: int = 6  # of each process
    memory_mb: int = 512  # address space of each process
    processes: int = 4  # threads count
    file_mb: int = 4  # of each file
    folder_mb: int = 16
    open_files: int = 64
    output_bytes: int = 10_000  # what is kept; the rest is read and thrown away


@dataclass(frozen=True)
class Outcome:
    """`passed`: all sources ran to their end without an exception. `reason` says what else happened."""

    passed: bool
    reason: str
    output: str  # stdout and stderr together, cut


def run(sources: list[str], limits: Limits | None = None) -> Outcome:
    """Execute `sources` one after the other in one namespace of a fresh sandboxed interpreter.

    Raises EntmtpError where the isolation cannot be had; whatever the code does is an Outcome.
    """
    check_sandbox()
    return _run(sources, limits or Limits())


@cache
def check_sandbox() -> None:
    """Raise EntmtpError unless a harmless program runs in the sandbox and comes out well."""
    if sys.platform != "linux":
        raise EntmtpError(_refusal(f"it needs Linux, this is {sys.platform}"))
    outcome = _run(["total = sum(range(10))", "assert total == 45"], Limits())
    if not outcome.passed:
        raise EntmtpError(_refusal(f"a harmless program failed in it: {outcome.reason} {outcome.output}".strip()))


def _refusal(reason: str) -> str:
    return (
        f"what a model wrote is executed in a sandbox only, and this machine has none ({reason}). It takes root, or "
        "user namespaces for everybody (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container CAP_SYS_ADMIN and no seccomp filter against "
        "unshare and mount). Without it keep confadapt.execute_code=false"
    )


def _run(sources: list[str], limits: Limits) -> Outcome:
    token = secrets.token_hex(16)
    # the folder only holds the program on its way in, and is where the jail mounts its own
    with tempfile.TemporaryDirectory(prefix="entmtp-sandbox-") as folder:
        program = Path(folder) / "program.json"
        program.write_text(json.dumps({"token": token, "sources": sources}))
        heard, said = os.pipe()
        try:
            with program.open("rb") as stdin:
                process = subprocess.Popen(
                    [_interpreter(), "-I", "-S", str(HERE / "jail.py"), json.dumps(_job(folder, limits, said))],
                    stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/", env={}, pass_fds=(said,),
                    start_new_session=True,
                )  # fmt: skip
            os.close(said)
            said = -1
            with process:
                output, report, late = _collect(process, heard, limits)
        finally:
            os.close(heard)
            if said >= 0:
                os.close(said)
    shown = output.decode("utf-8", errors="replace")
    if process.returncode == FAILED and not late:
        raise EntmtpError(_refusal(shown.strip() or "no reason given"))
    if late:
        return Outcome(False, f"wall time of {limits.wall_s:g} s", shown)
    return Outcome(*_judge(process.returncode, report, token, limits), shown)


def _interpreter() -> str:
    """The interpreter behind a virtual environment, which needs nothing outside its own prefix."""
    path = Path(sys.base_prefix).resolve() / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not path.is_file():
        raise EntmtpError(_refusal(f"{path}, the interpreter it would run, does not exist"))
    return str(path)


def _job(folder: str, limits: Limits, report: int) -> dict:
    binds: list[str] = []
    wanted = {str(Path(sys.base_prefix).resolve()), *(path for path in LIBRARIES if os.path.exists(path))}
    for path in sorted(wanted, key=len):  # a folder is bound with all that lies in it
        if not any(path.startswith(outer + "/") for outer in binds):
            binds.append(path)
    runner = (HERE / "runner.py").read_text()
    command = [_interpreter(), "-I", "-S", "-c", runner, str(report)]
    return {"folder": folder, "binds": binds, "limits": asdict(limits), "command": command}


def _collect(process: subprocess.Popen, report: int, limits: Limits) -> tuple[bytes, bytes, bool]:
    """Output and report, both cut, and whether time ran out. The process and all it started have ended."""
    kept = {process.stdout.fileno(): bytearray(), report: bytearray()}
    deadline = time.monotonic() + limits.wall_s
    try:
        with selectors.DefaultSelector() as selector:
            for source in kept:
                selector.register(source, selectors.EVENT_READ)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    kept[key.fd] += data[: limits.output_bytes - len(kept[key.fd])]
            late = bool(selector.get_map())
    except BaseException:  # Ctrl-C among them
        _kill(process)
        raise
    if late:
        _kill(process)
    process.wait()
    output, said = kept.values()
    return bytes(output), bytes(said), late


def _kill(process: subprocess.Popen) -> None:
    """The launcher's whole group; with the keeper goes everything in its process namespace, detached or not."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _judge(status: int, report: bytes, token: str, limits: Limits) -> tuple[bool, str]:
    """Whether it passed, and how it ended."""
    with suppress(ValueError, TypeError, KeyError):  # they may have written to the pipe too
        verdict = json.loads(report)
        if verdict["token"] == token:
            return (True, "passed") if verdict["error"] is None else (False, str(verdict["error"]))
    if status == 128 + signal.SIGXCPU:
        return False, f"CPU time of {limits.cpu_s} s"
    if status > 128:
        return False, f"killed by signal {status - 128}"
    return False, "ended before its tests did"
