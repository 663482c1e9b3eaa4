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
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import Timeout

from resroute.config import UserError
from resroute.files import lock_file, write_bytes
from resroute.ops.registry import Operators, register_fakes, registered

_SOURCES = tuple(Path(__file__).with_name(f"native_{part}.cpp") for part in ("site", "block"))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("native*.h")))

_BUILD = "build-"

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
    try:
        return _library(_folder()).is_file()
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
    try:
        _load_library(_folder())
    except (OSError, ImportError, UserError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"the native kernels could not be loaded: {error}") from error
    register_fakes("native", _Layout())
    return registered("native")


def _load_library(folder: Path) -> None:
    library = _library(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # the folder's name tells the sources: what is there needs no build
    if not library.is_file():
        with _alone(folder):
            # another process may have built it meanwhile
            if not library.is_file():
                _build(library)
                return
    torch.ops.load_library(library)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Be the one process that builds; the system lets the next one in however this one ends."""
    file = folder / "build.lock"
    try:
        held = lock_file(file, timeout=0)
    except Timeout:
        _logger.warning("waiting for another process that compiles the kernels: %s", folder)
        held = lock_file(file)
    if held is None:
        # no locks on this file system: several builds do no harm, since each has its own folder
        yield
        return
    try:
        # of builds that were killed
        for left in folder.glob(f"{_BUILD}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        held.release()


def _build(library: Path) -> None:
    """Compile in a folder of this build alone, and load; the library comes to its place whole."""
    # heavy, and needed here alone
    from torch.utils import cpp_extension

    compiler = _compiler()
    flags = _flags(compiler)
    _put_ninja_on_path()
    with tempfile.TemporaryDirectory(
        prefix=_BUILD, dir=library.parent, ignore_cleanup_errors=True
    ) as folder:
        cpp_extension.load(
            name=library.parent.name,
            sources=[str(path) for path in _SOURCES],
            extra_cflags=list(flags),
            extra_ldflags=["-fopenmp"] if "-fopenmp" in flags and _is_clang(compiler) else [],
            build_directory=folder,
            is_python_module=False,
            verbose=False,
        )
        # torch numbers what one process builds twice
        (built,) = Path(folder).glob(f"*{cpp_extension.LIB_EXT}")
        write_bytes(library, built.read_bytes())


class _Layout:
    def site_saved(
        self, rows: Sequence[int], num_bases: int, has_prior: bool, has_gain: bool
    ) -> Sequence[int]:
        return (math.prod(rows), 2 + 4 * num_bases)

    def block_saved(self, rows: Sequence[int], queries: int, sources: int) -> Sequence[int]:
        # one vector more, so that the last row can be read whole
        return (math.prod(rows) * sources * queries + 16,)


def _library(folder: Path) -> Path:
    # heavy
    from torch.utils import cpp_extension

    return folder / (folder.name + cpp_extension.LIB_EXT)


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
