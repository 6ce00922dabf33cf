"""What breaks runs elsewhere, one case a test; docs/robustness.md has the table. Message, no traceback, nothing half
written."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

from entmtp import LanguageModel, generate, io
from entmtp.checkpoint import load_checkpoint, save_checkpoint
from entmtp.config import CorpusConfig, DecodingConfig, PromptSource, TargetConfig, TaskConfig, compose, refuse_aliases
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.heads.corpus import source_prompts
from entmtp.long_run import resident_mb
from entmtp.policy.schedulers import Policy
from entmtp.target.fetch import fetch_target
from entmtp.target.load import load_target, load_tokenizer
from entmtp.tasks import build_prompts, split_prompts
from entmtp.tasks.pool import FilePool, MemoryPool
from entmtp.tasks.sources import load_source
from entmtp.tree.topology import Tree

AR = Policy("ar", [Tree(())])
TINY = TargetConfig(name="tiny", source="random")


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny target that a test may damage."""
    return shutil.copytree(tiny_folder, tmp_path / "target")


# -- damaged and hostile files


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_target_with_a_truncated_file_is_one_message(folder, name):
    content = (folder / name).read_bytes()
    for size in (0, 5, 100, len(content) // 2, len(content) - 2):
        (folder / name).write_bytes(content[:size])
        with pytest.raises(EntmtpError, match=str(folder)):
            load_target(TINY, folder, "float32")


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_malicious_pickle_in_a_model_folder_is_not_executed(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Malicious(tmp_path / "executed")}))
    with pytest.raises(EntmtpError, match="not a loadable causal language model"):
        load_target(TINY, folder, "float32")
    (tmp_path / "state.pt").write_bytes(pickle.dumps({"identity": Malicious(tmp_path / "executed")}))
    with pytest.raises(EntmtpError, match="damaged checkpoint"):
        load_checkpoint(tmp_path / "state.pt", "id", "cpu")
    assert not (tmp_path / "executed").exists()


def test_a_truncated_checkpoint_is_said_to_be_damaged(tmp_path):
    save_checkpoint(tmp_path / "state.pt", "id", {"step": 3, "w": torch.ones(50)})
    content = (tmp_path / "state.pt").read_bytes()
    assert load_checkpoint(tmp_path / "state.pt", "id", "cpu")["step"] == 3
    for size in (0, 10, len(content) // 2, len(content) - 5):
        (tmp_path / "state.pt").write_bytes(content[:size])
        with pytest.raises(EntmtpError, match=r"state\.pt: damaged checkpoint .*; delete it"):
            load_checkpoint(tmp_path / "state.pt", "id", "cpu")


def test_nan_weights_of_a_target_are_said_at_the_prompt(folder):
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    lm = LanguageModel(load_target(TINY, folder, "float32"), None, AR)
    with pytest.raises(EntmtpError, match=r"not numbers \(NaN\)"):
        generate(lm, "Hi")


def test_a_tokenizer_of_another_model_is_said_at_the_prompt(tiny_folder, tmp_path):
    """Its ids lie outside the vocabulary; heads that accept next to nothing warn about the rest (test_own_model)."""
    target = load_target(TINY, tiny_folder, "float32")
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.add_tokens(["<long>"])
    target.tokenizer = tokenizer
    with pytest.raises(EntmtpError, match="token id 259 is outside the target's vocabulary of 259: is this its own"):
        generate(LanguageModel(target, None, AR), "a <long> word", chat=False)


# -- prompts


def test_the_longest_prompt_and_one_token_more(tiny):
    lm = LanguageModel(tiny, None, AR)
    most = tiny.max_positions
    ids = torch.randint(3, tiny.vocab_size, (most,), generator=torch.Generator().manual_seed(0)).tolist()
    made = generate(lm, ids[: most - 1], max_new_tokens=1)
    assert len(made.tokens) == 1 and made.steps[0].nodes == -1
    with pytest.raises(EntmtpError, match=f"has {most} tokens; with max_new_tokens=1 it exceeds the model's {most}"):
        generate(lm, ids, max_new_tokens=1)
    with pytest.raises(EntmtpError, match="non-empty"):
        generate(lm, [])
    with pytest.raises(EntmtpError, match="empty"):
        tiny.prefill([], tiny.new_cache(4))


@pytest.mark.parametrize("text", ["🙂👩‍👩‍👧", "\u202e right to left", "a\x00b", "é" * 50, "\ufffd"])
def test_any_unicode_prompt_is_encoded_whole(tiny, text):
    lm = LanguageModel(tiny, None, AR)
    ids = lm.encode(text, chat=False)
    assert tiny.tokenizer.decode(ids) == text
    assert generate(lm, text, max_new_tokens=3).tokens


def test_bytes_that_are_no_utf_8_are_one_line_at_the_command(world):
    places = [f"results={world / 'results'}", f"resources={world / 'resources'}", "experiment=smoke", "policy=ar"]
    command = [sys.executable, "-m", "entmtp.generate"]
    environment = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:strict"}
    asked = subprocess.run([*command, b"caf\xe9 \xff", *places], capture_output=True, env=environment)
    piped = subprocess.run([*command, "-", *places], capture_output=True, input=b"caf\xe9 \xff", env=environment)
    for done, message in ((asked, b"not valid Unicode"), (piped, b"not valid utf-8")):
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr


# -- large files


MEMORY = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from entmtp.config import TaskConfig
    from entmtp.tasks import split_prompts
    from entmtp.tasks.pool import open_pool
    config = TaskConfig(name="big", source="file", file=sys.argv[1], calib=5, test=5)
    def peak():  # in KiB; ru_maxrss would start from that of the process that started this one
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    before = peak()
    drawn = split_prompts(config, open_pool(config, "."))
    print(len(drawn), peak() - before)
    """
)


def test_a_large_file_is_streamed(tmp_path):
    """50 MB of prompts, ten of which are wanted (`make test-faults`: 1 GB): some bytes a row stay in memory."""
    path, megabytes = tmp_path / "big.jsonl", int(os.environ.get("ENTMTP_LARGE_MB", "50"))
    with path.open("w") as file:
        for number in range(100 * megabytes):
            file.write(json.dumps({"prompt": f"{number} " + "word " * 2000}) + "\n")
    assert path.stat().st_size > megabytes * 1e6
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn, kilobytes = map(int, done.stdout.split())
    print(f"{megabytes} MB of prompts: {kilobytes} KiB more in memory")
    assert drawn == 10 and kilobytes < 160 * megabytes


def test_a_file_is_drawn_from_as_its_rows_in_memory_would_be(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"Prompt  {n % 37}", "kind": "ab"[n % 2], "answer": n} for n in range(90)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    for settings in ({}, {"where": {"kind": "a"}}):
        config = TaskConfig(name="mine", source="file", file=str(path), calib=4, test=5, seed=3, **settings)
        files, memory = FilePool(config, path), MemoryPool(load_source(config, tmp_path))
        assert [files[i] for i in range(len(files))] == [memory[i] for i in range(len(memory))]
        assert split_prompts(config, files) == split_prompts(config, load_source(config, tmp_path))
    assert len(FilePool(TaskConfig(source="file", file=str(path)), path)) == 37


def test_errors_of_a_streamed_file_name_the_line(tmp_path, tiny):
    path = tmp_path / "mine.jsonl"
    for content, message in [
        ('{"prompt": "a", "id": 1}\n\n{"prompt": "b", "id": 1}\n', "line 3: id '1' is also that of line 1"),
        ('{"prompt": "a"}\n{"prompt": broken}\n', "line 2: not valid JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2: no key 'messages'"),
        ("\n", r"mine\.jsonl: no prompts"),
    ]:
        path.write_text(content)
        with pytest.raises(EntmtpError, match=message):
            build_prompts(TaskConfig(name="mine", source="file", file=str(path)), tiny.tokenizer, tmp_path)


def test_training_prompts_without_the_column_that_halves_them(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n')
    source = PromptSource(file=str(tmp_path / "t.jsonl"), half="uid")
    with pytest.raises(EntmtpError, match="no column 'uid'"):
        list(source_prompts(source))
    assert CorpusConfig().prompts == []


# -- names and configuration


@pytest.mark.parametrize(
    "override",
    [
        "experiment=../x",
        "target.name=../../x",
        "heads.name=a/b",
        "policy.name=..",
        "task.name=/etc/x",
        "corpus.name=''",
    ],
)
def test_names_cannot_lead_out_of_their_folder(override):
    with pytest.raises(EntmtpError, match=r"letters, digits, '_', '-' and '\.' only|unknown experiment"):
        compose(["experiment=smoke", override])
    assert compose(["experiment=smoke", "target.name=my-model_1.5B"]).target.name == "my-model_1.5B"


def test_a_yaml_bomb_is_refused_before_it_is_composed(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(EntmtpError, match=r"bomb\.yaml, line 2: YAML aliases \(\*a0\) are not taken"):
        refuse_aliases(tmp_path)


def test_interpolation_cannot_grow_without_end():
    """Every key is known and typed, so values can only refer to a few others; one that refers to itself is named."""
    with pytest.raises(EntmtpError, match="config"):
        compose(["experiment=smoke", "target.repo=${target.revision}", "target.revision=${target.repo}"])
    for override in ("++bomb=[x,x]", "++policy.tau_onn=0.3", "+policy.tau_onn=0.3"):
        with pytest.raises(EntmtpError, match=r"bomb|tau_onn"):
            compose(["experiment=smoke", override])


# -- disks


FULL = textwrap.dedent(
    """
    import resource, sys, torch
    from pathlib import Path
    from safetensors.torch import save_file
    from entmtp import io
    from entmtp.checkpoint import save_checkpoint
    from entmtp.errors import EntmtpError
    folder = Path(sys.argv[1])
    journal = io.Journal(folder / "journal.jsonl", "job")
    journal.append({"id": 0})
    def tensors(path):
        with io.atomic(path) as partial:
            save_file({"a": torch.zeros(9999)}, partial)
    writers = {
        "a.json": lambda path: io.write_json(path, list(range(9999))),
        "a.jsonl": lambda path: io.write_jsonl(path, [{"a": "x" * 100}] * 999),
        "a.parquet": lambda path: io.write_parquet(path, [{"a": str(n) * 9} for n in range(9999)]),
        "a.safetensors": tensors,
        "a.pt": lambda path: save_checkpoint(path, "id", {"w": torch.zeros(9999)}),
    }
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # writes beyond fail as on a full disk
    for name, write in writers.items():
        try:
            write(folder / name)
        except EntmtpError as error:
            assert f"cannot write {folder / name}" in str(error), error
        else:
            raise SystemExit(f"{name} was written")
    try:
        journal.append({"id": 1, "text": "x" * 5000})
    except EntmtpError as error:
        assert "what it holds is kept" in str(error)
    """
)


def test_a_full_disk_leaves_the_old_file_and_one_message(tmp_path):
    io.write_json(tmp_path / "a.json", {"old": True})
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert io.read_json(tmp_path / "a.json") == {"old": True}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "journal.jsonl"]
    assert io.Journal(tmp_path / "journal.jsonl", "job").rows == [{"id": 0}]


def test_a_folder_that_cannot_be_written_is_named_before_any_work():
    with pytest.raises(EntmtpError, match="results=/proc/nowhere: not a writable folder"):
        io.check_writable("/proc/nowhere", "results")
    with pytest.raises(EntmtpError, match="cannot create folder /proc/nowhere"):
        io.write_json("/proc/nowhere/a.json", {})


# -- leftovers


def test_an_interrupted_download_or_conversion_is_not_taken_for_a_model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")  # a conversion that was killed: no sentinel
    (tmp_path / ".tiny.1.abcdefgh").mkdir()  # of another target, tiny.1
    left = tmp_path / ".tiny.x7_kd02m" / "made"  # and what it was working in
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(1000))
    assert fetch_target(TINY, folder) == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny.1.abcdefgh", ".tiny.lock", "tiny"]
    assert load_target(TINY, folder, "float32").vocab_size == 259


def test_decoding_allocates_nothing_that_grows(tiny, prompts):
    """FACTS 7 and issue 3: a cache is made once; a hundred texts through it leave memory where it was."""
    decoder = Decoder(tiny, None, 160)
    decoding = DecodingConfig(max_new_tokens=24)
    for _ in range(20):
        decoder.generate(prompts[1], AR, decoding)
    before = resident_mb()
    for _ in range(80):
        decoder.generate(prompts[1], AR, decoding)
    assert resident_mb() - before < 4
