"""Self-distillation on the target's own texts: everything follows from the seed, and a killed run resumes."""

import random
import time
from dataclasses import asdict
from pathlib import Path

import torch

from entmtp.checkpoint import load_checkpoint, save_checkpoint
from entmtp.config import DistillConfig
from entmtp.distill.loss import Outcome
from entmtp.distill.packing import region
from entmtp.distill.student import Student
from entmtp.errors import EntmtpError
from entmtp.io import sha256_json

WINDOW = 16  # batches, among which texts are sorted by length


class SelfDistiller:
    """Trains a student's parameters on `rows`: texts {key, prompt_ids, tokens}. `base`: the fingerprint of the model
    that it starts from. A checkpoint is resumed on these very texts, from this very model, and no others."""

    def __init__(self, student: Student, rows: list[dict], config: DistillConfig, device: str = "cpu", base: str = ""):
        if config.k_max < 2:
            raise EntmtpError(f"config key 'distill.k_max': {config.k_max} must be at least 2")
        if config.checkpoint_every % config.report_every:
            raise EntmtpError(f"config key 'distill.checkpoint_every': {config.checkpoint_every} must be a multiple of "
                              f"distill.report_every={config.report_every}")  # fmt: skip
        student.to(device, getattr(torch, config.dtype))
        self.student, self.parameters, self.config, self.device = student, student.parameters, config, device
        # a text gives a row if its answer has room for the latest first block
        long = [row for row in rows if len(row["tokens"]) >= config.spacing]
        self.rows = sorted((row for row in long if len(row["prompt_ids"]) < config.max_length), key=_key)
        short, crowded = len(rows) - len(long), len(long) - len(self.rows)
        print(f"distill: {len(self.rows)} of {len(rows)} texts; left out: {short} with an answer of fewer than "
              f"distill.spacing={config.spacing} tokens, {crowded} with a prompt of distill.max_length="
              f"{config.max_length} tokens or more", flush=True)  # fmt: skip
        if not self.rows:
            raise EntmtpError(
                f"distillation: no text is left to learn from ({short} with fewer than {config.spacing} tokens of "
                f"answer: distill.spacing; {crowded} with a prompt of {config.max_length} tokens or more: "
                "distill.max_length)"
            )
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0, fused=True
        )
        texts = [[_key(row), row["prompt_ids"], row["tokens"]] for row in self.rows]
        self.identity = sha256_json([asdict(config), texts, student.mask_id, base])
        self.step, self.seconds = 0, 0.0
        self.epoch, self.order = -1, []

    def batch(self, step: int, part: int):
        """Micro-batch `part` of a step: k and the first block's shift are drawn once a step, as the paper does."""
        draw = random.Random(f"{self.config.seed}/{step}")
        c, k = self.config, draw.randint(2, self.config.k_max)
        shift = draw.randrange(region(c.row_width, c.regions, k) if c.regions else c.spacing)
        first = (step * self.config.accumulate + part) * self.config.batch
        texts, prompts = zip(*map(self.text, range(first, first + self.config.batch)), strict=True)
        return self.student.batch(texts, prompts, k, shift).to(self.device)

    def text(self, number: int) -> tuple[list[int], int]:
        """Text `number` of an endless sequence of seeded orders, cut to max_length, and its prompt's length."""
        epoch, place = divmod(number, len(self.rows))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.epoch_order(epoch)
        row = self.rows[self.order[place]]
        return (row["prompt_ids"] + row["tokens"])[: self.config.max_length], len(row["prompt_ids"])

    def epoch_order(self, epoch: int) -> list[int]:
        """A seeded order in which a batch's texts have like numbers of blocks, and lengths: padding is computed too."""
        draw = random.Random(f"{self.config.seed}/epoch/{epoch}")
        order, batch = list(range(len(self.rows))), self.config.batch
        draw.shuffle(order)
        batches = []
        for start in range(0, len(order), WINDOW * batch):
            window = sorted(order[start : start + WINDOW * batch], key=self._cost)
            batches += [window[i : i + batch] for i in range(0, len(window), batch)]
        odd = [batches.pop()] if len(batches[-1]) < batch else []  # last: elsewhere it would shift all after it
        draw.shuffle(batches)
        return [index for one in batches + odd for index in one]

    def _cost(self, index: int) -> tuple[int, int]:
        prompt, answer = (len(self.rows[index][key]) for key in ("prompt_ids", "tokens"))
        length = min(prompt + answer, self.config.max_length)
        return min((length - prompt) // self.config.spacing, self.config.blocks), length

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, constant, and over the last `cooldown` steps linear to zero."""
        rise = (step + 1) / max(1, self.config.warmup)
        fall = (self.config.steps - step) / max(1, self.config.cooldown)
        return self.config.learning_rate * min(1.0, rise, fall)

    def run(self, checkpoint: Path) -> list[dict]:
        """Train to the end, resuming from `checkpoint`; a row of figures every `report_every` steps."""
        history = self._resume(checkpoint)
        start = time.monotonic() - self.seconds
        recent: list[tuple[float, Outcome]] = []
        while self.step < self.config.steps:
            recent.append(self._update())
            self.seconds = time.monotonic() - start
            if self.step % self.config.report_every == 0 or self.step == self.config.steps:
                n = len(recent)
                history.append({
                    "step": self.step,
                    "seconds": round(self.seconds, 1),
                    "loss": round(sum(loss for loss, _ in recent) / n, 5),
                    "agreement": round(sum(outcome.agreement for _, outcome in recent) / n, 4),
                    "block": round(sum(outcome.block for _, outcome in recent) / n, 4),
                })  # fmt: skip
                print(f"distill: {history[-1]} of {self.config.steps} steps", flush=True)
                recent = []
            if self.step % self.config.checkpoint_every == 0:
                self._save(checkpoint, history)
        self._save(checkpoint, history)
        return history

    def _update(self) -> tuple[float, Outcome]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in range(self.config.accumulate):
            outcome = self.student.learn(self.batch(self.step, part), self.step < self.config.text_steps)
            (outcome.loss / self.config.accumulate).backward()
            total += float(outcome.loss.detach()) / self.config.accumulate
        if total != total or total == float("inf"):
            raise EntmtpError(f"distillation: loss is {total} at step {self.step}; lower distill.learning_rate")
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step()
        self.step += 1
        return total, outcome

    def _save(self, path: Path, history: list[dict]) -> None:
        state = {"parameters": [p.detach() for p in self.parameters], "optimizer": self.optimizer.state_dict(),
                 "step": self.step, "seconds": self.seconds, "history": history}  # fmt: skip
        save_checkpoint(path, self.identity, state)

    def _resume(self, path: Path) -> list[dict]:
        state = load_checkpoint(path, self.identity, self.device)
        if state is None:
            return []
        with torch.no_grad():
            for own, kept in zip(self.parameters, state["parameters"], strict=True):
                own.copy_(kept)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        print(f"distill: resuming at step {self.step}/{self.config.steps}", flush=True)
        return state["history"]


def _key(row: dict) -> str:
    return row["key"]
