"""From a target's folder and its own texts to the folder of a multi-token model that any loader reads."""

import os
import shutil
import tempfile
from pathlib import Path

from entmtp.config import DistillConfig
from entmtp.distill.lora import add_lora, add_mask_row, merge
from entmtp.distill.mask_token import add_mask_token
from entmtp.distill.train import SelfDistiller
from entmtp.target.load import stop_ids

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def distil(
    base: str | Path, folder: str | Path, checkpoint: Path, rows: list[dict], config: DistillConfig, device: str
) -> list[dict]:
    """Train a student of the model in `base` on `rows` into `folder` (whole or not at all); the training's figures.

    An interrupted run resumes from `checkpoint`. The folder's config names `mtp_mask_id` and `mtp_k_max`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False) for _ in range(2)
    )
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    mask_id = add_mask_token(student, tokenizer, config.seed)
    parameters = list(student.parameters())
    if config.lora_rank:
        parameters = add_lora(student, config.lora_rank, config.lora_alpha, PROJECTIONS, config.seed)
        parameters.append(add_mask_row(student, mask_id))
    stops = stop_ids(teacher, tokenizer)
    trainer = SelfDistiller(student, teacher, parameters, mask_id, stops, rows, config, device)
    history = trainer.run(checkpoint)
    merge(student)
    student.config.mtp_k_max = config.k_max
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
        made = Path(work) / "model"
        student.to("cpu").save_pretrained(made)
        tokenizer.save_pretrained(made)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    return history
