"""Training of ATSKV's networks, all heads of all layers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvtailor.calibration.relevance_examples import Example
from kvtailor.errors import KvtailorError

__all__ = ["HIDDEN", "logits_of", "loss_of", "train"]

HIDDEN = 32
_RATE = 2e-2
_AT_ONCE = 4
_TINY = 1e-12


def train(
    examples: Sequence[Example], *, steps: int, state: int, advance: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Networks that predict each token's share of the future attention, as `score/atskv.py` reads them.

    The loss is the cross-entropy between the shares of the candidates' future attention and the softmax of the logits
    over them: the likelihood of attention that falls on tokens one by one. It cares for the order of the tokens and not
    for how much attention a head gives them together. The last bias then makes the exponential of a logit the expected
    attention beside an even share, so that the sigmoid is 1/2 there.

    Args:
        examples: at least one.
        steps: of Adam, each with `_AT_ONCE` examples.
        state: random state of weights and order.
        advance: called after each step.

    Returns:
        hidden (l, h, f, 32), hidden_bias (l, h, 32), out (l, h, 32), out_bias (l, h), float32.

    Raises:
        KvtailorError: there is no example, or the loss became no number.
    """
    if not examples:
        raise KvtailorError("there is nothing to learn from: give more text, or longer passages")
    layers, heads, _, features = examples[0].features.shape
    middle, scale = _moments(examples)
    generator = torch.Generator().manual_seed(state)
    hidden = torch.randn(layers, heads, features, HIDDEN, generator=generator, dtype=torch.float32) * features**-0.5
    out = torch.randn(layers, heads, HIDDEN, generator=generator, dtype=torch.float32) * HIDDEN**-0.5
    learned = [
        hidden,
        torch.zeros(layers, heads, HIDDEN, dtype=torch.float32),
        out,
        torch.zeros(layers, heads, dtype=torch.float32),
    ]
    for tensor in learned:
        tensor.requires_grad_()

    def networks() -> dict[str, Tensor]:
        # The features' scales go into the first matrix, so that a scorer needs no others.
        first = learned[0] / scale[..., None]
        bias = learned[1] - (middle[..., None] * first).sum(2)
        return {"hidden": first, "hidden_bias": bias, "out": learned[2], "out_bias": learned[3]}

    descent = torch.optim.Adam(learned, lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(descent, steps)
    with torch.enable_grad():
        for _ in range(steps):
            chosen = torch.randint(len(examples), (_AT_ONCE,), generator=generator).tolist()
            loss = torch.stack([loss_of(networks(), examples[each]) for each in chosen]).mean()
            descent.zero_grad()
            loss.backward()
            descent.step()
            schedule.step()
            advance()
    made = {name: tensor.detach().clone() for name, tensor in networks().items()}
    if not all(bool(tensor.isfinite().all()) for tensor in made.values()):
        raise KvtailorError("training ended with weights that are no numbers: give more text, or another random state")
    made["out_bias"] += _offset(made, examples)
    return made


def logits_of(networks: dict[str, Tensor], example: Example) -> Tensor:
    """(l, h, n) float32 before the sigmoid."""
    hidden = example.features.float() @ networks["hidden"] + networks["hidden_bias"][:, :, None]
    return (hidden.relu() @ networks["out"][..., None])[..., 0] + networks["out_bias"][..., None]


def loss_of(networks: dict[str, Tensor], example: Example) -> Tensor:
    """Cross-entropy of the candidates' shares, mean over layers and heads."""
    shares = example.mass / example.mass.sum(-1, keepdim=True).clamp_min(_TINY)
    return -(shares * logits_of(networks, example).log_softmax(-1)).sum(-1).mean()


def _moments(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """(l, h, f) mean and standard deviation of the features."""
    together = torch.cat([example.features for example in examples], 2).float()
    return together.mean(2), together.std(2).clamp_min(1e-3)


def _offset(networks: dict[str, Tensor], examples: Sequence[Example]) -> Tensor:
    """(l, h) what makes the exponential of the logits sum to the attention beside an even share, over all examples."""
    given = torch.stack([(example.mass * example.tokens).mean(-1) for example in examples]).mean(0)
    said = torch.stack([logits_of(networks, example).exp().mean(-1) for example in examples]).mean(0)
    return (given.clamp_min(_TINY) / said.clamp_min(_TINY)).log()
