"""A trained model as a folder that transformers loads, here and where resroute is not installed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers.utils import logging

from resroute.config import UserError, from_defaults
from resroute.data import Tokenizer
from resroute.files import new_folder, read_json, write_json, write_text
from resroute.hf.gpt import from_gpt
from resroute.hf.modeling_resroute import ResrouteForCausalLM
from resroute.hf.routing_resroute import BASES, METHODS
from resroute.hf.tokenizer import fast_tokenizer
from resroute.residual import ResidualConfig
from resroute.training import load
from resroute.training.checkpoint import Saved, open_checkpoint
from resroute.training.load import checkpoint_folder

CODE = tuple(
    f"{name}_resroute.py" for name in ("attention", "configuration", "modeling", "routing")
)
"""Python files beside exported weights."""

_AUTO_MAP = {
    "AutoConfig": "configuration_resroute.ResrouteConfig",
    "AutoModel": "modeling_resroute.ResrouteModel",
    "AutoModelForCausalLM": "modeling_resroute.ResrouteForCausalLM",
}


def export(
    run_or_checkpoint: str | Path,
    folder: str | Path,
    *,
    best: bool = False,
    ema: bool = False,
    remote_code: bool = True,
) -> Path:
    """Write a trained model, its tokenizer and its card as transformers has them.

    The folder is there whole or not at all.

    Args:
        run_or_checkpoint: A run folder of `resroute train`, or a checkpoint folder in it.
        folder: Where to write; it must not exist, or be empty.
        best: Of a run, take the kept checkpoint of least validation loss instead of the newest.
        ema: Take the average of the weights, of a run with `ema_decay`.
        remote_code: Put the model's code beside its weights, so that
            `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` needs nothing of
            resroute. Without it whoever loads the folder imports `resroute.hf` first.

    Returns:
        The folder.

    Raises:
        UserError: A folder that is in use or cannot be written, a method without code of its own,
            or what `load` refuses.
    """
    folder = Path(folder)
    _require_free(folder)
    source = checkpoint_folder(Path(run_or_checkpoint), best=best)
    if best and source == Path(run_or_checkpoint):
        raise UserError(f"{source} is one checkpoint; name its run to take the best")
    saved = open_checkpoint(source)
    if remote_code:
        _require_code(saved.config.model.residual)
    model, tokenizer, config = load(source, ema=ema)
    made = from_gpt(model, end_of_text=tokenizer.end_of_text)
    made.config.auto_map = dict(_AUTO_MAP)
    words = fast_tokenizer(tokenizer, config.model.context)
    try:
        with new_folder(folder) as target, _quiet():
            made.save_pretrained(target)
            words.save_pretrained(target)
            if not remote_code:
                _drop_code(target)
            weights = "average of the weights" if ema else "best" if best else "newest"
            weights += ", the best" if ema and best else ""
            card = _card(made, saved, weights, _opening(tokenizer), remote_code)
            write_text(target / "README.md", card)
    except FileExistsError:
        _require_free(folder)
        raise
    return folder


def _require_free(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        what = "is not empty" if folder.is_dir() else "is there, and no folder"
        raise UserError(f"{folder}: {what}; name a new folder")


def _require_code(residual: ResidualConfig) -> None:
    unknown = [name for name in getattr(residual, "bases", ()) if name not in BASES]
    if residual.type_name not in METHODS or unknown:
        what = f"the basis {unknown[0]!r}" if unknown else f"the method {residual.type_name!r}"
        raise UserError(
            f"there is no code of {what} to put beside the weights; leave it out: --no-remote-code "
            "(remote_code=False)"
        )


def _drop_code(folder: Path) -> None:
    for name in CODE:
        (folder / name).unlink()
    path = folder / "config.json"
    values = read_json(path, "export again")
    del values["auto_map"]
    write_json(path, values)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars that transformers draws as it writes."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _opening(tokenizer: Tokenizer) -> str:
    """A short text that the vocabulary has."""
    for text in ("One", "one"):
        with suppress(UserError):
            if tokenizer.decode(tokenizer.encode(text)) == text:
                return text
    return tokenizer.decode([0])


def _card(
    model: ResrouteForCausalLM, saved: Saved, weights: str, prompt: str, remote_code: bool
) -> str:
    """The model card: what was trained, on what, how well, and how to load it."""
    config, progress = saved.config, saved.progress
    shape = config.model
    data = "".join(c if c.isprintable() and c not in "|`" else "_" for c in Path(config.data).name)
    loss = "not measured"
    if progress.validation_loss is not None and not weights.startswith("average"):
        loss = f"{progress.validation_loss:.4f} nats a token"
    rows = {
        "method": shape.residual.label,
        "its options": f"`{json.dumps(from_defaults(shape.residual))}`",
        "layers, width, heads": f"{shape.num_layers}, {shape.dim}, {shape.num_heads}",
        "context": f"{shape.context} tokens of a vocabulary of {shape.vocab_size}",
        "parameters": f"{model.num_parameters():,}",
        "data": data,
        "steps": f"{progress.step:,} of {config.steps:,}, {config.batch_size} windows each",
        "weights": weights,
        "validation loss": loss,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    opening = "" if remote_code else "import resroute.hf\n"
    argument = ", trust_remote_code=True" if remote_code else ""
    where = (
        "The Python files in this folder are its code; resroute makes it faster where it is "
        "installed."
        if remote_code
        else "It needs the package resroute."
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [resroute]
---

# {shape.residual.label}, {shape.num_layers} layers

A decoder-only Transformer with depth routing, trained by resroute.

| | |
| --- | --- |
{table}

```python
{opening}from transformers import pipeline

write = pipeline("text-generation", model="path/of/this/folder"{argument})
print(write({json.dumps(prompt)}, max_new_tokens=50)[0]["generated_text"])
```

{where}
"""
