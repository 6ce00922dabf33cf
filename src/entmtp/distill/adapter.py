"""What self-distillation with low-rank adapters changed: few numbers to ship, folded into the base model to run.

A folder of `adapter.safetensors` ("<layer>.down" [rank, in], "<layer>.up" [out, rank], "mask_row" [hidden], all in
float16) and `config.json` (AdapterFormat).
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from entmtp.config import from_plain
from entmtp.distill.lora import LoraLinear, MaskRow, add_lora, add_mask_row, merge
from entmtp.distill.mask_token import add_mask_token
from entmtp.errors import EntmtpError
from entmtp.io import atomic, folder_atomic, read_json, read_safetensors, write_json
from entmtp.target.load import fingerprint

TENSORS = "adapter.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class AdapterFormat:
    """`target`: fingerprint of the model that it changes. `k_max`: most tokens a forward that it was taught."""

    target: str
    rank: int
    alpha: float
    k_max: int
    seed: int = 0


def save_adapter(model: nn.Module, folder: str | Path, config: AdapterFormat) -> None:
    """Write the adapters and the mask row of a student. Values beyond float16's range are an error."""
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            tensors |= {f"{name}.down": module.down, f"{name}.up": module.up}
        elif isinstance(module, MaskRow):
            tensors["mask_row"] = module.row
    stored = {name: tensor.detach().cpu().to(torch.float16).contiguous() for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        if not torch.isfinite(tensor).all():
            raise EntmtpError(f"adapter: {name} does not fit float16 or is not finite")
    with atomic(Path(folder) / TENSORS) as partial:
        save_file(stored, partial, metadata={"format": "pt"})
    write_json(Path(folder) / "config.json", asdict(config))


def apply_adapter(base: str | Path, adapter: str | Path, folder: str | Path) -> None:
    """Fold the adapter into the model in `base`: an ordinary transformers folder, whole or not at all.

    Raises EntmtpError where the adapter is of another model or its tensors are not those of its format.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = from_plain(AdapterFormat, read_json(Path(adapter) / "config.json"))
    own = fingerprint(Path(base))
    if config.target != own:
        raise EntmtpError(
            f"{adapter}: made for the target {config.target}, not for {own}; choose that target, or train mtp=distilled"
        )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    mask_id = add_mask_token(model, tokenizer, config.seed)
    add_lora(model, config.rank, config.alpha, PROJECTIONS, config.seed)
    add_mask_row(model, mask_id)
    _fill(model, read_safetensors(Path(adapter) / TENSORS), adapter)
    merge(model)
    save_multi_token(model, tokenizer, config.k_max, folder)


def _fill(model: nn.Module, stored: dict[str, torch.Tensor], where: str | Path) -> None:
    left = dict(stored)
    for name, module in model.named_modules():
        parts = {"down": f"{name}.down", "up": f"{name}.up"} if isinstance(module, LoraLinear) else {}
        parts |= {"row": "mask_row"} if isinstance(module, MaskRow) else {}
        for part, key in parts.items():
            own, given = getattr(module, part), left.pop(key, None)
            if given is None or given.shape != own.shape or not torch.isfinite(given).all():
                found = "missing" if given is None else f"{list(given.shape)}, or not finite"
                raise EntmtpError(f"{where}: tensor {key} must be {list(own.shape)} and finite; it is {found}")
            with torch.no_grad():
                own.copy_(given)
    if left:
        raise EntmtpError(f"{where}: tensors that its format does not have: {', '.join(sorted(left)[:5])}")


def save_multi_token(model: nn.Module, tokenizer, k_max: int, folder: str | Path) -> None:
    """A multi-token model's folder, whole or not at all; its config names `mtp_mask_id` and `mtp_k_max`."""
    model.config.mtp_k_max = k_max
    with folder_atomic(folder) as made:
        model.to("cpu").save_pretrained(made)
        tokenizer.save_pretrained(made)
