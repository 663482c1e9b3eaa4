"""Whether a module's parameters may be used in its stead."""

from torch import nn
from torch.nn.modules import module as torch_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def untouched(module: object, kind: type[nn.Module]) -> bool:
    """Whether calling `module` does what `kind` does and nothing else.

    It does not where someone subclassed or wrapped it, or attached hooks to it or to all modules.
    """
    if type(module) is not kind:
        return False
    held = vars(module)
    if "forward" in held or any(held[name] for name in _HOOKS):
        return False
    return not torch_module._has_any_global_hook()
