"""The native backend: C++ kernels for CPUs, built by the machine's compiler at first use."""

import functools
import hashlib
import importlib.util
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from resroute.ops.registry import Operators, register_fakes, registered

_SOURCES = tuple(Path(__file__).with_name(f"native_{part}.cpp") for part in ("site", "block"))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("native*.h")))

# a build takes about a minute at most; an older lock was left by a process that died
_STALE_SECONDS = 180.0

_logger = logging.getLogger("resroute")

_lock = threading.Lock()


@functools.cache
def available() -> bool:
    """Whether a C++ compiler and ninja are found. Does not build."""
    found = (shutil.which(_compiler()[0]), _ninja(), importlib.util.find_spec("setuptools"))
    return all(found)


def is_built() -> bool:
    """Whether `load` finds the kernels compiled: by this compiler, for this processor and torch."""
    if not available():
        return False
    # heavy
    from torch.utils import cpp_extension

    folder = _folder()
    try:
        return (folder / (folder.name + cpp_extension.LIB_EXT)).is_file()
    except OSError:
        return False


def load() -> Operators:
    """Build and load the kernels, once per process; a build is kept in torch's extension cache.

    Returns:
        The four operators, `torch.ops.resroute_native.*`.

    Raises:
        RuntimeError: The kernels could not be built or loaded; the message holds the compiler's
            words.
    """
    with _lock:
        return _load()


@functools.cache
def _load() -> Operators:
    # heavy, and needed here alone
    from torch.utils import cpp_extension

    flags, folder = _flags(_compiler()), _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for(folder / "lock")
        library = folder / (folder.name + cpp_extension.LIB_EXT)
        if library.is_file():
            # the folder's name tells the sources: there is nothing to build
            torch.ops.load_library(library)
            register_fakes("native", _Layout())
            return registered("native")
        _put_ninja_on_path()
        cpp_extension.load(
            name=folder.name,
            sources=[str(path) for path in _SOURCES],
            extra_cflags=list(flags),
            extra_ldflags=["-fopenmp"] if "-fopenmp" in flags and _is_clang(_compiler()) else [],
            build_directory=str(folder),
            is_python_module=False,
            verbose=False,
        )
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"the native kernels could not be loaded: {error}") from error
    register_fakes("native", _Layout())
    return registered("native")


class _Layout:
    def site_saved(
        self, rows: Sequence[int], num_bases: int, has_prior: bool, has_gain: bool
    ) -> Sequence[int]:
        return (math.prod(rows), 2 + 4 * num_bases)

    def block_saved(self, rows: Sequence[int], queries: int, sources: int) -> Sequence[int]:
        # one vector more, so that the last row can be read whole
        return (math.prod(rows) * sources * queries + 16,)


def _folder() -> Path:
    """Where the library is, named as its folder is."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root) / f"resroute_native_{_fingerprint(_flags(_compiler()))}"


def _compiler() -> tuple[str, ...]:
    # as torch chooses it; it may have a launcher or options
    return ("cl",) if sys.platform == "win32" else tuple(shlex.split(os.environ.get("CXX", "c++")))


def _ninja() -> str | None:
    # beside the interpreter too: a virtual environment need not be activated
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def _put_ninja_on_path() -> None:
    ninja = _ninja()
    if ninja and not shutil.which("ninja"):
        os.environ["PATH"] = os.pathsep.join([str(Path(ninja).parent), os.environ["PATH"]])


@functools.cache
def _flags(compiler: tuple[str, ...]) -> tuple[str, ...]:
    if sys.platform == "win32":
        return ("/O2", "/openmp")
    flags = ["-O3", "-fno-math-errno", "-Wno-psabi"]
    flags += next(([f] for f in ("-march=native", "-mcpu=native") if _takes(compiler, f)), [])
    # without it (Apple's clang) the kernels run on one thread
    if _takes(compiler, "-fopenmp", "#include <omp.h>\n"):
        flags.append("-fopenmp")
    return tuple(flags)


def _takes(compiler: tuple[str, ...], flag: str, source: str = "") -> bool:
    command = [*compiler, flag, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True).returncode == 0


def _is_clang(compiler: tuple[str, ...]) -> bool:
    # gcc's calls are resolved by the OpenMP runtime that torch has loaded: one pool of threads.
    # clang's need its own
    command = [*compiler, "--version"]
    return "clang" in subprocess.run(command, text=True, capture_output=True).stdout


def _fingerprint(flags: Sequence[str]) -> str:
    """Tells apart what must not share a build: processors, versions of torch and of us, flags."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(errors="replace").splitlines()
        cpu = next((x for x in lines if x.startswith(("flags", "Features"))), cpu)
    sources = (path.read_text(encoding="utf-8") for path in (*_SOURCES, *_HEADERS))
    parts = (platform.machine(), cpu, torch.__version__, sys.version, *flags, *sources)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _wait_for(lock: Path) -> None:
    """Wait while another process builds; torch would wait for ever for one that was killed."""
    said = False
    try:
        while time.time() - lock.stat().st_mtime < _STALE_SECONDS:
            if not said:
                _logger.warning("waiting for another process that compiles the kernels: %s", lock)
            said = True
            time.sleep(0.2)
        lock.unlink()
    except FileNotFoundError:
        pass
