"""Draft heads as modules: Medusa and Hydra bodies over a restricted draft vocabulary, and their native file format.

Head d (1-based) predicts the token d places after the root, from the target's hidden state h that chose the root:

- Medusa (arXiv 2401.10774): from h alone, residual SiLU blocks.
- Hydra (arXiv 2402.05109): from [h, embedding of the root, embeddings of the d - 1 drafted tokens since], oldest
  first: a linear layer to the hidden size, then residual SiLU blocks.
- Hydra++ (same paper): Hydra from the state of a prefix attention layer in h's place (`heads/prefix.py`).

The vocabulary projection of heads trained here is the target's own head, frozen and restricted to the draft vocabulary
(FR-Spec); it is taken from the target at load and not stored. A token outside the draft vocabulary is never drafted,
which costs speed only. Published heads keep projections of their own (`projection: own`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from entmtp.config import HeadsConfig
from entmtp.errors import EntmtpError
from entmtp.heads.prefix import PrefixFormat, make_prefix, reset_prefix
from entmtp.io import atomic, check_sha256, read_json, sha256_file, write_json

LinearLike = Callable[[Tensor], Tensor]


@dataclass
class HeadsFormat:
    """What `config.json` of the native format holds."""

    arch: str  # medusa | hydra
    depth: int
    blocks: int
    hidden_size: int
    draft_vocab: int
    target: str  # fingerprint of the target that the heads were trained for
    embedding_scale: float = 1.0  # hydra: embeddings are multiplied by this, so that inputs have comparable size
    first: str = "linear"  # hydra's first layer: linear | residual (published: res_connection(x) + SiLU(linear(x)))
    projection: str = "target"  # target: its head's rows of the draft vocabulary | own: one stored per head
    projection_bias: bool = False
    prefix: dict | None = None  # shape of the prefix attention layer (PrefixFormat); null: the heads see h itself
    format: str = "entmtp-heads-1"
    weights: str = ""  # SHA-256 of model.safetensors: other weights are another config.json, which rules follow from


def run_body(x: Tensor, first: LinearLike | None, blocks: Sequence[LinearLike]) -> Tensor:
    """x [..., in] -> [..., hidden]: an optional linear layer, then residual SiLU blocks."""
    if first is not None:
        x = first(x)
    for block in blocks:
        x = x + F.silu(block(x))
    return x


class ResidualFirst(nn.Module):
    """Published Hydra's first block: the input changes width, so its residual connection is a linear layer."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        self.res_connection = nn.Linear(inputs, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return residual_first(x, self.linear, self.res_connection)


def residual_first(x: Tensor, linear: LinearLike, res_connection: LinearLike) -> Tensor:
    return res_connection(x) + F.silu(linear(x))


class DraftHeads(nn.Module):
    """All heads of one kind. `token_map` [draft_vocab] gives the target's token id of each draft token."""

    def __init__(self, config: HeadsFormat, token_map: Tensor):
        super().__init__()
        self.config = config
        h = config.hidden_size
        self.register_buffer("token_map", token_map.to(torch.int32))
        hydra = config.arch == "hydra"
        first = ResidualFirst if config.first == "residual" else nn.Linear
        self.first = nn.ModuleList([first((d + 1) * h, h) for d in range(1, config.depth + 1)] if hydra else [])
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(h, h) for _ in range(config.blocks)) for _ in range(config.depth)
        )
        self.prefix = None if config.prefix is None else make_prefix(PrefixFormat(**config.prefix), h)
        own = config.depth if config.projection == "own" else 0
        self.projections = nn.ModuleList(
            nn.Linear(h, config.draft_vocab, bias=config.projection_bias) for _ in range(own)
        )

    def reset(self, seed: int, hidden_rms: float = 1.0) -> None:
        """Start every head as the target's own next-token prediction: h passes through, everything else is small.

        `hidden_rms` is the root mean square of the target's hidden states, which a prefix layer's norm must restore.
        """
        generator = torch.Generator().manual_seed(seed)
        for block in self.blocks.modules():
            if isinstance(block, nn.Linear):
                nn.init.zeros_(block.weight)
                nn.init.zeros_(block.bias)
        for linear in self.first:
            h = self.config.hidden_size
            nn.init.normal_(linear.weight, std=0.01, generator=generator)
            nn.init.zeros_(linear.bias)
            with torch.no_grad():
                linear.weight[:, :h] += torch.eye(h)
        if self.prefix is not None:
            reset_prefix(self.prefix, generator, hidden_rms)

    def features(self, depth: int, state: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Head `depth`'s features [n, hidden] from the state (h, or the prefix layer's output) [n, hidden] and `depth`
        embeddings [n, hidden], root's first."""
        if self.config.arch == "medusa":
            return run_body(state, None, self.blocks[depth - 1])
        scaled = [embedding * self.config.embedding_scale for embedding in embeddings[:depth]]
        return run_body(torch.cat([state, *scaled], dim=-1), self.first[depth - 1], self.blocks[depth - 1])


def save_heads(heads: DraftHeads, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
    """Write the native format. Values beyond the dtype's range are an error, never a silent infinity."""
    folder = Path(folder)
    state = {}
    for key, value in heads.state_dict().items():
        stored = value if key == "token_map" else value.to(dtype)
        if stored.is_floating_point() and not torch.isfinite(stored).all():
            raise EntmtpError(f"heads: {key} does not fit {dtype} or is not finite")
        state[key] = stored.contiguous()
    with atomic(folder / "model.safetensors") as partial:
        save_file(state, partial, metadata={"format": "pt"})
    weights = sha256_file(folder / "model.safetensors")
    write_json(folder / "config.json", {**asdict(heads.config), "weights": weights})


def _ill_value(config: HeadsFormat, vocab_size: int) -> str | None:
    """What is wrong with a config's values by themselves: files of others may hold anything."""

    def count(value: object, least: int, most: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    sound = {
        "depth": count(config.depth, 1, 64),
        "blocks": count(config.blocks, 0, 64),
        "hidden_size": count(config.hidden_size, 1, 1 << 20),
        "draft_vocab": count(config.draft_vocab, 1, vocab_size),
        "embedding_scale": isinstance(config.embedding_scale, int | float) and abs(config.embedding_scale) < 1e6,
        "first": config.first in ("linear", "residual"),
        "projection": config.projection in ("target", "own"),
        "projection_bias": isinstance(config.projection_bias, bool),
        "prefix": config.prefix is None or isinstance(config.prefix, dict),
    }
    if isinstance(config.prefix, dict):
        sizes = ("heads", "kv_heads", "head_dim", "intermediate_size", "max_positions")
        sound["prefix"] = all(count(config.prefix.get(key, 1), 1, 1 << 22) for key in sizes)
    wrong = [key for key, fits in sound.items() if not fits]
    return f"{wrong[0]}: {getattr(config, wrong[0])!r:.60}" if wrong else None


def load_kind(folder: str | Path, target, kind: HeadsConfig) -> DraftHeads:
    """`load_heads` of a configured kind, whose architecture they must have: one folder given for all kinds would time
    Hydra heads under Medusa's name."""
    heads = load_heads(folder, target)
    if heads.config.arch != kind.arch:
        raise EntmtpError(
            f"{folder}: these are {heads.config.arch} heads, but the configured kind '{kind.name}' is {kind.arch}; "
            f"give each kind its own (heads_overrides.{kind.name}.path=…), or leave out the policies that use "
            f"'{kind.name}'"
        )
    return heads


def load_heads(folder: str | Path, target) -> DraftHeads:
    """Read the native format and check that it fits `target`. Raises EntmtpError that says what does not fit."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise EntmtpError(f"{folder}: no heads here (config.json is missing); train some with `snakemake heads`")
    raw = read_json(folder / "config.json")
    try:
        config = HeadsFormat(**raw)
    except TypeError as error:
        raise EntmtpError(f"{folder / 'config.json'}: not a heads config ({error})") from error
    if config.format != HeadsFormat.format or config.arch not in ("medusa", "hydra"):
        raise EntmtpError(
            f"{folder / 'config.json'}: this version reads format '{HeadsFormat.format}' with arch medusa or hydra, "
            f"not format '{config.format}' with arch '{config.arch}'"
        )
    problem = _ill_value(config, target.vocab_size)
    if problem:
        raise EntmtpError(f"{folder / 'config.json'}: not a heads config ({problem})")
    if config.hidden_size != target.hidden_size:
        raise EntmtpError(
            f"{folder}: heads for hidden size {config.hidden_size}, but the target has {target.hidden_size}"
        )
    if config.target != target.fingerprint:
        raise EntmtpError(
            f"{folder}: heads were trained for target {config.target}, this target is {target.fingerprint}; "
            "draft heads fit one target only: train heads for this one"
        )
    check_sha256(
        folder / "model.safetensors", config.weights,
        "not the weights that its config.json was written with; copy both files again, or take the key 'weights' out "
        "of config.json if they were changed on purpose",
    )  # fmt: skip
    try:
        state = load_file(folder / "model.safetensors")
        heads = DraftHeads(config, torch.zeros(config.draft_vocab))
        heads.load_state_dict({key: v if key == "token_map" else v.float() for key, v in state.items()})
    except Exception as error:  # torch, safetensors and transformers have no common type for what does not fit
        raise EntmtpError(f"{folder / 'model.safetensors'}: does not match its config.json ({error})") from error
    known = PrefixFormat(**config.prefix).max_positions if config.prefix else target.max_positions
    if known < target.max_positions:
        raise EntmtpError(
            f"{folder}: the prefix layer knows {known} positions, but the target has {target.max_positions}"
        )
    for token in (int(heads.token_map.min()), int(heads.token_map.max())):
        if not 0 <= token < target.vocab_size:
            raise EntmtpError(f"{folder}: draft vocabulary names token {token}, but the target has {target.vocab_size}")
    if len(heads.token_map.unique()) < len(heads.token_map):  # siblings with one token: ranks would not decide
        raise EntmtpError(f"{folder}: the draft vocabulary names a token twice")
    if not all(torch.isfinite(parameter).all() for parameter in heads.parameters()):
        raise EntmtpError(f"{folder / 'model.safetensors'}: holds NaN or infinite weights")
    return heads.eval()
