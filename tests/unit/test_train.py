"""The trainer of draft heads: seeds, resuming, held-out prompts, the loss itself, when it stops."""

import pytest
import torch
from train_fixture import CORPUS, make_config, texts

from entmtp.errors import EntmtpError
from entmtp.heads.features import (
    Features,
    compute_shard,
    is_held_out,
)
from entmtp.heads.prefix import PrefixDecoder
from entmtp.heads.train import HeadsTrainer

KINDS = ["medusa", "hydra", "hydra_plus"]


def weights(trainer: HeadsTrainer) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in trainer.heads.state_dict().items()}


def assert_identical(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def without_seconds(history: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]


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
    for row, text in zip(rows, features.texts, strict=True):
        assert text.held_out == (row["key"].split("/")[0] in held_prompts)  # all texts of a prompt on one side
        inside = bool(((used >= text.start) & (used < text.end)).any())
        assert not (text.held_out and inside)
    held = [text for text in features.texts if text.held_out and text.end - text.start > 1]
    assert history[-1]["positions"] == sum(text.end - text.start for text in held)


def test_a_share_of_the_texts_is_the_start_of_the_whole(tiny, features):
    whole = HeadsTrainer(tiny, features, make_config())
    part = HeadsTrainer(tiny, features, make_config(text_share=0.3))
    assert len(part.texts) == -(-3 * len(whole.texts) // 10)
    assert torch.equal(part.texts, whole.texts[: len(part.texts)])
    assert torch.equal(part.index, features.positions(part.texts))
    assert torch.equal(part.heads.token_map, whole.heads.token_map)
    assert torch.equal(part.held.texts, whole.held.texts)


def test_a_prefix_layer_trains_on_whole_training_texts(tiny, features):
    trainer = HeadsTrainer(tiny, features, make_config("hydra_plus"))
    batches = trainer.batches(0)
    assert torch.equal(torch.cat(batches).sort().values, trainer.texts)
    assert not any(features.texts[n].held_out for n in trainer.texts.tolist())
    assert not torch.equal(torch.cat(batches), torch.cat(trainer.batches(1)))


def test_training_states_are_those_of_decoding(tiny, features):
    """Batched, padded, in bfloat16: yet each position's state is what the decoder's own prefix cache gives."""
    trainer = HeadsTrainer(tiny, features, make_config("hydra_plus"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.heads.prefix.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
    chosen = trainer.texts[3:9]
    with torch.inference_mode():
        index, states = trainer.text_states(chosen)
        assert torch.equal(index, features.positions(chosen))
        decoder = PrefixDecoder(trainer.heads.prefix, torch.float32, "cpu")
        expected = []
        for n in chosen.tolist():
            text = features.texts[n]
            expected.append(decoder.states(features.sequence(text).float())[text.prompt_rows : -1])
    torch.testing.assert_close(states.float(), torch.cat(expected), rtol=3e-2, atol=6e-2)


def test_the_prefix_layer_learns(tiny, features):
    trainer = HeadsTrainer(tiny, features, make_config("hydra_plus"))
    before = {name: value.clone() for name, value in trainer.heads.prefix.named_parameters()}
    for batch in trainer.batches(0)[:3]:
        trainer._update(batch)
    for name, value in trainer.heads.prefix.named_parameters():
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("arch", KINDS)
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


@pytest.mark.parametrize("arch", KINDS)
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


@pytest.mark.parametrize("arch", KINDS)
def test_training_learns(tiny, features, tmp_path, arch):
    trainer = HeadsTrainer(tiny, features, make_config(arch, epochs=12, patience=12))
    everything = trainer.texts if arch == "hydra_plus" else trainer.index
    with torch.no_grad():
        before = float(trainer.loss(everything))
    history = trainer.run(tmp_path / "c.pt")
    with torch.no_grad():
        after = float(trainer.loss(everything))
    assert after < 0.8 * before
    assert sum(history[-1]["top1"]) > sum(history[0]["top1"])
    assert set(history[-1]["num_accepted"]) == {"maths", "chat"}
    assert history[-1]["accept_length"] > history[0]["accept_length"]
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
                x = trainer.heads.features(depth, features.hidden_at(torch.tensor([t])).float(), embeddings)
                logp = (x @ tiny.head_rows(torch.tensor(token_map)).T)[0].log_softmax(dim=-1)
                true = int(features.tokens[t + depth])
                if true in token_map:
                    hard.append(-float(logp[token_map.index(true)]))
                top = zip(
                    features.top_ids[t + depth].tolist(),
                    features.top_logp[t + depth].float().exp().tolist(),
                    strict=True,
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
    rows = [{"key": "0" * 16 + "/0", "task": "t", "prompt_ids": [5], "tokens": [6, 7, 8]}]  # its prompt is held out
    with pytest.raises(EntmtpError, match="no position to train on"):
        HeadsTrainer(tiny, Features([compute_shard(tiny, rows, CORPUS)]), make_config())


def scripted(trainer: HeadsTrainer, lengths: list[float]) -> list[dict]:
    """Weights of each epoch's end; the held-out figures are given."""
    seen, given = [], iter(lengths)

    class Given:
        @staticmethod
        def figures(of: HeadsTrainer) -> dict:
            seen.append(weights(of))
            return {"accept_length": next(given)}

    trainer.held = Given()
    return seen


def test_the_best_epoch_is_kept_and_training_stops_when_nothing_improves(tiny, features, tmp_path):
    trainer = HeadsTrainer(tiny, features, make_config(epochs=9, patience=2))
    seen = scripted(trainer, [1.2, 1.5, 1.4, 1.5, 2.0])
    history = trainer.run(tmp_path / "c.pt")
    assert [row["epoch"] for row in history] == [1, 2, 3, 4]  # equal is not better
    assert_identical(weights(trainer), seen[1])
    again = HeadsTrainer(tiny, features, make_config(epochs=9, patience=2))
    scripted(again, [])
    assert again.run(tmp_path / "c.pt") == history  # stopped stays stopped
    assert_identical(weights(again), seen[1])


@pytest.mark.parametrize("kind", KINDS)
def test_both_dtypes_of_the_products_train(tiny, features, monkeypatch, kind):
    """Whatever this processor would choose: what it has instructions for."""
    losses = []
    for dtype in ("float32", "bfloat16"):
        monkeypatch.setattr("entmtp.heads.train.resolved", lambda name, device, dtype=dtype: dtype)
        trainer = HeadsTrainer(tiny, features, make_config(kind))
        assert trainer.projection.dtype == getattr(torch, dtype)
        loss = trainer.loss(trainer.batches(0)[0])
        loss.backward()
        assert all(parameter.grad is not None for parameter in trainer.heads.parameters() if parameter.requires_grad)
        assert trainer.held.figures(trainer)["accept_length"] >= 1
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
