"""Model averaging: every rank trains on its own and from time to time all take the mean of the parameters."""

from unisono import _C
from unisono.ddp import DistributedDataParallel
from unisono.group import resolve


class ParameterAverager:
    """Averages the parameters of `module` at every `period`-th `step()`, not before step number `warmup`.

    A wrapped module's step guard and comparison of replicas are for replicas that are equal: wrap it with
    `check_replicas=False`; the guard is switched off here. Not what DistributedDataParallel computes; see
    examples/model_averaging.py."""

    def __init__(self, module, period: int, warmup: int = 0, process_group=None):
        if isinstance(module, DistributedDataParallel):
            module.step_guard = False
            process_group = process_group or module.process_group
            module = module.module
        self._module = module
        self._averager = _C.ParameterAverager(list(module.named_parameters()), resolve(process_group), period, warmup)

    def step(self) -> bool:
        """To be called after each optimizer step, equally often on all ranks. Whether it averaged."""
        self._averager.follow(list(self._module.named_parameters()))
        return self._averager.step()

    def average(self) -> None:
        """Averages now. Collective."""
        self._averager.follow(list(self._module.named_parameters()))
        self._averager.average()
