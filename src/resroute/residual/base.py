"""The interface of residual methods: what a sublayer reads, and where its update goes."""

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from resroute.config import UserError, Variant, require_whole, suggestion
from resroute.residual.norms import Norm

DEFAULT_KINDS = ("attention", "mlp")
STREAM = "stream"
"""What a plain sum of updates is called among sources."""


class Stream(Protocol):
    """What a policy carries over depth within one forward pass; a tuple, never changed in place."""

    @property
    def site(self) -> int:
        """The site that is read and written next."""


S = TypeVar("S", bound=Stream)


class NothingLeftError(UserError):
    """A read was asked for without any of its sources."""


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(Variant):
    """Settings of one residual method; `build` makes the policy, the module that carries it out."""

    @property
    def label(self) -> str:
        """The method's name for people, such as `Block AttnRes`."""
        return type(self).__name__.replace("AttnRes", " AttnRes")

    def build(
        self, num_layers: int, dim: int, kinds: Sequence[str] = DEFAULT_KINDS
    ) -> "Policy[Any]":
        """Make the policy for a stack, with its initial parameters.

        Args:
            num_layers: L, layers of the stack.
            dim: D, width of the stream.
            kinds: The K sublayers of one layer, in order. Sites are numbered `0 .. K * L - 1`.
                The phase basis knows `attention` and `mlp` by these names.

        Warns:
            UserWarning: Settings that the policy cannot meet, or that have no effect.

        Raises:
            UserError: Sizes below one, or settings that do not fit the stack.
        """
        num_layers = require_whole("num_layers", num_layers, 1)
        dim = require_whole("dim", dim, 1)
        require_whole("len(kinds)", len(kinds), 1)
        if isinstance(kinds, str):
            raise UserError(f"kinds must be a sequence of names, such as ({kinds!r},)")
        policy = self._build(num_layers, dim, tuple(kinds))
        policy.label = self.label
        policy.reset_parameters()
        for note in policy.notes:
            warnings.warn(note, stacklevel=2)
        return policy

    # not by ABC, which hides the fields' texts from `help`; type checkers need none
    @abstractmethod
    def _build(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> "Policy[Any]":
        """Make the policy; its parameters may still be unset."""
        raise TypeError(f"{type(self).__name__} has no _build")


class Policy(nn.Module, ABC, Generic[S]):
    """How updates accumulate over depth and how sublayers read them back.

    ```python
    stream = policy.start(embedding)
    for site, sublayer in enumerate(sublayers):
        stream = policy.write(stream, site, sublayer(policy.read(stream, site)))
    hidden = policy.finish(stream)
    ```

    Sites come in order, each once: reading or writing any other site, or finishing early, is a
    `UserError` (a `ValueError`). Routing is per token, so a stream lives for one forward pass and
    cached decoding needs nothing of it.

    Attributes:
        num_layers: L.
        dim: D.
        kinds: The K sublayers of one layer.
        num_sites: K * L.
        detail_names: Names, as `weights` gives them, of the sources that are details of blocks.
        label: The method's name for people.
    """

    def __init__(self, num_layers: int, dim: int, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.dim = dim
        self.kinds = kinds
        self.num_sites = num_layers * len(self.kinds)
        self.detail_names: frozenset[str] = frozenset()
        self.label = type(self).__name__.removesuffix("Policy")
        self.notes: list[str] = []
        """What the person who built the policy should know."""

    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its initial value, in place."""

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"num_layers={self.num_layers}, dim={self.dim}, kinds={self.kinds}"

    def start(self, embedding: Tensor) -> S:
        """Open a stream on the embedding (..., D), whose dtype the stream keeps."""
        if not embedding.is_floating_point():
            raise UserError(f"a stream needs a floating-point embedding, got {embedding.dtype}")
        if embedding.shape[-1:] != (self.dim,):
            raise UserError(
                f"the policy was built for width {self.dim}, got an embedding of shape "
                f"{tuple(embedding.shape)}"
            )
        return self._start(embedding)

    def read(self, stream: S, site: int) -> Tensor:
        """What the sublayer at `site` is given (..., D), before its own norm; pure."""
        self._expect(stream, site)
        return self._read(stream)

    def read_normalised(self, stream: S, site: int, norm: Norm) -> tuple[Tensor, S]:
        """`norm(read(stream, site))`, and the stream to go on with.

        Where `norm` is an `nn.RMSNorm`, the latest update, the read and the norm take one pass
        over the row: in a stack that normalises what it reads, this is the fast way to read.

        ```python
        normalised, stream = policy.read_normalised(stream, site, sublayer.norm)
        stream = policy.write(stream, site, sublayer(normalised))
        ```

        Args:
            stream: Left as it is; the one that is returned holds the same, in another form.
            site: The site that is read.
            norm: A function of the read (..., D).

        Returns:
            The normalised read (..., D), under autocast in its dtype; and the stream.
        """
        self._expect(stream, site)
        return self._read_normalised(stream, norm)

    def write(self, stream: S, site: int, update: Tensor) -> S:
        """A new stream with the update of the sublayer at `site` added.

        Args:
            stream: Left as it is.
            site: The site that is written; it need not have been read.
            update: What the sublayer puts out, of the embedding's shape. Its dtype may be another:
                the sum is rounded once, to the stream's.
        """
        self._expect(stream, site)
        shape = self._reference(stream).shape
        if update.shape != shape:
            raise UserError(
                f"the update of site {site} has shape {tuple(update.shape)}, the stream has "
                f"{tuple(shape)}: a sublayer returns what it reads in shape"
            )
        return self._write(stream, update)

    def finish(self, stream: S) -> Tensor:
        """The readout (..., D) that the model's final norm is given."""
        if stream.site != self.num_sites:
            raise UserError(
                f"the stream ends at site {stream.site}, but the stack has {self.num_sites}: "
                "write every site before finish"
            )
        return self._read(stream)

    def weights(self, stream: S, site: int) -> tuple[list[str], Tensor]:
        """Depth weights of a site, or of the readout where `site` is `num_sites`.

        Returns:
            Names of the S sources, and their weights (..., S), which sum to one. Methods that do
            not route have one source, the stream, of weight one. A Delta site that mixes nothing
            has none.
        """
        self._expect_at(stream, site)
        return self._weights(stream)

    def source_names(self, site: int | None = None) -> tuple[str, ...]:
        """Names that `weights` gives at a site, or at any site, in order."""
        return (STREAM,)

    def sources(self, stream: S, site: int) -> dict[str, Tensor]:
        """Values (..., D) of what a site, or the readout, can read.

        Returns:
            By the names of `weights`, details before matching; and as `stream` the plain sum of
            updates, where the method keeps it.
        """
        self._expect_at(stream, site)
        return self._sources(stream)

    def read_without(self, stream: S, site: int, sources: Collection[str]) -> Tensor:
        """What `read` would give if a site, or the readout, did not have some of its sources.

        The softmax is taken over the others, which renormalises their weights; plain sums, gates
        and biases stay. Computed by the formula on every backend; pure.

        Args:
            stream: At `site`.
            site: The site that is read; `num_sites` is the readout.
            sources: Names as in `weights`; those that the site does not have change nothing.

        Raises:
            NothingLeftError: No source is left, and the method has no plain sum to add a mix to.
                (Delta has: its read is then the plain sum.)
            UserError: A method that does not route, or a name that no site has.
        """
        self._expect_at(stream, site)
        names = self.source_names()
        for name in sources:
            if names != (STREAM,) and name not in names:
                raise UserError(
                    f"no site has a source {name!r}{suggestion(name, names)}; the readout has "
                    f"{', '.join(self.source_names(self.num_sites)) or 'none'}"
                )
        return self._read_without(stream, frozenset(sources))

    def coefficient(self, site: int) -> Tensor | None:
        """What the update of a site is multiplied by as it is written, () or (D,); None is one."""
        return None

    def gate_of(self, site: int) -> Tensor | None:
        """The gate (), of a gated method, between a site's plain sum and its mix."""
        return None

    def source_rms(self, stream: S) -> dict[str, float]:
        """Size of each finished source of a stream, by its name in `weights`.

        The root mean square over the width, without eps and of details before matching, mean over
        tokens. Empty for methods that do not route.
        """
        return {}

    def _expect(self, stream: S, site: int) -> None:
        if stream.site != site or not 0 <= site < self.num_sites:
            raise UserError(
                f"the stream is at site {stream.site} of {self.num_sites}, got site {site}: "
                "sites are read and written in order, each once"
            )

    def _expect_at(self, stream: S, site: int) -> None:
        if stream.site != site:
            raise UserError(
                f"the stream is at site {stream.site}, not at {site}: ask before a site is written"
            )

    def _sources(self, stream: S) -> dict[str, Tensor]:
        return {STREAM: self._read(stream)}

    def _read_without(self, stream: S, left_out: frozenset[str]) -> Tensor:
        raise UserError(
            f"{type(self).__name__} reads one sum: it has no sources to leave out; leave out "
            "sites instead"
        )

    @abstractmethod
    def _reference(self, stream: S) -> Tensor:
        """Any tensor of the stream's shape and dtype."""

    @abstractmethod
    def _start(self, embedding: Tensor) -> S: ...

    @abstractmethod
    def _read(self, stream: S) -> Tensor: ...

    def _read_normalised(self, stream: S, norm: Norm) -> tuple[Tensor, S]:
        return norm(self._read(stream)), stream

    @abstractmethod
    def _write(self, stream: S, update: Tensor) -> S: ...

    @abstractmethod
    def _weights(self, stream: S) -> tuple[list[str], Tensor]: ...


def policy_of(model: nn.Module) -> Policy[Any]:
    """The policy that a model holds, or that it is.

    Where peft trains a copy of it (`modules_to_save`), the copy.

    Raises:
        UserError: A model that holds none, or more than one.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"needs a policy or a model that holds one, got {type(model).__name__}")
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, Policy) and "original_module" not in name.split(".")
    ]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} holds {len(found)} residual policies, and exactly one is "
            "needed; pass the policy itself"
        )
    return found[0]


def site_name(policy: Policy[Any], site: int) -> str:
    """A site for people: `3 attention`, or `readout`."""
    if site == policy.num_sites:
        return "readout"
    return f"{site // len(policy.kinds)} {policy.kinds[site % len(policy.kinds)]}"


def kind_of_source(name: str) -> str:
    """A source's name without the number of its block: `state` of `state 3`."""
    return re.sub(r" \d+$", "", name)


def by_kind(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights by source, added up by kind of source in the order of the first of each."""
    found: dict[str, float] = {}
    for name, weight in weights.items():
        kind = kind_of_source(name)
        found[kind] = found.get(kind, 0.0) + weight
    return found
