"""Training masks only: rows, what masks and teacher see, and that training and decoding read the same model."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from entmtp.config import DistillConfig, TargetConfig
from entmtp.decoding.confadapt import BlockDecoder
from entmtp.distill.adapter import is_adapter, load_adapted
from entmtp.distill.loss import against_teacher, before_first, one_of
from entmtp.distill.mask_rows import cuts_of, pack_masks
from entmtp.distill.mask_student import MaskStudent
from entmtp.distill.packing import UNKNOWN
from entmtp.distill.recipe import distil
from entmtp.distill.train import SelfDistiller
from entmtp.errors import EntmtpError
from entmtp.target.load import load_tokenizer, wrap_model
from entmtp.target.mask_adapter import MaskAdapter

STOP = 2
TEXTS = [[20 + (number + n) % 40 for n in range(12 + number)] for number in range(3)]
CUTS = [[3, 6, 9], [5], [2, 4]]


def make_student(folder, **options) -> MaskStudent:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    adapter = MaskAdapter(model, 4, 8.0, seed=1)
    for layer in adapter.layers.values():
        layer.up.data = 0.1 * torch.randn(layer.up.shape, generator=torch.Generator().manual_seed(5))
    return MaskStudent(model, adapter, {STOP}, DistillConfig(**options))


def test_rows_of_masks():
    batch = pack_masks([[10, 11, 12, 13, 14, 15]], [[2, 4]], k=3)
    assert batch.ids.tolist() == [[10, 11, 12, 13]]  # what no mask sees is not read
    assert batch.positions.tolist() == [[2, 3, 4, 5]] and batch.cut.tolist() == [[2, 2, 4, 4]]
    assert batch.first.tolist() == [12, 14] and batch.text.tolist() == [[13, 14], [15, UNKNOWN]]
    assert batch.block_mask()[0, 0].int().tolist() == [
        [1, 1, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 1, 0, 0, 1, 1],
    ]
    # the teacher reads the text's next token, then what the student said
    assert batch.forced(torch.tensor([[30, 31], [40, 41]])).tolist() == [[12, 30, 14, 40]]
    assert cuts_of(prompt=2, length=9, spacing=3, shift=1, most=9) == [3, 6]
    assert cuts_of(prompt=2, length=9, spacing=1, shift=0, most=4) == [2, 3, 4, 5]
    uneven = pack_masks(TEXTS, CUTS, k=4)
    assert uneven.real.sum() == len(uneven.text) == 6 and uneven.positions.shape == (3, 9)
    assert uneven.block_mask()[1, 0, 3:, : uneven.ids.shape[1]].sum() == 0  # padding sees no text


@torch.no_grad()
def test_training_reads_what_decoding_reads(tiny_folder):
    """A block's log-probabilities in a packed batch are those of the decoder after the same tokens."""
    student = make_student(tiny_folder)
    batch = pack_masks(TEXTS, CUTS, k=4)
    said = student.said(batch, student.read(batch)).exp()
    best, chosen = said.max(dim=-1)
    target = wrap_model(student.model, load_tokenizer(tiny_folder), "auto", "float32", "cpu", "x", student.adapter)
    decoder, block = BlockDecoder(target, target.mask_id, 64), 0
    for text, cuts in zip(TEXTS, CUTS, strict=True):
        for cut in cuts:
            decoder.start(text[:cut], 8, 8)
            confidence, tokens = decoder.predict(text[:cut], 4)
            assert tokens[1:] == chosen[block].tolist()
            assert confidence[1:] == pytest.approx(best[block].tolist(), abs=1e-5)
            block += 1


@torch.no_grad()
def test_the_teacher_is_the_original_model_on_the_students_words(tiny_folder):
    student = make_student(tiny_folder)
    batch = pack_masks(TEXTS, CUTS, k=4)
    context = student.read(batch)
    chosen = student.said(batch, context).argmax(dim=-1)
    judged = student.judged(batch, context, chosen)
    original, block = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval(), 0
    for text, cuts in zip(TEXTS, CUTS, strict=True):
        for cut in cuts:
            read = [*text[: cut + 1], *chosen[block, :-1].tolist()]
            expected = original(input_ids=torch.tensor([read])).logits[0, cut:]
            torch.testing.assert_close(judged[block], expected, rtol=1e-4, atol=1e-4)
            block += 1


def test_what_counts_and_what_learns(tiny_folder):
    student = make_student(tiny_folder)
    batch = pack_masks(TEXTS, CUTS, k=4)
    with torch.no_grad():
        context = student.read(batch)
        said = student.said(batch, context)
        labels = student.judged(batch, context, said.argmax(dim=-1)).argmax(dim=-1)
        losses = -said.gather(-1, labels[..., None])[..., 0]
        sure = said.exp().amax(dim=-1)
        threshold = 1.0001 * float(sure.median())  # at no value itself
        counts = before_first(sure < threshold)
    assert 0 < counts.sum() < counts.numel()
    student.config.prefix_threshold = threshold
    outcome = student.learn(batch, from_text=False)
    assert float(outcome.loss.detach()) == pytest.approx(float(losses[counts].mean()), rel=1e-5)
    outcome.loss.backward()
    learning = [name for name, value in student.model.named_parameters() if value.grad is not None]
    assert learning and all(name.endswith((".down", ".up")) for name in learning)
    assert student.adapter.row.grad is not None
    # of a block whose own token is a stop nothing counts
    student.stop_ids = {TEXTS[1][5]}
    text = batch.text
    known = (text != UNKNOWN) & before_first(text == TEXTS[1][5])
    known[batch.first == TEXTS[1][5]] = False
    with torch.no_grad():
        expected = -said.gather(-1, text.clamp_min(0)[..., None])[..., 0][known].mean()
    assert known.sum() < (text != UNKNOWN).sum()
    assert float(student.learn(batch, from_text=True).loss.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_training_leaves_an_adapter_that_decodes_and_resumes_to_the_same(tiny_folder, tmp_path):
    rows = [{"key": f"{n:016x}/0", "prompt_ids": [5, 6, 20 + n], "tokens": [20 + (n + i) % 40 for i in range(30)]}
            for n in range(12)]  # fmt: skip
    config = DistillConfig(k_max=4, spacing=3, blocks=8, batch=4, steps=60, text_steps=60, learning_rate=2e-2,
                           warmup=2, cooldown=20, lora_rank=4, lora_alpha=8, masks_only=True, report_every=10,
                           checkpoint_every=30, dtype="float32")  # fmt: skip
    history = distil(tiny_folder, tmp_path / "made", tmp_path / "c.pt", rows, config, "cpu")
    assert history[-1]["step"] == 60 and history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert is_adapter(tmp_path / "made") and not (tmp_path / "made.adapter").exists()
    target = load_adapted(TargetConfig(name="x", source="folder"), tiny_folder, tmp_path / "made", "float32")
    decoder = BlockDecoder(target, target.mask_id, 96)
    decoder.start([5, 6, 25], 8, 8)
    # the text of the training: 25, 26, 27, … after this prompt, which the original does not know
    assert decoder.predict([5, 6, 25, 25, 26], 4)[1][1:] == [28, 29, 30]
    again = distil(tiny_folder, tmp_path / "again", tmp_path / "other.pt", rows, config, "cpu")
    assert [row["loss"] for row in again] == [row["loss"] for row in history]
    ours, theirs = ((tmp_path / name / "adapter.safetensors").read_bytes() for name in ("made", "again"))
    assert ours == theirs


def test_by_student_forcing_the_masks_come_to_agree_with_the_teacher(tiny_folder, prompts, greedy_texts, tmp_path):
    rows = [{"key": f"{n:016x}/0", "prompt_ids": prompt, "tokens": text}
            for n, (prompt, text) in enumerate(zip(prompts, greedy_texts, strict=True))]  # fmt: skip
    config = DistillConfig(k_max=4, spacing=3, blocks=10, batch=4, steps=80, learning_rate=1e-2, warmup=5, lora_rank=8,
                           lora_alpha=16, masks_only=True, report_every=20, checkpoint_every=80,
                           dtype="float32")  # fmt: skip
    history = distil(tiny_folder, tmp_path / "made", tmp_path / "c.pt", rows, config, "cpu")
    assert history[-1]["loss"] < 0.7 * history[0]["loss"] and history[-1]["agreement"] > history[0]["agreement"]


def test_masks_only_needs_a_rank(tiny_folder, tmp_path):
    with pytest.raises(EntmtpError, match=r"distill.lora_rank must be above 0"):
        distil(tiny_folder, tmp_path / "m", tmp_path / "c.pt", [], DistillConfig(masks_only=True), "cpu")


def test_precision_of_the_base_and_of_what_learns(tiny_folder):
    student = make_student(tiny_folder, k_max=3, spacing=3)
    rows = [{"key": "a/0", "prompt_ids": [5], "tokens": list(range(20, 40))}]
    SelfDistiller(student, rows, replace(student.config, dtype="bfloat16"), "cpu")
    assert student.model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in student.parameters} == {torch.float32}


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("quantile", [0.3, 0.6])
def test_depth_by_depth_is_the_loss_of_all_at_once(tiny_folder, soft, quantile):
    """Same loss, same gradients, and what the figures say of the blocks that count; stops of the teacher among them."""
    student = make_student(tiny_folder, soft=soft)
    batch = pack_masks(TEXTS, CUTS, k=5)
    with torch.no_grad():
        context = student.read(batch)
        said = student.said(batch, context)
        judged = student.judged(batch, context, said.argmax(dim=-1))
    # a stop that ends a block early, and a block that starts with it
    student.stop_ids = {int(judged[3, 0].argmax()), int(batch.first[5])}
    threshold = float(said.exp().amax(dim=-1).flatten().quantile(quantile)) * 1.0001
    assert threshold < 0.9
    outcomes, gradients = [], []
    for limit in (threshold, None):
        student.config.prefix_threshold = limit
        if limit is None:  # the whole block at once, of which the prefix counts
            said = student.said(batch, student.read(batch))
            judged = student.judged(batch, student.read(batch), said.detach().argmax(dim=-1))
            counting = ~one_of(batch.first, student.stop_ids)
            outcome = against_teacher(said, judged, student.stop_ids, soft, threshold, counting, own=0)
        else:
            outcome = student.learn(batch, from_text=False)
        for parameter in student.parameters:
            parameter.grad = None
        outcome.loss.backward()
        outcomes.append(outcome)
        gradients.append([parameter.grad.clone() for parameter in student.parameters])
    assert float(outcomes[0].loss.detach()) == pytest.approx(float(outcomes[1].loss.detach()), rel=1e-5)
    assert outcomes[0].agreement == pytest.approx(outcomes[1].agreement)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_blocks_none_of_which_counts_teach_nothing(tiny_folder):
    student = make_student(tiny_folder, prefix_threshold=0.5)
    batch = pack_masks(TEXTS[:1], CUTS[:1], k=3)
    student.stop_ids = set(batch.first.tolist())
    outcome = student.learn(batch, from_text=False)
    assert float(outcome.loss.detach()) == 0.0 and (outcome.agreement, outcome.block) == (0.0, 1.0)
    outcome.loss.backward()
