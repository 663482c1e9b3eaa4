"""A stack of anyone's sublayers over a residual stream that a policy carries."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from resroute.config import UserError
from resroute.residual.base import Policy, ResidualConfig, site_name


class RoutedStack(nn.Module):
    """Runs sublayers in order: each gets what the policy reads for it, and gives back an update.

    In place of `for f in sublayers: x = x + f(x)`, with any residual method:

    ```python
    stack = rr.RoutedStack(sublayers, rr.WAV(), dim=512, kinds=("attention", "mlp"), norms=norms)
    hidden = final_norm(stack(embedding))
    ```

    It takes `torch.compile(fullgraph=True)`, autocast, DDP and FSDP2, where sublayers may be units
    and the policy belongs to the unit of the stack, or of the model around it. `capture`, `health`
    and `importance` work on it. Where something needs a word:

    - `torch.export` under `rr.backend("reference")`: graphs of other backends hold operators of
      resroute, which a process that loads them may not have.
    - Look inside with `torch.compiler.set_stance("force_eager")` where it is compiled.

    Attributes:
        policy: Carries the stream. Let the optimizer take no weight decay on its parameters.
        sublayers: One a site.
        norms: One a site, or None.
        update_of: As given.
        activation_checkpointing: As given; may be set at any time.
    """

    policy: Policy[Any]

    def __init__(
        self,
        sublayers: Iterable[nn.Module],
        policy: Policy[Any] | ResidualConfig,
        *,
        norms: Iterable[nn.Module] | None = None,
        dim: int | None = None,
        kinds: Sequence[str] | None = None,
        update_of: Callable[[Any], Tensor] | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        """Put sublayers behind one another.

        Args:
            sublayers: Modules that map what they read (..., D) to an update of that shape, without
                any residual sum of their own; in order of depth.
            policy: A built policy with as many sites, or the configuration of a method, which is
                then built.
            norms: The norm of each read, where sublayers do not begin with their own. The latest
                update, the read and an `nn.RMSNorm` then take one pass over the data.
            dim: D, with a configuration.
            kinds: With a configuration, what the sublayers of one layer are, such as
                `("attention", "mlp")`; the stack has `len(sublayers) / len(kinds)` layers.
            update_of: Takes the update out of what a sublayer returns where that is no tensor,
                such as `operator.itemgetter(0)` of a tuple.
            activation_checkpointing: Keep what layers hand on and compute the rest again in the
                backward pass.

        Warns:
            UserWarning: As `ResidualConfig.build`, with a configuration.

        Raises:
            UserError: Sublayers or norms that are not modules in order; numbers of sublayers, sites
                and norms that differ, or sublayers that are not whole layers; no policy and no
                configuration of a method; or `dim` and `kinds` missing with a configuration, or
                given with a built policy.
        """
        super().__init__()
        self.sublayers = _modules("sublayer", sublayers)
        self.policy = _policy(policy, len(self.sublayers), dim, kinds)
        self.norms = None if norms is None else _modules("norm", norms)
        self._require_as_many()
        self.update_of = update_of
        self.activation_checkpointing = activation_checkpointing

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The readout of the stack (..., D), before any final norm.

        Args:
            x: The embedding (..., D), whose dtype the stream keeps.
            args: Handed to every sublayer after what it reads, as `kwargs` are.
            kwargs: Such as a mask; sublayers that have no use for it must still take it.

        Raises:
            UserError: A width that is not the policy's; a sublayer that does not return an update;
                or a policy of which this process holds a share alone.
        """
        if not torch.compiler.is_compiling():
            _require_whole(self.policy, x)
            self._require_as_many()
        stream, size = self.policy.start(x), len(self.policy.kinds)
        recomputes = self.activation_checkpointing and torch.is_grad_enabled()
        for first in range(0, self.policy.num_sites, size):
            sites = range(first, first + size)
            if recomputes:
                stream = checkpoint(self._run, stream, sites, args, kwargs, use_reentrant=False)
            else:
                stream = self._run(stream, sites, args, kwargs)
        return self.policy.finish(stream)

    def _run(self, stream: Any, sites: range, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry the stream over some sites."""
        policy = self.policy
        for site in sites:
            if self.norms is None:
                read = policy.read(stream, site)
            else:
                read, stream = policy.read_normalised(stream, site, self.norms[site])
            version = _version(read)
            output = self.sublayers[site](read, *args, **kwargs)
            if _version(read) != version:
                raise UserError(
                    f"sublayer {site} ({site_name(policy, site)}) changes what it reads in place, "
                    "and others read that too; let it make a new tensor (inplace=False)"
                )
            stream = policy.write(stream, site, self._update(site, output))
        return stream

    def _require_as_many(self) -> None:
        """Refuse what was changed after it was made: sublayers would be left out."""
        for name, modules in (("sublayers", self.sublayers), ("norms", self.norms)):
            if modules is not None and len(modules) != self.policy.num_sites:
                raise UserError(
                    f"the policy has {self.policy.num_sites} sites, one a sublayer, got "
                    f"{len(modules)} {name}"
                )

    def _update(self, site: int, output: Any) -> Tensor:
        if self.update_of is not None and not isinstance(output, Tensor):
            output = self.update_of(output)
        if not isinstance(output, Tensor):
            raise UserError(
                f"sublayer {site} ({site_name(self.policy, site)}) returned a "
                f"{type(output).__name__}; return the update alone, or take it out by update_of, "
                "such as operator.itemgetter(0)"
            )
        if output.is_complex():
            raise UserError(
                f"sublayer {site} ({site_name(self.policy, site)}) returned complex numbers; the "
                "stream has real ones"
            )
        return output


def _require_whole(policy: Policy[Any], x: Tensor) -> None:
    """Refuse parameters that were sharded and not gathered: torch would fail somewhere inside."""
    parameter = next(policy.parameters(), None)
    if hasattr(parameter, "device_mesh") and not hasattr(x, "device_mesh"):
        raise UserError(
            "each process holds a share of the policy alone; fully_shard the stack, or the model "
            "around it, instead of the policy, and call what was sharded"
        )


def _version(read: Tensor) -> int:
    """How often a tensor was changed in place; tensors of inference mode do not count it."""
    counts = not (torch.compiler.is_compiling() or read.is_inference())
    return read._version if counts else 0


def _modules(what: str, modules: Iterable[nn.Module]) -> nn.ModuleList:
    if isinstance(modules, Mapping | nn.ModuleDict) or not isinstance(modules, Iterable):
        raise UserError(
            f"{what}s must be modules in order, one a site, got {type(modules).__name__}"
        )
    found = list(modules)
    for place, module in enumerate(found):
        if not isinstance(module, nn.Module):
            raise UserError(
                f"{what} {place} is a {type(module).__name__}; each {what} is an nn.Module"
            )
    return nn.ModuleList(found)


def _policy(
    policy: Policy[Any] | ResidualConfig,
    num_sublayers: int,
    dim: int | None,
    kinds: Sequence[str] | None,
) -> Policy[Any]:
    """The policy as it is, or built for so many sublayers."""
    if isinstance(policy, Policy):
        if dim is not None or kinds is not None:
            raise UserError("dim and kinds go with a configuration; a built policy has its own")
        return policy
    if not isinstance(policy, ResidualConfig):
        raise UserError(
            "a stack needs a policy or the configuration of a method, such as rr.WAV(), got "
            f"{policy if isinstance(policy, type) else type(policy)}"
        )
    if dim is None or kinds is None:
        raise UserError(
            f"to build {policy.label} a stack needs dim, the width, and kinds, what the sublayers "
            'of one layer are, such as ("attention", "mlp")'
        )
    # a set has no order, and would have another one in each process
    if not isinstance(kinds, list | tuple) or not kinds:
        raise UserError(f'kinds must be names, such as ("attention", "mlp"), got {kinds!r}')
    if num_sublayers % len(kinds):
        raise UserError(
            f"{num_sublayers} sublayers are not whole layers of {len(kinds)} ({', '.join(kinds)})"
        )
    with warnings.catch_warnings():
        # said below, of the line that makes the stack
        warnings.simplefilter("ignore")
        built = policy.build(num_sublayers // len(kinds), dim, kinds)
    for note in built.notes:
        warnings.warn(note, stacklevel=3)
    return built
