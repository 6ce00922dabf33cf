"""Streaming generation: the text of plain decoding, whole characters only, a closing line, and clear messages."""

import io
import os
import signal
import subprocess
import sys

import pytest

import entmtp.generate as generate
from entmtp.decoding.text_stream import TextStream
from entmtp.generate import Stats

TASK = "sharegpt"


@pytest.fixture
def call(world, monkeypatch, capsys):
    """Run the command in this process: (exit status, stdout, stderr)."""

    def run(*arguments: str, stdin: str = ""):
        places = [f"results={world / 'results'}", f"resources={world / 'resources'}", "experiment=smoke"]
        monkeypatch.setattr(sys, "argv", ["generate", *arguments, f"task={TASK}", *places])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = generate.main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("policy", ["entmtp_tau", "entmtp_ladder", "adaptive", "hydra", "medusa"])
def test_same_text_as_plain_decoding(call, policy):
    status, plain, line = call("Tell me a story", "policy=ar", "max_new_tokens=40")
    assert status == 0 and len(plain) > 5
    assert line.startswith("ar: 40 tokens in ") and "accept length 1.00 | trees (nodes: share) 0: 100%" in line
    status, text, line = call("Tell me a story", f"policy={policy}", "max_new_tokens=40")
    assert (status, text) == (0, plain)
    assert line.startswith(f"{policy}: 40 tokens in ") and line.rstrip().endswith("| lossless")
    assert all(part in line for part in (" tokens/s | ", "| accept length ", "| trees (nodes: share) "))


def test_shares_name_the_trees_that_were_used(call):
    _, _, line = call("Tell me a story", "policy=entmtp_tau", "policy.tau_on=2", "policy.tau_off=-1")
    assert "trees (nodes: share) 2: 100%" in line, "thresholds given by the user replace the fitted ones"
    _, _, line = call("Tell me a story", "policy=entmtp_tau", "policy.tau_on=-1", "policy.tau_off=-1")
    assert "trees (nodes: share) 6: 100%" in line


def test_sampling_is_the_same_for_every_policy_and_typical_is_marked(call):
    options = ("decoding=sample", "decoding.temperature=1.2", "decoding.seed=3")
    assert call("Hi", "policy=ar", *options)[1] == call("Hi", "policy=entmtp_tau", *options)[1]
    assert call("Hi", "policy=hydra", "decoding=typical")[2].rstrip().endswith("| lossy (typical)")
    assert "lossless up to bfloat16's numerical ties" in call("Hi", "policy=hydra", "dtype=bfloat16")[2]


def test_prompt_from_stdin_and_without_chat(call):
    assert call("-", "policy=ar", stdin="Hi\n")[1] == call("Hi", "policy=ar")[1]
    assert call("Hi", "policy=ar", "--no-chat")[1] != call("Hi", "policy=ar")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Hi", "policy=nope"], "unknown policy 'nope': choose one of adaptive, ar, bandit, cost_aware, dynamic"),
        (["Hi", "policy=entmtp_star"], "no fitted policy 'entmtp_star' for task 'sharegpt'"),
        (["Hi", "policy=entmtp_tau", "policy.tau_on=0.1", "policy.tau_off=0.3"], "tau_off=0.3 must not exceed"),
        (["Hi", "policy=entmtp_tau", "policy.depth=9"], "policy.depth=9 exceeds the 4 draft heads"),
        (["Hi", "policy=hydra", "heads=medusa"], "drafts with hydra heads, not medusa"),
        (["Hi", "policy=ar", "max_new_tokens=99999"], "shorten it or lower decoding.max_new_tokens"),
        (["Hi", "policy=ar", "max_new_tokens=0"], "config key 'decoding.max_new_tokens'"),
        (["Hi", "nonsense=1"], "config: Could not override 'nonsense'"),
        (["policy=ar"], "'policy=ar' is an override: put the prompt before it"),
        (["-", "policy=ar"], "the prompt is empty"),
    ],
)
def test_mistakes_are_one_line(call, arguments, message):
    status, out, err = call(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_help_lists_names_and_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        generate.parse(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(word in text for word in ("entmtp_tau", "humaneval", "smoke", "examples:", "whose bank", "--no-chat"))


def test_interrupt_ends_with_130(call, monkeypatch):
    def interrupted(*_):
        yield "half a te"
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "stream", interrupted)
    status, out, err = call("Hi", "policy=ar")
    assert (status, out) == (130, "half a te") and "Traceback" not in err


def test_interrupt_of_the_real_command(world):
    places = [f"results={world / 'results'}", f"resources={world / 'resources'}", "experiment=smoke"]
    command = [sys.executable, "-m", "entmtp.generate", "Tell me a story", "policy=ar", "max_new_tokens=900", *places]
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 (a background shell ignores Ctrl-C)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed) as process:
        assert process.stdout.read(1), "text comes while it is made"
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err and b"tokens/s" not in err


EMOJI = "naïve → 🙂👩‍👩‍👧 日本語 é"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_are_never_cut(tiny, size):
    """The tiny tokenizer has one token a byte, so that every multi-byte character arrives in pieces."""
    ids = tiny.tokenizer(EMOJI)["input_ids"]
    assert len(ids) == len(EMOJI.encode())
    stream = TextStream(tiny.tokenizer)
    pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) + stream.close() == EMOJI


def test_invalid_bytes_are_shown_once_they_are_final(tiny):
    ids = tiny.tokenizer("🙂")["input_ids"]
    stream = TextStream(tiny.tokenizer)
    assert stream.push(ids[:2]) == ""
    assert stream.push(tiny.tokenizer("a")["input_ids"]).endswith("�a")
    assert stream.push(ids[:3]) == ""
    assert set(stream.close()) == {"�"}
    assert "<|im_end|>" not in stream.push([2, *tiny.tokenizer("b")["input_ids"]])


def test_no_steps_no_division():
    from entmtp.config import compose

    line = Stats(tokens=1, seconds=0.5).line(compose(["experiment=smoke", "policy=ar"]))
    assert "1 tokens in 0.50 s | 2.0 tokens/s | accept length n/a | trees (nodes: share) none" in line
