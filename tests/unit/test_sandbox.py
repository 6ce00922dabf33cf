"""The sandbox: what code in it cannot do, what a run of it can cost, and that nobody gets by without it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from entmtp.errors import EntmtpError
from entmtp.evaluation import sandbox
from entmtp.evaluation.jail import NOBODY
from entmtp.evaluation.sandbox import Limits, check_sandbox, run

QUICK = Limits(wall_s=15, cpu_s=1)
RUNNER = (sandbox.HERE / "runner.py").read_text()


def available() -> str | None:
    """Why there is no sandbox here, if there is none."""
    try:
        check_sandbox()
    except EntmtpError as error:
        return str(error)
    return None


@pytest.fixture(scope="module", autouse=True)
def jailed():
    reason = available()
    if reason:
        pytest.skip(reason)


def outcome(source: str, limits: Limits = QUICK):
    return run([source], limits)


def test_correct_code_passes_and_wrong_code_fails():
    solution = "def add(a, b):\n    return a + b\n"
    check = "def check(candidate):\n    assert candidate(2, 3) == 5, 'sum'\n"
    assert run([solution, check, "check(add)"]).passed
    wrong = run([solution.replace("+", "-"), check, "check(add)"])
    assert (wrong.passed, wrong.reason) == (False, "AssertionError: sum")
    assert run(["def add(:"]).reason.startswith("SyntaxError")
    assert run(["import json, math, re, collections, typing, hashlib, itertools, datetime"]).passed
    assert sorted(run(["print('a'); import sys; print('b', file=sys.stderr)"]).output.split()) == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "ended before its tests did"),
        ("exit()", "NameError"),  # site is not there
        ('import os; os.write(int(__import__("sys").argv[1]), b\'{"token": "x", "error": null}\'); os._exit(0)',
         "ended before its tests did"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("class passed(Exception):\n    def __str__(self):\n        raise ValueError\nraise passed", "passed"),
    ],
)  # fmt: skip
def test_leaving_early_is_no_success(source, reason):
    ended = outcome(source)
    assert not ended.passed and ended.reason.startswith(reason)


def test_an_infinite_loop_ends_by_processor_time_and_a_sleeper_by_the_clock():
    assert outcome("while True: pass").reason == "CPU time of 1 s"
    begin = time.monotonic()
    asleep = outcome("import time; time.sleep(600)", Limits(wall_s=2))
    assert asleep.reason == "wall time of 2 s"
    assert time.monotonic() - begin < 60
    deaf = "import signal, time\nfor n in set(signal.valid_signals()) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
    assert outcome(deaf + "time.sleep(600)", Limits(wall_s=2)).reason == "wall time of 2 s"


def test_memory_is_bounded():
    patient = Limits(wall_s=60, cpu_s=6)  # half a gigabyte of new pages takes more than a second on a busy machine
    hoard = outcome("kept = []\nwhile True: kept.append(bytearray(1 << 24))", patient)
    assert hoard.reason.startswith("MemoryError")
    assert outcome("x = bytearray(900 << 20)", patient).reason.startswith("MemoryError")
    assert outcome("import mmap; mmap.mmap(-1, 900 << 20)", patient).reason.startswith("OSError")
    assert outcome("x = bytearray(100 << 20)", patient).passed


def processes_of_the_sandbox() -> set[int]:
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any("jail.py" in part or part == RUNNER for part in process.info["cmdline"] or ()):
            found.add(process.pid)
    return found


def wait_until_gone(before: set[int]) -> set[int]:
    """Those that are left a while after a run: the kernel may take a moment to clear a namespace."""
    end = time.monotonic() + 20
    while (left := processes_of_the_sandbox() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return left


BOMB = """
import os
made = 0
while made < 1000:
    try:
        if os.fork() == 0:
            import time
            time.sleep(600)
    except BlockingIOError:
        raise AssertionError(f"{made} forks") from None
    made += 1
"""


def test_a_fork_bomb_is_bounded_and_nothing_of_it_is_left():
    before = processes_of_the_sandbox()
    ended = outcome(BOMB, Limits(processes=4, wall_s=15))
    # itself is the fourth; other processes of the same user may count too
    assert ended.reason in [f"AssertionError: {made} forks" for made in range(4)]
    assert not wait_until_gone(before)
    endless = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    assert not outcome(endless, Limits(cpu_s=1, wall_s=4)).passed
    assert not wait_until_gone(before)


def test_detached_processes_end_with_the_run():
    before = processes_of_the_sandbox()
    detached = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
    assert outcome(detached).passed
    assert not wait_until_gone(before)


def test_threads_count_as_processes():
    source = (
        "import threading, time\nthreads = [threading.Thread(target=time.sleep, args=(600,)) for _ in range(99)]\n"
        "for thread in threads: thread.start()"
    )
    assert "can't start new thread" in outcome(source, Limits(processes=3, wall_s=15)).reason


def test_files_can_be_written_in_the_temporary_folder_only(tmp_path):
    tmp_path.chmod(0o777)
    assert outcome("open('a.txt', 'w').write('x'); assert open('a.txt').read() == 'x'").passed
    assert not outcome("open('a.txt')").passed, "every run has a folder of its own"
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o666)
    for place in (secret, tmp_path / "new", "/new", "/tmp/new", "/etc/new", sys.base_prefix + "/new", "/work/../new"):
        ended = outcome(f"open({str(place)!r}, 'w').write('overwritten')")
        assert not ended.passed and ended.reason.split(":")[0] in (
            "FileNotFoundError", "PermissionError", "OSError"), (place, ended)  # fmt: skip
    assert secret.read_text() == "s"
    assert os.listdir(tmp_path) == ["secret"]
    python = str(Path(sys.base_prefix).resolve() / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    for act in (f"os.unlink({python!r})", f"os.chmod({python!r}, 0o777)", "os.mkdir('/x')", "os.rmdir('/work')"):
        assert not outcome(f"import os; {act}").passed, act


def test_files_of_the_machine_cannot_be_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    for place in (secret, "/etc/passwd", "/proc/1/environ", "/proc/self/environ", "/dev/sda", __file__):
        assert outcome(f"open({str(place)!r}).read()").reason.startswith("FileNotFoundError"), place
    assert outcome(f"import os; os.listdir({str(Path(__file__).parent)!r})").reason.startswith("FileNotFoundError")
    # what it does see: the way to the interpreter and its libraries, and its own folder
    binds = sandbox._job("/x", QUICK, 3)["binds"]
    tops = sorted({bind.split("/")[1] for bind in binds} | {"work"})
    assert outcome(f"import os; assert sorted(os.listdir('/')) == {tops}").passed


def test_the_size_of_files_and_of_the_folder_is_bounded():
    assert "File too large" in outcome("open('a', 'wb').write(b'x' * (9 << 20))").reason
    many = "for n in range(99): open(str(n), 'wb').write(b'x' * (3 << 20))"
    assert "No space left" in outcome(many).reason
    assert "Too many open files" in outcome("kept = [open('a', 'w') for _ in range(999)]").reason


def test_no_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:  # one that listens: a refusal would prove nothing
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert "Network is unreachable" in outcome(source).reason
    assert not outcome("import socket; socket.create_connection(('1.1.1.1', 53), timeout=5)").passed
    assert not outcome("import socket; socket.getaddrinfo('example.org', 80)").passed
    with socket.socket(socket.AF_UNIX) as server:  # abstract names belong to the network namespace
        name = f"entmtp-test-{os.getpid()}"
        server.bind("\0" + name)
        server.listen()
        reach = f"import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + {name!r})"
        assert "Connection refused" in outcome(reach).reason


def test_huge_output_is_cut_and_harmless():
    ended = outcome("print('x' * 50_000_000)")
    assert ended.passed and ended.output == "x" * 10_000
    endless = outcome("while True: print('y' * 1000)")
    assert not endless.passed and len(endless.output) == 10_000
    assert outcome("import sys; sys.stdout.buffer.write(bytes(range(256)))").passed


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("ENTMTP_SECRET", "token")
    ended = outcome("import os; raise AssertionError(sorted(os.environ))")
    assert "ENTMTP_SECRET" not in ended.reason and "PATH" not in ended.reason
    assert outcome("import sys; assert sys.flags.isolated and sys.flags.no_site").passed
    assert outcome("import os; assert os.getcwd() == '/work' and os.listdir() == []").passed
    assert not outcome("import numpy").passed
    assert outcome("input()").reason.startswith("EOFError")


def test_other_processes_cannot_be_seen_or_killed():
    source = (
        "import os, signal\n"
        f"for target in (os.getppid(), 1, -1, {os.getpid()}, {os.getppid()}):\n"
        "    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):\n"
        "        try: os.kill(target, number)\n"
        "        except (ProcessLookupError, PermissionError): pass\n"
    )
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        assert outcome(source).passed
        outcome(f"import os; os.kill({sleeper.pid}, 9)")
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


PRIVILEGES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
done = []
if libc.unshare(0x10000000) == 0: done.append("user namespace")
if libc.unshare(0x40000000) == 0: done.append("network namespace")
if libc.mount(b"none", b"/work", b"tmpfs", 0, None) == 0: done.append("mount")
if libc.ptrace(16, 1, 0, 0) == 0: done.append("trace of the keeper")
for name, act in {
    "root": lambda: os.setuid(0), "chroot": lambda: os.chroot("."), "nice": lambda: os.nice(-5),
    "device": lambda: os.mknod("d", 0o600 | 0o020000, os.makedev(1, 1)),
    "outside": lambda: os.stat("/../../etc/passwd"),
}.items():
    try: act()
    except OSError: continue
    done.append(name)
import resource
for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_CPU"):
    try: resource.setrlimit(getattr(resource, name), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError): continue
    done.append(name)
assert not done, done
"""


def test_no_privileges_are_left_or_to_be_had():
    assert outcome(PRIVILEGES).reason == "passed"


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root takes this way anyway")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_the_way_of_those_who_are_not_root():
    """The same under a user of no rights: in a namespace where this process is user 1000."""
    programs = [
        "assert 1 + 1 == 2",
        "assert False",
        PRIVILEGES,
        "open('/tmp/x', 'w')",
        "open('/etc/passwd')",
        "open('a', 'w').write('x')",
        "import socket; socket.create_connection(('127.0.0.1', 80), timeout=5)",
        "import os; os.kill(1, 9); os.kill(os.getppid(), 9)",
        "import time; time.sleep(600)",
    ]
    driver = (
        "import json, sys, os; from entmtp.evaluation.sandbox import Limits, run\n"
        "assert os.geteuid() == 1000\n"
        "print(json.dumps([run([p], Limits(wall_s=4)).reason for p in json.load(sys.stdin)]))"
    )
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", driver]
    done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, timeout=120)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    reasons = json.loads(done.stdout)
    assert [reason.split(":")[0] for reason in reasons[:3]] == ["passed", "AssertionError", "passed"], reasons
    assert reasons[3].startswith(("FileNotFoundError", "OSError")) and reasons[4].startswith("FileNotFoundError")
    assert reasons[5] == "passed"
    assert "Network is unreachable" in reasons[6]
    assert reasons[7] == "passed"  # signals to the first process of a namespace go nowhere
    assert reasons[8] == "wall time of 4 s"


def test_a_sandbox_in_which_nothing_runs_is_refused(monkeypatch):
    """Missing libraries would make every answer wrong: said once, not counted."""
    monkeypatch.setattr(sandbox, "LIBRARIES", ())
    monkeypatch.setattr(sandbox, "_job", lambda *args, job=sandbox._job: {**job(*args), "binds": []})
    check_sandbox.cache_clear()
    try:
        with pytest.raises(EntmtpError, match=r"this machine has none"):
            run(["pass"])
    finally:
        check_sandbox.cache_clear()


def test_an_interrupted_caller_leaves_nothing_behind(tmp_path):
    """Whoever asked is killed: the launcher ends with it, and all the rest with the launcher."""
    before = processes_of_the_sandbox()
    source = "from entmtp.evaluation.sandbox import run; run(['import time; time.sleep(600)'])"
    caller = subprocess.Popen([sys.executable, "-c", source], env={**os.environ, "TMPDIR": str(tmp_path)})
    end, seen = time.monotonic() + 60, set()
    while time.monotonic() < end:  # launcher, keeper, prisoner: those that stay, not those of the self-test before
        now = processes_of_the_sandbox() - before
        if len(now) >= 3 and now == seen:
            break
        seen = now
        time.sleep(0.5)
    assert len(seen) >= 3
    caller.kill()
    caller.wait()
    assert not wait_until_gone(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root steps down to another user")
def test_root_steps_down():
    assert outcome(f"import os; assert os.getuid() == os.geteuid() == os.getgid() == {NOBODY}").passed
    assert outcome("import os; assert os.getgroups() == []").passed
