"""Training of draft heads on a corpus: cross-entropy plus distillation from the target's top tokens.

Heads are judged by what they are for: the accept length of a fixed small tree, replayed on held-out texts after every
epoch. The best epoch is kept, and training stops when `patience` epochs brought nothing better.

Everything follows from the seed: the order of batches is a permutation keyed by (seed, epoch), so a run resumed from
a checkpoint sees the same batches as one that was never stopped.
"""

import hashlib
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from entmtp.checkpoint import load_checkpoint, save_checkpoint
from entmtp.config import HeadsConfig
from entmtp.errors import EntmtpError
from entmtp.heads.features import Features, draft_vocabulary
from entmtp.heads.held_out import HeldOut
from entmtp.heads.model import DraftHeads, HeadsFormat
from entmtp.heads.prefix import prefix_like, prefix_states
from entmtp.io import sha256_json
from entmtp.target.precision import resolved


class HeadsTrainer:
    def __init__(self, target, features: Features, config: HeadsConfig):
        self.config, self.train, self.device = config, config.train, target.device
        self.texts = features.text_numbers(held_out=False)  # in the order of their keys, which are hashes
        self.texts = self.texts[: math.ceil(self.train.text_share * len(self.texts))]
        self.index = features.positions(self.texts)
        if not len(self.index):
            raise EntmtpError("heads training: no position to train on; more or longer texts are needed")
        tokens = hashlib.sha256(features.tokens.numpy().tobytes()).hexdigest()
        token_map = draft_vocabulary(features, self.train.draft_vocab, target.vocab_size)
        self.features = features.to(target.device)
        self.index = self.index.to(features.tokens.device)
        self.to_draft = torch.full((target.vocab_size,), -1, dtype=torch.long)
        self.to_draft[token_map] = torch.arange(len(token_map))
        self.to_draft = self.to_draft.to(features.tokens.device)
        table = target.model.embed(torch.arange(target.vocab_size, device=target.device)).float()
        hidden_rms = float(features.hidden_at(self.index[:4096]).float().square().mean().sqrt())
        self.dtype = getattr(torch, resolved("auto", self.device))  # of the products; weights are float32
        self.table = table.to(self.dtype)
        self.projection = target.head_rows(token_map.to(target.device)).to(self.dtype)
        self.heads = DraftHeads(
            HeadsFormat(config.arch, config.depth, config.blocks, target.hidden_size, len(token_map),
                        target.fingerprint, embedding_scale=hidden_rms / float(table.square().mean().sqrt()),
                        prefix=asdict(prefix_like(target.config)) if config.prefix else None),
            token_map,
        )  # fmt: skip
        self.heads.reset(self.train.seed, hidden_rms)
        self.heads.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(),
            lr=self.train.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.train.weight_decay,
        )
        self.held = HeldOut(features, config)
        self.identity = sha256_json([asdict(config), target.fingerprint, tokens, len(self.index), str(self.dtype)])
        self.steps_per_epoch = max(1, len(self.index) // self.train.batch_positions)
        self.total_steps = self.steps_per_epoch * self.train.epochs
        self.step, self.seconds = 0, 0.0
        self.best: dict | None = None  # weights of the best epoch so far

    # --- batches ------------------------------------------------------------------------------------------------

    def batches(self, epoch: int) -> list[Tensor]:
        """The epoch's batches: positions, or numbers of whole texts when a prefix layer must attend over them."""
        generator = torch.Generator().manual_seed(self.train.seed * 1000 + epoch)
        if self.heads.prefix is not None:
            order = self.texts[torch.randperm(len(self.texts), generator=generator)]
            return list(order.tensor_split(min(self.steps_per_epoch, len(order))))
        order = self.index[torch.randperm(len(self.index), generator=generator)]
        return list(order.split(self.train.batch_positions))[: self.steps_per_epoch]

    def states(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [b] of a batch and what the heads start from there [b, H]."""
        if self.heads.prefix is None:
            return batch, self.features.hidden_at(batch).to(self.device)
        return self.text_states(batch)

    def text_states(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and states of whole texts."""
        index = self.features.positions(texts)
        if self.heads.prefix is None:
            return index, self.features.hidden_at(index).to(self.device)
        chosen = [self.features.texts[n] for n in texts.tolist()]
        hidden = pad_sequence([self.features.sequence(text) for text in chosen], batch_first=True).to(self.device)
        lengths = torch.tensor([text.rows for text in chosen], device=self.device)
        with self.precision():
            states = prefix_states(self.heads.prefix, hidden.float(), lengths)
        return index, torch.cat([row[t.prompt_rows : t.rows - 1] for row, t in zip(states, chosen, strict=True)])

    def logits(self, index: Tensor, states: Tensor, depth: int) -> Tensor:
        """Draft logits [b, draft_vocab] of head `depth` given the text's own tokens."""
        last = len(self.features.tokens) - 1  # positions near a text's end read another text: their loss is masked
        paths = [self.features.tokens[(index + d).clamp_max(last)].to(self.device) for d in range(depth)]
        embeddings = [F.embedding(tokens, self.table) for tokens in paths]
        states = states.to(torch.promote_types(states.dtype, self.dtype))  # features are kept in bfloat16
        with self.precision():
            return F.linear(self.heads.features(depth, states, embeddings).to(self.dtype), self.projection)

    def precision(self) -> torch.autocast:
        half = self.dtype == torch.bfloat16
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, enabled=half)

    # --- loss ---------------------------------------------------------------------------------------------------

    def loss(self, batch: Tensor) -> Tensor:
        """Mean over heads of (1 - w) * cross-entropy + w * soft cross-entropy with the target's top tokens.

        A token outside the draft vocabulary has no hard label; its probability is missing from the soft one.
        """
        index, states = self.states(batch)
        w, losses = self.train.distill_weight, []
        for depth in range(1, self.config.depth + 1):
            logp = self.logits(index, states, depth).float().log_softmax(dim=-1)
            label, soft_ids, soft_p, drafted = self.labels(index, depth)
            hard = F.nll_loss(logp, label, ignore_index=-1, reduction="sum") / (label >= 0).sum().clamp_min(1)
            soft = -(logp.gather(1, soft_ids.clamp_min(0)) * soft_p).sum() / drafted.sum().clamp_min(1)
            losses.append((1 - w) * hard + w * soft)
        return torch.stack(losses).mean()

    def labels(self, index: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """label [b] and soft_ids [b, k]: draft-vocabulary ids, -1 outside; soft_p [b, k], renormalised; which of the
        positions have a token `depth` places on."""
        f = self.features
        drafted = f.remaining[index] >= depth
        at = (index + depth).clamp_max(len(f.tokens) - 1)
        label = torch.where(drafted, self.to_draft[f.tokens[at]], -1)
        soft_ids = self.to_draft[f.top_ids[at].long()]
        soft_p = f.top_logp[at].float().exp() * (soft_ids >= 0) * drafted[:, None]
        soft_p = soft_p / soft_p.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        return tuple(tensor.to(self.device) for tensor in (label, soft_ids, soft_p, drafted))

    # --- the run ------------------------------------------------------------------------------------------------

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.train.warmup:
            return self.train.learning_rate * (step + 1) / self.train.warmup
        share = (step - self.train.warmup) / max(1, self.total_steps - self.train.warmup)
        return self.train.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    def run(self, checkpoint: Path) -> list[dict]:
        """Train to the end or until nothing improves, resuming from `checkpoint`; the heads are then the best epoch's.

        Returns held-out figures after each epoch.
        """
        history = self._resume(checkpoint)
        start = time.monotonic() - self.seconds
        while self.step < self.total_steps and not self._stalled(history):
            epoch, within = divmod(self.step, self.steps_per_epoch)
            batches = self.batches(epoch)
            for number in range(within, self.steps_per_epoch):
                self._update(batches[number % len(batches)])
                self.seconds = time.monotonic() - start
                if self.step % self.train.checkpoint_every == 0 and number + 1 < self.steps_per_epoch:
                    self._save(checkpoint, history)
            figures = self.held.figures(self)
            history.append({"epoch": epoch + 1, "step": self.step, "seconds": round(self.seconds, 1), **figures})
            print(f"train {self.config.name}: held out {history[-1]}", flush=True)
            if max(history, key=_quality) is history[-1]:
                self.best = {key: value.detach().cpu().clone() for key, value in self.heads.state_dict().items()}
            self._save(checkpoint, history)
        self.heads.load_state_dict(self.best)
        return history

    def _update(self, batch: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        if not torch.isfinite(loss):
            raise EntmtpError(f"heads training: loss is {loss.item()} at step {self.step}; lower learning_rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        if self.step % 50 == 0:
            rate = self.step / max(self.seconds, 1e-9)
            print(f"train {self.config.name}: step {self.step}/{self.total_steps}, loss {loss.item():.3f}, "
                  f"{rate:.2f} steps/s", flush=True)  # fmt: skip

    def _stalled(self, history: list[dict]) -> bool:
        best = max(range(len(history)), key=lambda row: _quality(history[row]), default=0)
        return len(history) - 1 - best >= self.train.patience

    def _save(self, path: Path, history: list[dict]) -> None:
        state = {"heads": self.heads.state_dict(), "best": self.best, "optimizer": self.optimizer.state_dict(),
                 "step": self.step, "seconds": self.seconds, "history": history}  # fmt: skip
        save_checkpoint(path, self.identity, state)

    def _resume(self, path: Path) -> list[dict]:
        state = load_checkpoint(path, self.identity, self.device)
        if state is None:
            return []
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        print(f"train {self.config.name}: resuming at step {self.step}/{self.total_steps}", flush=True)
        return state["history"]


def _quality(row: dict) -> float:
    return row["accept_length"]
