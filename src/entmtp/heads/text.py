"""Batched generation of the target's own text, for calibration and for training heads.

With the fused forward: slots of one big KV cache, refilled as sequences end; every sequence keeps its own length, so
the batch needs no padding. With compiled layers (CPU) a prompt is prefilled as it enters. With tensor operators (GPU)
it is fed token by token along with the batch, because a prefill of its own would launch as many kernels as a step of
all slots. Any other transformers model: its own `generate`, in left-padded batches.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from entmtp.decoding.sampling import Chooser
from entmtp.errors import EntmtpError
from entmtp.target.cpu import BatchLayers
from entmtp.target.llama import FusedLlama

ROUND = 64  # cache rows are read in multiples of this: few shapes, aligned masks


@dataclass
class Draw:
    """Sampling at a temperature by inverting the distribution function at one uniform number a position.

    The number follows from seed, key and position alone, whatever else is in the batch. Hundreds of times cheaper than
    Gumbel noise over the vocabulary, which only exact coupling with a draft needs.
    """

    temperature: float
    seed: int
    key: str

    def uniform(self, position: int) -> float:
        """In [0, 1)."""
        digest = hashlib.blake2b(f"{self.seed}/{self.key}/{position}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53


@dataclass
class Sequence:
    """One prompt and the text so far. `key` is the caller's name for it.

    Greedy by default; `chooser` for choices coupled to a seed's noise, `draw` for plain sampling.
    """

    key: str
    prompt: list[int]
    tokens: list[int]
    chooser: Chooser | None = None
    draw: Draw | None = None

    def token(self, place: int) -> int:
        """Of the prompt and the text after it."""
        n = len(self.prompt)
        return self.prompt[place] if place < n else self.tokens[place - n]


class BatchDecoder:
    """Decodes `batch` sequences at once with a fused Llama-family target (one row a sequence)."""

    def __init__(self, model: FusedLlama, batch: int, capacity: int, stop_ids: set[int], max_new_tokens: int):
        shape = (model.layers, 2, batch, model.kv_heads, -(-capacity // ROUND) * ROUND, model.head_dim)
        self.model, self.stop_ids, self.max_new_tokens, self.capacity = model, stop_ids, max_new_tokens, capacity
        self.data = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.lengths = [0] * batch  # rows of each slot that the cache holds
        self.slots: list[Sequence | None] = [None] * batch
        self.compiled = None if model.cpu is None else BatchLayers(model.cpu, self.data)

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
        """Give one prompt its slot; prefill it and choose its first token if the layers are compiled.

        True: the sequence is already complete.
        """
        n = len(sequence.prompt)
        if n + self.max_new_tokens > self.capacity:
            raise ValueError(f"{sequence.key}: {n} prompt + {self.max_new_tokens} new tokens exceed {self.capacity}")
        self.lengths[slot] = 0
        if self.compiled is not None:
            cache = self.model.new_cache(n)
            tokens = torch.tensor(sequence.prompt, device=self.model.device)
            hidden = self.model.hidden(tokens, torch.arange(n, device=self.model.device), cache, None)
            self.data[:, :, slot, :, :n] = cache.data
            self.lengths[slot] = n
            sequence.tokens.extend(choose([sequence], self.model.logits(hidden[-1:])))
            if self._finished(sequence):
                return True
        self.slots[slot] = sequence
        return False

    def _finished(self, sequence: Sequence) -> bool:
        return sequence.tokens[-1] in self.stop_ids or len(sequence.tokens) >= self.max_new_tokens

    def _step(self, active: list[int]) -> Iterator[Sequence]:
        """Run the next token of every active slot, and choose one more for those whose prompt is through."""
        fed = [self.slots[slot].token(self.lengths[slot]) for slot in active]
        hidden = self._hidden(active, fed)
        ready = []
        for row, slot in enumerate(active):
            self.lengths[slot] += 1
            if self.lengths[slot] >= len(self.slots[slot].prompt):
                ready.append(row)
        if not ready:
            return
        chosen = [self.slots[active[row]] for row in ready]
        logits = self.model.logits(hidden if len(ready) == len(hidden) else hidden[ready])
        for row, sequence, token in zip(ready, chosen, choose(chosen, logits), strict=True):
            sequence.tokens.append(token)
            if self._finished(sequence):
                self.slots[active[row]] = None
                yield sequence

    def _hidden(self, active: list[int], fed: list[int]) -> Tensor:
        """One token for each active slot -> final hidden states [b, hidden]."""
        m, device = self.model, self.model.device
        if self.compiled is not None:
            positions = torch.tensor([self.lengths[slot] for slot in active])
            return self.compiled.run(m.embed(torch.tensor(fed)), torch.tensor(active), positions)
        # every slot takes part, idle ones with token 0: gathering the active slots' keys would copy the cache
        every = torch.zeros(len(self.slots), dtype=torch.long)
        every[active] = torch.tensor(fed)
        hidden = self._all_slots(every.to(device), torch.tensor(self.lengths, device=device), max(self.lengths) + 1)
        return hidden if len(active) == len(hidden) else hidden[active]

    def _all_slots(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """One token for every slot, with tensor operators: tokens and positions [slots] -> hidden states [slots, H]."""
        m, b = self.model, len(tokens)
        rows = torch.arange(b, device=m.device)
        longest = -(-longest // ROUND) * ROUND
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
            kv = kv[..., :longest, :]
            q = qk[:, : m.heads].reshape(b, m.kv_heads, m.groups, m.head_dim)
            out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask)
            x = x + out_linear(out.reshape(b, -1))
            gate, up = up_linear(F.rms_norm(x, (m.hidden_size,), norm2, m.eps)).chunk(2, dim=-1)
            x = x + down_linear(F.silu(gate) * up)
        return F.rms_norm(x, (m.hidden_size,), m.final_norm, m.eps)


def choose(sequences: list[Sequence], logits: Tensor) -> list[int]:
    """Next token of each sequence from logits [b, V]."""
    tokens = logits.argmax(dim=-1).tolist()
    drawn = [index for index, sequence in enumerate(sequences) if sequence.draw is not None]
    if drawn:
        found = _draw([sequences[index] for index in drawn], logits[drawn])
        for index, token in zip(drawn, found, strict=True):
            tokens[index] = token
    for index, sequence in enumerate(sequences):
        if sequence.chooser is not None and sequence.chooser.noise is not None:
            position = len(sequence.prompt) + len(sequence.tokens)
            tokens[index] = sequence.chooser(logits[index : index + 1], [position])[0]
    return tokens


def _draw(sequences: list[Sequence], logits: Tensor) -> list[int]:
    temperatures = [sequence.draw.temperature for sequence in sequences]
    uniform = [sequence.draw.uniform(len(sequence.prompt) + len(sequence.tokens)) for sequence in sequences]
    scale = torch.tensor(temperatures, device=logits.device)[:, None]
    below = (logits.float() / scale).softmax(dim=-1).cumsum(dim=-1)  # [b, V]
    u = torch.tensor(uniform, device=logits.device)[:, None] * below[:, -1:]  # rounding leaves the last short of 1
    return torch.searchsorted(below, u, right=True)[:, 0].clamp_max(logits.shape[-1] - 1).tolist()


class GenerateDecoder:
    """Batches with transformers' `generate`; every choice is ours (`choose`), so texts follow the same rules."""

    def __init__(self, model, batch: int, stop_ids: set[int], max_new_tokens: int):
        """`model` is a transformers causal LM."""
        self.model, self.batch, self.stop_ids, self.max_new_tokens = model, batch, stop_ids, max_new_tokens

    @torch.inference_mode()
    def run(self, source: Iterable[Sequence]) -> Iterator[Sequence]:
        """Decode every sequence of `source`, batch by batch."""
        source = iter(source)
        while sequences := list(islice(source, self.batch)):
            longest = max(len(sequence.prompt) for sequence in sequences)
            pads = [longest - len(sequence.prompt) for sequence in sequences]
            rows = [[0] * pad + sequence.prompt for pad, sequence in zip(pads, sequences, strict=True)]
            real = [[0] * pad + [1] * (longest - pad) for pad in pads]

            def force(ids: Tensor, scores: Tensor, sequences=sequences) -> Tensor:
                chosen = choose(sequences, scores)
                for sequence, token in zip(sequences, chosen, strict=True):
                    if not sequence.tokens or sequence.tokens[-1] not in self.stop_ids:
                        sequence.tokens.append(token)
                picked = torch.tensor(chosen, device=scores.device)[:, None]
                return torch.full_like(scores, -torch.inf).scatter(1, picked, 0.0)

            self._generate(rows, real, force)
            yield from sequences

    def _generate(self, rows: list[list[int]], real: list[list[int]], force: Callable) -> None:
        """The model's generation config is set aside: its penalties would change scores before `force` sees them."""
        from transformers import GenerationConfig

        device, own = self.model.device, self.model.generation_config
        self.model.generation_config = GenerationConfig()
        try:
            self.model.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(real, device=device),
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(self.stop_ids) or None,
                pad_token_id=0,
                logits_processor=[force],
            )
        finally:
            self.model.generation_config = own


def batch_decoder(target, batch: int, capacity: int, max_new_tokens: int) -> BatchDecoder | GenerateDecoder:
    """The fast way to make many texts with `target`. `capacity`: positions of the longest prompt and its text. Raises
    EntmtpError where the target has not so many."""
    if capacity > target.max_positions:
        raise EntmtpError(
            f"texts of up to {capacity} positions (prompt and {max_new_tokens} new tokens), but the target has "
            f"{target.max_positions}: lower corpus.max_prompt_tokens or task.max_prompt_tokens, or max_new_tokens"
        )
    if isinstance(target.model, FusedLlama):
        return BatchDecoder(target.model, batch, capacity, target.stop_ids, max_new_tokens)
    return GenerateDecoder(target.model.model, batch, target.stop_ids, max_new_tokens)
