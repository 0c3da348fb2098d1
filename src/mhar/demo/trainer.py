"""Training of one variant: steps, held-out evaluation, metrics, and checkpoints from which it continues exactly."""

import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from mhar.demo.checkpoints import load_model, newest_checkpoint, restore, save_checkpoint
from mhar.demo.data import DemoData
from mhar.demo.memory import peak_bytes, state_bytes
from mhar.demo.metrics import MetricsFile
from mhar.demo.settings import DemoSettings
from mhar.models import MharForCausalLM

STATE = ("step", "timed_steps", "seconds", "peak_bytes")
EVALUATION_BATCH = 16


class VariantTrainer:
    """One variant in training.

    Args:
        name: the routing variant.
        model: at its initial state.
        data: shared by all variants: the token order and the held-out windows.
        folder: where metrics and checkpoints go; the newest checkpoint there, if any, is where training continues.
    """

    def __init__(
        self,
        name: str,
        model: MharForCausalLM,
        data: DemoData,
        settings: DemoSettings,
        folder: Path,
    ) -> None:
        self.name, self.folder, self.settings = name, folder, settings
        self.data = data
        self.device = torch.device(settings.device)
        self.step = 0
        self.timed_steps, self.seconds = 0, 0.0
        self._first_step = 0
        self.peak_bytes: int | None = None
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = newest_checkpoint(folder)
        self.model = model if checkpoint is None else load_model(checkpoint)
        self.model.to(self.device)  # pyright: ignore[reportArgumentType]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=settings.weight_decay,
        )
        if checkpoint is not None:
            self._restore(checkpoint)
        self.metrics = MetricsFile(folder / "metrics.jsonl", self.step)

    @property
    def tokens(self) -> int:
        return self.step * self.settings.tokens_per_step

    @property
    def tokens_per_s(self) -> float:
        """Training throughput, without evaluations, checkpoints and each session's first step, which warms up."""
        return self.timed_steps * self.settings.tokens_per_step / self.seconds if self.seconds else 0.0

    def train_step(self) -> float:
        """One optimizer step; returns its training loss in nats per token."""
        started = time.perf_counter()
        loss, gradient_norm = self._optimize(self.data.order.batch(self.step).to(self.device))
        value = loss.item()
        if self.step > self._first_step:
            self.timed_steps += 1
            self.seconds += time.perf_counter() - started
        self.step += 1
        self.metrics.append(
            kind="train",
            step=self.step,
            tokens=self.tokens,
            loss=value,
            learning_rate=self.settings.learning_rate_at(self.step - 1),
            gradient_norm=gradient_norm.item(),
            tokens_per_s=round(self.tokens_per_s, 1),
        )
        return value

    def _optimize(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate_at(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.gradient_clip)
        self.optimizer.step()
        return loss.detach(), norm

    def measure_memory(self) -> None:
        """Peak bytes of a training step: state held throughout, plus the peak of one forward and backward pass."""
        ids = self.data.order.batch(0).to(self.device)

        def forward_and_backward() -> None:
            self.model(input_ids=ids, labels=ids).loss.backward()

        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        transient = peak_bytes(forward_and_backward, self.device)
        self.optimizer.zero_grad(set_to_none=True)
        self.peak_bytes = transient + state_bytes(self.model, self.optimizer)

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """Mean loss of each held-out window, nats per token, float64 [count]; also written to the metrics."""
        self.model.eval()
        losses = torch.cat(
            [self._window_losses(ids.to(self.device)) for ids in self.data.held_out.split(EVALUATION_BATCH)]
        )
        self.metrics.append(
            kind="eval",
            step=self.step,
            tokens=self.tokens,
            heldout_loss=losses.mean().item(),
            window_losses=losses.tolist(),
        )
        return losses

    def _window_losses(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return losses.view(ids.shape[0], -1).double().mean(dim=1).cpu()

    @torch.no_grad()
    def sample(self) -> str:
        """The prompt and its continuation; depends on the weights and the seed alone."""
        self.model.eval()
        prompt = self.data.tokenizer(self.settings.prompt, return_tensors="pt").input_ids.to(self.device)
        with torch.random.fork_rng():
            torch.manual_seed(self.settings.seed)
            ids = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=self.settings.temperature,
                max_new_tokens=self.settings.sample_tokens,
            )
        return str(self.data.tokenizer.decode(ids[0], skip_special_tokens=True))

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one."""
        save_checkpoint(
            self.folder, self.model, self.optimizer, self.data.tokenizer, {n: getattr(self, n) for n in STATE}
        )

    def _restore(self, checkpoint: Path) -> None:
        for name, value in restore(checkpoint, self.optimizer).items():
            setattr(self, name, value)
        self._first_step = self.step
