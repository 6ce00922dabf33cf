"""Bad input: one clear message, a non-zero exit, no half-written result."""

import pytest

from .conftest import snakemake


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("tasks=[nosuch]", "unknown task 'nosuch'"),
        ("policies=[nosuch]", "unknown policy 'nosuch'"),
        ("policies=[hydra,entmtp_tau]", "lacks ar, plain decoding"),
        ("confadapt.thresholds=[0.9,1.5]", "config key 'confadapt.thresholds': 1.5 must be above 0 and at most 1"),
        ("policy.tau_onn=0.3", "policy.tau_onn"),
        ("dtype=fp8", "'fp8' is not one of float32"),
        ("results=/proc/nowhere", "results=/proc/nowhere: not a writable folder"),
        ("tasks=[../x]", "unknown task '../x'"),
        ("target.name=../../x", "a name has letters, digits"),
        ("confadapt.enabled=true tasks=[sharegpt] +distill.prompts={counting:3}", "task sharegpt has no task.scoring"),
    ],
)
def test_configuration_errors(tmp_path, overrides, message):
    done = snakemake(tmp_path, "--dry-run", overrides=overrides)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results" / "summary.json").exists()


def test_broken_prompt_file_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "fine"}\n{"prompt": broken}\n')
    done = snakemake(
        tmp_path, "results/smoke/prompts/file.jsonl",
        overrides=f"tasks=[file] ++task_overrides.file.file={tmp_path}/mine.jsonl",
    )  # fmt: skip
    assert done.returncode != 0
    assert "mine.jsonl, line 2: not valid JSON" in done.stderr
    assert not (tmp_path / "results/smoke/prompts/file.jsonl").exists()


def test_an_edited_prompt_file_is_read_again(tmp_path):
    """Rules follow from what a file says, not from its name alone; a template's braces are only themselves."""
    mine, made = tmp_path / "mine.jsonl", tmp_path / "results/smoke/prompts/file.jsonl"
    mine.write_text("".join(f'{{"prompt": "number {n}"}}\n' for n in range(12)))
    overrides = (
        f"tasks=[file] ++task_overrides.file.file={mine} ++task_overrides.file.template='Say it: {{prompt}}' "
        "++task_overrides.file.calib=4 ++task_overrides.file.test=3"
    )
    target = str(made.relative_to(tmp_path))
    assert snakemake(tmp_path, target, overrides=overrides).returncode == 0
    assert "Say it: number" in made.read_text()
    assert "Nothing to be done" in snakemake(tmp_path, target, overrides=overrides).stderr
    mine.write_text("".join(f'{{"prompt": "another {n}"}}\n' for n in range(12)))
    done = snakemake(tmp_path, target, overrides=overrides)
    assert done.returncode == 0 and "Say it: another" in made.read_text(), done.stderr
