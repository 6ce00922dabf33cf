"""Self-distillation on the paper's rows: all parameters, regions over the whole chat."""

import pytest
import torch
from distill_fixture import texts
from transformers import AutoModelForCausalLM, AutoTokenizer

from entmtp.config import DistillConfig, TargetConfig, compose
from entmtp.distill.mask_token import MASK, add_mask_token
from entmtp.distill.recipe import distil
from entmtp.distill.student import WholeStudent
from entmtp.distill.train import SelfDistiller
from entmtp.errors import EntmtpError
from entmtp.target.load import load_target


def test_all_parameters_are_trained_on_the_papers_rows(tiny_folder, tmp_path):
    config = DistillConfig(k_max=3, regions=3, row_width=18, spacing=6, batch=3, steps=3, learning_rate=1e-2, warmup=1,
                           report_every=1, checkpoint_every=1, dtype="float32")  # fmt: skip
    history = distil(tiny_folder, tmp_path / "made", tmp_path / "c.pt", texts(), config, "cpu")
    assert len(history) == 3 and not (tmp_path / "made.adapter").exists()
    base, made = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_folder, tmp_path / "made"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert (made.config.mtp_mask_id, made.config.mtp_k_max) == (tokenizer.convert_tokens_to_ids(MASK), 3)
    for name, value in base.named_parameters():
        assert not torch.equal(value, made.get_parameter(name)[: len(value)]), name
    target = load_target(TargetConfig(name="x", source="folder"), tmp_path / "made", "float32")
    assert target.vocab_size >= made.config.mtp_mask_id


def test_blocks_of_the_papers_rows_lie_in_the_prompt_too_and_their_offset_is_drawn(tiny_folder):
    student, teacher = (AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32) for _ in range(2))
    mask_id = add_mask_token(student, AutoTokenizer.from_pretrained(tiny_folder), seed=1)
    config = DistillConfig(k_max=3, regions=3, row_width=18, spacing=6, batch=3, dtype="float32", report_every=20)
    trainer = SelfDistiller(
        WholeStudent(student, teacher, student.parameters(), mask_id, set(), config), texts(), config
    )
    firsts = {}
    for step in range(60):
        batch = trainer.batch(step, 0)
        assert batch.real.all() and batch.predict.shape[1] == 3
        firsts.setdefault(batch.predict.shape[2], set()).update(batch.predict[:, 0, 0].tolist())
    assert firsts == {2: {0, 1, 2, 3, 4}, 3: {0, 1, 2, 3}}  # P = 18 / 3 - (k - 1) starts, the prompt's first token on


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["distill=paper", "distill.k_max=33"],
            r"distill.row_width': 160 must be a multiple of distill.regions=5, and",
        ),
        (["distill=paper", "distill.regions=7"], r"160 must be a multiple of distill.regions=7"),
        (["distill=paper", "distill.regions=-5"], r"160 must be a multiple of distill.regions=-5"),
        (["distill=short", "distill.regions=5"], r"'distill.regions': rows of regions train a whole model"),
    ],
)
def test_rows_that_cannot_be_are_refused_before_training(overrides, message):
    with pytest.raises(EntmtpError, match=message):
        compose(overrides)
    assert compose(["distill=paper"]).distill.regions == 5
