"""A plugin's advantages and loss, on a tiny batch."""

from __future__ import annotations

from slime_core.bound import Bound
from slime_core.contract.examples import groups
from slime_core.errors import PluginError
from slime_core.options import Options
from slime_core.types import TrainBatch


async def check_advantages(bound: Bound, args: Options) -> str:
    """Two tensors, float32, one number a response token, finite where every sample has a reward.

    Raises:
        PluginError: otherwise.
    """
    import torch

    from slime_core.training.batch import TensorBatch

    whole = TrainBatch.from_samples([sample for group in groups() for sample in group])
    batch = TensorBatch.of(whole, torch.device("cpu"))
    tokens = batch.num_response_tokens
    generator = torch.Generator().manual_seed(0)
    batch.old_logprobs, batch.teacher_logprobs = -torch.rand(2, tokens, generator=generator)
    batch.values = torch.rand(tokens, generator=generator)
    batch.kl_penalty = torch.rand(tokens, generator=generator) / 10
    made = bound(
        args=args,
        batch=batch,
        round_rewards=torch.from_numpy(whole.rewards),
        round_group_index=torch.from_numpy(whole.group_index),
    )
    if not isinstance(made, tuple) or len(made) != 2:
        raise PluginError(f"plugin '{bound.name}': return a pair, advantages and returns, not {type(made).__name__}.")
    for what, tensor in zip(("advantages", "returns"), made, strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != (tokens,) or tensor.dtype != torch.float32:
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise PluginError(f"plugin '{bound.name}': {what} must be float32 [{tokens}], they are {got}.")
        if not torch.isfinite(tensor).all():
            raise PluginError(f"plugin '{bound.name}': {what} are not finite although every sample has a reward.")
    return f"advantages and returns for {tokens} tokens of uneven groups"


async def check_loss(bound: Bound, args: Options) -> str:
    """One finite loss a response token, through which the gradient reaches the log-probabilities; metrics likewise.

    Raises:
        PluginError: otherwise.
    """
    import torch

    from slime_core.training.batch import TensorBatch

    batch = TensorBatch.of(TrainBatch.from_samples(groups()[0]), torch.device("cpu"))
    tokens = batch.num_response_tokens
    generator = torch.Generator().manual_seed(0)
    batch.old_logprobs = -torch.rand(tokens, generator=generator)
    batch.advantages = torch.randn(tokens, generator=generator)
    logprobs = (-torch.rand(tokens, generator=generator)).requires_grad_()
    entropy = torch.rand(tokens, generator=generator)
    made = bound(args=args, batch=batch, logprobs=logprobs, entropy=entropy)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
        raise PluginError(f"plugin '{bound.name}': return a pair, the losses and a dict of metrics.")
    loss, metrics = made
    for what, tensor in {"the loss": loss, **{f"metric '{key}'": value for key, value in metrics.items()}}.items():
        if not isinstance(tensor, torch.Tensor) or tensor.shape != (tokens,) or not torch.isfinite(tensor).all():
            raise PluginError(
                f"plugin '{bound.name}': {what} must be a finite tensor [{tokens}], one a response token."
            )
    loss.sum().backward()
    if logprobs.grad is None or not logprobs.grad.any():
        raise PluginError(f"plugin '{bound.name}': no gradient reaches `logprobs`; do not detach them.")
    return f"a loss for each of {tokens} tokens, with gradient; metrics: {', '.join(metrics) or 'none'}"
