"""Loading a converted model from the folder that it was saved to."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel

from resroute.config import UserError
from resroute.hf.routed import POLICY
from resroute.hf.routed_model import MARK, method_of, model_class


def from_pretrained(
    folder: str | Path, *, architecture: type[PreTrainedModel] | None = None, **options: Any
) -> Any:
    """Load a converted model with its routing.

    Stock classes refuse the folder and say so; this is the way to load it.

    Args:
        folder: Where `save_pretrained` of a converted model, or `Trainer`, wrote it.
        architecture: The model's class; None is the one of transformers that the folder names. A
            model of a class of your own needs it.
        options: As for `from_pretrained` of transformers, such as `dtype`, `attn_implementation`,
            `subfolder`, fields of the configuration, or `device_map` with a single device.

    Returns:
        The model; with `output_loading_info`, also what transformers tells of the loading.

    Raises:
        UserError: A folder without a converted model or without weights of its routing that fit, of
            a class that transformers lacks, or a device map of several devices.
    """
    if isinstance(folder, str | Path):
        folder = Path(folder, options.pop("subfolder", None) or "")
    if not isinstance(folder, Path) or not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no config.json; name a folder of a converted model's save_pretrained"
        )
    wants_info = options.pop("output_loading_info", False)
    config, where = options.pop("config", None), "the configuration that was given"
    if config is None:
        # the configuration would take "auto" as the name of a dtype
        kept: dict[str, Any] = {
            name: options.pop(name) for name in ("dtype", "torch_dtype") if name in options
        }
        config, options = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
        options, where = {**options, **kept}, f"{folder}/config.json"
    method_of(config, where)
    stock = architecture or _named(config, folder)
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise UserError(f"architecture must be a class of models of transformers, got {stock!r}")
    if hasattr(config, MARK):
        delattr(config, MARK)
    loaded, info = model_class(stock).from_pretrained(
        folder, config=config, output_loading_info=True, **options
    )
    _require_routing(info, folder)
    if len(set(getattr(loaded, "hf_device_map", {}).values())) > 1:
        raise UserError(
            "a converted model cannot be shared among devices, or offloaded; load it with "
            "device_map={'': 'cuda:0'}"
        )
    return (loaded, info) if wants_info else loaded


def _named(config: Any, folder: Path) -> Any:
    """The class of transformers that a configuration names."""
    names = getattr(config, "architectures", None) or ["none"]
    stock = getattr(transformers, names[0], None)
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        raise UserError(
            f"{folder}: made for the class {names[0]}, which transformers does not have; give the "
            f"class: from_pretrained(folder, architecture={names[0]})"
        )
    return stock


def _require_routing(info: dict[str, Any], folder: Path) -> None:
    """Refuse a policy that was not in the folder, or had other sizes: it has initial values."""
    missing = sorted(name for name in info["missing_keys"] if POLICY in name.split("."))
    if missing:
        raise UserError(f"{folder}: no weights of its routing ({missing[0]}, ..); save it again")
    for name, saved, asked in info["mismatched_keys"]:
        if POLICY in name.split("."):
            raise UserError(
                f"{folder}: its routing has other sizes than the model that was asked for ({name}: "
                f"{tuple(saved)}, not {tuple(asked)}); load it with the sizes that it was saved "
                "with"
            )
