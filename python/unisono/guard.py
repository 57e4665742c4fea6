"""Refuses an optimizer step on gradients that no synchronisation has averaged: replicas would drift apart in silence."""

import weakref

from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono.errors import InvalidArgumentError


def guard_steps(ddp, ignored):
    """Looks at every optimizer's step for as long as `ddp` lives. Parameters named in `ignored` are never averaged."""
    reference = weakref.ref(ddp)
    ignored = frozenset(ignored)

    def before_step(optimizer, args, kwargs):
        wrapper = reference()
        if wrapper is None or wrapper._stepping or not wrapper.step_guard or wrapper.process_group.size() == 1:
            return
        if not wrapper.has_unsynchronised_gradients():
            return
        own = {id(parameter) for name, parameter in wrapper.module.named_parameters() if name not in ignored}
        for group in optimizer.param_groups:
            if any(id(p) in own and p.grad is not None for p in group["params"]):
                raise InvalidArgumentError(
                    f"{type(optimizer).__name__}.step() on gradients that were accumulated under no_sync and not "
                    f"averaged since: the replicas would drift apart. Run the last backward of the step outside of "
                    f"no_sync, or call sync_grads() before step(); DistributedDataParallel(..., step_guard=False) "
                    f"lets it pass.")

    weakref.finalize(ddp, register_optimizer_step_pre_hook(before_step).remove)
