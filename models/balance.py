"""Balance of experts without a loss, in eager: selection biases of routers, moved after every step by the load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .router import Router


class Balancer:
    """Counts the choices of all routers that have a selection bias while the model trains.

    balancer = Balancer(model, rate=1e-3)
    ...                       # forward and backward of each microbatch
    optimizer.step()
    balancer.step()           # bias of e += rate * sign(mean load - load of e), and the counts begin again
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        self.rate = rate
        self.loads: dict[Router, Tensor] = {}
        for module in model.modules():
            if isinstance(module, Router) and module.selection_bias is not None:
                self.loads[module] = torch.zeros(module.config.num_experts, dtype=torch.int64)
                module.register_forward_hook(self._count)

    def _count(self, router: Router, _: tuple[Tensor], made: tuple[Tensor, Tensor, Tensor | None]) -> None:
        if router.training:
            self.loads[router] += (
                made[1].flatten().bincount(minlength=len(self.loads[router]) + 1)[:-1]
            )  # the last: dropped

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by the counts since the last step."""
        for router, load in self.loads.items():
            assert router.selection_bias is not None, "only routers with a bias are counted"
            router.selection_bias += self.rate * torch.sign(load.double().mean() - load).to(router.selection_bias)
            load.zero_()
