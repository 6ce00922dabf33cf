"""The engine's benchmark on the two-layer random model: it runs, its floors are right, its page can be read."""

import json

import pytest
import torch

from entmtp import engine_bench
from entmtp.engine_flips import flips, plain
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
    decoding = DecodingConfig(max_new_tokens=30)
    parts = engine_bench.step_parts(decoder, trees["fixed_16"], prompts[2], decoding)
    assert [part["stage"] for part in parts] == ["propose", "verify", "accept", "commit", "scheduler"]
    assert all(part["ms"] > 0 and part["nodes"] == 16 for part in parts)
    expected = Decoder(tiny, None, 120).plain(prompts[2], decoding).tokens
    rows = len(prompts[2]) + len(expected) - 1  # and it was decoding: the cache holds the text's own keys
    mine = decoder.cache.data[..., :rows, :].clone()
    decoder.plain(prompts[2], decoding)
    torch.testing.assert_close(decoder.cache.data[..., :rows, :], mine, rtol=1e-4, atol=1e-4)


def test_no_choice_flips_where_rows_are_computed_alike(tiny, prompts):
    made = flips(tiny, [prompts[0], prompts[2]], tokens=40)
    assert (made["dtype"], made["tokens"], made["flips_per_1000"], made["largest_margin"]) == ("float32", 80, 0.0, 0.0)
    assert made["largest_difference"] < 1e-4


def test_flips_are_counted_with_the_margin_that_they_overturn(tiny, prompts, monkeypatch):
    """A head that adds to the second-largest logit of every forward of several rows what is missing, and a little."""
    honest = tiny.model.logits

    def biased(hidden):
        logits = honest(hidden).clone()
        if len(hidden) == 17:
            top = logits[3].topk(2)
            logits[3, top.indices[1]] = top.values[0] + 0.5
        return logits

    expected = honest_margins(tiny, prompts[2], 34)
    monkeypatch.setattr(tiny.model, "logits", biased)
    made = flips(tiny, [prompts[2]], tokens=34)
    assert made["flips_per_1000"] == pytest.approx(1000 * 2 / 34)  # one in each of two forwards of 17 rows
    assert made["largest_margin"] == pytest.approx(max(expected[3], expected[20]), abs=1e-4)


def honest_margins(target, prompt, tokens: int) -> list[float]:
    """Between the two largest logits after each token of a greedy text."""
    _, logits = plain(target, target.new_cache(len(prompt) + tokens), prompt, tokens)
    top = logits.topk(2).values
    return (top[:, 0] - top[:, 1]).tolist()


def test_the_whole_benchmark(tiny_heads, tmp_path, monkeypatch, capsys):
    """From nothing: the target is made on the way."""
    # the second context is beyond the model and left out
    monkeypatch.setattr(engine_bench, "CONTEXTS", {16: [0, 2, 8], 10_000: [0]})
    monkeypatch.setattr(engine_bench, "REPEATS", 2)
    save_heads(tiny_heads["hydra"], tmp_path / "heads")
    engine_bench.main([
        "target=tiny", f"resources={tmp_path / 'resources'}", "heads.source=folder",
        f"heads.path={tmp_path / 'heads'}", "dtype=bfloat16", f"results={tmp_path}", "task=counting",
        "task.calib=2", "task.test=1",
    ])  # fmt: skip
    made = json.loads((tmp_path / "engine.json").read_text())
    forward = [row for row in made["rows"] if row["stage"] == "forward"]
    assert [(row["dtype"], row["context"], row["nodes"]) for row in forward] == [("bfloat16", 16, n) for n in (0, 2, 8)]
    assert all(row["ms"] > 0 and row["floor_ms"] > 0 and row["compute_ms"] > 0 for row in forward)
    parts = {(row["nodes"], row["stage"]) for row in made["rows"] if row["stage"] != "forward"}
    assert parts == {(nodes, stage) for nodes in (4, 16) for stage in engine_bench.PARTS}
    assert made["machine"][0]["gb_per_s"] > 0
    assert all(row["floor_ms"] == forward[0]["floor_ms"] for row in forward)  # of one context
    (flip,) = made["flips"]
    assert (flip["dtype"], flip["nodes"], flip["tokens"]) == ("bfloat16", 16, 3 * 128)
    page = (tmp_path / "engine.md").read_text()
    assert "flips in a thousand tokens between forwards of 16 drafted nodes" in page
    said = capsys.readouterr()
    assert page in said.out
    assert "fetching and converting it" in said.err
    assert "| 16 | 8 |" in page
    assert (tmp_path / "engine.png").stat().st_size > 0


def test_an_unknown_key_is_named(tmp_path):
    with pytest.raises(EntmtpError, match="contexts"):
        engine_bench.main(["latency.contextss=3"])
