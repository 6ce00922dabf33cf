"""Comparison with peers: ratios, which of our policies runs, what workers answer, and workers that fail."""

import json
import shutil

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from entmtp.config import DecodingConfig, TaskConfig, compose
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.io import write_json, write_jsonl
from entmtp.peers.bench import BEST, PLAIN, PROMPTS, Peer, compare, fastest, markdown, measure, prepare
from entmtp.peers.llama_cpp import spelled_out
from entmtp.peers.worker import PEERS
from entmtp.tasks import build_prompts

RECORD = {"cpu": "some cpu", "threads": 2, "packages": {"torch": "1"}}


def run(peer: str, prompt: int, seconds: float, tokens: int = 10, first: int = 0) -> dict:
    return {"peer": peer, "task": "t", "prompt": prompt, "tokens": [first] + [1] * (tokens - 1), "seconds": seconds}


def test_ratios_are_of_totals_and_texts_are_compared_with_our_plain_ones():
    rows = [run(name, prompt, seconds, first=prompt if name == "slow" else 0)
            for name, seconds in ((PLAIN, 2.0), (BEST, 1.0), ("slow", 4.0)) for prompt in (0, 1)]  # fmt: skip
    made = {row["peer"]: row for row in compare(rows, "float32", 50, 0)}
    assert made["slow"]["tokens_per_s"] == 2.5
    assert made["slow"]["best_over"] == {"ratio": 4.0, "low": 4.0, "high": 4.0}
    assert made["slow"]["plain_over"]["ratio"] == 2.0
    assert made[BEST]["best_over"]["ratio"] == 1.0
    assert (made["slow"]["same_text"], made[BEST]["same_text"]) == (0.5, 1.0)
    text = markdown(list(made.values()), {"other": "not installed"}, RECORD)
    assert "| t | float32 | slow | 2.5 | 4.00 [4.00, 4.00] | 2.00 [2.00, 2.00] | 50% |" in text
    assert "Not measured: other (not installed)." in text


def test_the_fastest_lossless_policy_of_each_task_runs():
    def row(task, policy, speed, lossless="exact", heads="hydra"):
        return {"task": task, "policy": policy, "tokens_per_s": speed, "lossless": lossless, "heads": heads}

    summary = {"rows": [row("a", "ar", 99, heads=None), row("a", "x", 2), row("a", "y", 3), row("a", "z", 9, "lossy"),
                        row("b", "x", 5), row("b", "y", 4)]}  # fmt: skip
    assert fastest(summary, ["ar", "x", "y", "z"]) == {"a": ("hydra", "y"), "b": ("hydra", "x")}


def test_peers_take_turns_in_rotated_order():
    class Fake:
        def __init__(self, name):
            self.name = name

        def generate(self, task, prompt, budget):
            order.append(self.name)
            return {"tokens": [1], "seconds": 1.0}

    order: list[str] = []
    measure([Fake("a"), Fake("b")], {"t": [[1], [2]]}, 4)
    assert order == ["a", "b", "a", "b", "b", "a"]  # warm-up, then the two prompts


def test_a_run_that_is_not_there_is_named(tmp_path):
    config = compose([f"results={tmp_path}", "experiment=smoke"])
    with pytest.raises(EntmtpError, match=r"summary\.json: no such file; run `snakemake"):
        prepare(config, [])


def test_a_worker_says_why_it_cannot_take_part(tmp_path):
    peer = Peer("transformers eager", {"folder": str(tmp_path / "none"), "dtype": "float32", "threads": 1})
    assert "none" in peer.problem
    peer.process.wait(timeout=60)


# --- workers on a finished run in small -----------------------------------------------------------------------------


@pytest.fixture
def finished(world, tiny, tmp_path):
    """(setting, prompts) as `prepare` makes them for a run with one task, one timed policy and ten prompts."""
    root, raw = tmp_path / "world", tmp_path / "raw.jsonl"
    shutil.copytree(world, root, symlinks=True)
    run = root / "results" / "smoke"
    write_jsonl(raw, [{"prompt": f"Tell me of {number} ships."} for number in range(12)])
    task = TaskConfig(name="sharegpt", source="file", file=str(raw), calib=2, test=8)
    write_jsonl(run / "prompts" / "sharegpt.jsonl", build_prompts(task, tiny.tokenizer, root / "resources"))
    row = {"task": "sharegpt", "policy": "entmtp_tau", "heads": "hydra", "lossless": "exact", "tokens_per_s": 2.0}
    write_json(run / "summary.json", {"rows": [row]})
    places = [f"{name}={root / name}" for name in ("results", "resources")]
    overrides = ["experiment=smoke", *places, "tasks=[sharegpt]"]
    setting, prompts = prepare(compose(overrides), overrides)
    return {**setting, "dtype": "float32", "threads": 1}, prompts


def plain_text(tiny, prompt: list[int], budget: int) -> list[int]:
    return Decoder(tiny, None, len(prompt) + budget + 1).plain(prompt, DecodingConfig(max_new_tokens=budget)).tokens


def test_workers_are_told_of_the_first_test_prompts_and_the_fastest_policy(finished):
    setting, prompts = finished
    assert len(prompts["sharegpt"]) == PROMPTS < 8
    assert setting["policies"] == {"sharegpt": ("hydra", "entmtp_tau")}
    assert set(setting["heads"]) == {"hydra"} and setting["heads_folders"]["hydra"].endswith("smoke/heads/hydra")
    assert setting["max_new_tokens"] == 16, "no more than the run's own budget"
    assert setting["capacity"] >= max(map(len, prompts["sharegpt"])) + 16 + 64
    json.dumps(setting)  # it goes over a pipe


@pytest.mark.parametrize("name", [name for name in PEERS if not name.startswith("llama.cpp")])
def test_every_peer_writes_plain_decodings_text(finished, tiny, name):
    setting, prompts = finished
    generate = PEERS[name](setting)
    for prompt in prompts["sharegpt"][:2]:
        assert generate("sharegpt", prompt, 12) == plain_text(tiny, prompt, 12)


def test_llama_cpp_takes_part_where_it_is_installed_and_the_target_is_a_gguf(finished):
    problem = Peer("llama.cpp", finished[0]).problem
    assert problem in ("No module named 'llama_cpp'", "target tiny comes from no GGUF")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_cpp_reads_the_weights_that_we_read(tmp_path, dtype):
    """A packed file's matrices spelled out: dequantised values and everything that describes the model."""
    packed, rng = tmp_path / "packed.gguf", np.random.default_rng(0)
    writer = GGUFWriter(packed, "llama")
    writer.add_block_count(2)
    writer.add_file_type(3)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "né", "b"])
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1])
    matrix, norm = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=64).astype(np.float32)
    writer.add_tensor("blk.0.attn_q.weight", quantize(matrix, Kind.Q4_1), raw_dtype=Kind.Q4_1)
    writer.add_tensor("blk.0.attn_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = GGUFReader(spelled_out(packed, tmp_path / "made.gguf", dtype))
    fields = {name: field.contents() for name, field in GGUFReader(packed).fields.items() if "GGUF." not in name}
    del fields["general.file_type"]
    assert {name: field.contents() for name, field in made.fields.items() if "GGUF." not in name} == fields
    by_name = {tensor.name: tensor for tensor in made.tensors}
    weight = by_name["blk.0.attn_q.weight"]
    expected = torch.tensor(dequantize(quantize(matrix, Kind.Q4_1), Kind.Q4_1)).to(getattr(torch, dtype)).float()
    assert weight.tensor_type == {"float32": Kind.F32, "bfloat16": Kind.BF16}[dtype]
    assert torch.equal(torch.tensor(dequantize(weight.data, weight.tensor_type)), expected)
    assert np.array_equal(by_name["blk.0.attn_norm.weight"].data, norm)
    assert spelled_out(tmp_path / "gone.gguf", tmp_path / "made.gguf", dtype) == tmp_path / "made.gguf"


def test_a_worker_answers_over_its_pipe_and_its_end_is_said(finished, tiny):
    setting, prompts = finished
    peer = Peer(PLAIN, setting)
    assert peer.problem is None
    prompt = prompts["sharegpt"][0]
    for budget in (5, 9):
        answer = peer.generate("sharegpt", prompt, budget)
        assert answer["tokens"] == plain_text(tiny, prompt, budget) and answer["seconds"] > 0
    peer.process.kill()
    peer.process.wait()
    with pytest.raises(EntmtpError, match="peer 'entmtp plain' ended with status -9"):
        peer.generate("sharegpt", prompt, 5)
