"""Health checks: whether a routing method does anything, and whether it is about to fail.

Each check has a threshold with its reason. Healthy runs are 27 of the study on CPUs
(docs/experiments.md): PreNorm, Block AttnRes and WAV at 12, 24 and 48 layers and three learning
rates, of which the highest is too high for some. None of them gives a finding.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from resroute.residual.base import kind_of_source, policy_of
from resroute.residual.capture import Capture
from resroute.residual.dead_mixing import dead_mixing
from resroute.residual.findings import LEAST_STEPS, MOST, Finding, Look, look_at, shares, whole
from resroute.residual.observe import Observation
from resroute.residual.routed import RoutedPolicy
from resroute.residual.wav import WAVPolicy

IDLE = 1e-3
"""RMS of an update beside what its sublayer reads: smaller ones are lost in rounding of bfloat16
(3 digits). Healthy runs had at least 0.0056, with 48 layers and a rate too high."""
UNUSED_DETAILS = 0.1
"""Weight on details beside their initial one. Healthy runs had 1.2 to 1.6 times as much."""
COLLAPSED = 1.2
"""Effective number of sources: 95 % on one of two sources has 1.22. The median site of healthy runs
had at least 2.07."""
GROWTH = 20.0
"""Largest source beside the middle one. Sums of N updates of one size differ by N at most, and
sources of healthy runs by 3.5; growth by a factor each layer passes any bound."""
BIAS_DRIFT = 2.0
"""Mean change of a detail bias in nats: a factor of 7.4 in the weight. Healthy runs had 0.11."""
BIAS_SATURATED = 6.0
"""Change of one bias in nats beyond which its detail has, or takes, nearly everything: a factor of
400. Healthy runs had at most 0.5."""


def health(
    seen: Observation | Capture,
    model: nn.Module,
    history: Iterable[Mapping[str, Any]] = (),
) -> list[Finding]:
    """Check that routing is alive and sizes are sane.

    ```python
    with rr.capture(model) as seen, torch.no_grad():
        model(tokens)
    for finding in rr.health(seen, model):
        print(finding.check, finding.saw)
    ```

    Args:
        seen: What `capture` collected over a few windows; or, cheaper and coarser, what `observe`
            returned (a line of kind `routing` in metrics.jsonl).
        model: A policy, or a module that holds one.
        history: Lines of metrics.jsonl, or their `routing` ones. They say how long the model has
            trained, without which it counts as trained, and how sizes have grown.

    Returns:
        What was found, in a fixed order of checks; nothing of a healthy model.

    Raises:
        UserError: Not exactly one policy; or what was seen is of neither form, or of a stack with
            another number of sites.
    """
    look = look_at(seen, policy_of(model), history)
    return [finding for check in CHECKS for finding in check(look)]


def idle_layers(look: Look) -> list[Finding]:
    """Sublayers whose update is negligible."""
    if look.steps is not None and look.steps < LEAST_STEPS:
        return []
    # a method whose coefficients never moved says so already
    if not isinstance(look.policy, RoutedPolicy) and dead_mixing(look):
        return []
    sizes = [size for size in look.updates if size is not None]
    middle = statistics.median(sizes) if sizes else 0.0
    beside = "the middle one" if look.reads is None else "that of what they read"
    shares_of = {}
    for site, size in enumerate(look.updates):
        against = middle if look.reads is None else look.reads[site]
        if size is not None and against:
            shares_of[site] = size / against
    idle = [site for site, share in shares_of.items() if share < IDLE]
    if not idle:
        return []
    kinds = len(look.policy.kinds)
    layers = [
        layer
        for layer in range(look.policy.num_layers)
        if all(site in idle for site in range(layer * kinds, (layer + 1) * kinds))
    ]
    largest = max(shares_of[site] for site in idle)
    return [
        Finding(
            check="idle layers",
            severity="warning" if layers else "note",
            where=look.places(idle),
            saw=f"RMS of updates at most {largest:.1e} times {beside}"
            + (f"; {len(layers)} whole layers" if layers else ""),
            why="these sublayers take time and add nothing that later ones can see",
            remedy="see that gradients reach them (capture gives `update_gradient`); try fewer "
            "layers, or another learning rate",
        )
    ]


def details(look: Look) -> list[Finding]:
    """Details that are not used, or that hold nearly all weight."""
    policy, share = look.policy, look.means.get("detail_weight")
    if not isinstance(policy, RoutedPolicy) or not policy.detail_names or share is None:
        return []
    rows = [policy.initial_weights(site) for site in range(policy.num_sites + 1)]
    rows = [row for row in rows if row]
    first = shares(rows, policy.detail_names)["detail_weight"]
    saw = f"weight on details {share:.3f}, at the start {first:.3f}"
    if share < UNUSED_DETAILS * first:
        return [_unused("all details", saw)]
    found = []
    # halfway from where they started to all weight
    if share > first + (1 - first) / 2:
        found.append(
            Finding(
                check="dominating details",
                severity="note",
                where="all details",
                saw=saw,
                why="sums of blocks and the embedding, which carry most of what is known, are "
                "hardly read",
                remedy="lower detail_bias or rho_max, and compare `importance` by source",
            )
        )
    for basis in policy.bases if look.weights is not None else ():
        of_basis = frozenset(n for n in policy.detail_names if basis in (n, _without_block(n)))
        before = shares(rows, of_basis)["detail_weight"]
        now = shares([row for row in look.weights or [] if row], of_basis)["detail_weight"]
        if now < UNUSED_DETAILS * before:
            found.append(_unused(basis, f"weight on {basis} {now:.4f}, at the start {before:.4f}"))
    return found


def _unused(where: str, saw: str) -> Finding:
    return Finding(
        check="unused details",
        severity="warning",
        where=where,
        saw=saw,
        why="the model has learned to do without them: it is Block AttnRes at a higher price",
        remedy="raise detail_bias, or rho_max where details are small; or take fewer bases "
        "(`trajectory` shows what each explains)",
    )


def _without_block(name: str) -> str:
    """The basis of a detail: `phase` of `phase 3` and of `running phase`."""
    return kind_of_source(name).removeprefix("running ")


def collapsed_mixing(look: Look) -> list[Finding]:
    """Nearly all weight on one source at most sites."""
    choices = look.choices()
    if not choices:
        return []
    if look.effective is not None:
        known = {site: look.effective[site] for site in choices if site in look.effective}
        low = [site for site, count in known.items() if count < COLLAPSED]
        is_collapsed = bool(known) and len(low) >= MOST * len(known)
        where = f"{len(low)} of {len(known)} sites: {look.places(low)}"
        count = statistics.median(known.values()) if known else 0.0
    else:
        # reads of a single source count one each
        policy = look.policy
        assert isinstance(policy, RoutedPolicy)
        reads = sum(bool(policy.initial_weights(s)) for s in range(policy.num_sites + 1))
        mean = look.means.get("effective_sources")
        if mean is None:
            return []
        count = (mean * reads - (reads - len(choices))) / len(choices)
        is_collapsed, where = count < COLLAPSED, "mean of all sites"
    if not is_collapsed:
        return []
    return [
        Finding(
            check="collapsed mixing",
            severity="warning",
            where=where,
            saw=f"{count:.2f} effective sources where several are there",
            why="a softmax that has settled on one source passes hardly any gradient to its query "
            "and to the other sources",
            remedy="lower the learning rate or lengthen the warm-up; key_gain=False leaves out "
            "the gain that sharpens it",
        )
    ]


def growing_sources(look: Look) -> list[Finding]:
    """Sizes that explode over depth or over training, or are not numbers."""
    named = {
        name: size
        for name, size in look.sizes.items()
        if name != "embedding" and name not in look.policy.detail_names
    }
    if not named:
        # a plain sum is what its sites read; the first reads the embedding
        pairs = enumerate(look.updates if look.reads is None else look.reads[1:], start=1)
        named = {f"read {site}": size for site, size in pairs}
    sizes = [size for size in named.values() if size is not None]
    if len(sizes) < len(named) or None in look.updates:
        lost = [name for name, size in named.items() if size is None] or ["updates"]
        return [_growing(lost[0], "a size that is not a finite number")]
    found = []
    largest = max(named, key=lambda name: named[name] or 0.0)
    top, middle = max(sizes), statistics.median_low(sizes)
    if top > GROWTH * middle:
        found.append(
            _growing(largest, f"RMS {top:.3g}, {top / max(middle, 1e-30):.3g} times the middle one")
        )
    now, half = (look.past[-1], look.past[len(look.past) // 2]) if look.past else ([], [])
    if now and half and max(now) > GROWTH * max(half):
        saw = f"largest RMS {max(now):.3g}, halfway through training {max(half):.3g}"
        found.append(_growing("all depths", saw))
    return found


def _growing(where: str, saw: str) -> Finding:
    return Finding(
        check="growing sources",
        severity="warning",
        where=where,
        saw=saw,
        why="a source that grows without bound outweighs all others, and the loss follows",
        remedy="lower the learning rate, lengthen the warm-up, or clip gradients lower",
    )


def detail_bias_drift(look: Look) -> list[Finding]:
    """Learned biases of details that are far from where they started."""
    policy = look.policy
    if not isinstance(policy, WAVPolicy) or not isinstance(policy.detail_bias, nn.Parameter):
        return []
    drift = whole(policy.detail_bias) - policy.config.detail_bias
    saturated = (drift.abs() > BIAS_SATURATED).float().mean().item()
    means = dict(zip(policy.bases, drift.mean(0).tolist(), strict=True))
    far = {basis: mean for basis, mean in means.items() if abs(mean) > BIAS_DRIFT}
    if saturated >= MOST or far:
        moved = ", ".join(f"{basis} {mean:+.2f}" for basis, mean in (far or means).items())
        return [
            Finding(
                check="detail bias drift",
                severity="warning" if saturated >= MOST else "note",
                where=", ".join(far or means),
                saw=f"mean change of the bias in nats: {moved}; {saturated:.0%} changed by more "
                f"than {BIAS_SATURATED:g}",
                why="a bias far below switches its detail off for all tokens, one far above lets "
                "it crowd out the sums",
                remedy="start detail_bias nearer to where it went, or fix it "
                "(learn_detail_bias=False)",
            )
        ]
    return []


CHECKS: tuple[Callable[[Look], list[Finding]], ...] = (
    dead_mixing,
    idle_layers,
    details,
    collapsed_mixing,
    growing_sources,
    detail_bias_drift,
)
