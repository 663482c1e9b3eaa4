"""Files of datasets on the Hugging Face hub, by way of its own client and cache."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from resroute.config import UserError
from resroute.data.documents import import_extra

# seconds that the hub has to answer before it counts as out of reach
_TIMEOUT = 10.0


def hub_file(
    repository: str, revision: str, name: str, *, remedy: str, report: Callable[[int], None]
) -> Path:
    """A file of a dataset, from the cache of huggingface_hub or downloaded to it.

    The client's settings hold: `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`,
    `HF_TOKEN`. A file that is in the cache needs no network. Its checksum is left to the caller.

    Args:
        repository: Of the dataset.
        revision: A commit.
        name: Of the file in the repository.
        remedy: The line that says what to do where the file cannot be had.
        report: Called with the bytes of the file that are here.

    Raises:
        UserError: huggingface_hub is missing, or the file is not in the cache and cannot be
            downloaded.
    """
    hub = import_extra("huggingface_hub", f"downloading {repository}")
    errors = import_extra("huggingface_hub.errors", f"downloading {repository}")
    place = {
        "repo_id": repository,
        "filename": name,
        "repo_type": "dataset",
        "revision": revision,
    }
    # the base is the error of the HTTP client, which differs between releases of the hub's
    failures = (OSError, *errors.HfHubHTTPError.__bases__)
    with _quiet():
        try:
            if isinstance(cached := hub.try_to_load_from_cache(**place), str):
                return Path(cached)
            # the download waits long for a network that is not there, so that is tried first;
            # which answers to wait out, the download knows
            with suppress(errors.HfHubHTTPError):
                hub.get_hf_file_metadata(hub.hf_hub_url(**place), timeout=_TIMEOUT)
            return Path(hub.hf_hub_download(**place, tqdm_class=_bar(report)))
        except failures as error:
            is_offline = isinstance(error, errors.OfflineModeIsEnabled)
            reason = (
                "HF_HUB_OFFLINE is set, and it is not in the cache" if is_offline else _said(error)
            )
            raise UserError(
                f"{repository}/{name}: cannot be downloaded ({reason})\n{remedy}"
            ) from None


def _said(error: BaseException) -> str:
    # where there is a cause it is the plainer one
    error = error.__cause__ or error
    text = str(getattr(error, "strerror", None) or error).strip()
    return next(iter(text.splitlines()), type(error).__name__)[:160]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the client says of its waiting off the terminal."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _bar(report: Callable[[int], None]) -> type:
    """What the client takes for a progress bar; it counts bytes and shows nothing."""

    class Bar:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.done = 0

        def update(self, count: float | None = 1) -> None:
            self.done += int(count or 0)
            report(self.done)

        # bytes on the wire, which may be fewer than those of the file
        def update_transfer(self, count: float | None = 1) -> None: ...

        def _ignore(self, *_: Any, **__: Any) -> None: ...

        close = refresh = set_description = set_description_str = _ignore
        set_postfix_str = set_transfer_postfix_str = __exit__ = _ignore

        def __enter__(self) -> "Bar":
            return self

    return Bar
