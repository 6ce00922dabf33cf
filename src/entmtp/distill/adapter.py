"""What self-distillation with low-rank adapters learned: few numbers to ship.

A folder of `adapter.safetensors` ("<layer>.down" [rank, in], "<layer>.up" [out, rank], "mask_row" [hidden], all in
float16) and `config.json` (AdapterFormat). Adapters that act on masks only are read beside the base model's weights
(`load_adapted`); others are folded into them (`apply_adapter`).
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from entmtp.config import TargetConfig, from_plain
from entmtp.distill.lora import LoraLinear, MaskRow, add_lora, add_mask_row, merge
from entmtp.distill.mask_token import add_mask_token
from entmtp.errors import EntmtpError
from entmtp.io import atomic, check_sha256, folder_atomic, read_json, read_safetensors, sha256_file, write_json
from entmtp.target.load import Target, fingerprint, load_model, load_tokenizer, wrap_model
from entmtp.target.mask_adapter import MaskAdapter

TENSORS = "adapter.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class AdapterFormat:
    """`target`: fingerprint of the model that it is for. `k_max`: most tokens a forward that it was taught.
    `masks_only`: real tokens are read by the base model's own weights."""

    target: str
    rank: int
    alpha: float
    k_max: int
    seed: int = 0
    masks_only: bool = False
    weights: str = ""  # SHA-256 of adapter.safetensors: another adapter is another config.json, which rules follow from


def save_adapter(tensors: dict[str, torch.Tensor], folder: str | Path, config: AdapterFormat) -> None:
    """Write an adapter's folder. Values beyond float16's range are an error."""
    stored = {name: tensor.detach().cpu().to(torch.float16).contiguous() for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        if not torch.isfinite(tensor).all():
            raise EntmtpError(f"adapter: {name} does not fit float16 or is not finite")
    with atomic(Path(folder) / TENSORS) as partial:
        save_file(stored, partial, metadata={"format": "pt"})
    weights = sha256_file(Path(folder) / TENSORS)
    write_json(Path(folder) / "config.json", {**asdict(config), "weights": weights})


def lora_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters and the mask row of a student."""
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            tensors |= {f"{name}.down": module.down, f"{name}.up": module.up}
        elif isinstance(module, MaskRow):
            tensors["mask_row"] = module.row
    return tensors


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / TENSORS).is_file()


def read_format(base: str | Path, adapter: str | Path) -> AdapterFormat:
    """An adapter's config.json. Raises EntmtpError where it is of another model than the one in `base`."""
    config = from_plain(AdapterFormat, read_json(Path(adapter) / "config.json"))
    own = fingerprint(Path(base))
    if config.target != own:
        raise EntmtpError(
            f"{adapter}: made for the target {config.target}, not for {own}; choose that target, or train mtp=distilled"
        )
    check_sha256(Path(adapter) / TENSORS, config.weights,
                 "not the adapter that its config.json was written with; copy both files again")  # fmt: skip
    return config


def load_adapted(
    config: TargetConfig, base: str | Path, adapter: str | Path, dtype: str, device: str = "cpu"
) -> Target:
    """The model in `base` with an adapter that acts on masks only: a target whose `mask_id` it names."""
    made = read_format(base, adapter)
    model = load_model(base, dtype, device)
    masks = MaskAdapter(model, made.rank, made.alpha, made.seed)
    _fill(masks.tensors(), read_safetensors(Path(adapter) / TENSORS), adapter)
    tokenizer = load_tokenizer(base, config.chat_template)
    identity = f"{made.target}-{(made.weights or sha256_file(Path(adapter) / TENSORS))[:12]}"
    return wrap_model(model, tokenizer, config.forward, dtype, device, identity, masks)


def use_adapter(base: str | Path, adapter: str | Path, folder: str | Path) -> None:
    """Put into `folder` what `load_multi_token` reads for the model in `base` and this adapter."""
    if not read_format(base, adapter).masks_only:
        apply_adapter(base, adapter, folder)
        return
    with folder_atomic(folder) as made:
        for name in (TENSORS, "config.json"):
            shutil.copyfile(Path(adapter) / name, Path(made) / name)


def apply_adapter(base: str | Path, adapter: str | Path, folder: str | Path) -> None:
    """Fold the adapter into the model in `base`: an ordinary transformers folder, whole or not at all.

    Raises EntmtpError where the adapter is of another model, acts on masks only, or its tensors are not those of its
    format.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = read_format(base, adapter)
    if config.masks_only:
        raise EntmtpError(f"{adapter}: acts on masks only, so it cannot be folded into the weights that all tokens use")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    mask_id = add_mask_token(model, tokenizer, config.seed)
    add_lora(model, config.rank, config.alpha, PROJECTIONS, config.seed)
    add_mask_row(model, mask_id)
    _fill(lora_tensors(model), read_safetensors(Path(adapter) / TENSORS), adapter)
    merge(model)
    save_multi_token(model, tokenizer, config.k_max, folder)


def _fill(own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], where: str | Path) -> None:
    for key, tensor in own.items():
        given = stored.get(key)
        if given is None or given.shape != tensor.shape or not torch.isfinite(given).all():
            found = "missing" if given is None else f"{list(given.shape)}, or not finite"
            raise EntmtpError(f"{where}: tensor {key} must be {list(tensor.shape)} and finite; it is {found}")
        with torch.no_grad():
            tensor.copy_(given)
    unknown = sorted(set(stored) - set(own))
    if unknown:
        raise EntmtpError(f"{where}: tensors that its format does not have: {', '.join(unknown[:5])}")


def save_multi_token(model: nn.Module, tokenizer, k_max: int, folder: str | Path) -> None:
    """A multi-token model's folder, whole or not at all; its config names `mtp_mask_id` and `mtp_k_max`."""
    model.config.mtp_k_max = k_max
    with folder_atomic(folder) as made:
        model.to("cpu").save_pretrained(made)
        tokenizer.save_pretrained(made)
        config = Path(made) / "config.json"  # rules follow from it, so other weights must be another one
        weights = [sha256_file(path) for path in sorted(Path(made).glob("*.safetensors"))]
        write_json(config, {**read_json(config), "mtp_weights": weights})
