"""Numbers of a running model: what its sites read, what they add, and how gradients come back.

B batch, T tokens, D width, S depth sources.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resroute.config import UserError
from resroute.residual.base import STREAM, Policy, policy_of
from resroute.residual.diagnostics import listening_to
from resroute.residual.means import SOURCES, Means
from resroute.residual.tally import Tally, total, wide

FORMAT_VERSION = 1
Classify = Callable[[Tensor], Tensor]
"""From token ids (B, T) to numbers of classes of that shape; a negative one counts nowhere."""


@contextmanager
def capture(
    model: nn.Module,
    *,
    keep_tokens: bool = False,
    classes: Classify | None = None,
    class_names: Sequence[str] = (),
) -> Iterator["Capture"]:
    """Collect numbers of every forward pass of a model while the context is open.

    The model computes what it would compute, to the bit, and so do its gradients. Sums over tokens
    are kept in float64 and nothing for each token, so that any number and length of passes takes
    the same memory. A pass adds what each site does once: layers that are computed again in the
    backward pass (activation checkpointing) do not count twice.

    ```python
    with rr.capture(model) as seen, torch.no_grad():
        model(tokens)
    seen.result()["sites"][3]["weights"]
    ```

    Args:
        model: A policy, or a module that holds one.
        keep_tokens: Keep the depth weights of each token of the latest forward pass as well.
        classes: Makes classes of the token ids that the model's first embedding is given; depth
            weights are then averaged in each class too. Needs a module that calls an
            `nn.Embedding`; else set `Capture.classes` before each pass.
        class_names: Of the classes 0, 1, ..; those without a name are called by their number.

    Raises:
        UserError: Not exactly one policy; or, in the pass, classes that do not fit its tokens.
    """
    policy = policy_of(model)
    if classes is not None and model is policy:
        raise UserError(
            "a policy sees no token ids: pass the model that holds it, or set `classes` of the "
            "capture before each forward pass"
        )
    found = Capture(policy, keep_tokens=keep_tokens, classify=classes, class_names=class_names)
    with ExitStack() as stack:
        if classes is not None:
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    handle = module.register_forward_pre_hook(found.note_tokens)
                    stack.callback(handle.remove)
        stack.enter_context(
            listening_to(
                policy,
                found.note_read,
                found.note_write,
                on_start=found.note_start,
                on_given=found.note_given,
            )
        )
        yield found


class Capture:
    """What `capture` collects; read it at any time.

    Attributes:
        policy: The policy that is looked at.
        classes: Class numbers (B, T) of the tokens of the next passes, or None; set it yourself
            where `capture` was not given a function.
        passes: Forward passes so far.
        tokens: Tokens of these.
        latest: With `keep_tokens`, depth weights (tokens, S) of the latest pass by site, on the
            CPU; columns are `policy.source_names(site)`, and rows run over the batch, then time.
    """

    def __init__(
        self,
        policy: Policy[Any],
        *,
        keep_tokens: bool,
        classify: Classify | None,
        class_names: Sequence[str],
    ) -> None:
        self.policy = policy
        self.classes: Tensor | None = None
        self.passes = 0
        self.tokens = 0
        self.latest: dict[int, Tensor] = {}
        self._keeps_tokens = keep_tokens
        self._classify = classify
        self._least_classes = max(1, len(class_names))
        self._ids: Tensor | None = None
        self._one_hot: Tensor | None = None
        self._tally = Tally()
        self._means = Means(policy, self._tally, list(class_names))
        self._read_next = self._given_next = self._write_next = 0

    def note_tokens(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Of an embedding's call: keep the ids of the first one before a stream starts."""
        if self._ids is None and arguments and isinstance(arguments[0], Tensor):
            self._ids = arguments[0]

    def note_start(self, embedding: Tensor) -> None:
        """A forward pass begins."""
        self._read_next = self._given_next = self._write_next = 0
        self.latest = {}
        ids, self._ids = self._ids, None
        self._one_hot = self._classes_of(ids, embedding)
        self.passes += 1
        self.tokens += embedding.shape[:-1].numel()

    def note_read(self, stream: Any, site: int) -> None:
        """A site is about to be read, or the readout."""
        if site < self._read_next:
            return
        self._read_next = site + 1
        policy, tally = self.policy, self._tally
        read = policy._read(stream)
        tokens = read.shape[:-1].numel()
        tally.add(site, "read", total(wide(read).square()) / policy.dim, tokens)
        names, weights = policy._weights(stream)
        if names and names != [STREAM]:
            self._note_weights(site, weights.flatten(0, -2))
        if site == policy.num_sites:
            for name, size in policy.source_rms(stream).items():
                mean = torch.tensor(size * tokens, dtype=torch.float64)
                tally.add(SOURCES, name, mean, tokens)

    def _note_weights(self, site: int, rows: Tensor) -> None:
        tally, tokens = self._tally, len(rows)
        entropy = -torch.xlogy(rows, rows).sum(-1)
        tally.add(site, "weights", total(rows, 0), tokens)
        tally.add(site, "entropy", total(entropy), tokens)
        tally.add(site, "effective", total(entropy.exp()), tokens)
        if self._one_hot is not None:
            tally.add(site, "class_tokens", self._one_hot.sum(0), 1)
            shares = self._one_hot.T @ rows.to(self._one_hot)
            tally.add(site, "class_weights", shares, 1)
        if self._keeps_tokens:
            self.latest[site] = rows.float().cpu()

    def note_given(self, stream: Any, site: int, given: Tensor) -> None:
        """A sublayer is given what it reads."""
        if not self._read_next == site + 1 > self._given_next:
            return
        self._given_next = site + 1
        # the gradient of a plain sum is not that of this read alone
        if given is not self.policy._reference(stream):
            self._watch(given, site, "read_gradient")

    def note_write(self, stream: Any, site: int, update: Tensor) -> None:
        """An update is about to be written."""
        if site < self._write_next:
            return
        self._write_next = site + 1
        update_wide = wide(update)
        squares = update_wide.square().sum(-1)
        tokens = squares.numel()
        self._tally.add(site, "update", total(squares) / self.policy.dim, tokens)
        cosines = []
        for value in self.policy._sources(stream).values():
            value = wide(value)
            sizes = squares.sqrt() * value.square().sum(-1).sqrt()
            # a token without an update, or without the source, has no angle: it counts as zero
            least = torch.finfo(sizes.dtype).tiny
            cosines.append(total((update_wide * value).sum(-1) / sizes.clamp_min(least)))
        if cosines:
            self._tally.add(site, "cosine", torch.stack(cosines), tokens)
        self._watch(update, site, "update_gradient")

    def _watch(self, tensor: Tensor, site: int, name: str) -> None:
        if tensor.requires_grad:

            def note(gradient: Tensor) -> None:
                self._tally.add(site, name, total(wide(gradient).square()), 1)

            tensor.register_hook(note)

    def _classes_of(self, ids: Tensor | None, embedding: Tensor) -> Tensor | None:
        """Classes of a pass's tokens as columns (tokens, classes) of zeros and ones."""
        classes = self.classes
        if self._classify is not None:
            if ids is None:
                raise UserError(
                    "no token ids came by an nn.Embedding before the pass; set `classes` of the "
                    "capture before each forward pass"
                )
            classes = self._classify(ids)
        if classes is None:
            return None
        shape = embedding.shape[:-1]
        if classes.shape != shape or classes.is_floating_point():
            raise UserError(
                f"classes must be whole numbers of shape {tuple(shape)}, one a token, got "
                f"{classes.dtype} of shape {tuple(classes.shape)}"
            )
        home = "cpu" if embedding.device.type == "mps" else embedding.device
        numbers = classes.flatten().to(home)
        count = max(int(numbers.max()) + 1, self._least_classes)
        return (numbers[:, None] == torch.arange(count, device=home)).double()

    def result(self) -> dict[str, Any]:
        """All means, as JSON values; a number that is not finite, or not known, is None.

        `sites` has one entry a site and a last one for the readout:

        - `site`, `name`, `layer`, `kind`; the readout has no layer and no kind;
        - `weights`: mean depth weight by source; `kinds`: the same, sources of all blocks
          together (`embedding`, `state`, `phase`, `running state`, ..). Empty where nothing is
          mixed: in methods that do not route, and where Delta reads its plain sum;
        - `entropy` in nats, of each token's weights, and `effective_sources`, e to it; means;
        - `read_rms`, `update_rms`: RMS over tokens and width of what the site reads before its
          norm, and of what it hands to `write`, before any coefficient;
        - `cosine`: by source, and `stream` for the plain sum where the method keeps it: mean over
          tokens of the cosine between the update and the source's value as the site could read it;
        - `update_gradient`, `read_gradient`: L2 norm over all tokens and channels of the gradient
          at the update, and at what the sublayer is given (normalised, where the model reads by
          `read_normalised`), of whatever went backward; root mean square over backward passes.
          None without any, and where a read is the stream's own tensor, whose gradient is not the
          read's alone;
        - `gate`: the gate as it is, of gated methods. `coefficient`: what the method multiplies
          the update by, mean magnitude over channels (ReZero's alpha, LayerScale's scale);
        - `classes`: by class, `tokens` and `weights`.

        Besides: `source_rms` (see `Policy.source_rms`), `details` (names of details), `blocks`
        (first site and one past the last of each), `passes`, `tokens`, `num_layers`, `layer_kinds`.
        """
        return self._means.result() | {
            "format_version": FORMAT_VERSION,
            "passes": self.passes,
            "tokens": self.tokens,
        }

    def table(self, token_class: str | None = None) -> dict[str, Any] | None:
        """Mean depth weights as a table, of all tokens or of those of one class.

        Returns:
            `sites` (R names), `sources` (S names) and `weights` (R rows of S numbers, None where a
            site does not have a source); None where the method does not route.
        """
        return self._means.table(token_class)
