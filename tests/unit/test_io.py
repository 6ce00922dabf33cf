"""Files between stages: whole or not at all, journals that resume, errors that name the place."""

import json
import os
import subprocess
import sys
import time

import pytest

from entmtp import io
from entmtp.errors import EntmtpError


def test_atomic_leaves_nothing_on_error(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with pytest.raises(KeyError), io.atomic(path) as partial:
        partial.write_text("half")
        raise KeyError("stop")
    assert list(path.parent.iterdir()) == []


def test_atomic_keeps_the_old_file_on_error(tmp_path):
    path = tmp_path / "a.json"
    io.write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        io.write_json(path, {"a": float("nan")})
    with pytest.raises(ValueError):
        io.write_jsonl(path, [{"a": 1}, {"a": float("inf")}])
    assert io.read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_names_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EntmtpError, match=r"cannot create folder .*file"):
        io.write_text(tmp_path / "file" / "a.txt", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(EntmtpError, match=r"cannot write .*folder"):
        io.write_text(tmp_path / "folder", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_json_and_jsonl_round_trip(tmp_path):
    rows = [{"text": "ö\u2028\n"}, {"n": [1, 2.5, None]}]
    io.write_json(tmp_path / "a.json", rows)
    io.write_jsonl(tmp_path / "a.jsonl", iter(rows))
    assert io.read_json(tmp_path / "a.json") == io.read_jsonl(tmp_path / "a.jsonl") == rows
    assert "ö" in (tmp_path / "a.jsonl").read_text(encoding="utf-8")


def test_parquet_round_trip(tmp_path):
    io.write_parquet(tmp_path / "a.parquet", [{"a": 1, "b": [1, 2]}, {"a": 2, "b": [3]}])
    frame = io.read_parquet(tmp_path / "a.parquet")
    assert frame["a"].tolist() == [1, 2] and [list(cell) for cell in frame["b"]] == [[1, 2], [3]]


@pytest.mark.parametrize("reader", [io.read_json, io.read_jsonl, io.read_parquet])
def test_readers_name_what_is_missing_or_broken(tmp_path, reader):
    with pytest.raises(EntmtpError, match="gone: no such file"):
        reader(tmp_path / "gone")
    (tmp_path / "broken").write_bytes(b"{\xff")
    with pytest.raises(EntmtpError, match="broken"):
        reader(tmp_path / "broken")


@pytest.mark.parametrize("line, reason", [(b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (b"3", "found int")])
def test_read_jsonl_names_the_line(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(EntmtpError, match=f"a.jsonl, line 3: .*{reason}"):
        io.read_jsonl(tmp_path / "a.jsonl")


def test_hashes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert io.sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert io.sha256_json({"a": 1, "b": 2}) == io.sha256_json({"b": 2, "a": 1}) != io.sha256_json({"a": 2, "b": 1})


def test_journal_resumes(tmp_path):
    path = tmp_path / "job" / "journal.jsonl"
    journal = io.Journal(path, "job 1")
    for n in range(3):
        journal.append({"id": n, "text": "a\u2028b\n"})
    again = io.Journal(path, "job 1")
    assert again.rows == journal.rows
    assert again.done(lambda row: row["id"]) == {0, 1, 2}
    again.remove()
    again.remove()
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_journal_cuts_a_torn_last_line(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    journal = io.Journal(path, "job")
    journal.append({"id": 0})
    journal.append({"id": 1, "text": "long enough"})
    path.write_bytes(path.read_bytes()[:-cut])
    again = io.Journal(path, "job")
    assert again.rows == [{"id": 0}]
    again.append({"id": 2})
    assert [row["id"] for row in io.Journal(path, "job").rows] == [0, 2]
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [{"id": 0}, {"id": 2}]


def test_journal_of_another_job_starts_afresh(tmp_path):
    path = tmp_path / "journal.jsonl"
    io.Journal(path, "old").append({"id": 0})
    assert io.Journal(path, "new").rows == []
    assert io.Journal(path, "old").rows == []


@pytest.mark.parametrize("content", ["", '{"fingerpr'])
def test_journal_torn_in_its_first_line_starts_afresh(tmp_path, content):
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    io.Journal(path, "job").append({"id": 0})
    assert io.Journal(path, "job").rows == [{"id": 0}]


def test_a_folder_stays_until_its_successor_is_whole(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").write_text("x")
    with pytest.raises(KeyError), io.folder_atomic(tmp_path / "m") as made:
        (made / "new").write_text("y")
        raise KeyError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["m", "old"]


def test_an_unwritable_place_for_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EntmtpError, match=r"cannot write .*file/target"),
        io.folder_atomic(tmp_path / "file" / "target"),
    ):
        pass
    with pytest.raises(EntmtpError, match=r"cannot write .*target: No space"), io.folder_atomic(tmp_path / "target"):
        raise OSError(28, "No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_processes_wait_for_one_another(tmp_path):
    """The second holder begins when the first one ends; a place that cannot be written is said."""
    code = ("import sys; from entmtp.io import alone\n"
            "with alone(sys.argv[1]): print('in', flush=True); sys.stdin.read()")  # fmt: skip
    lock = tmp_path / "new" / ".lock"
    first = subprocess.Popen([sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"in\n"
    second = subprocess.Popen([sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    os.set_blocking(second.stdout.fileno(), False)
    time.sleep(1.5)
    assert not second.stdout.read()
    first.communicate()
    os.set_blocking(second.stdout.fileno(), True)
    assert second.stdout.readline() == b"in\n"
    second.communicate()
    (tmp_path / "file").write_text("")
    with pytest.raises(EntmtpError, match=r"\.lock.*choose another folder"), io.alone(tmp_path / "file" / ".lock"):
        pass


@pytest.mark.parametrize("size", [1000, 40 << 20])
def test_another_middle_of_the_weights_is_another_model(tmp_path, size):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    before = io.weights_digest(tmp_path)
    assert io.weights_digest(tmp_path) == before
    with path.open("r+b") as file:  # a layer's worth, far from both ends
        file.seek(size // 2)
        file.write(b"x" * max(1, size // 40))
    assert io.weights_digest(tmp_path) != before
