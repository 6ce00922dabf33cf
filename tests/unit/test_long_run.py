"""Many texts in one process, on the two-layer random model."""

import json

import pytest

from entmtp import long_run
from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.heads.model import save_heads


def test_every_text_is_decoded_and_memory_stays(tiny, drafters, prompts):
    decoder = Decoder(tiny, drafters["hydra"], 120)
    rows = long_run.run(decoder, prompts, 200, DecodingConfig(max_new_tokens=20))
    assert [row["texts"] for row in rows] == list(range(20, 201, 20))
    expected = [len(decoder.plain(prompts[number % len(prompts)], DecodingConfig(max_new_tokens=20)).tokens)
                for number in range(1, 21)]  # fmt: skip
    assert [row["tokens"] for row in rows] == [sum(expected)] * 10
    assert 0 < rows[0]["resident_mb"] <= rows[0]["peak_mb"]
    # 180 texts later: caches, masks and graphs are kept by shape, nothing is kept by text
    assert rows[-1]["resident_mb"] - rows[0]["resident_mb"] < 8


def test_the_command(tiny_folder, tiny_heads, tmp_path, capsys):
    save_heads(tiny_heads["hydra"], tmp_path / "heads")
    long_run.main([
        "texts=4", "target=folder", f"target.path={tiny_folder}", "target.name=tiny", "heads.source=folder",
        f"heads.path={tmp_path / 'heads'}", "task=sharegpt", "task.calib=2", "task.test=2", f"results={tmp_path}",
        "decoding.max_new_tokens=5",
    ])  # fmt: skip
    rows = json.loads((tmp_path / "long_run.json").read_text())["rows"]
    assert [row["texts"] for row in rows] == [1, 2, 3, 4]
    assert "tokens_per_s" in capsys.readouterr().out
    with pytest.raises(EntmtpError, match="texts=none"):
        long_run.main(["texts=none"])
