"""Batched generation of the target's own text: slots of one big KV cache, refilled as sequences end.

Used for calibration texts and for head-training text. Every sequence keeps its own length, so the batch needs no
padding; a finished slot takes the next prompt at once.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from entmtp.decoding.sampling import Chooser
from entmtp.target.llama import FusedLlama


@dataclass
class Sequence:
    """One prompt and the text so far. `key` is the caller's name for it."""

    key: str
    prompt: list[int]
    chooser: Chooser
    tokens: list[int]


class BatchDecoder:
    """Decodes `batch` sequences at once with a fused Llama-family target (one row a sequence)."""

    def __init__(self, model: FusedLlama, batch: int, capacity: int, stop_ids: set[int], max_new_tokens: int):
        shape = (model.layers, 2, batch, model.kv_heads, capacity, model.head_dim)
        self.model, self.stop_ids, self.max_new_tokens, self.capacity = model, stop_ids, max_new_tokens, capacity
        self.data = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.slots: list[Sequence | None] = [None] * batch

    @torch.inference_mode()
    def run(self, source: Iterable[Sequence], progress: Callable[[int], None] = lambda n: None) -> Iterator[Sequence]:
        """Decode every sequence of `source`; yield each when it stops, in order of finishing."""
        source = iter(source)
        exhausted = False
        while True:
            for slot, sequence in enumerate(self.slots):
                while self.slots[slot] is None and not exhausted:
                    sequence = next(source, None)
                    if sequence is None:
                        exhausted = True
                    elif self._admit(slot, sequence):
                        yield sequence  # it stopped with its first token
            active = [slot for slot, sequence in enumerate(self.slots) if sequence is not None]
            if not active:
                return
            yield from self._step(active)
            progress(len(active))

    def _admit(self, slot: int, sequence: Sequence) -> bool:
        """Prefill one prompt into its slot and choose its first token. True: the sequence is already complete."""
        n = len(sequence.prompt)
        if n + self.max_new_tokens > self.capacity:
            raise ValueError(f"{sequence.key}: {n} prompt + {self.max_new_tokens} new tokens exceed {self.capacity}")
        cache = self.model.new_cache(n)
        tokens = torch.tensor(sequence.prompt, device=self.model.device)
        hidden = self.model.hidden(tokens, torch.arange(n, device=self.model.device), cache, None)
        self.data[:, :, slot, :, :n] = cache.data
        self.lengths[slot] = n
        sequence.tokens.extend(sequence.chooser(self.model.logits(hidden[-1:]), [n]))
        if self._finished(sequence):
            return True
        self.slots[slot] = sequence
        return False

    def _finished(self, sequence: Sequence) -> bool:
        return sequence.tokens[-1] in self.stop_ids or len(sequence.tokens) >= self.max_new_tokens

    def _step(self, active: list[int]) -> Iterator[Sequence]:
        rows = torch.tensor(active, device=self.model.device)
        sequences = [self.slots[slot] for slot in active]
        tokens = torch.tensor([sequence.tokens[-1] for sequence in sequences], device=self.model.device)
        logits = self.model.logits(self._hidden(tokens, rows))
        self.lengths[rows] += 1
        greedy = logits.argmax(dim=-1).tolist()
        for index, (slot, sequence) in enumerate(zip(active, sequences, strict=True)):
            token = greedy[index]
            if sequence.chooser.noise is not None:
                position = len(sequence.prompt) + len(sequence.tokens)
                token = sequence.chooser(logits[index : index + 1], [position])[0]
            sequence.tokens.append(token)
            if self._finished(sequence):
                self.slots[slot] = None
                yield sequence

    def _hidden(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """One token for each of the slots `rows` [b] -> final hidden states [b, hidden]."""
        m, b = self.model, len(tokens)
        positions = self.lengths[rows]
        longest = int(positions.max()) + 1
        every = len(rows) == len(self.slots)  # all slots active: no gather of the cache is needed
        mask = torch.zeros(b, 1, 1, longest, dtype=m.dtype, device=m.device)
        mask.masked_fill_(torch.arange(longest, device=m.device)[None, None, None] > positions[:, None, None, None],
                          torch.finfo(m.dtype).min)  # fmt: skip
        cos, sin, split = m.cos[positions], m.sin[positions], m.heads + m.kv_heads
        x = m.embed(tokens)
        for index, (norm1, qkv_linear, out_linear, norm2, up_linear, down_linear) in enumerate(m.blocks):
            qkv = qkv_linear(F.rms_norm(x, (m.hidden_size,), norm1, m.eps)).view(b, split + m.kv_heads, m.head_dim)
            qk = torch.addcmul(qkv[:, :split] * cos, qkv[:, :split].roll(m.head_dim // 2, -1), sin)
            kv = self.data[index]
            kv[0, rows, :, positions] = qk[:, m.heads :]
            kv[1, rows, :, positions] = qkv[:, split:]
            kv = kv[..., :longest, :] if every else kv[:, rows, :, :longest]
            q = qk[:, : m.heads].reshape(b, m.kv_heads, m.groups, m.head_dim)
            out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask)
            x = x + out_linear(out.reshape(b, -1))
            gate, up = up_linear(F.rms_norm(x, (m.hidden_size,), norm2, m.eps)).chunk(2, dim=-1)
            x = x + down_linear(F.silu(gate) * up)
        return F.rms_norm(x, (m.hidden_size,), m.final_norm, m.eps)
