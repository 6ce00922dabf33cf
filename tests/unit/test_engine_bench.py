"""The engine's benchmark on the two-layer random model: it runs, its floors are right, its page can be read."""

import json

import pytest
import torch

from entmtp import engine_bench
from entmtp.errors import EntmtpError
from entmtp.heads.model import save_heads


def test_bytes_of_a_step_are_the_linear_layers_and_the_cache(tiny_folder, tiny, tiny_bf16):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))  # the head included
    kv = tiny.new_cache(100).data.numel() * 4
    assert engine_bench.step_bytes(tiny, 100) == (4 * linear, kv)
    assert engine_bench.step_bytes(tiny_bf16, 100) == (2 * linear, kv // 2)


def test_parts_add_up_to_decoding(tiny, drafters, trees, prompts):
    from entmtp.config import DecodingConfig
    from entmtp.decoding.engine import Decoder

    decoder = Decoder(tiny, drafters["hydra_plus"], 120)
    part = engine_bench.step_parts(decoder, trees["fixed_16"], prompts[2], DecodingConfig(max_new_tokens=30))
    assert part["nodes"] == 16
    assert 1 <= part["steps"] <= 30
    assert all(part[name] > 0 for name in ("propose", "verify", "accept", "commit"))


def test_the_whole_benchmark(tiny_folder, tiny_heads, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine_bench, "CONTEXTS", [16, 10_000])  # the second is beyond the model and left out
    monkeypatch.setattr(engine_bench, "NODES", [0, 2, 8])
    monkeypatch.setattr(engine_bench, "REPEATS", 2)
    save_heads(tiny_heads["hydra"], tmp_path / "heads")
    engine_bench.main([
        "target=folder", f"target.path={tiny_folder}", "target.name=tiny", "heads.source=folder",
        f"heads.path={tmp_path / 'heads'}", "dtype=bfloat16", f"results={tmp_path}",
    ])  # fmt: skip
    made = json.loads((tmp_path / "engine/engine.json").read_text())
    (result,) = made["results"]
    assert result["dtype"] == "bfloat16"
    assert [(row["context"], row["nodes"]) for row in result["forward"]] == [(16, 0), (16, 2), (16, 8)]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 and row["compute_ms"] > 0 for row in result["forward"])
    assert result["machine"]["gb_per_s"] > 0
    page = (tmp_path / "engine/engine.md").read_text()
    assert page in capsys.readouterr().out + "\n" or "| 16 | 8 |" in page
    assert (tmp_path / "engine/engine.png").stat().st_size > 0


def test_an_unknown_key_is_named(tmp_path):
    with pytest.raises(EntmtpError, match="contexts"):
        engine_bench.main(["latency.contextss=3"])
