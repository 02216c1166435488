"""A step package written by hand: the next byte from the byte before, through one hidden layer.

It obeys the contract of emitted packages, with a backward pass in closed form. The environment variables TEST_STOP_AT,
TEST_NAN_AT and TEST_PAUSE make a chosen step send SIGTERM to its own process, lose its loss, or take long.
"""

import os
import signal
import time

import torch
from torch import Tensor

from mgraph.runtime import v1 as rt

PARAMS = ("embed.weight", "hidden.weight", "head.weight")
IGNORED = -100

State = dict[str, Tensor]


def forward(state: State, tokens: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    embedded = state["embed.weight"][tokens.flatten()]
    hidden = torch.tanh(embedded @ state["hidden.weight"].t())
    logits = hidden @ state["head.weight"].t()
    kept = labels.flatten() != IGNORED
    targets = torch.where(kept, labels.flatten(), 0)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    picked = log_probabilities.gather(1, targets[:, None])[:, 0]
    return embedded, hidden, log_probabilities, kept, targets, -(picked * kept).sum()


def microbatch(state: State, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    embedded, hidden, log_probabilities, kept, targets, loss_sum = forward(state, tokens, labels)
    d_logits = log_probabilities.exp()
    d_logits.scatter_add_(1, targets[:, None], -torch.ones_like(d_logits[:, :1]))
    d_logits *= kept[:, None]
    d_hidden = (d_logits @ state["head.weight"]) * (1 - hidden**2)
    state["head.weight.grad"] += d_logits.t() @ hidden
    state["hidden.weight.grad"] += d_hidden.t() @ embedded
    state["embed.weight.grad"].index_add_(0, tokens.flatten(), d_hidden @ state["hidden.weight"])
    count = kept.sum()
    state["loss_sum"] += loss_sum
    state["count"] += count
    return loss_sum, count


def finish(state: State, lr: Tensor) -> tuple[Tensor, ...]:
    grads = [state[f"{name}.grad"] for name in PARAMS]
    disturb(int(state["step"] + state["skipped"]) + 1, state["loss_sum"])
    rt.all_reduce([*grads, state["loss_sum"], state["count"]], "dp")
    count = state["count"].float()
    torch._foreach_div_(grads, count)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
    finite = rt.all_finite([norm, state["loss_sum"]])
    state["step"] += finite
    state["skipped"] += ~finite
    means, squares = ([state[f"{name}.{kind}"] for name in PARAMS] for kind in ("exp_avg", "exp_avg_sq"))
    params = [state[name] for name in PARAMS]
    rt.adamw_(params, grads, means, squares, state["step"], lr, 0.9, 0.95, 1e-8, 0.1, finite=finite)
    loss, total = state["loss_sum"] / count, state["count"].clone()
    torch._foreach_zero_([*grads, state["loss_sum"], state["count"]])
    return loss, norm, total, state["skipped"]


def disturb(step: int, loss: Tensor) -> None:
    time.sleep(float(os.environ.get("TEST_PAUSE", "0")))
    if step == int(os.environ.get("TEST_STOP_AT", "0")) and os.environ.get("RANK", "0") == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    if step == int(os.environ.get("TEST_NAN_AT", "0")):
        loss.fill_(float("nan"))


def evaluate(state: State, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    *_, kept, _, loss_sum = forward(state, tokens, labels)
    return loss_sum, kept.sum()


def predict(state: State, tokens: Tensor) -> tuple[Tensor]:
    hidden = torch.tanh(state["embed.weight"][tokens] @ state["hidden.weight"].t())
    return (hidden @ state["head.weight"].t(),)
