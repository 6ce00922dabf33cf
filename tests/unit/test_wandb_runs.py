"""W&B's offline files, entry by entry, and which of many runs a table is made from."""

import struct
import zlib
from pathlib import Path

import pytest
from wandb_fixture import Fake

from entmtp import from_logs
from entmtp.errors import EntmtpError
from entmtp.wandb_runs import HEADER, log_entries


def test_entries_cross_blocks():
    def piece(part: int, content: bytes) -> bytes:
        return struct.pack("<IHB", zlib.crc32(bytes([part]) + content), len(content), part) + content

    first = 32768 - len(HEADER) - 7
    log = HEADER + piece(2, b"a" * first) + piece(3, b"b" * 32761) + piece(4, b"c" * 32755) + b"\0" * 6
    assert len(log) == 3 * 32768
    log += piece(1, b"whole")
    assert list(log_entries(log, Path("x"))) == [b"a" * first + b"b" * 32761 + b"c" * 32755, b"whole"]
    assert list(log_entries(log[:-1], Path("x"))) == [b"a" * first + b"b" * 32761 + b"c" * 32755]
    assert list(log_entries(b"", Path("x"))) == list(log_entries(HEADER[:3], Path("x"))) == []


def finished_run(created: float, batch: str) -> list[Fake]:
    return [Fake("sharegpt", "task", created, batch), Fake("sharegpt/ar", "bench", created + 1, batch)]


def test_the_newest_finished_run_is_chosen_and_of_a_run_tracked_twice_the_newer():
    old, new, again = finished_run(0, "old"), finished_run(10, "new"), finished_run(20, "new")
    chosen = from_logs.choose([*again, *old, *new], "smoke")
    assert list(chosen.values()) == again
    again[1].finished = False  # killed while it was tracked a second time: the first is whole
    assert from_logs.choose([*old, *again, *new], "smoke")["bench", "sharegpt/ar"] is new[1]
    assert list(from_logs.choose([*old, Fake(group="main", created=99)], "smoke").values()) == old


def test_a_record_that_was_cut_short_is_missing(monkeypatch):
    whole = [*finished_run(0, "a"), Fake("confadapt", "record", 2, "a")]
    assert ("record", "confadapt") in from_logs.choose(whole, "smoke")
    whole[-1].finished = False
    with pytest.raises(EntmtpError, match="incomplete, confadapt missing or cut short"):
        from_logs.choose(whole, "smoke")
    enabled = {**whole[0].config, "confadapt": {"enabled": True}}
    monkeypatch.setattr(Fake, "config", property(lambda run: enabled))
    with pytest.raises(EntmtpError, match="incomplete, confadapt missing"):
        from_logs.choose(whole[:-1], "smoke")


def test_runs_of_earlier_versions_and_other_experiments_are_said_to_be_of_no_use():
    with pytest.raises(EntmtpError, match=r"0 W&B runs of experiment 'main'.*--forcerun track"):
        from_logs.choose(finished_run(0, "a"), "main")
    with pytest.raises(EntmtpError, match="2 W&B runs of experiment 'smoke', none of which says"):
        from_logs.choose(finished_run(0, ""), "smoke")


@pytest.mark.parametrize("name", ["run/../../evil.json", "run//etc/x.json", "run/.hidden.json", "run/a.py"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    runs = [Fake(files_={name: b"{}"}), Fake("sharegpt/ar", "bench")]
    with pytest.raises(EntmtpError, match="is no file of a run folder"):
        from_logs.restore(from_logs.choose(runs, "smoke"), tmp_path / "out")
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob("*.py"))
