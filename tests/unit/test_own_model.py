"""docs/own-model.md on a model of another family: text, features, training, native format, lossless decoding."""

import json

import pytest
from neox import make_neox

from entmtp.config import CorpusConfig, DecodingConfig, HeadsConfig, PromptSource, TargetConfig, TrainConfig
from entmtp.decoding.engine import Decoder
from entmtp.heads.corpus import write_shard
from entmtp.heads.drafter import make_drafter
from entmtp.heads.features import Features, compute_shard
from entmtp.heads.model import load_heads, save_heads
from entmtp.heads.train import HeadsTrainer
from entmtp.policy.schedulers import LadderPolicy, Policy
from entmtp.target.generic import GenericForward
from entmtp.target.load import load_target


@pytest.fixture(scope="module")
def neox(tiny_folder, tmp_path_factory):
    folder = make_neox(tmp_path_factory.mktemp("neox"), tiny_folder)
    return load_target(TargetConfig(name="neox", source="folder", path=str(folder)), folder, "float32")


@pytest.fixture(scope="module")
def corpus(neox, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("corpus")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {n} and {n + 1}."}) + "\n" for n in range(24)))
    config = CorpusConfig(prompts=[PromptSource(str(prompts), samples=2)], batch=8, max_new_tokens=24)
    return write_shard(neox, config, [], 0, folder / "journal").rows


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra_plus"])
def test_heads_are_trained_stored_and_draft_without_changing_the_text(neox, corpus, trees, tmp_path, kind):
    assert isinstance(neox.model, GenericForward)
    assert len(corpus) == 48
    features = Features([compute_shard(neox, corpus, CorpusConfig(held_out=0.2, top_k=4))])
    train = TrainConfig(draft_vocab=200, epochs=2, batch_positions=64, warmup=2)
    arch = "medusa" if kind == "medusa" else "hydra"
    trainer = HeadsTrainer(neox, features, HeadsConfig(kind, arch, 4, 1, kind == "hydra_plus", 16, train=train))
    history = trainer.run(tmp_path / "checkpoint.pt")
    assert history[-1]["positions"] > 50
    save_heads(trainer.heads, tmp_path)
    drafter = make_drafter(load_heads(tmp_path, neox), neox, 16)
    decoder, decoding, accepted = Decoder(neox, drafter, 300), DecodingConfig(max_new_tokens=30), 0
    ladder = LadderPolicy("l", [trees["empty"], trees["chain_4"], trees["full"]], depth=2, thresholds=[0.01, 0.1])
    for row in corpus[:4]:
        expected = decoder.plain(row["prompt_ids"], decoding).tokens
        for policy in (Policy("s", [trees["full"]]), Policy("p", [trees["mc_sim_7b_63"]]), ladder):
            made = decoder.generate(row["prompt_ids"], policy, decoding)
            assert made.tokens == expected
            accepted += sum(step.accepted for step in made.steps)
    assert accepted > 0
