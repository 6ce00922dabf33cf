"""Isolation, then somebody else's code: the script that `sandbox.run` starts (`python -I -S jail.py JOB`).

Three processes, so that nobody whom the code could reach has anything to lose:

1. The *launcher* leaves the machine's network, process, IPC and mount namespaces (as root; anyone else first enters a
   user namespace of their own), starts 2 and waits.
2. The *keeper*, first process of the new process namespace, builds a root folder of read-only binds (the interpreter
   and its libraries) and one small writable folder in memory, changes into it and starts 3. When it ends, the kernel
   kills whatever is left in its namespace, detached processes too. /proc, /dev and everybody's files are not there.
3. The *prisoner* sets its limits, gives up root (or, with its exec, the capabilities of the user namespace) and
   executes the interpreter with an empty environment.

A process in a changed root may not make user namespaces, and one without capabilities can neither leave that root nor
gain any (no_new_privs). Only the standard library is imported, and only Linux is served. Exit status `FAILED`: the
isolation could not be had, the reason is on stderr and nothing was run.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys

FAILED = 125
NOBODY = 65534

# linux/sched.h, linux/mount.h, linux/prctl.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # this call's number is the same everywhere
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38

LIBC = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    rest = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    checked(LIBC.prctl(ctypes.c_int(option), *rest), f"prctl {option}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text if text is None else text.encode() for text in (source, target, kind, options)]
    checked(LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount of {source}")


def read_only(path: str, recursive: bool) -> None:
    """What is mounted at `path` (and below it) can be written no more; Linux 5.12 and newer."""
    sealed = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    attributes = struct.pack("QQQQ", sealed, 0, 0, 0)
    depth = ctypes.c_uint(AT_RECURSIVE if recursive else 0)
    checked(
        LIBC.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_int(AT_FDCWD), path.encode(), depth, attributes,
                     ctypes.c_size_t(len(attributes))),
        "mount_setattr (Linux 5.12)",
    )  # fmt: skip


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def leave_namespaces() -> bool:
    """Whether we are root: then a process namespace costs no user namespace, and there is a user to step down to."""
    root, uid, gid = os.geteuid() == 0, os.geteuid(), os.getegid()
    parts = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    checked(LIBC.unshare(ctypes.c_int(parts if root else parts | CLONE_NEWUSER)), "unshare")
    if not root:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
    return root


def build_root(folder: str, binds: list[str], limits: dict, owner: tuple[int, int]) -> None:
    """Mount the prisoner's world at `folder` and change into it. Mounts are seen by this namespace only."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    root = folder + "/root"  # a folder of the mount, not its top: a changed root, in which no user namespace is made
    for path in binds:
        place = root + path
        if os.path.isdir(path):
            os.makedirs(place)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            write(place, "")
        mount(path, place, None, MS_BIND | MS_REC)
        read_only(place, recursive=True)
    os.mkdir(root + "/work")
    size = f"size={limits['folder_mb']}m,nr_inodes=4096,mode=700,uid={owner[0]},gid={owner[1]}"
    mount("tmpfs", root + "/work", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, size)
    read_only(folder, recursive=False)
    os.chroot(root)
    os.chdir("/work")


def confine(limits: dict, root: bool) -> None:
    """Limits and the loss of all privileges, in that order but for the number of processes: the kernel counts those of
    the user that we become, and among them, where that is our own user in our own namespace, launcher and keeper."""
    megabyte = 1 << 20
    for name, soft, hard in (
        ("RLIMIT_AS", limits["memory_mb"] * megabyte, limits["memory_mb"] * megabyte),
        ("RLIMIT_FSIZE", limits["file_mb"] * megabyte, limits["file_mb"] * megabyte),
        ("RLIMIT_CPU", limits["cpu_s"], limits["cpu_s"] + 1),
        ("RLIMIT_NOFILE", limits["open_files"], limits["open_files"]),
        ("RLIMIT_CORE", 0, 0),
        ("RLIMIT_MEMLOCK", 0, 0),
        ("RLIMIT_MSGQUEUE", 0, 0),
    ):
        resource.setrlimit(getattr(resource, name), (soft, hard))
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    processes = limits["processes"] + (0 if root else 2)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def keep(job: dict, root: bool) -> int:
    """The keeper: its exit status is the prisoner's."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    owner = (NOBODY, NOBODY) if root else (os.geteuid(), os.getegid())
    build_root(job["folder"], job["binds"], job["limits"], owner)
    heard, said = os.pipe()  # closed by a successful exec
    prisoner = os.fork()
    if prisoner == 0:
        try:
            confine(job["limits"], root)
            os.execve(job["command"][0], job["command"], {})
        except BaseException as error:  # whatever it is, this process must not go on as the keeper
            os.write(said, str(error).encode()[:500])
        os._exit(FAILED)
    os.close(said)
    failed = os.read(heard, 500)
    status = os.waitpid(prisoner, 0)[1]
    if failed:
        raise OSError(failed.decode(errors="replace"))
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return 1 if os.WEXITSTATUS(status) else 0  # never FAILED


def main() -> int:
    job = json.loads(sys.argv[1])
    os.umask(0o022)  # folders of the root must be open to the user that we become
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # whoever asked has died: nobody is left to stop this
    root = leave_namespaces()
    keeper = os.fork()
    if keeper == 0:
        try:
            os._exit(keep(job, root))
        except BaseException as error:
            os.write(2, str(error).encode())
            os._exit(FAILED)
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]) & 0xFF


if __name__ == "__main__":
    try:
        outcome = main()
    except OSError as error:
        os.write(2, str(error).encode())
        outcome = FAILED
    os._exit(outcome)
