"""From a target's folder and its own texts to the folder of a multi-token model that any loader reads."""

from pathlib import Path

from entmtp.config import DistillConfig
from entmtp.distill.adapter import PROJECTIONS, AdapterFormat, apply_adapter, save_adapter, save_multi_token
from entmtp.distill.lora import add_lora, add_mask_row
from entmtp.distill.mask_token import add_mask_token
from entmtp.distill.train import SelfDistiller
from entmtp.target.load import fingerprint, stop_ids


def distil(
    base: str | Path, folder: str | Path, checkpoint: Path, rows: list[dict], config: DistillConfig, device: str
) -> list[dict]:
    """Train a student of the model in `base` on `rows` into `folder` (whole or not at all); the training's figures.

    An interrupted run resumes from `checkpoint`. The folder's config names `mtp_mask_id` and `mtp_k_max`. With
    `lora_rank` the adapter comes to lie beside it (`<folder>.adapter`), and the folder is made from that very file.
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
    if config.lora_rank:
        adapter = Path(folder).with_name(f"{Path(folder).name}.adapter")
        made = AdapterFormat(fingerprint(Path(base)), config.lora_rank, config.lora_alpha, config.k_max, config.seed)
        save_adapter(student, adapter, made)
        apply_adapter(base, adapter, folder)
    else:
        save_multi_token(student, tokenizer, config.k_max, folder)
    return history
