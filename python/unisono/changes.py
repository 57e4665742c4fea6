"""Notices that parameters may have been added to a module or replaced since it was last looked at."""

import weakref

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class Registrations:
    """Whether any module of the process has been given a parameter or a submodule since the last `seen()`. Cheap to ask;
    who gets True compares the module's parameters themselves."""

    def __init__(self):
        seen = self._seen = [False]

        def note(module, name, value):
            seen[0] = True

        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            weakref.finalize(self, register(note).remove)

    def seen(self) -> bool:
        was, self._seen[0] = self._seen[0], False
        return was


def sparse_parameters(module) -> list[str]:
    """Names of the weights of embeddings whose gradients are sparse."""
    return [f"{name}.weight" if name else "weight" for name, layer in module.named_modules() if getattr(layer, "sparse", False)]
