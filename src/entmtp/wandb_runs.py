"""Reading W&B runs back: offline run folders, and runs on a server, behind one interface (`LoggedRun`).

An offline run is a folder whose `run-<id>.wandb` file holds protobuf records in a LevelDB log. Since version 0.31 wandb
reads that log in its Go service only, so the framing is read here, as LevelDB's log_format.md gives it with wandb's
header and checksum (plain CRC-32); the records are parsed by wandb's own protobuf classes. A server is asked through
wandb's public API. As in `entmtp.tracking`, wandb is imported only where a run is read.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from entmtp.config import TrackingConfig
from entmtp.errors import EntmtpError

HEADER = b":W&B\xe1\xbe\x00"  # name, magic number 0xBEE1, version 0
BLOCK = 32768  # bytes; no piece crosses a block's end
PIECE = struct.Struct("<IHB")  # CRC-32 of part and content, length of the content, part
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class LoggedRun(Protocol):
    """What regenerating tables asks of a run, wherever it lies."""

    id: str
    name: str  # as shown: "gsm8k/entmtp_tau"
    group: str  # the experiment
    job: str  # bench | task | record | sweep (entmtp.tracking)
    created: float  # seconds since 1970
    where: str  # folder or address, for messages
    config: dict[str, Any]

    @property
    def finished(self) -> bool: ...

    def history(self) -> Iterator[dict[str, Any]]:
        """Logged values of each step, in any order; `_step` is the step's number."""

    def files(self) -> list[str]:
        """Names of the run's files, with forward slashes."""

    def read(self, name: str) -> bytes: ...


def log_entries(data: bytes, path: Path) -> Iterator[bytes]:
    """Entries of a W&B log, up to its end or to where its writer was killed. Raises EntmtpError where it is damaged."""
    if len(data) < len(HEADER) and HEADER.startswith(data):
        return  # killed before anything was written
    if data[: len(HEADER)] != HEADER:
        raise EntmtpError(f"{path}: not a W&B run file of a version that can be read (its first bytes differ)")
    at, entry = len(HEADER), b""
    while True:
        if BLOCK - at % BLOCK < PIECE.size:  # no room for another header: zeros fill the block
            at += BLOCK - at % BLOCK
        if at + PIECE.size > len(data):
            return
        checksum, length, part = PIECE.unpack_from(data, at)
        content, end = at + PIECE.size, at + PIECE.size + length
        if end > len(data):
            return
        # the checksum covers the part's byte, the last of the header, and the content
        if part not in (WHOLE, FIRST, MIDDLE, LAST) or zlib.crc32(data[content - 1 : end]) != checksum:
            raise EntmtpError(f"{path}: damaged at byte {at} (checksum); delete the run's folder and track it again")
        entry = data[content:end] if part in (WHOLE, FIRST) else entry + data[content:end]
        at = end
        if part in (WHOLE, LAST):
            yield entry


def read_records(path: Path) -> Iterator[Any]:
    """Records (wandb's protobuf `Record`) of a .wandb file."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    try:
        data = path.read_bytes()
    except OSError as error:
        raise EntmtpError(f"{path}: {error.strerror}") from error
    for entry in log_entries(data, path):
        try:
            yield Record.FromString(entry)
        except DecodeError as error:
            raise EntmtpError(f"{path}: holds what is no W&B record ({error})") from error


def _values(items: Iterable[Any], path: Path) -> dict[str, Any]:
    """Key (nested ones joined by dots, as W&B does) and JSON value of config or history items."""
    try:
        return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
    except ValueError as error:
        raise EntmtpError(f"{path}: a logged value is not JSON ({error})") from error


class OfflineRun:
    """A run folder on disk. `head` is the run's own record, which the log starts with."""

    def __init__(self, path: Path, head: Any):
        self.path, self.where = path, str(path.parent)
        self.id, self.name, self.group, self.job = head.run_id, head.display_name, head.run_group, head.job_type
        self.created = head.start_time.seconds + head.start_time.nanos / 1e9
        self.config = _values(head.config.update, path)

    @property
    def finished(self) -> bool:
        return self._steps_and_exit[1]

    def history(self) -> Iterator[dict[str, Any]]:
        return iter(self._steps_and_exit[0])

    @cached_property
    def _steps_and_exit(self) -> tuple[list[dict[str, Any]], bool]:
        """The whole log, read once: values of its history records, and whether it was written to its end."""
        steps, ended = [], False
        for record in read_records(self.path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                steps.append(_values(record.history.item, self.path))
            ended = ended or (kind == "exit" and record.exit.exit_code == 0)
        return steps, ended

    def files(self) -> list[str]:
        root = self.path.parent / "files"
        found = [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
        return sorted(path.relative_to(root).as_posix() for path in found if not path.is_symlink())

    def read(self, name: str) -> bytes:
        try:
            return (self.path.parent / "files" / name).read_bytes()
        except OSError as error:
            raise EntmtpError(f"{self.path.parent / 'files' / name}: {error.strerror}") from error


def offline_runs(folder: str | Path) -> list[LoggedRun]:
    """Runs whose folders lie in `folder` (offline ones, and the local copies that online ones leave).

    Raises EntmtpError when there are none. A run that was killed before it wrote its own record is left out.
    """
    paths = sorted(Path(folder).glob("*run-*/run-*.wandb"))
    if not paths:
        raise EntmtpError(f"{folder}: no W&B runs; name the folder they are in with tracking.dir=, or tracking=online")
    heads = ((path, next((r.run for r in read_records(path) if r.WhichOneof("record_type") == "run"), None))
             for path in paths)  # fmt: skip
    return [OfflineRun(path, head) for path, head in heads if head is not None]


@contextmanager
def _asking(where: str) -> Iterator[None]:
    """What wandb or the network says, as one message."""
    import wandb

    try:
        yield
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise EntmtpError(f"W&B, {where}: {' '.join(str(error).split())[:200]}") from error


class ServerRun:
    """A run of wandb's public API (`wandb.apis.public.Run`)."""

    def __init__(self, run: Any):
        self._run = run
        self.id, self.name, self.where = run.id, run.name or run.id, "/".join(run.path)
        self.group, self.job = run.group or "", run.job_type or ""
        self.created = datetime.fromisoformat(run.created_at.replace("Z", "+00:00")).timestamp()

    @cached_property
    def config(self) -> dict[str, Any]:  # listings leave it out, so that asking for it may ask the server
        with _asking(self.where):
            return dict(self._run.config)

    @property
    def finished(self) -> bool:
        return self._run.state == "finished"

    def history(self) -> Iterator[dict[str, Any]]:
        with _asking(self.where):
            return iter(list(self._run.scan_history()))  # every step; `history()` would sample them

    def files(self) -> list[str]:
        with _asking(self.where):
            return sorted(file.name for file in self._run.files())

    def read(self, name: str) -> bytes:
        with _asking(self.where), TemporaryDirectory() as folder:
            self._run.file(name).download(root=folder, replace=True).close()
            return (Path(folder) / name).read_bytes()


def server_runs(config: TrackingConfig, filters: dict[str, str], api: Any = None) -> list[LoggedRun]:
    """Runs of the project on a server, chosen by W&B's `filters` ({"group": …}, {"jobType": …}).

    `api` stands for `wandb.Api()`. Raises EntmtpError without an account, a project or a network.
    """
    if api is None:
        import wandb

        from entmtp.tracking import login

        login(wandb)
        api = wandb.Api()
    path = f"{config.entity}/{config.project}" if config.entity else config.project
    with _asking(path):
        return [ServerRun(run) for run in api.runs(path, filters=filters)]
