"""Terms of the training loss: z-loss, cross-entropy in chunks, load balancing of experts."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def shifted_targets(labels: Tensor, shift_labels: Tensor | None = None, ignore_index: int = IGNORED) -> Tensor:
    """Targets [B, T]: the label of the next token, `ignore_index` for the last; `shift_labels` are targets already."""
    if shift_labels is not None:
        return shift_labels
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def num_targets(targets: Tensor, num_items_in_batch: Any = None, ignore_index: int = IGNORED) -> Any:
    """What sums are divided by: the batch's number of targets under gradient accumulation, else this call's."""
    return (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch


def cross_entropy_and_z(logits: Tensor, targets: Tensor, with_z: bool, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Sums over targets of the cross-entropy and of logsumexp(logits)^2, in float32 (float64 for float64 logits)."""
    logits = logits.float() if logits.dtype != torch.float64 else logits
    cross_entropy = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return cross_entropy, squared_log_partition(logits, targets, ignore_index) if with_z else cross_entropy.new_zeros(
        ()
    )


def squared_log_partition(logits: Tensor, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """Sum over targets of logsumexp(logits)^2: the z-loss of PaLM (Chowdhery et al. 2022) before its coefficient."""
    squares = logits.logsumexp(dim=-1).square()
    return torch.where(targets != ignore_index, squares, 0.0).sum()


def chunked_loss(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    chunk_size: int,
    *,
    with_z: bool,
    ignore_index: int = IGNORED,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_and_z` of `head(hidden)` with the logits of at most `chunk_size` tokens in memory at once.

    Logits are recomputed in the backward pass. hidden [B, T, D], targets [B, T].
    """

    def one_chunk(rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy_and_z(head(rows), chosen, with_z, ignore_index)

    chunks = zip(hidden.flatten(0, -2).split(chunk_size), targets.flatten().split(chunk_size), strict=True)
    sums = [checkpoint(one_chunk, rows, chosen, use_reentrant=False) for rows, chosen in chunks]
    return torch.stack([s[0] for s in sums]).sum(), torch.stack([s[1] for s in sums]).sum()


def load_balancing_loss(expert_logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None) -> Tensor:
    """Load-balancing loss of Switch Transformer (Fedus et al. 2021, equations 4 to 6) over all sparse layers.

    Args:
        expert_logits: per layer [B * T, E].
        top_k: experts per token.
        attention_mask: [B, T] with zeros at padding, which does not count.
    """
    probabilities = torch.cat([logits.float().softmax(dim=-1) for logits in expert_logits])
    num_experts = probabilities.shape[-1]
    chosen = F.one_hot(probabilities.topk(top_k, dim=-1).indices, num_experts).sum(dim=1).float()
    if attention_mask is None:
        load, importance = chosen.mean(dim=0), probabilities.mean(dim=0)
    else:
        counts = attention_mask.flatten().to(probabilities).repeat(len(expert_logits)).unsqueeze(-1)
        load = (chosen * counts).sum(dim=0) / counts.sum()
        importance = (probabilities * counts).sum(dim=0) / counts.sum()
    return num_experts * (load * importance).sum()
