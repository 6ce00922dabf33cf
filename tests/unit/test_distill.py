"""Self-distillation: the mask token, the objective, adapters, the trainer."""

import copy
import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from entmtp.config import DistillConfig, TargetConfig
from entmtp.distill.lora import LoraLinear, MaskRow, add_lora, add_mask_row, merge
from entmtp.distill.loss import before_first, distillation, predictions
from entmtp.distill.mask_token import MASK, add_mask_token
from entmtp.distill.packing import layout, pack
from entmtp.distill.train import SelfDistiller
from entmtp.errors import EntmtpError
from entmtp.target.load import load_target


@pytest.fixture
def teacher(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture
def student(teacher, tiny_folder):
    made = copy.deepcopy(teacher)
    made.mask_id = add_mask_token(made, AutoTokenizer.from_pretrained(tiny_folder), seed=1)
    return made


def make_batch(mask_id: int, k: int = 4, length: int = 24):
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(8, 200, (length,), generator=generator).tolist() for _ in range(3)]
    return pack(texts, [layout([5, 12], k, length), layout([8], k, length), layout([4, 10, 20], k, length)], mask_id)


def test_the_mask_token_is_drawn_like_the_others_and_travels_with_the_model(teacher, tiny_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    before = teacher.get_input_embeddings().weight.detach().clone()
    made = copy.deepcopy(teacher)
    mask_id = add_mask_token(made, tokenizer, seed=1)
    after = made.get_input_embeddings().weight.detach()
    assert mask_id == len(before) and len(after) == mask_id + 1
    assert torch.equal(after[:mask_id], before)
    scaled = (after[mask_id] - before.mean(dim=0)) / before.std(dim=0)
    assert abs(float(scaled.mean())) < 0.5 and 0.6 < float(scaled.std()) < 1.5
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = load_target(TargetConfig(name="x", source="folder"), tmp_path, "float32")
    assert target.config.mtp_mask_id == mask_id < target.vocab_size
    assert target.tokenizer.convert_tokens_to_ids(MASK) == mask_id
    assert target.tokenizer.decode([mask_id], skip_special_tokens=True) == ""


def test_without_masks_the_student_starts_in_agreement_with_its_teacher(student, teacher):
    batch = make_batch(student.mask_id, k=1)
    soft = distillation(student, teacher, batch, student.mask_id, set(), soft=True)
    assert float(soft.loss.detach()) == pytest.approx(0.0, abs=1e-5)
    assert soft.agreement == 1.0 and soft.block == 1.0
    assert (
        float(distillation(student, teacher, make_batch(student.mask_id), student.mask_id, set(), soft=True).loss)
        > 0.01
    )


def test_gradients_reach_only_through_the_students_logits(student, teacher):
    batch = make_batch(student.mask_id)
    distillation(student, teacher, batch, student.mask_id, set()).loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    grads = [parameter.grad.clone() for parameter in student.parameters()]
    # the same loss with the labels given as constants has the same gradients
    student.zero_grad(set_to_none=True)
    logits = predictions(student, batch, batch.ids, student.mask_id)
    with torch.no_grad():
        labels = predictions(teacher, batch, batch.forced(logits.argmax(dim=-1)), student.mask_id).argmax(dim=-1)
    real = batch.real
    torch.nn.functional.cross_entropy(logits[real].flatten(0, 1), labels[real].flatten()).backward()
    for own, parameter in zip(grads, student.parameters(), strict=True):
        assert torch.allclose(own, parameter.grad, atol=1e-6)


def test_the_teacher_judges_the_students_own_continuation(student, teacher):
    """Labels of a block are what the teacher says after the text and the student's choices."""
    batch = make_batch(student.mask_id)
    with torch.no_grad():
        chosen = predictions(student, batch, batch.ids, student.mask_id).argmax(dim=-1)
        labels = predictions(teacher, batch, batch.forced(chosen), student.mask_id).argmax(dim=-1)
        first = batch.ids[0, :5].tolist() + chosen[0, 0, :-1].tolist()
        expected = teacher(input_ids=torch.tensor([first])).logits[0, 4:].argmax(dim=-1)
    assert labels[0, 0].tolist() == expected.tolist()


def test_nothing_counts_after_a_stop_or_beyond_the_confident_prefix(student, teacher):
    events = torch.tensor([[False, True, False, True], [False, False, False, False], [True, False, False, False]])
    assert before_first(events).tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    batch = make_batch(student.mask_id)
    with torch.no_grad():
        logits = predictions(student, batch, batch.ids, student.mask_id)
        labels = predictions(teacher, batch, batch.forced(logits.argmax(dim=-1)), student.mask_id).argmax(dim=-1)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(
            labels
        )
        stop = int(labels[0, 0, 1])
        stopped = float(distillation(student, teacher, batch, student.mask_id, {stop}).loss)
        counts = batch.real[..., None] & before_first(labels == stop)
        assert counts.sum() < batch.real.sum() * 4
        assert stopped == pytest.approx(float(losses[counts].mean()), rel=1e-5)
        confident = logits.softmax(dim=-1).amax(dim=-1)
        threshold = float(confident[batch.real][:, 0].median())
        prefix = float(distillation(student, teacher, batch, student.mask_id, set(), prefix_threshold=threshold).loss)
        counts = batch.real[..., None] & before_first(confident < threshold)
        assert prefix == pytest.approx(float(losses[counts].mean()), rel=1e-5)


def test_adapters_start_as_nothing_train_alone_and_merge(student):
    batch = make_batch(student.mask_id)
    names = ("q_proj", "down_proj")
    with torch.no_grad():
        before = predictions(student, batch, batch.ids, student.mask_id)
    parameters = [*add_lora(student, 4, 8.0, names, seed=2), add_mask_row(student, student.mask_id)]
    assert len(parameters) == 2 * 2 * 2 + 1  # two layers, two names, down and up; the mask's embedding
    with torch.no_grad():
        assert torch.allclose(predictions(student, batch, batch.ids, student.mask_id), before, atol=1e-5)
        for parameter in parameters:
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    predictions(student, batch, batch.ids, student.mask_id).nan_to_num(neginf=0.0).sum().backward()
    assert {id(p) for p in student.parameters() if p.grad is not None} == {id(p) for p in parameters}
    with torch.no_grad():
        adapted = predictions(student, batch, batch.ids, student.mask_id)
        merge(student)
        assert not any(isinstance(module, LoraLinear | MaskRow) for module in student.modules())
        assert torch.allclose(predictions(student, batch, batch.ids, student.mask_id), adapted, atol=1e-3)
    with pytest.raises(EntmtpError, match="no linear layers named nothing"):
        add_lora(student, 4, 8.0, ("nothing",), seed=2)


def texts(count: int = 12) -> list[dict]:
    """Answers that count upwards: something that several tokens at once can be learned on."""
    rows = []
    for number in range(count):
        key = hashlib.sha256(str(number).encode()).hexdigest()[:16]
        rows.append(
            {
                "key": f"{key}/0",
                "prompt_ids": [5, 6, 20 + number],
                "tokens": [20 + (number + n) % 40 for n in range(30)],
            }
        )
    return rows


def trainer(student, teacher, steps: int = 6, **options) -> SelfDistiller:
    config = DistillConfig(**{"k_max": 4, "spacing": 6, "blocks": 4, "batch": 4, "steps": steps, "learning_rate": 2e-3,
                              "warmup": 2, "dtype": "float32", "report_every": 2, "checkpoint_every": 2}
                           | options)  # fmt: skip
    return SelfDistiller(student, teacher, list(student.parameters()), student.mask_id, {2}, texts(), config)


def test_training_teaches_the_masks_to_agree_with_the_teacher(student, teacher, tmp_path):
    history = trainer(student, teacher, 120, soft=True, report_every=20, checkpoint_every=60).run(tmp_path / "c.pt")
    assert history[-1]["step"] == 120
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]
    assert history[-1]["agreement"] > history[0]["agreement"]


def test_the_same_seed_gives_the_same_weights_and_a_killed_run_resumes(student, teacher, tmp_path, monkeypatch):
    other = copy.deepcopy(student)
    third = copy.deepcopy(student)
    whole = trainer(student, teacher).run(tmp_path / "whole.pt")
    killed = trainer(other, teacher)
    original = SelfDistiller._update

    def dying(self):
        if self.step == 5:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(SelfDistiller, "_update", dying)
    with pytest.raises(KeyboardInterrupt):
        killed.run(tmp_path / "c.pt")
    monkeypatch.setattr(SelfDistiller, "_update", original)
    resumed = trainer(third, teacher)
    history = resumed.run(tmp_path / "c.pt")
    strip = [{key: value for key, value in row.items() if key != "seconds"} for row in history]
    assert strip == [{key: value for key, value in row.items() if key != "seconds"} for row in whole]
    for a, b in zip(student.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)
    # another configuration starts afresh
    assert trainer(third, teacher, 4)._resume(tmp_path / "c.pt") == []


def test_batches_follow_seed_and_step(student, teacher):
    one = trainer(student, teacher)
    first, again, later = one.batch(0, 0), trainer(student, teacher).batch(0, 0), one.batch(1, 0)
    assert torch.equal(first.ids, again.ids)
    assert first.ids.shape != later.ids.shape or not torch.equal(first.ids, later.ids)
    seen = [one.text(number)[0][2] for number in range(24)]
    assert sorted(seen[:12]) == sorted(seen[12:]) == sorted(row["prompt_ids"][2] for row in texts())
    assert seen[:12] != seen[12:]
    assert {one.batch(step, 0).predict.shape[2] for step in range(20)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"spacing": 99}, "no text has 99 tokens"), ({"checkpoint_every": 3}, "must be a multiple")],
)
def test_mistakes_are_named(student, teacher, options, message):
    with pytest.raises(EntmtpError, match=message):
        trainer(student, teacher, **options)
