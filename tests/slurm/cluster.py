"""A real Slurm of one node on this machine, for `make test-slurm`: Debian's slurmctld, slurmd and munged.

Everything lies in one folder: configuration, munge key and socket, state, logs. Ports are free ones. No file of a Slurm
that may be installed is read or changed, and stopping ends the daemons that starting began, by their own handles.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
# accounting, cgroups and task placement are what a test can do without: jobs, queue and exclusive nodes are Slurm's own
CONF = """\
ClusterName=entmtp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MinJobAge=65000
KillWait=5
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Slurm:
    """with Slurm(folder) as slurm: a running cluster; slurm.env is what its commands and those who submit need."""

    def __init__(self, folder: Path):
        self.folder, self.daemons = folder, []
        self.cpus = len(os.sched_getaffinity(0))
        self.node = socket.gethostname().split(".")[0]
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def configure(self) -> None:
        """slurm.conf, gres.conf and a munge key of its own. The one GPU is one in name: /dev/null stands for it."""
        self.folder.chmod(0o755)  # munge wants its socket's folder to be reachable
        for name in ("state", "spool"):
            (self.folder / name).mkdir(exist_ok=True)
        control_port, node_port = free_ports(2)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10 // 2**20  # MiB; more would drain it
        values = {
            "folder": self.folder, "host": self.node, "cpus": self.cpus,
            "user": pwd.getpwuid(os.getuid()).pw_name, "control_port": control_port, "node_port": node_port,
            "memory": memory,
        }  # fmt: skip
        (self.folder / "slurm.conf").write_text(CONF.format(**values))
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName={self.node} Name=gpu File=/dev/null\n")
        version = self.command("slurmctld", "-V").split()[-1]
        if int(version.split(".")[0]) >= 23:  # newer ones look for cgroups unless told not to
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)

    def start(self) -> None:
        self.configure()
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        munge = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._spawn("munged", "--foreground", "--force", *munge)
        self._wait_for("munge's socket", lambda: (self.folder / "munge.socket").exists())
        self._spawn("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        self._spawn("slurmd", "-D", "-f", str(self.folder / "slurm.conf"))
        self._wait_for("an idle node", lambda: self.node_state() == "idle")

    def stop(self) -> None:
        """Cancel what still runs, then end the daemons, the last started first."""
        if self.daemons:
            self.run("scancel", "--partition=main")
        for process in reversed(self.daemons):
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.daemons.clear()

    def __enter__(self) -> "Slurm":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def _spawn(self, *command: str) -> None:
        path = shutil.which(command[0], path=PATH)
        with (self.folder / f"{command[0]}.out").open("w") as out:
            self.daemons.append(subprocess.Popen([path, *command[1:]], env=self.env, stdout=out, stderr=out))

    def _wait_for(self, what: str, there, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while not there():
            ended = [process.args[0] for process in self.daemons if process.poll() is not None]
            if ended or time.monotonic() > end:
                raise RuntimeError(f"no {what}; ended: {ended}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files)

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=self.env, capture_output=True, text=True)

    def command(self, *command: str) -> str:
        done = self.run(*command)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}\n{self.logs()}")
        return done.stdout

    def node_state(self) -> str:
        return self.run("sinfo", "--noheader", "--format=%T").stdout.strip()

    def jobs(self) -> list[dict[str, str]]:
        """Every job since the start as scontrol tells of it: JobId, JobState, Comment, StartTime, EndTime, …"""
        lines = self.command("scontrol", "--oneliner", "show", "jobs").splitlines()
        rows = [dict(item.partition("=")[::2] for item in line.split() if "=" in item) for line in lines]
        return [row for row in rows if "JobId" in row]
