"""`python -m entmtp.blocks`: the second method from the command line."""

import re
import shutil

import pytest

from entmtp import blocks
from entmtp.config import DecodingConfig, DistillConfig, TargetConfig
from entmtp.decoding.engine import Decoder
from entmtp.distill.recipe import distil
from entmtp.io import read_json
from entmtp.target.fetch import fetch_target
from entmtp.target.load import load_target
from entmtp.tasks.prompts import encode


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A resources folder with the test target, and a multi-token model of it beside its adapter."""
    root = tmp_path_factory.mktemp("blocks")
    base = fetch_target(TargetConfig(name="tiny", source="random"), root / "resources/targets/tiny")
    rows = [{"key": str(n), "prompt_ids": [5, 6, n + 20], "tokens": [30 + (n + i) % 9 for i in range(12)]}
            for n in range(6)]  # fmt: skip
    config = DistillConfig(k_max=3, spacing=4, blocks=2, batch=3, steps=2, lora_rank=2, report_every=1,
                           checkpoint_every=1, dtype="float32")  # fmt: skip
    distil(base, root / "made", root / "c.pt", rows, config, "cpu")
    return root


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["blocks", *arguments])
    status = blocks.main()
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def options(made, mtp) -> list[str]:
    return ["experiment=smoke", f"resources={made / 'resources'}", f"mtp={mtp}", "k_max=3"]


def test_every_block_is_shown_and_counted(made, monkeypatch, capsys):
    asked = ["Count.", *options(made, made / "made"), "static=3", "--max-new-tokens", "20"]
    status, text, said = run(monkeypatch, capsys, *asked, "--show")
    tokens, forwards, longest = map(
        int, re.search(r"(\d+) tokens in (\d+) forwards .*longest block (\d+)", said).groups()
    )
    assert status == 0 and text.count(blocks.MARK) == forwards and longest <= 3
    assert forwards == -(-tokens // 3) and said.rstrip().endswith("lossy")
    status, plain, _ = run(monkeypatch, capsys, *asked)
    assert plain == text.replace(blocks.MARK, "")


def test_an_adapter_is_folded_into_its_target_once(made, monkeypatch, capsys):
    trained = run(monkeypatch, capsys, "Hi", *options(made, made / "made"), "threshold=0.2")
    first = run(monkeypatch, capsys, "Hi", *options(made, made / "made.adapter"), "threshold=0.2")
    folded = list((made / "resources/targets").glob("tiny-mtp-*"))
    assert first[:2] == trained[:2] and len(folded) == 1 and read_json(folded[0] / "config.json")["mtp_k_max"] == 3
    monkeypatch.setattr("entmtp.distill.adapter.apply_adapter", None)
    assert run(monkeypatch, capsys, "Hi", *options(made, made / "made.adapter"), "threshold=0.2")[:2] == trained[:2]


def test_an_adapter_for_masks_is_read_beside_its_target(made, monkeypatch, capsys):
    rows = [{"key": str(n), "prompt_ids": [5, 6, n + 20], "tokens": [30 + (n + i) % 9 for i in range(12)]}
            for n in range(6)]  # fmt: skip
    config = DistillConfig(k_max=3, spacing=4, blocks=2, batch=3, steps=2, lora_rank=2, masks_only=True, report_every=1,
                           checkpoint_every=1, dtype="float32")  # fmt: skip
    base = made / "resources/targets/tiny"
    distil(base, made / "masks", made / "m.pt", rows, config, "cpu")
    capsys.readouterr()
    before = sorted((made / "resources/targets").iterdir())
    plain = run(monkeypatch, capsys, "Hi", *options(made, made / "masks"), "static=1")
    status, verified, said = run(monkeypatch, capsys, "Hi", *options(made, made / "masks"), "verify=true")
    assert (status, verified) == (0, plain[1]) and said.rstrip().endswith("lossless")
    other = run(monkeypatch, capsys, "Hi", *options(made, made / "masks"), "threshold=1.0")
    assert plain[0] == 0 and plain[2].rstrip().endswith("plain decoding") and other[1] == plain[1]
    target = load_target(TargetConfig(name="tiny", source="random"), base, "float32")
    ids = encode(target.tokenizer, [{"role": "user", "content": "Hi"}])
    text = Decoder(target, None, 400).plain(ids, DecodingConfig(max_new_tokens=200)).tokens
    assert plain[1] == target.tokenizer.decode(text, skip_special_tokens=True) + "\n"
    assert sorted((made / "resources/targets").iterdir()) == before


def test_mistakes_are_one_line(made, monkeypatch, capsys, tmp_path):
    both = run(monkeypatch, capsys, "Hi", *options(made, made / "made"), "verify=true", "static=2")
    assert both[0] == 1 and both[2].startswith("error: threshold=, masks=, static= and verify=true exclude one another")
    assert run(monkeypatch, capsys, "Hi", "k_max=3")[::2] == (1, "error: mtp=FOLDER is missing: a multi-token model's "
                                                               "folder, or an adapter's\n")  # fmt: skip
    said = {"verify=1": "true or false", "threshold=abc": "must be a number", "k_max=two": "must be a number"}
    for option, message in said.items():
        assert run(monkeypatch, capsys, "Hi", *options(made, made / "made"), option)[::2] == (
            1,
            f"error: {option}: {message}\n",
        )
    nothing = run(monkeypatch, capsys, "Hi", *options(made, made / "made"), "--max-new-tokens", "0")
    assert nothing[0] == 1 and "max_new_tokens=0: must be at least 1" in nothing[2]
    wrong = tmp_path / "wrong"
    shutil.copytree(made / "made.adapter", wrong)
    text = (wrong / "config.json").read_text()
    (wrong / "config.json").write_text(re.sub(r'"target": "[^"]*"', '"target": "llama-h1"', text))
    shutil.rmtree(next((made / "resources/targets").glob("tiny-mtp-*"), tmp_path / "none"), ignore_errors=True)
    status, _, said = run(monkeypatch, capsys, "Hi", *options(made, wrong))
    assert status == 1 and said.startswith("error: ") and "made for the target llama-h1" in said
