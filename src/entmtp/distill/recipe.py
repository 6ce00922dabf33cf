"""From a target's folder and its own texts to a multi-token model: an adapter, or a folder that any loader reads."""

from dataclasses import replace
from pathlib import Path

from entmtp.config import DistillConfig
from entmtp.distill.adapter import (
    PROJECTIONS,
    AdapterFormat,
    apply_adapter,
    lora_tensors,
    save_adapter,
    save_multi_token,
)
from entmtp.distill.lora import add_lora, add_mask_row
from entmtp.distill.mask_student import MaskStudent
from entmtp.distill.mask_token import add_mask_token
from entmtp.distill.student import WholeStudent
from entmtp.distill.train import SelfDistiller
from entmtp.errors import EntmtpError
from entmtp.target.load import fingerprint, load_model, load_tokenizer, stop_ids
from entmtp.target.mask_adapter import MaskAdapter
from entmtp.target.precision import resolved


def distil(
    base: str | Path, folder: str | Path, checkpoint: Path, rows: list[dict], config: DistillConfig, device: str
) -> list[dict]:
    """Train on `rows` what makes the model in `base` a multi-token one, into `folder`; the training's figures.

    An interrupted run resumes from `checkpoint`. With `masks_only` the folder is an adapter's. Otherwise it is a
    model's (whole or not at all), whose config names `mtp_mask_id` and `mtp_k_max`; with `lora_rank` the adapter that
    was folded into it comes to lie beside it (`<folder>.adapter`).
    """
    config = replace(config, dtype=resolved(config.dtype, device))
    if config.masks_only:
        return _distil_masks(base, folder, checkpoint, rows, config, device)
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
    whole = WholeStudent(student, teacher, parameters, mask_id, stops, config)
    history = SelfDistiller(whole, rows, config, device, fingerprint(Path(base))).run(checkpoint)
    if config.lora_rank:
        adapter = Path(folder).with_name(f"{Path(folder).name}.adapter")
        save_adapter(lora_tensors(student), adapter, _format(base, config))
        apply_adapter(base, adapter, folder)
    else:
        save_multi_token(student, tokenizer, config.k_max, folder)
    return history


def _distil_masks(
    base: str | Path, folder: str | Path, checkpoint: Path, rows: list[dict], config: DistillConfig, device: str
) -> list[dict]:
    if config.lora_rank < 1:
        raise EntmtpError("config key 'distill.masks_only': the weights stay, so distill.lora_rank must be above 0")
    model = load_model(base, config.dtype, device)
    adapter = MaskAdapter(model, config.lora_rank, config.lora_alpha, config.seed)
    student = MaskStudent(model, adapter, stop_ids(model, load_tokenizer(base)), config)
    history = SelfDistiller(student, rows, config, device, fingerprint(Path(base))).run(checkpoint)
    save_adapter(adapter.tensors(), folder, _format(base, config))
    return history


def _format(base: str | Path, config: DistillConfig) -> AdapterFormat:
    return AdapterFormat(fingerprint(Path(base)), config.lora_rank, config.lora_alpha, config.k_max, config.seed,
                         config.masks_only)  # fmt: skip
