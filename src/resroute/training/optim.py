"""AdamW with named parameter groups, and its learning rate."""

import math
from typing import Any

import torch
from torch import nn

from resroute.model import GPT
from resroute.training.config import TrainConfig


def parameter_groups(model: GPT, weight_decay: float) -> list[dict[str, Any]]:
    """Sort a model's parameters into `matrices`, which decay, and `policy`, `norms`, `embeddings`.

    Each group also lists the names of its parameters under `names`, in the order of `params`.
    """
    groups: dict[str, dict[str, Any]] = {
        name: {"name": name, "params": [], "names": [], "weight_decay": decay}
        for name, decay in (
            ("matrices", weight_decay),
            ("policy", 0.0),
            ("norms", 0.0),
            ("embeddings", 0.0),
        )
    }
    kinds = ((nn.Linear, "matrices"), (nn.RMSNorm, "norms"), (nn.Embedding, "embeddings"))
    for module_name, module in model.named_modules():
        in_policy = module is model.policy or module_name.startswith("policy.")
        for name, parameter in module.named_parameters(module_name, recurse=False):
            group = "policy"
            if not in_policy:
                group = next((g for kind, g in kinds if isinstance(module, kind)), "")
                assert group, f"no parameter group takes {name}"
            groups[group]["params"].append(parameter)
            groups[group]["names"].append(name)
    counted = sum(len(group["params"]) for group in groups.values())
    assert counted == len(list(model.parameters())), "parameter groups miss a parameter"
    return [group for group in groups.values() if group["params"]]


def make_optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the named groups, fused where the device has it."""
    device = next(model.parameters()).device
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda", "mps"),
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of a step, counted from zero: linear warm-up to the peak, then a cosine.

    The last step has the final rate; a warm-up as long as the run ends at the peak.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = config.steps - config.warmup_steps
    done = (step - config.warmup_steps + 1) / max(1, decay_steps)
    share = config.final_learning_rate
    return config.learning_rate * (
        share + (1 - share) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    )
