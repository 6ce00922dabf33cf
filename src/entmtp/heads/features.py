"""Training features: one teacher-forced target pass over each text, written once per shard and memory-mapped after."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from entmtp.config import CorpusConfig
from entmtp.errors import EntmtpError
from entmtp.io import atomic

PACKED = 2048  # positions of one forward on a GPU, where short texts apiece would only launch kernels


@dataclass
class Text:
    """One text in the flat arrays: positions [start, end); its sequence's hidden states are rows [row, row + rows).

    Row `row + prompt_rows` chose the text's first token: the rows before it are the prompt's.
    """

    task: str
    held_out: bool
    start: int
    end: int
    row: int
    rows: int
    prompt_rows: int


class Features:
    """A corpus, flat over text positions t. Root token t was chosen from the hidden state in row `rows[t]`.

    tokens, remaining [T]: the text's token at t, and how many of the same text follow it · top_ids, top_logp [T, k]:
    the target's most probable tokens at t and their log-probabilities · hidden states [R, H] (bf16, prompts' included)
    stay on disk and are gathered by batch: (2 H) bytes a row are never in memory at once.
    """

    def __init__(self, shards: Sequence[dict]):
        self.hidden = [shard["hidden"] for shard in shards]
        self.row_bounds = torch.tensor([0] + [len(part) for part in self.hidden]).cumsum(0)
        self.tokens = torch.cat([shard["tokens"] for shard in shards]).long()
        self.top_ids = torch.cat([shard["top_ids"] for shard in shards])
        self.top_logp = torch.cat([shard["top_logp"] for shard in shards])
        self.texts: list[Text] = []
        start = 0
        for shard, first_row in zip(shards, self.row_bounds.tolist(), strict=False):
            row = first_row
            for task, held_out, prompt_rows, length in shard["texts"]:
                rows = prompt_rows + length
                self.texts.append(Text(task, held_out, start, start + length, row, rows, prompt_rows))
                start, row = start + length, row + rows
        lengths = [text.end - text.start for text in self.texts]
        self.remaining = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths])
        self.rows = torch.cat([torch.arange(text.row + text.prompt_rows, text.row + text.rows) for text in self.texts])

    def text_numbers(self, held_out: bool) -> Tensor:
        """Numbers of the training or of the held-out texts that have at least one token to draft."""
        found = [n for n, t in enumerate(self.texts) if t.held_out == held_out and t.end - t.start > 1]
        return torch.tensor(found, dtype=torch.long)

    def positions(self, texts: Tensor) -> Tensor:
        """Positions of the given texts that have a token to draft."""
        chosen = [self.texts[n] for n in texts.tolist()]
        found = torch.cat([torch.arange(text.start, text.end - 1) for text in chosen] or [torch.zeros(0).long()])
        return found.to(self.tokens.device)

    def hidden_at(self, index: Tensor) -> Tensor:
        """Hidden states [b, H] that chose the tokens at positions `index` [b]."""
        rows = self.rows[index]
        if len(self.hidden) == 1:
            return self.hidden[0][rows]
        out = torch.empty(len(rows), self.hidden[0].shape[1], dtype=self.hidden[0].dtype)
        owner = torch.bucketize(rows, self.row_bounds[1:], right=True)
        for shard in owner.unique().tolist():
            here = (owner == shard).nonzero()[:, 0]
            out[here] = self.hidden[shard][rows[here] - self.row_bounds[shard]]
        return out

    def sequence(self, text: Text) -> Tensor:
        """Hidden states [rows, H] of a whole sequence, prompt included."""
        shard = int(torch.bucketize(torch.tensor(text.row), self.row_bounds[1:], right=True))
        row = text.row - int(self.row_bounds[shard])
        return self.hidden[shard][row : row + text.rows]

    def to(self, device: str) -> "Features":
        """Everything on a GPU that has room for it three times over, so that batches are gathered there; else as is."""
        size = 2 * int(self.row_bounds[-1]) * self.hidden[0].shape[1]
        if not device.startswith("cuda") or 3 * size > torch.cuda.mem_get_info(device)[0]:
            return self
        self.hidden = [torch.cat([part.to(device) for part in self.hidden])]
        self.row_bounds = torch.tensor([0, len(self.hidden[0])])  # small and asked by number: it stays here
        for name in ("tokens", "top_ids", "top_logp", "remaining", "rows"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> "Features":
        return cls([read_shard(path) for path in paths])


TENSORS = ("hidden", "tokens", "top_ids", "top_logp")


def is_held_out(key: str, share: float) -> bool:
    """By a hash of the prompt (the key without its sample number): all texts of a prompt fall on one side."""
    return int(key.split("/")[0][:8], 16) / 2**32 < share


@torch.inference_mode()
def compute_shard(target, rows: list[dict], config: CorpusConfig, packed: int | None = None) -> dict:
    """Run the target once over every text {key, task, prompt_ids, tokens}: one shard for `Features`.

    `packed`: positions that share a forward; by default a text has its own on a CPU, and PACKED share one on a GPU.
    """
    if packed is None:
        packed = PACKED if target.device.startswith("cuda") else 1
    rows = sorted(rows, key=lambda row: row["key"])
    total = sum(len(row["tokens"]) for row in rows)
    total_rows = sum(len(sequence_of(row)) for row in rows)
    hidden = torch.empty(total_rows, target.hidden_size, dtype=torch.bfloat16)
    tokens = torch.tensor([token for row in rows for token in row["tokens"]], dtype=torch.int32)
    top_ids = torch.empty(total, config.top_k, dtype=torch.int32)
    top_logp = torch.empty(total, config.top_k, dtype=torch.float16)
    texts, start, at, said = [], 0, 0, 0
    for pack in packs(rows, packed):
        states = packed_states(target, [sequence_of(row) for row in pack])
        choosing, first = [], 0  # the rows that chose the texts' tokens
        for row in pack:
            end = first + len(sequence_of(row))
            choosing += range(end - len(row["tokens"]), end)
            first = end
            texts.append((row["task"], is_held_out(row["key"], config.held_out), len(row["prompt_ids"]) - 1,
                          len(row["tokens"])))  # fmt: skip
        end = start + len(choosing)
        logits = target.model.logits(states[torch.tensor(choosing, device=states.device)]).float()
        values, ids = top_k(logits, config.top_k)
        top_logp[start:end] = (values - logits.logsumexp(dim=-1, keepdim=True)).half()
        top_ids[start:end] = ids.int()
        hidden[at : at + len(states)] = states.bfloat16()
        start, at = end, at + len(states)
        if len(texts) - said >= 100:
            said = len(texts)
            print(f"features: {said}/{len(rows)} texts, {start} positions", flush=True)
    return {"hidden": hidden, "tokens": tokens, "top_ids": top_ids, "top_logp": top_logp, "texts": texts}


def sequence_of(row: dict) -> list[int]:
    """What the target reads of a text: the prompt and all tokens that are followed by another."""
    return row["prompt_ids"] + row["tokens"][:-1]


def packs(rows: list[dict], positions: int) -> Iterator[list[dict]]:
    """Texts in order, as many together as fit `positions`; at least one."""
    pack, size = [], 0
    for row in rows:
        length = len(sequence_of(row))
        if pack and size + length > positions:
            yield pack
            pack, size = [], 0
        pack.append(row)
        size += length
    if pack:
        yield pack


def packed_states(target, sequences: list[list[int]]) -> Tensor:
    """Hidden states [n, H] of sequences that go through the target side by side in one forward, each seeing itself."""
    lengths = [len(sequence) for sequence in sequences]
    cache = target.new_cache(sum(lengths))
    if len(sequences) == 1:
        return target.prefill(sequences[0], cache)
    device = target.device
    owner = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    order = torch.arange(len(owner), device=device)
    sees = (owner[:, None] == owner) & (order[:, None] >= order)
    mask = torch.zeros(sees.shape, dtype=target.dtype, device=device)
    mask = mask.masked_fill_(~sees, torch.finfo(target.dtype).min).repeat(target.mask_rows, 1)
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    return target.model.hidden(tokens, positions, cache, mask)


def top_k(logits: Tensor, k: int, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """`logits.topk(k)` over a large vocabulary: the k largest values lie in the k chunks with the largest maxima."""
    rows, size = logits.shape
    if size <= chunk * k:
        return logits.topk(k, dim=-1)
    padded = torch.nn.functional.pad(logits, (0, -size % chunk), value=-torch.inf).view(rows, -1, chunk)
    chunks = padded.amax(dim=-1).topk(k, dim=-1).indices  # [rows, k]
    inside = padded.gather(1, chunks[:, :, None].expand(-1, -1, chunk)).view(rows, -1)
    values, places = inside.topk(k, dim=-1)
    return values, chunks.gather(1, places // chunk) * chunk + places % chunk


def write_shard_features(shard: dict, path: str | Path) -> None:
    with atomic(path) as partial:
        save_file({name: shard[name] for name in TENSORS}, partial, metadata={"texts": json.dumps(shard["texts"])})


def read_shard(path: str | Path) -> dict:
    """A shard with its tensors memory-mapped."""
    try:
        with safe_open(path, framework="pt") as file:
            texts = [tuple(text) for text in json.loads(file.metadata()["texts"])]
            return {**{name: file.get_tensor(name) for name in TENSORS}, "texts": texts}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EntmtpError(f"{path}: not a file of training features ({error}); delete it and run again") from error


def draft_vocabulary(features: Features, size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent tokens of the training texts, most frequent first; ties go to the lower id."""
    train = torch.cat([features.tokens[text.start : text.end] for text in features.texts if not text.held_out])
    counts = torch.bincount(train, minlength=vocab_size)
    return torch.argsort(counts, descending=True, stable=True)[: min(size, vocab_size)]
