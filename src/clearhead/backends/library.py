"""The compiled library (csrc/clearhead.h): found and loaded once, and run.

It is a plain C interface, reached through ctypes. Its work runs on torch's own threads: torch's
parallel loop is handed in as a function pointer, since a second pool beside it would spin against
the first.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fields import ADDRESSES, CALL, DTYPES, densely, empty_out, layout_of

# A thread keeps no workspace that is larger than this.
KEPT_BYTES = 64 << 20

# csrc/clearhead.h, enum clearhead_status: the last three.
_SMALL_WORKSPACE, _UNKNOWN_ISA, _UNSUPPORTED_ISA = 6, 7, 8


class Library(NamedTuple):
    forward: Any
    workspace: Any
    parallel_for: int
    isa: dict[torch.dtype, str]


_loaded: list[Library | str] = []


def find_library() -> Library | str:
    """The library, loaded once, or why there is none.

    Raises:
        ValueError: CLEARHEAD_ISA names an instruction set that cannot be had.
    """
    if not _loaded:
        _loaded.append(_load())
    return _loaded[0]


# What torch.compiler.assume_constant_result does, without the seconds that it takes to import.
find_library._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load() -> Library | str:
    path = _find()
    if path is None:
        return (
            "its library was not built when clearhead was installed; with a C++ compiler at hand, "
            "pip install --force-reinstall --no-deps clearhead builds it"
        )
    library = ctypes.CDLL(str(path))
    library.clearhead_call_bytes.restype = ctypes.c_int64
    if library.clearhead_call_bytes() != CALL.size:
        return f"{path} belongs to another version of clearhead; install clearhead again"
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _name("torch_cpu")))
    if not hasattr(torch_cpu, "torch_parallel_for"):
        return f"torch {torch.__version__} does not lend its threads; it needs torch 2.10"
    parallel_for = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p).value or 0
    isa = {dtype: _isa(library, number) for dtype, number in DTYPES.items()}
    return Library(library.clearhead_forward, library.clearhead_workspace, parallel_for, isa)


def _name(stem: str) -> str:
    if sys.platform == "win32":
        return f"{stem}.dll"
    return f"lib{stem}.dylib" if sys.platform == "darwin" else f"lib{stem}.so"


def _find() -> Path | None:
    """The library beside the package's files, or in an installed package while a checkout runs."""
    folders = [Path(__file__).parents[1], *(Path(entry) / "clearhead" for entry in sys.path)]
    return next((f / _name("clearhead") for f in folders if (f / _name("clearhead")).is_file()),
                None)  # fmt: skip


def _isa(library: ctypes.CDLL, dtype: int) -> str:
    name = ctypes.c_char_p()
    status = library.clearhead_isa(ctypes.c_int64(dtype), ctypes.byref(name))
    if status == 0 and name.value is not None:
        return name.value.decode()
    wanted = os.environ.get("CLEARHEAD_ISA")
    if status == _UNSUPPORTED_ISA:
        raise ValueError(
            f'CLEARHEAD_ISA is "{wanted}", which this processor does not have; "generic" runs on '
            "any, and without the variable the best one is taken"
        )
    raise ValueError(
        f'CLEARHEAD_ISA is "{wanted}"; it must be "generic", "avx2", "avx512", "avx512bf16", '
        '"amx" or, on AArch64, "neon", or not be set'
    )


# -- one call -------------------------------------------------------------------------------------


class _Kept(threading.local):
    """The workspace that a thread keeps for its next call: fresh pages would cost more than a small
    call does.

    A call holds the tensors that it uses itself: what is kept here goes when the interpreter ends,
    and a daemon thread may be in the midst of a call then.
    """

    def __init__(self) -> None:
        self.workspace = _memory(1)

    def keep(self, workspace: "_Memory") -> None:
        """Keep this workspace, unless it is a very large one."""
        if workspace.size <= KEPT_BYTES:
            self.workspace = workspace


class _Memory(NamedTuple):
    tensor: Tensor
    address: int
    size: int


def _memory(size: int) -> _Memory:
    tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
    return _Memory(tensor, tensor.data_ptr(), size)


_kept = _Kept()


def threads() -> int:
    """How many threads a call uses: torch's number, and one in a forked process.

    The threads of OpenMP do not survive a fork, and a loop of torch's would wait for them for ever.
    """
    return 1 if _forked else torch.get_num_threads()


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)

# One entry for each call in progress, and the thread that ends the interpreter, once it does.
_running: list[None] = []
_ended_by = 0


@atexit.register
def _let_calls_end() -> None:
    """Wait for the calls of other threads, and let these neither return nor begin new ones.

    Python ends a daemon thread where it next asks for the interpreter's lock. If that is where
    torch makes or frees a tensor, the whole process aborts ("terminate called without an active
    exception"; measured 2026-11 with Python 3.11: torch's own attention did so 24 times of 24).
    """
    global _ended_by
    _ended_by = threading.get_ident()
    if threading.active_count() > 1:
        time.sleep(0.005)  # one that is between two calls gets to the next
    while _running:
        time.sleep(0.001)


def _stay() -> None:
    """In all threads but the one that ends the interpreter: sleep until the process is gone, and
    never ask for the interpreter's lock again."""
    if _ended_by != threading.get_ident():
        for_ever = threading.Lock()
        for_ever.acquire()
        for_ever.acquire()


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: bytes,
    sequences: tuple[int, int, int] | None = None,
) -> Tensor:
    """Call the library: out (B, H, L, Dv).

    The tensors that `rules` names are read and filled; with Dv = 0, where the address of out is 0,
    to fill them is all that the library does. For `sequences` and what is raised beside this see
    `layout_of`.

    Raises:
        NotImplementedError: there is no library.
    """
    if _ended_by:
        _stay()
    _running.append(None)
    try:
        lib = find_library()
        if isinstance(lib, str):
            raise NotImplementedError(f'attention(backend="native"): {lib}')
        layout = layout_of(query, key, value, sequences)
        out = empty_out(query, layout.heads_in_rows, *layout.sizes)
        if not layout.dense:
            query, key, value = densely(query, key, value)
        memory, address, size = _kept.workspace
        while True:
            call = ADDRESSES.pack(
                query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
                lib.parallel_for, threads(), address, size,
            ) + layout.packed + rules  # fmt: skip
            status = lib.forward(call)
            if status == 0:
                return out
            if status != _SMALL_WORKSPACE:
                raise _refused(status)
            needed = ctypes.c_int64()
            if status := lib.workspace(call, ctypes.byref(needed)):
                raise _refused(status)
            memory, address, size = larger = _memory(needed.value)
            _kept.keep(larger)
    finally:
        _running.pop()
        if _ended_by:
            _stay()


def _refused(status: int) -> RuntimeError:
    return RuntimeError(f"clearhead::native: its library refused the call with code {status}")
