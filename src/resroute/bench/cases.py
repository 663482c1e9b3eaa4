"""The cases by name, and a case's whole result."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from resroute.bench.capture import capture
from resroute.bench.decode import decode
from resroute.bench.memory import memory
from resroute.bench.mixer import mixer
from resroute.bench.observe import observe
from resroute.bench.peers import PACKAGES, peer_version
from resroute.bench.scaling import scaling
from resroute.bench.settings import Settings, with_blocks
from resroute.bench.step import step
from resroute.bench.timing import Comparison, Listener
from resroute.config import UserError, suggestion, to_dict
from resroute.model import GPT
from resroute.residual import WAV, BlockAttnRes, PreNorm, ResidualConfig
from resroute.training.device import environment, keep_freed_memory

Case = Callable[[Settings, Listener], Iterator[Comparison]]

CASES: dict[str, Case] = {
    "step": step,
    "memory": memory,
    "decode": decode,
    "mixer": mixer,
    "scaling": scaling,
    "observe": observe,
    "capture": capture,
}
"""In the order in which they are documented."""

UNUSED = {
    "memory": ("pairs",),
    "decode": ("compile",),
    "mixer": ("methods", "precision", "compile"),
}
"""Options that have no effect in a case."""

METHODS: dict[str, tuple[ResidualConfig, ...]] = {
    **dict.fromkeys(("step", "memory", "decode", "observe"), (BlockAttnRes(), WAV())),
    "capture": (PreNorm(), BlockAttnRes(), WAV()),
    "scaling": (WAV(),),
    "mixer": (),
}
"""Methods of a case where none are given."""

FORMAT_VERSION = 1


def run(
    case: str,
    settings: Settings,
    listener: Listener | None = None,
    *,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[list[Comparison], dict[str, Any]]:
    """Run a case.

    Args:
        case: A name among `CASES`.
        settings: What it is run with.
        listener: Told what happens.
        save: Called after each comparison with the JSON of those that are done, in which
            `complete` is false, and at the end with all of it.

    Returns:
        The comparisons, and all of it as JSON: settings, machine, every pair. Methods are listed
        with the number of blocks that they are asked for; `num_blocks` in a row's details is what
        was built. The machine is described without host, user and paths.

    Raises:
        UserError: An unknown case, or settings that this machine or the methods do not take.
        WrongResultError: Something computes another result than the reference; it is not timed.
    """
    if case not in CASES:
        raise UserError(f"unknown case {case!r}{suggestion(case, CASES)}; use {', '.join(CASES)}")
    methods = settings.methods or METHODS[case]
    settings = dataclasses.replace(settings, methods=methods)
    listener = listener or Listener()
    for note in _require_runnable(settings):
        listener.message(f"note: {note}")
    # as training does
    keep_freed_memory()
    rows: list[Comparison] = []
    with _threads(settings.threads):
        result = _head(case, settings)
        for row in CASES[case](settings, listener):
            rows.append(row)
            result["rows"].append(row.to_json())
            if save is not None:
                save(result)
    result["complete"] = True
    if save is not None:
        save(result)
    return rows, result


def _head(case: str, settings: Settings) -> dict[str, Any]:
    """The JSON of a case before its first row."""
    blocks = settings.num_blocks
    methods = tuple(with_blocks(residual, blocks) for residual in settings.methods)
    asked = dataclasses.replace(settings, methods=methods, blocks=blocks)
    peers = {name: peer_version(name) for name in PACKAGES} if case == "mixer" else {}
    return {
        "format_version": FORMAT_VERSION,
        "case": case,
        "complete": False,
        "settings": to_dict(asked),
        "machine": environment(settings.torch_device, settings.torch_precision),
        "peers": {name: found for name, found in peers.items() if found},
        "rows": [],
    }


def _require_runnable(settings: Settings) -> list[str]:
    """Raise now what minutes of other measurements would come before; notes on what is built."""
    settings.served()
    notes: list[str] = []
    for residual in settings.methods:
        with torch.device("meta"), warnings.catch_warnings():
            # they are handed back
            warnings.simplefilter("ignore")
            policy = GPT(settings.model(residual)).policy
        notes += policy.notes
    return list(dict.fromkeys(notes))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    former = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)
