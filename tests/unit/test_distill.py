"""Self-distillation: the mask token, the objective, adapters, the trainer."""

import copy

import pytest
import torch
from distill_fixture import texts
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from entmtp.config import DistillConfig, TargetConfig
from entmtp.distill.adapter import apply_adapter
from entmtp.distill.lora import LoraLinear, MaskRow, add_lora, add_mask_row, merge
from entmtp.distill.loss import Outcome, before_first, distillation, predictions, text_loss
from entmtp.distill.mask_token import MASK, add_mask_token
from entmtp.distill.packing import UNKNOWN, layout, pack
from entmtp.distill.recipe import distil
from entmtp.distill.student import WholeStudent
from entmtp.distill.train import SelfDistiller
from entmtp.errors import EntmtpError
from entmtp.io import read_json, read_safetensors, write_json
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
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for own, parameter in zip(grads, student.parameters(), strict=True):
        assert torch.allclose(own, parameter.grad, atol=1e-6)


def test_the_teacher_judges_the_students_own_continuation(student, teacher):
    """Labels of a block are what the teacher says after the text and the student's choices."""
    batch = make_batch(student.mask_id)
    with torch.no_grad():
        chosen = predictions(student, batch, batch.ids, student.mask_id).argmax(dim=-1)
        labels = predictions(teacher, batch, batch.forced(chosen), student.mask_id).argmax(dim=-1)
        first = batch.ids[0, :5].tolist() + chosen[0, :-1].tolist()
        expected = teacher(input_ids=torch.tensor([first])).logits[0, 4:].argmax(dim=-1)
    assert labels[0].tolist() == expected.tolist()


def test_nothing_counts_after_a_stop_or_beyond_the_confident_prefix(student, teacher):
    events = torch.tensor([[False, True, False, True], [False, False, False, False], [True, False, False, False]])
    assert before_first(events).tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    batch = make_batch(student.mask_id)
    with torch.no_grad():
        logits = predictions(student, batch, batch.ids, student.mask_id)
        labels = predictions(teacher, batch, batch.forced(logits.argmax(dim=-1)), student.mask_id).argmax(dim=-1)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses = losses.view_as(labels)
        stop = int(labels[0, 1])
        stopped = float(distillation(student, teacher, batch, student.mask_id, {stop}).loss)
        counts = before_first(labels == stop)
        assert counts.sum() < batch.real.sum() * 4
        assert stopped == pytest.approx(float(losses[counts].mean()), rel=1e-5)
        confident = logits.softmax(dim=-1).amax(dim=-1)
        threshold = 1.0001 * float(confident[:, 0].median())  # at no value itself
        prefix = float(distillation(student, teacher, batch, student.mask_id, set(), prefix_threshold=threshold).loss)
        counts = before_first(confident < threshold)
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


def test_the_texts_own_labels_are_learned_from_without_the_teacher(student):
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(8, 200, (14,), generator=generator).tolist()
    batch = pack([text], [layout([5, 12], 4, len(text))], student.mask_id)
    assert batch.text[0].tolist() == [text[5:9], [*text[12:14], UNKNOWN, UNKNOWN]]
    with torch.no_grad():
        logits = predictions(student, batch, batch.ids, student.mask_id)
    said = batch.text[0]
    known = said != UNKNOWN
    expected = torch.nn.functional.cross_entropy(logits[known], said[known])
    assert float(text_loss(student, batch, student.mask_id, set()).loss.detach()) == pytest.approx(float(expected))
    # after the text's first stop nothing counts
    kept = known & before_first(said == text[6])
    assert kept.sum() == known.sum() - 2
    expected = torch.nn.functional.cross_entropy(logits[kept], said[kept])
    stopped = text_loss(student, batch, student.mask_id, {text[6]})
    assert float(stopped.loss.detach()) == pytest.approx(float(expected))


def test_an_adapter_gives_the_trained_model_back(tiny_folder, tmp_path):
    rows = texts()
    config = DistillConfig(k_max=3, spacing=6, blocks=2, batch=3, steps=3, learning_rate=1e-2, warmup=1, lora_rank=2,
                           report_every=3, checkpoint_every=3, dtype="float32")  # fmt: skip
    distil(tiny_folder, tmp_path / "made", tmp_path / "c.pt", rows, config, "cpu")
    adapter = tmp_path / "made.adapter"
    apply_adapter(tiny_folder, adapter, tmp_path / "again")
    made, again = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("made", "again"))
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert made.config.mtp_k_max == 3
    for (name, one), other in zip(made.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    changed = [name for name, value in base.named_parameters() if "proj" in name
               and not torch.equal(value, made.get_parameter(name))]  # fmt: skip
    assert len(changed) == 2 * 7
    # nothing of the base model but its fingerprint is in the adapter
    assert set(read_safetensors(adapter / "adapter.safetensors")) == {"mask_row"} | {
        f"{name.removesuffix('.weight')}.{part}" for name in changed for part in ("down", "up")
    }


def test_what_does_not_fit_an_adapter_is_named(tiny_folder, tmp_path):
    config = DistillConfig(k_max=2, spacing=6, blocks=2, batch=2, steps=1, lora_rank=2, report_every=1,
                           checkpoint_every=1, dtype="float32")  # fmt: skip
    distil(tiny_folder, tmp_path / "made", tmp_path / "c.pt", texts(), config, "cpu")
    adapter = tmp_path / "made.adapter"
    tensors = read_safetensors(adapter / "adapter.safetensors")
    said = read_json(adapter / "config.json") | {"weights": ""}  # with its hash, another file is named as such

    def refused(message: str) -> None:
        with pytest.raises(EntmtpError, match=message):
            apply_adapter(tiny_folder, adapter, tmp_path / "other")
        assert not (tmp_path / "other").exists()

    write_json(adapter / "config.json", said | {"rank": 3})
    refused(r"down must be \[3, 48\] and finite; it is \[2, 48\]")
    write_json(adapter / "config.json", said | {"target": "llama-h9-v9-000"})
    refused("made for the target llama-h9-v9-000, not for llama-h48")
    write_json(adapter / "config.json", said)
    save_file({name: value for name, value in tensors.items() if name != "mask_row"}, adapter / "adapter.safetensors")
    refused("tensor mask_row must be .* it is missing")
    save_file({**tensors, "more": torch.ones(1)}, adapter / "adapter.safetensors")
    refused("tensors that its format does not have: more")
    (adapter / "adapter.safetensors").write_bytes(b"not safetensors")
    refused("not a whole safetensors file")


def trainer(student, teacher, steps: int = 6, **options) -> SelfDistiller:
    config = DistillConfig(**{"k_max": 4, "spacing": 6, "blocks": 4, "batch": 4, "steps": steps, "learning_rate": 2e-3,
                              "warmup": 2, "dtype": "float32", "report_every": 2, "checkpoint_every": 2}
                           | options)  # fmt: skip
    whole = WholeStudent(student, teacher, list(student.parameters()), student.mask_id, {2}, config)
    return SelfDistiller(whole, texts(), config)


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


def test_an_order_has_every_text_once_and_batches_of_like_lengths(student, teacher):
    one = trainer(student, teacher)
    one.rows = [{"key": str(n), "prompt_ids": [5], "tokens": [20] * (6 + 3 * n)} for n in range(30)]
    order = one.epoch_order(0)
    assert sorted(order) == list(range(30)) and order == one.epoch_order(0) != one.epoch_order(1)
    batches = [sorted(order[i : i + 4]) for i in range(0, 30, 4)]  # one window: batches are runs of the sorted lengths
    assert all(batch[-1] - batch[0] == len(batch) - 1 for batch in batches) and len(batches[-1]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spacing": 99}, "no text is left .* fewer than 99 tokens of answer"),
        ({"checkpoint_every": 3}, "must be a multiple"),
    ],
)
def test_mistakes_are_named(student, teacher, options, message):
    with pytest.raises(EntmtpError, match=message):
        trainer(student, teacher, **options)


def test_the_rate_rises_stays_and_falls_to_zero(student, teacher):
    one = trainer(student, teacher, 10, learning_rate=1.0, warmup=2, cooldown=4)
    assert [one.learning_rate(step) for step in range(10)] == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_the_first_steps_ask_no_teacher(student, teacher, monkeypatch):
    one = trainer(student, teacher, 3, text_steps=2)
    monkeypatch.setattr(one.student.teacher, "forward", None)
    monkeypatch.setattr(one.student.teacher.base_model, "forward", None)
    one._update()
    one._update()
    with pytest.raises(TypeError):
        one._update()


def test_a_checkpoint_of_other_texts_or_another_base_is_not_resumed(student, teacher):
    """Under the same keys: a longer answer, another prompt, another model of the same shape."""
    one = trainer(student, teacher)
    again = SelfDistiller(one.student, texts(), one.config)
    assert again.identity == one.identity
    longer, asked = texts(), texts()
    longer[0]["tokens"] = [*longer[0]["tokens"], 21]
    asked[0]["prompt_ids"] = [*asked[0]["prompt_ids"], 6]
    others = [SelfDistiller(one.student, rows, one.config).identity for rows in (longer, asked)]
    others.append(SelfDistiller(one.student, texts(), one.config, base="llama-other").identity)
    assert len({one.identity, *others}) == 4


def test_no_block_comes_after_a_texts_stop(student, teacher):
    """Of prompt 2, answer 20 21 22 and the stop: the last block may predict the stop, none may start from it."""
    whole = trainer(student, teacher, spacing=1, blocks=9).student
    whole.stop_ids = {2}
    with_stop = whole.batch([[5, 6, 20, 21, 22, 2]], [2], 2, 0)
    assert with_stop.text[with_stop.real][:, 0].tolist() == [20, 21, 22, 2]
    without = whole.batch([[5, 6, 20, 21, 22, 23]], [2], 2, 0)
    assert without.text[without.real][:, 0].tolist() == [20, 21, 22, 23, -1]


def test_micro_batches_are_the_next_texts_their_gradient_is_a_mean_and_the_rate_is_applied(
    student, teacher, monkeypatch
):
    one = trainer(student, teacher, 4, batch=2, accumulate=3, clip=1e9, warmup=3)
    read, text, losses, parameter = [], one.text, iter([1.0, 2.0, 6.0]), one.parameters[0]
    monkeypatch.setattr(one, "text", lambda number: read.append(number) or text(number))
    monkeypatch.setattr(one.student, "learn", lambda batch, _: Outcome(next(losses) * parameter.sum(), 0.0, 1.0))
    one._update()
    assert read == list(range(6))
    assert torch.allclose(parameter.grad, torch.full_like(parameter, 3.0))
    assert one.optimizer.param_groups[0]["lr"] == one.learning_rate(0) < one.config.learning_rate
