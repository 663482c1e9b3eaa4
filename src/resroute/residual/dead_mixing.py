"""The check for mixing that never left its initial value, while the loss may look fine.

Healthy runs are those that `health` names.
"""

import math
import statistics
from collections.abc import Mapping

from resroute.residual.findings import LEAST_STEPS, MOST, Finding, Look, shares, whole
from resroute.residual.routed import RoutedPolicy
from resroute.residual.scaled import LayerScalePolicy, ReZeroPolicy

DEAD_LOGITS = 0.01
"""Norm of a site's query times its key gain: the spread, in nats, of its logits over keys in random
directions, which have norm sqrt(D). Weights are then within 1 % of the initial ones. Healthy runs
had at least 0.12 after 240 steps."""
DEAD_WEIGHTS = 1e-3
"""Largest change of a mean weight, or of an entropy in nats, that counts as none: in healthy runs
they change by tenths."""
CLOSED = 1e-3
"""A gate or ReZero scalar this small leaves 99.9 % of the read, or all but 0.1 % of the stream, as
it was without the method. They start at zero, and Adam moves them by the learning rate a step."""


def dead_mixing(look: Look) -> list[Finding]:
    """Parameters, or weights, that never left their initial value."""
    policy = look.policy
    if look.steps is not None and look.steps < LEAST_STEPS:
        return []
    if isinstance(policy, ReZeroPolicy | LayerScalePolicy):
        return _closed_layers(policy)
    if not isinstance(policy, RoutedPolicy) or not look.choices():
        return []
    gate = None if policy.gate is None else whole(policy.gate).abs().max().item()
    if gate is not None and gate < CLOSED:
        return [
            Finding(
                check="closed gates",
                severity="warning",
                where="all sites",
                saw=f"no gate is larger than {gate:.1e}; they start at 0",
                why="every read is the plain sum: the model is PreNorm, whatever its loss",
                remedy="see that the policy's parameters reach the optimizer, without weight decay;"
                " raise the learning rate, or start with gated=False",
            )
        ]
    keys = whole(policy.query)
    if policy.key_gain is not None:
        keys = keys * whole(policy.key_gain)
    spread = {site: keys[site].norm().item() for site in look.choices()}
    dead = [site for site, size in spread.items() if size < DEAD_LOGITS]
    if len(dead) >= MOST * len(spread):
        return [
            Finding(
                check="dead mixing",
                severity="warning",
                where=f"{len(dead)} of {len(spread)} sites: {look.places(dead)}",
                saw=f"queries of norm {max(spread[s] for s in dead):.1e} or less; they start at 0",
                why="all tokens get the initial weights: the router has learned nothing, and the "
                "loss may look fine without it",
                remedy="see that the policy's parameters reach the optimizer, without weight decay;"
                " train longer or with a higher learning rate",
            )
        ]
    return _unmoved_weights(look)


def _closed_layers(policy: ReZeroPolicy | LayerScalePolicy) -> list[Finding]:
    if isinstance(policy, ReZeroPolicy):
        moved, bound = whole(policy.alpha).abs().max().item(), CLOSED
    else:
        moved = (whole(policy.scale) - policy.init).abs().max().item()
        bound = CLOSED * abs(policy.init) or CLOSED
    if moved >= bound:
        return []
    return [
        Finding(
            check="dead mixing",
            severity="warning",
            where="all layers",
            saw=f"no coefficient has moved by more than {moved:.1e} from its initial value",
            why="the method's parameters do not train; where they start near zero, the stack is "
            "the identity",
            remedy="see that the policy's parameters reach the optimizer, without weight decay; "
            "train longer or with a higher learning rate",
        )
    ]


def _unmoved_weights(look: Look) -> list[Finding]:
    policy, choices = look.policy, look.choices()
    assert isinstance(policy, RoutedPolicy)
    first = {site: policy.initial_weights(site) for site in range(policy.num_sites + 1)}
    if look.weights is not None:
        unmoved = []
        for site in choices:
            row, effective = look.weights[site], (look.effective or {}).get(site)
            if not row or effective is None:
                continue
            changes = [abs(row[name] - weight) for name, weight in first[site].items()]
            changes.append(abs(math.log(effective) - _entropy(first[site])))
            if max(changes) < DEAD_WEIGHTS:
                unmoved.append(site)
        is_dead = len(unmoved) >= MOST * len(choices)
        where = f"{len(unmoved)} of {len(choices)} sites: {look.places(unmoved)}"
    else:
        rows = [row for row in first.values() if row]
        start = shares(rows, policy.detail_names)
        start["entropy"] = statistics.fmean(map(_entropy, rows))
        is_dead = all(abs(look.means.get(k, math.inf) - v) < DEAD_WEIGHTS for k, v in start.items())
        where = "all sites"
    if not is_dead:
        return []
    return [
        Finding(
            check="dead mixing",
            severity="warning",
            where=where,
            saw=f"depth weights within {DEAD_WEIGHTS:g} of the initial ones, though queries moved",
            why="queries do not reach the weights: keys whose mean square is below eps are not "
            "normalised to one",
            remedy="lower eps of the residual config, or let the embedding start larger (untied "
            "embeddings do)",
        )
    ]


def _entropy(weights: Mapping[str, float]) -> float:
    return -math.fsum(w * math.log(w) for w in weights.values() if w > 0)
