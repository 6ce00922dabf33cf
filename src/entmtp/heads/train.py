"""Training of draft heads on the target's own text: cross-entropy plus distillation from the target's top tokens.

Everything follows from the seed: the order of batches is a permutation keyed by (seed, epoch), so a run resumed from
a checkpoint sees the same batches as one that was never stopped.
"""

import hashlib
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from entmtp.config import HeadsConfig
from entmtp.errors import EntmtpError
from entmtp.heads.features import Features, draft_vocabulary
from entmtp.heads.model import DraftHeads, HeadsFormat
from entmtp.io import atomic, sha256_json


@dataclass
class Batch:
    """Positions [b] of one head's loss: inputs and labels, all texts long enough for this depth."""

    hidden: Tensor  # [b, H]
    embeddings: list[Tensor]  # depth x [b, H]
    label: Tensor  # [b] draft-vocabulary id, -1 outside
    soft_ids: Tensor  # [b, k] draft-vocabulary ids, -1 outside
    soft_p: Tensor  # [b, k] target probabilities, zero outside, renormalised


class HeadsTrainer:
    def __init__(self, target, features: Features, config: HeadsConfig):
        self.target, self.features, self.config, self.train = target, features, config, config.train
        self.index = features.positions(held_out=False)
        self.held = features.positions(held_out=True)
        if not len(self.index):
            raise EntmtpError("heads training: no position to train on; more or longer texts are needed")
        token_map = draft_vocabulary(features, self.train.draft_vocab, target.vocab_size)
        self.to_draft = torch.full((target.vocab_size,), -1, dtype=torch.long)
        self.to_draft[token_map] = torch.arange(len(token_map))
        table = target.model.embed(torch.arange(target.vocab_size, device=target.device)).float()
        scale = float(features.hidden[:4096].float().square().mean().sqrt() / table.square().mean().sqrt())
        self.table = table.bfloat16()
        self.projection = target.head_rows(token_map.to(target.device)).bfloat16()
        self.heads = DraftHeads(
            HeadsFormat(config.arch, config.depth, config.blocks, target.hidden_size, len(token_map),
                        target.fingerprint, embedding_scale=scale),
            token_map,
        )  # fmt: skip
        self.heads.reset(self.train.seed)
        self.optimizer = torch.optim.AdamW(
            self.heads.parameters(),
            lr=self.train.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=self.train.weight_decay,
        )
        self.identity = sha256_json([asdict(config), target.fingerprint, hashlib.sha256(
            features.tokens.numpy().tobytes()).hexdigest(), len(self.index)])  # fmt: skip
        self.steps_per_epoch = max(1, len(self.index) // self.train.batch_positions)
        self.total_steps = self.steps_per_epoch * self.train.epochs
        self.step = 0
        self.seconds = 0.0

    def batch(self, index: Tensor, depth: int) -> Batch:
        f = self.features
        index = index[f.remaining[index] >= depth]
        label = self.to_draft[f.tokens[index + depth]]
        soft_ids = self.to_draft[f.top_ids[index + depth].long()]
        soft_p = f.top_logp[index + depth].exp() * (soft_ids >= 0)
        soft_p = soft_p / soft_p.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        embeddings = [F.embedding(f.tokens[index + d], self.table) for d in range(depth)]
        return Batch(f.hidden[index], embeddings, label, soft_ids, soft_p)

    def logits(self, batch: Batch, depth: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.heads.features(depth, batch.hidden, batch.embeddings)
            return F.linear(x.bfloat16(), self.projection)

    def loss(self, index: Tensor) -> Tensor:
        """Mean over heads of (1 - w) * cross-entropy + w * soft cross-entropy with the target's top tokens."""
        losses = []
        for depth in range(1, self.config.depth + 1):
            batch = self.batch(index, depth)
            logp = self.logits(batch, depth).float().log_softmax(dim=-1)
            known = (batch.label >= 0).sum().clamp_min(1)
            hard = F.nll_loss(logp, batch.label, ignore_index=-1, reduction="sum") / known
            soft = -(logp.gather(1, batch.soft_ids.clamp_min(0)) * batch.soft_p).sum(dim=-1).mean()
            losses.append((1 - self.train.distill_weight) * hard + self.train.distill_weight * soft)
        return torch.stack(losses).mean()

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.train.warmup:
            return self.train.learning_rate * (step + 1) / self.train.warmup
        share = (step - self.train.warmup) / max(1, self.total_steps - self.train.warmup)
        return self.train.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    def run(self, checkpoint: Path) -> list[dict]:
        """Train to the end, resuming from `checkpoint`. Returns held-out figures after each epoch."""
        history = self._resume(checkpoint)
        start = time.monotonic() - self.seconds
        while self.step < self.total_steps:
            epoch, within = divmod(self.step, self.steps_per_epoch)
            generator = torch.Generator().manual_seed(self.train.seed * 1000 + epoch)
            order = self.index[torch.randperm(len(self.index), generator=generator)]
            for at in range(within, self.steps_per_epoch):
                chunk = order[at * self.train.batch_positions : (at + 1) * self.train.batch_positions]
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate(self.step)
                self.optimizer.zero_grad(set_to_none=True)
                loss = self.loss(chunk)
                if not torch.isfinite(loss):
                    raise EntmtpError(f"heads training: loss is {loss.item()} at step {self.step}; lower learning_rate")
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
                self.optimizer.step()
                self.step += 1
                self.seconds = time.monotonic() - start
                if self.step % 50 == 0:
                    rate = self.step / self.seconds
                    print(f"train {self.config.name}: step {self.step}/{self.total_steps}, loss {loss.item():.3f}, "
                          f"{rate:.2f} steps/s", flush=True)  # fmt: skip
                if self.step % self.train.checkpoint_every == 0 and at + 1 < self.steps_per_epoch:
                    self._save(checkpoint, history)
            history.append(
                {"epoch": epoch + 1, "step": self.step, "seconds": round(self.seconds, 1), **self.held_out()}
            )
            print(f"train {self.config.name}: held out {history[-1]}", flush=True)
            self._save(checkpoint, history)
        return history

    @torch.inference_mode()
    def held_out(self, chunk: int = 2048) -> dict:
        """Held-out top-1 and top-5 per head, tokens outside the draft vocabulary counted as misses."""
        hits = torch.zeros(self.config.depth, 2)
        counts = torch.zeros(self.config.depth)
        for part in self.held.split(chunk):
            for depth in range(1, self.config.depth + 1):
                batch = self.batch(part, depth)
                if not len(batch.label):
                    continue
                top = self.logits(batch, depth).topk(5, dim=-1).indices
                match = top == batch.label[:, None]
                hits[depth - 1, 0] += match[:, 0].sum()
                hits[depth - 1, 1] += match.any(dim=-1).sum()
                counts[depth - 1] += len(batch.label)
        rates = (hits / counts.clamp_min(1)[:, None]).tolist()
        return {
            "positions": len(self.held),
            "top1": [round(r[0], 4) for r in rates],
            "top5": [round(r[1], 4) for r in rates],
        }

    def _save(self, path: Path, history: list[dict]) -> None:
        state = {"heads": self.heads.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                 "seconds": self.seconds, "history": history, "identity": self.identity}  # fmt: skip
        with atomic(path) as partial:
            torch.save(state, partial)

    def _resume(self, path: Path) -> list[dict]:
        if not Path(path).exists():
            return []
        state = torch.load(path, weights_only=True)
        if state["identity"] != self.identity:
            return []  # another text or configuration: start afresh
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        print(f"train {self.config.name}: resuming at step {self.step}/{self.total_steps}", flush=True)
        return state["history"]
