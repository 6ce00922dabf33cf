"""An archive holds the run's files with their hashes, and says what of it has changed since."""

import pytest

from entmtp import archive
from entmtp.archive import MANIFEST, differences, make_archive
from entmtp.errors import EntmtpError
from entmtp.io import read_json, sha256_file, write_json

PROVENANCE = {"git": {"sha": "0123456789abcdef", "dirty": False}, "date": "2026-11-30T12:00:00+00:00", "cpu": "cpu"}
KEPT = {"summary.json", "bench/t.parquet", "trees/hydra/t/bank.json", "trees/hydra/t/policy/entmtp_tau.json",
        "heads/hydra/model.safetensors", "tables/speed.md"}  # fmt: skip
DROPPED = {"heads/features/000.safetensors", "bench/t.journal.jsonl", "heads/text/000.journal",
           "heads/hydra/checkpoint.pt", "distill/short.checkpoint.pt", "checks/lossless/t.failed.json",
           "bench/.t.parquet.77.partial"}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "results" / "smoke"
    for name in KEPT | DROPPED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    write_json(folder / "summary.json", {"rows": [], "provenance": PROVENANCE})
    return folder


def test_an_archive_is_the_run_with_hashes_and_where_it_comes_from(run, tmp_path):
    made = make_archive(run, tmp_path / "archives")
    assert made == tmp_path / "archives" / "smoke-2026-11-30-0123456"
    record = read_json(made / MANIFEST)
    assert record["provenance"] == PROVENANCE and record["experiment"] == "smoke"
    listed = {entry["path"]: entry for entry in record["files"]}
    assert {f"run/{name}" for name in KEPT} | set(archive.BESIDE) == set(listed)
    for name in KEPT:
        copy = made / "run" / name
        assert copy.read_bytes() == (run / name).read_bytes()
        hashed = {"path": f"run/{name}", "bytes": copy.stat().st_size, "sha256": sha256_file(copy)}
        assert listed[f"run/{name}"] == hashed
    assert not list(differences(made))
    assert [path.name for path in made.parent.iterdir()] == [made.name], "nothing half made is left"


def test_folders_that_lie_elsewhere_are_archived_too(run, tmp_path):
    scratch = tmp_path / "scratch"
    (run / "trees").rename(scratch)
    (run / "trees").symlink_to(scratch)
    made = make_archive(run, tmp_path / "archives")
    assert (made / "run/trees/hydra/t/bank.json").is_file() and not list(differences(made))


def test_a_run_between_two_configurations_is_not_archived(run, tmp_path):
    timed = {"bench/t.parquet": sha256_file(run / "bench/t.parquet")}
    write_json(run / "summary.json", {"rows": [], "provenance": {**PROVENANCE, "timed_sha256": timed}})
    assert make_archive(run, tmp_path / "archives").is_dir()
    (run / "bench/t.parquet").write_text("of a run that was stopped half-way")
    with pytest.raises(EntmtpError, match=r"bench/t\.parquet: not the file that .*summary\.json was made from"):
        make_archive(run, tmp_path / "other")


CHANGES = {
    "a byte": (lambda folder: (folder / "run/tables/speed.md").write_text("content of tables/speed.mD"),
               "changed: run/tables/speed.md"),
    "cut": (lambda folder: (folder / "run/bench/t.parquet").write_text(""), "changed: run/bench/t.parquet"),
    "gone": (lambda folder: (folder / "run/bench/t.parquet").unlink(), "missing: run/bench/t.parquet"),
    "more": (lambda folder: (folder / "run/bench/u.parquet").write_text(""), "not in the manifest: run/bench/u"),
    "a path that leads out": (
        lambda folder: write_json(folder / MANIFEST, {**read_json(folder / MANIFEST), "files": [
            *read_json(folder / MANIFEST)["files"], {"path": "../outside", "bytes": 1, "sha256": "00"}]}),
        "missing: ../outside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_is_named(run, tmp_path, change, capsys):
    made = make_archive(run, tmp_path / "archives")
    (tmp_path / "archives" / "outside").write_text("x")
    edit, line = CHANGES[change]
    edit(made)
    (found,) = differences(made)
    assert found.startswith(line)
    assert archive.main(["--check", str(made)]) == 1
    assert capsys.readouterr().out.strip() == found


def test_the_command_archives_the_experiments_run_and_checks_it(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert archive.main(["experiment=smoke"]) == 0
    made = tmp_path / "archives" / "smoke-2026-11-30-0123456"
    said = capsys.readouterr().out
    assert said.startswith("archives/smoke-2026-11-30-0123456: 9 files") and sha256_file(made / MANIFEST) in said
    assert archive.main(["--check", str(made)]) == 0
    assert "every file is as its manifest says" in capsys.readouterr().out
    with pytest.raises(EntmtpError, match="has been archived already"):
        archive.main(["experiment=smoke"])


def test_what_is_no_run_or_no_archive_is_said(run, tmp_path):
    (run / "summary.json").unlink()
    with pytest.raises(EntmtpError, match=r"summary\.json: no such file; finish the run first"):
        make_archive(run, tmp_path / "archives")
    with pytest.raises(EntmtpError, match=r"manifest\.json: no such file"):
        list(differences(run))
    for content in ([], {"format": archive.FORMAT}, {"format": archive.FORMAT, "files": [{"path": "x"}]}):
        write_json(run / MANIFEST, content)
        with pytest.raises(EntmtpError, match="not a manifest of an archive"):
            list(differences(run))
    write_json(run / MANIFEST, {"format": "other", "files": []})
    with pytest.raises(EntmtpError, match="reads format 'entmtp-archive-1', not 'other'"):
        list(differences(run))
    with pytest.raises(EntmtpError, match="--check takes one folder"):
        archive.main(["--check"])


def test_an_unwritable_place_leaves_one_message(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EntmtpError, match=r"cannot write .*/file/smoke-2026-11-30-0123456"):
        make_archive(run, tmp_path / "file")
