"""Training features and the trainer: seeds, resuming, held-out prompts, the loss itself."""

import hashlib

import pytest
import torch

from entmtp.config import HeadsConfig, TrainConfig
from entmtp.errors import EntmtpError
from entmtp.heads import features as features_module
from entmtp.heads.features import Features, compute_features, draft_vocabulary, is_held_out, load_or_compute
from entmtp.heads.train import HeadsTrainer


def texts(count: int = 30) -> list[dict]:
    """Two texts a prompt over few tokens with a pattern that heads can learn."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        digest = hashlib.sha256(str(number).encode()).hexdigest()[:16]
        for sample in range(2):
            start = int(torch.randint(10, 40, (1,), generator=generator))
            length = int(torch.randint(1, 16, (1,), generator=generator))
            tokens = [10 + (start + 7 * step) % 30 for step in range(length)]
            rows.append({"key": f"{digest}/{sample}", "prompt_ids": [5, 6, start], "tokens": tokens})
    return rows


def make_config(arch: str = "hydra", **train) -> HeadsConfig:
    options = {"draft_vocab": 24, "epochs": 2, "batch_positions": 40, "warmup": 3, "held_out": 0.25, "distill_top_k": 8,
                   "checkpoint_every": 3, "learning_rate": 3e-3, "seed": 1} | train  # fmt: skip
    return HeadsConfig(name="test", arch=arch, depth=3, blocks=1, width=8, source="train", train=TrainConfig(**options))


@pytest.fixture(scope="module")
def features(tiny) -> Features:
    return compute_features(tiny, texts(), make_config().train)


def weights(trainer: HeadsTrainer) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in trainer.heads.state_dict().items()}


def assert_identical(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def without_seconds(history: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]


def test_features_are_the_targets_own(tiny, features):
    rows = sorted(texts(), key=lambda row: row["key"])
    assert [end - start for start, end, _ in features.texts] == [len(row["tokens"]) for row in rows]
    with torch.inference_mode():
        for row, (start, end, held) in list(zip(rows, features.texts, strict=True))[::7]:
            assert features.tokens[start:end].tolist() == row["tokens"]
            assert features.remaining[start:end].tolist() == list(range(end - start))[::-1]
            assert held == is_held_out(row["key"], 0.25)
            states = tiny.prefill(row["prompt_ids"] + row["tokens"], tiny.new_cache(64))
            states = states[len(row["prompt_ids"]) - 1 : -1]  # row i chose token i
            torch.testing.assert_close(features.hidden[start:end].float(), states, rtol=1e-2, atol=1e-2)
            logp = tiny.model.logits(states).log_softmax(dim=-1)
            torch.testing.assert_close(features.top_logp[start:end], logp.topk(8).values, rtol=1e-4, atol=1e-4)
            assert torch.equal(features.top_ids[start:end].long(), logp.topk(8).indices)


def test_held_out_prompts_are_never_trained_on(tiny, features, tmp_path, monkeypatch):
    trainer = HeadsTrainer(tiny, features, make_config())
    used = []
    original = trainer.loss
    monkeypatch.setattr(trainer, "loss", lambda index: used.append(index) or original(index))
    history = trainer.run(tmp_path / "checkpoint.pt")
    used = torch.cat(used).unique()
    rows = sorted(texts(), key=lambda row: row["key"])
    held_prompts = {row["key"].split("/")[0] for row in rows if is_held_out(row["key"], 0.25)}
    assert 2 < len(held_prompts) < 15
    for row, (start, end, held) in zip(rows, features.texts, strict=True):
        assert held == (row["key"].split("/")[0] in held_prompts)  # all texts of a prompt on one side
        inside = bool(((used >= start) & (used < end)).any())
        assert not (held and inside)
    held_positions = sum(end - start - 1 for start, end, held in features.texts if held)
    assert history[-1]["positions"] == len(trainer.held) == held_positions
    assert not set(used.tolist()) & set(trainer.held.tolist())


def test_stored_features_serve_the_same_texts_only(tiny, features, tmp_path, monkeypatch):
    path, config = tmp_path / "features.safetensors", make_config().train
    rows = texts()
    first = load_or_compute(tiny, rows, config, path)
    computed = []
    original = features_module.compute_features
    monkeypatch.setattr(features_module, "compute_features", lambda *a: computed.append(a) or original(*a))
    stored = load_or_compute(tiny, rows[::-1], config, path)
    assert computed == []
    assert stored.texts == first.texts == features.texts
    for name in ("hidden", "tokens", "remaining", "top_ids", "top_logp"):
        assert torch.equal(getattr(stored, name), getattr(features, name))
        assert getattr(stored, name).dtype == getattr(features, name).dtype
    assert (
        HeadsTrainer(tiny, stored, make_config()).index.tolist()
        == HeadsTrainer(tiny, features, make_config()).index.tolist()
    )
    other = [rows[0] | {"tokens": [*rows[0]["tokens"], 9]}, *rows[1:]]
    assert len(load_or_compute(tiny, other, config, path).tokens) == len(first.tokens) + 1
    assert len(computed) == 1
    # the same answers to another prompt (another chat template, say) have other hidden states
    moved = [row | {"prompt_ids": [7, *row["prompt_ids"]]} for row in rows]
    load_or_compute(tiny, rows, config, path)
    assert not torch.equal(load_or_compute(tiny, moved, config, path).hidden, first.hidden)


def test_share_of_held_out_prompts():
    keys = [hashlib.sha256(str(n).encode()).hexdigest() + "/0" for n in range(2000)]
    assert sum(is_held_out(key, 0.1) for key in keys) == pytest.approx(200, abs=60)
    assert not any(is_held_out(key, 0.0) for key in keys)


@pytest.mark.parametrize("arch", ["medusa", "hydra"])
def test_same_seed_same_weights(tiny, features, tmp_path, arch):
    def train(name: str, **options) -> dict:
        trainer = HeadsTrainer(tiny, features, make_config(arch, epochs=1, **options))
        trainer.run(tmp_path / name)
        return weights(trainer)

    first = train("a")
    assert_identical(first, train("b"))
    other = train("c", seed=2)
    assert not all(torch.equal(first[key], other[key]) for key in first)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("arch", ["medusa", "hydra"])
@pytest.mark.parametrize("stops", [[4], [8, 2, 5]])
def test_resumed_training_is_bit_identical(tiny, features, tmp_path, monkeypatch, arch, stops):
    """Stopped in the middle of an epoch, between two checkpoints, and more than once."""
    whole = HeadsTrainer(tiny, features, make_config(arch))
    history = whole.run(tmp_path / "whole.pt")
    assert whole.steps_per_epoch > 6
    assert whole.total_steps == 2 * whole.steps_per_epoch
    path = tmp_path / "stopped.pt"
    for after in stops:
        trainer = HeadsTrainer(tiny, features, make_config(arch))
        original, calls = trainer.loss, []

        def loss(index, original=original, calls=calls, after=after):
            calls.append(index)
            if len(calls) > after:
                raise Stopped
            return original(index)

        monkeypatch.setattr(trainer, "loss", loss)
        with pytest.raises(Stopped):
            trainer.run(path)
    assert path.exists()
    resumed = HeadsTrainer(tiny, features, make_config(arch))
    calls = []
    original = resumed.loss
    monkeypatch.setattr(resumed, "loss", lambda index: calls.append(1) or original(index))
    again = resumed.run(path)
    assert 0 < len(calls) < whole.total_steps  # it did resume
    assert_identical(weights(resumed), weights(whole))
    assert without_seconds(again) == without_seconds(history)
    assert [row["epoch"] for row in again] == [1, 2]


def test_a_finished_run_is_not_trained_again(tiny, features, tmp_path):
    first = HeadsTrainer(tiny, features, make_config(epochs=1))
    history = first.run(tmp_path / "c.pt")
    second = HeadsTrainer(tiny, features, make_config(epochs=1))
    assert second.run(tmp_path / "c.pt") == history
    assert_identical(weights(second), weights(first))


@pytest.mark.parametrize("change", [{"seed": 9}, {"learning_rate": 1e-2}, {"distill_weight": 0.0}])
def test_a_checkpoint_of_another_configuration_is_not_resumed(tiny, features, tmp_path, change):
    """The number of steps is the same, so it cannot tell the two apart."""
    HeadsTrainer(tiny, features, make_config(epochs=1)).run(tmp_path / "c.pt")
    resumed = HeadsTrainer(tiny, features, make_config(epochs=1, **change))
    resumed.run(tmp_path / "c.pt")
    fresh = HeadsTrainer(tiny, features, make_config(epochs=1, **change))
    fresh.run(tmp_path / "d.pt")
    assert_identical(weights(resumed), weights(fresh))


@pytest.mark.parametrize("arch", ["medusa", "hydra"])
def test_training_learns(tiny, features, tmp_path, arch):
    trainer = HeadsTrainer(tiny, features, make_config(arch, epochs=12))
    with torch.no_grad():
        before = float(trainer.loss(trainer.index))
    history = trainer.run(tmp_path / "c.pt")
    with torch.no_grad():
        after = float(trainer.loss(trainer.index))
    assert after < 0.8 * before
    assert sum(history[-1]["top1"]) > sum(history[0]["top1"])
    assert all(t5 >= t1 for t1, t5 in zip(history[-1]["top1"], history[-1]["top5"], strict=True))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_loss_is_the_straight_line(tiny, features, weight):
    """Per head: (1 - w) * cross-entropy of true tokens in the draft vocabulary + w * the target's top tokens."""
    trainer = HeadsTrainer(tiny, features, make_config(distill_weight=weight))
    with torch.no_grad():
        for parameter in trainer.heads.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    index = trainer.index[::3]
    token_map = trainer.heads.token_map.tolist()
    assert any(int(token) not in token_map for token in features.tokens)
    table = tiny.model.embed(torch.arange(tiny.vocab_size))
    per_head = []
    with torch.inference_mode():
        for depth in range(1, 4):
            hard, soft = [], []
            for t in index.tolist():
                if features.remaining[t] < depth:
                    continue
                embeddings = [table[features.tokens[t + d]][None] for d in range(depth)]
                x = trainer.heads.features(depth, features.hidden[t : t + 1].float(), embeddings)
                logp = (x @ tiny.head_rows(torch.tensor(token_map)).T)[0].log_softmax(dim=-1)
                true = int(features.tokens[t + depth])
                if true in token_map:
                    hard.append(-float(logp[token_map.index(true)]))
                top = zip(
                    features.top_ids[t + depth].tolist(), features.top_logp[t + depth].exp().tolist(), strict=True
                )
                pairs = [(token_map.index(token), p) for token, p in top if token in token_map]
                total = sum(p for _, p in pairs)
                soft.append(-sum(p / total * float(logp[k]) for k, p in pairs) if pairs else 0.0)
            per_head.append((1 - weight) * sum(hard) / len(hard) + weight * sum(soft) / len(soft))
        got = float(trainer.loss(index))
    assert got == pytest.approx(sum(per_head) / 3, rel=2e-2)  # the trainer computes in bfloat16


def test_learning_rate_warms_up_and_falls_to_a_tenth(tiny, features):
    trainer = HeadsTrainer(tiny, features, make_config(epochs=4, warmup=4, learning_rate=1.0))
    rates = [trainer.learning_rate(step) for step in range(trainer.total_steps + 1)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_diverging_loss_stops_the_job(tiny, features, tmp_path, monkeypatch):
    trainer = HeadsTrainer(tiny, features, make_config())
    monkeypatch.setattr(trainer, "loss", lambda index: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(EntmtpError, match="loss is nan at step 0"):
        trainer.run(tmp_path / "c.pt")


def test_no_text_to_train_on_is_refused(tiny):
    rows = [{"key": "0" * 16 + "/0", "prompt_ids": [5], "tokens": [6, 7, 8]}]  # its prompt is held out
    config = make_config()
    with pytest.raises(EntmtpError, match="no position to train on"):
        HeadsTrainer(tiny, compute_features(tiny, rows, config.train), config)


def test_draft_vocabulary_counts_training_texts_only_and_breaks_ties_by_id():
    tokens = torch.tensor([7, 7, 7, 2, 2, 9, 9, 4, 1, 1, 1, 1, 1])
    held = torch.zeros(13, 1)
    features = Features(held, tokens, held, held, held, [(0, 5, False), (5, 8, False), (8, 13, True)])
    assert draft_vocabulary(features, 4, 12).tolist() == [7, 2, 9, 4]
    # tokens that never occur come last, by id; the held-out text's token 1 is one of them
    assert draft_vocabulary(features, 7, 12).tolist() == [7, 2, 9, 4, 0, 1, 3]
    assert sorted(draft_vocabulary(features, 99, 12).tolist()) == list(range(12))
