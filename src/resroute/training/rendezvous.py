"""How processes find each other: again and again, and after a restart too."""

import functools
import os
import secrets
import time
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

_ASKING = "resroute/asking"
_SECONDS_BETWEEN_LOOKS = 0.01


def meeting_place() -> dict[str, Any]:
    """What `init_process_group` needs besides its backend.

    Processes that torchrun starts in the stead of others get the store of those, with the
    addresses that they have left there (pytorch issue 135712; so in torch 2.13). One that comes
    before its process 0 would call a dead one. And where processes meet a second time, one that
    comes early would find the store that process 0 is about to close. So a store stays, and every
    process asks process 0 for a word, under which only those meet who have heard it.

    Raises:
        RuntimeError: Some process has not come in the time that torch waits for one.
    """
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    store, rank, size = _store(*map(os.environ.get, names))
    word = _give_word(store, size - 1) if rank == 0 else _ask_word(store)
    return {"store": PrefixStore(word, store), "rank": rank, "world_size": size}


@functools.cache
def _store(*place: str | None) -> tuple[Any, int, int]:
    found: tuple[Any, int, int] = next(rendezvous("env://"))
    return found


# torch's stubs lack some of a store's methods
def _give_word(store: Any, others: int) -> str:
    word = secrets.token_hex(8)
    deadline = time.monotonic() + store.timeout.total_seconds()
    answered: set[str] = set()
    while store.add(f"{word}/heard", 0) < others:
        # the dead are answered too: nobody hears it
        asking = store.get(_ASKING).decode().split() if store.check([_ASKING]) else []
        for name in set(asking) - answered:
            store.set(name, word)
            answered.add(name)
        if time.monotonic() > deadline:
            raise RuntimeError(f"some of {others} other processes did not come")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return word


def _ask_word(store: Any) -> str:
    name = f"resroute/{secrets.token_hex(8)}"
    store.append(_ASKING, f"{name} ")
    word: str = store.get(name).decode()
    store.add(f"{word}/heard", 1)
    return word
