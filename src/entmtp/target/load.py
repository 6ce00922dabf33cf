"""A loaded target: tokenizer, stop ids, forward (fused or generic) and its cache, behind one interface."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from entmtp.config import TargetConfig
from entmtp.errors import EntmtpError, first_line
from entmtp.io import read_json, weights_digest
from entmtp.target import llama
from entmtp.target.cache import KVCache
from entmtp.target.fetch import model_fingerprint
from entmtp.target.mask_adapter import MaskAdapter

# what transformers raises over a damaged config or weight file, a pickle that is no list of tensors among them
_UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError,
               pickle.UnpicklingError)  # fmt: skip
ATTENDING = {"full_attention", "sliding_attention", "chunked_attention", "attention"}  # layers that our cache serves
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Target:
    """The base model; it decides every token.

    `model` is a FusedLlama or a GenericForward: `hidden(tokens [n], positions [n], cache, mask) -> [n, hidden]`,
    `logits([n, hidden]) -> [n, vocab]`, `embed([n]) -> [n, hidden]`, `new_cache(capacity)`.
    """

    model: "llama.FusedLlama"
    tokenizer: object
    stop_ids: set[int]
    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: torch.dtype
    device: str
    fingerprint: str  # weights of another target have another one
    config: object  # the model's transformers config
    mask_id: int | None = None  # a token beyond the vocabulary that the model reads by its adapter

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def fused(self) -> "llama.FusedLlama":
        if not isinstance(self.model, llama.FusedLlama):
            raise EntmtpError("batched text generation needs the fused forward (target.forward=fused)")
        return self.model

    @property
    def mask_rows(self) -> int:
        """How often a tree's mask rows repeat: once a query group in the fused forward."""
        return self.model.groups

    def new_cache(self, capacity: int) -> KVCache:
        return self.model.new_cache(capacity)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Rows [n, hidden] of the vocabulary projection, for draft heads that share it."""
        return self.model.head_weight[token_ids]

    def prefill(self, token_ids: list[int], cache: KVCache) -> Tensor:
        """Run a prompt onto an empty cache and commit it. Returns hidden states [n, hidden]."""
        if not token_ids:
            raise EntmtpError("the prompt is empty: it must have at least one token")
        n = len(token_ids)
        tokens = torch.tensor(token_ids, device=self.device)
        hidden = self.model.hidden(tokens, torch.arange(n, device=self.device), cache, None)
        cache.length += n
        if torch.isnan(hidden[-1]).any():  # argmax over NaN is a token id like any other: text would come all the same
            raise EntmtpError(
                f"the target's hidden states are not numbers (NaN): its weights are damaged, or {self.dtype_name} "
                "overflows; try dtype=float32 or dtype=bfloat16"
            )
        return hidden

    def check_tokens(self, token_ids: list[int]) -> None:
        """Refuse ids that the model has no embedding for."""
        wrong = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise EntmtpError(
                f"token id {wrong} is outside the target's vocabulary of {self.vocab_size}: is this its own tokenizer?"
            )

    def check_room(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if prompt_tokens + max_new_tokens > self.max_positions:
            raise EntmtpError(
                f"the prompt has {prompt_tokens} tokens; with max_new_tokens={max_new_tokens} it exceeds the model's "
                f"{self.max_positions} positions: shorten it or lower decoding.max_new_tokens"
            )


def load_target(config: TargetConfig, folder: str | Path, dtype: str, device: str = "cpu") -> Target:
    """Load the model folder that `fetch_target` returned. Only safetensors or weights-only pickles are read."""
    model = load_model(folder, dtype, device)
    tokenizer = load_tokenizer(folder, config.chat_template)
    return wrap_model(model, tokenizer, config.forward, dtype, device, fingerprint=fingerprint(Path(folder)))


def load_model(folder: str | Path, dtype: str, device: str = "cpu"):
    """The transformers model of a folder, on the CPU; `device` is where it will be used."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if dtype not in DTYPES:
        raise EntmtpError(f"dtype={dtype}: choose one of {', '.join(DTYPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EntmtpError(f"device={device}: this torch build sees no GPU; use device=cpu")
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], trust_remote_code=False).eval()
    except _UNLOADABLE as error:
        raise EntmtpError(f"{folder}: not a loadable causal language model ({first_line(error)})") from error


def load_tokenizer(folder: str | Path, chat_template: str | None = None):
    """The tokenizer of a model folder, with another chat template if one is given."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing narrower for a file that it cannot read
        raise EntmtpError(f"{folder}: no loadable tokenizer ({first_line(error)})") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def wrap_model(
    model, tokenizer, forward: str, dtype: str, device: str, fingerprint: str, adapter: MaskAdapter | None = None
) -> Target:
    """A Target around a transformers causal LM. `forward`: auto takes the fused one where it is exact. `adapter`: with
    which the model reads masks; it is attached to it."""
    from entmtp.target.generic import GenericForward
    from entmtp.target.masked import MaskGeneric, MaskLlama

    config = model.config
    _refuse_unsupported(model)
    _refuse_changed_logits(config)
    fusable = llama.supports(config)
    if forward == "fused" and not fusable:
        raise EntmtpError(f"target.forward=fused does not cover model_type={config.model_type}: use generic")
    fused = fusable and forward != "generic"
    if adapter is None:
        made = (llama.FusedLlama if fused else GenericForward)(model, DTYPES[dtype], device)
    else:
        made = (MaskLlama if fused else MaskGeneric)(model, adapter, DTYPES[dtype], device)
    if not fused:
        _try_out(made, config)
    return Target(
        model=made,
        tokenizer=tokenizer,
        stop_ids=stop_ids(model, tokenizer),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        max_positions=_max_positions(config),
        dtype=DTYPES[dtype],
        device=device,
        fingerprint=fingerprint,
        config=config,
        mask_id=adapter and adapter.mask_id,
    )


def _refuse_unsupported(model) -> None:
    """Models of another make than a decoder with attention over one cache and a vocabulary head."""
    config = model.config
    kind = f"model_type={config.model_type} ({type(model).__name__})"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if getattr(head, "weight", None) is None:
        raise EntmtpError(f"{kind}: no vocabulary head; load it as a causal language model (AutoModelForCausalLM)")
    missing = [key for key in ("hidden_size", "max_position_embeddings") if getattr(config, key, None) is None]
    if missing:
        raise EntmtpError(f"{kind}: its config has no {missing[0]}: not supported")
    others = sorted(set(getattr(config, "layer_types", None) or []) - ATTENDING)
    if others:
        raise EntmtpError(
            f"{kind}: layers of type {', '.join(others)}: only attention over keys and values is supported"
        )


@torch.inference_mode()
def _try_out(forward, config) -> None:
    """Two tokens through a model that nothing is known of: what its layers keep may not be what our cache holds."""
    tokens = torch.tensor([0, 0], device=forward.device)
    try:
        forward.hidden(tokens, torch.arange(2, device=forward.device), forward.new_cache(2), None)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise EntmtpError(f"model_type={config.model_type}: not supported by the generic forward "
                          f"({first_line(error)})") from error  # fmt: skip


def _refuse_changed_logits(config) -> None:
    """Models that scale or cap their logits after the head: taking the head alone would give other probabilities."""
    for key, neutral in (("logits_scaling", 1), ("logit_scale", 1), ("final_logit_softcapping", None)):
        value = getattr(config, key, neutral)
        if value not in (neutral, None):
            raise EntmtpError(f"model_type={config.model_type} changes its logits ({key}={value}): not supported")


def _max_positions(config) -> int:
    """Longest context that the forwards compute exactly. Our masks know no sliding window, so it ends at the window: of
    all layers, or of GPT-Neo's local ones, which count cache rows; or at the end of an attention chunk. It ends too
    where longrope changes the rotation of whole forwards: a tree's deepest node would change its root's."""
    limits = [config.max_position_embeddings]
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        limits.append(config.sliding_window)
    if getattr(config, "attention_chunk_size", None):
        limits.append(config.attention_chunk_size)
    if "local" in (getattr(config, "attention_layers", None) or []):
        limits.append(config.window_size)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type", one.get("type")) == "longrope":
            original = one.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", limits[0]))
    return min(limits)


def stop_ids(model, tokenizer) -> set[int]:
    """All stop ids that model, generation config and tokenizer name."""
    found: set[int] = set()
    for value in (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


def fingerprint(folder: Path) -> str:
    """The model's shape and an identity of its weights: the pinned hash they came from, or a digest of their files."""
    marker = folder / "entmtp.json"
    made = read_json(marker) if marker.is_file() else {}
    if not isinstance(made, dict):
        raise EntmtpError(f"{marker}: not what entmtp wrote; remove the folder {folder}, it is made again")
    pinned = made.get("sha256")
    return f"{model_fingerprint(folder)}-{(pinned or weights_digest(folder))[:12]}"
