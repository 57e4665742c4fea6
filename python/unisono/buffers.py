"""The wrapper's buffers: policies, the user's hook, and bringing them to one state by hand."""

from __future__ import annotations

import weakref

from unisono import _C


def policy_of(name: str) -> _C.BufferPolicy:
    try:
        return {"rank0": _C.BufferPolicy.rank0, "mean": _C.BufferPolicy.mean}[name]
    except (KeyError, TypeError):
        raise ValueError(f"DistributedDataParallel(buffer_policy={name!r}): it may be 'rank0' or 'mean'") from None


class BufferMethods:
    """What `DistributedDataParallel` does with buffers beside bringing them before a forward."""

    def sync_state(self) -> None:
        """Brings the buffers of all ranks to one state now, by `buffer_policy` or the hook: after it every rank may
        save or evaluate, and `replicas_identical()` holds. Parameters are left alone. Collective."""
        self._core.sync_state(list(self.module.named_buffers()))

    def register_buffer_comm_hook(self, state, hook) -> None:
        """Calls `hook(state, buffers)` in the place of `buffer_policy`, `buffers` being a dict of the buffers that
        are not ignored, under their names. It changes them in place, alike on all ranks. What it returns, one future or
        several (anything with `wait()`), is waited for before the forward. Called with the gradient mode switched off,
        before the forward and by `sync_state`; not in a world of one. `hook=None` brings the policy back."""
        if hook is None:
            self._core.set_buffer_hook(None)
            self._buffer_hook = None
            return
        if not callable(hook):
            raise TypeError(f"hook is a {type(hook).__name__}, which cannot be called")

        def run(buffers):
            pending = hook(state, buffers)
            if pending is None:
                return
            for future in pending if isinstance(pending, (list, tuple)) else [pending]:
                future.wait()

        # The C++ side holds it weakly: a state that holds this wrapper would keep both alive for ever.
        reference = weakref.ref(run)
        self._core.set_buffer_hook(lambda buffers: reference()(buffers))
        self._buffer_hook = run
