"""The compiled library (csrc/clearhead.h): found and loaded once, and one call of it.

It is a plain C interface, reached through ctypes. Its work runs on torch's own threads: torch's
parallel loop is handed in as a function pointer, since a second pool beside it would spin against
the first. A call is a struct, packed in parts; every field has eight bytes.
"""

import atexit
import ctypes
import functools
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
NO_LIMIT = 2**63 - 1
# What is to be filled, in the struct's order: first what has one number per row.
ROW_STATISTICS = ("m", "z", "lse", "max_logit", "entropy", "first_mass", "previous_mass",
                  "self_mass", "distance")  # fmt: skip
_STATISTICS_FIELDS = (*ROW_STATISTICS, "first_key", "its strides", "", "top_weights", "top_keys",
                      "top_k", "key_mass", "weights")  # fmt: skip
_FIELD = {name: n for n, name in enumerate(_STATISTICS_FIELDS)}
# A thread keeps no workspace that is larger than this.
KEPT_BYTES = 64 << 20

_HEAD = struct.Struct("@7qq4P12qPqPq")  # sizes, dtype, tensors, strides, threads, workspace
_NUMBERS = struct.Struct("@2d2q")  # scale to right
_RULES = struct.Struct("@" + "P4qq" * 3 + "P2q2P4qPP2qP2q2P")  # mask to cu_k
_STATISTICS = struct.Struct("@9PP2q2Pq2P")  # m to weights
_CALL = struct.Struct(
    "@" + "".join(part.format[1:] for part in (_HEAD, _NUMBERS, _RULES, _STATISTICS))
)
_NO_RULES, _NO_STATISTICS = bytes(_RULES.size), bytes(_STATISTICS.size)
_NO_DENSE = (0, 0, 0, 0, 0, 0)

# csrc/clearhead.h, enum clearhead_status: the last three.
_SMALL_WORKSPACE, _UNKNOWN_ISA, _UNSUPPORTED_ISA = 6, 7, 8


class Library(NamedTuple):
    forward: Any
    workspace: Any
    parallel_for: int
    isa: str


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
    if library.clearhead_call_bytes() != _CALL.size:
        return f"{path} belongs to another version of clearhead; install clearhead again"
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _name("torch_cpu")))
    if not hasattr(torch_cpu, "torch_parallel_for"):
        return f"torch {torch.__version__} does not lend its threads; it needs torch 2.10"
    parallel_for = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p).value or 0
    return Library(
        library.clearhead_forward, library.clearhead_workspace, parallel_for, _isa(library)
    )


def _name(stem: str) -> str:
    if sys.platform == "win32":
        return f"{stem}.dll"
    return f"lib{stem}.dylib" if sys.platform == "darwin" else f"lib{stem}.so"


def _find() -> Path | None:
    """The library beside the package's files, or in an installed package while a checkout runs."""
    folders = [Path(__file__).parents[1], *(Path(entry) / "clearhead" for entry in sys.path)]
    return next((f / _name("clearhead") for f in folders if (f / _name("clearhead")).is_file()),
                None)  # fmt: skip


def _isa(library: ctypes.CDLL) -> str:
    name = ctypes.c_char_p()
    status = library.clearhead_isa(ctypes.byref(name))
    if status == 0 and name.value is not None:
        return name.value.decode()
    wanted = os.environ.get("CLEARHEAD_ISA")
    if status == _UNSUPPORTED_ISA:
        raise ValueError(
            f'CLEARHEAD_ISA is "{wanted}", which this processor does not have; "generic" runs on '
            "any, and without the variable the best one is taken"
        )
    raise ValueError(
        f'CLEARHEAD_ISA is "{wanted}"; it must be "generic", "avx2", "avx512", "avx512bf16" or, on '
        'AArch64, "neon", or not be set'
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
    packed: tuple[int, int, int] | None = None,
) -> Tensor:
    """Call the library: out (B, H, L, Dv).

    The tensors that `rules` names are read and filled; with Dv = 0, where the address of out is 0,
    to fill them is all that the library does. `packed` is for sequences packed into one batch item:
    how many, and the most queries and keys of one.

    Raises:
        NotImplementedError: there is no library.
        ValueError, TypeError: sizes or dtypes with which it would read other memory.
    """
    if _ended_by:
        _stay()
    _running.append(None)
    try:
        lib = find_library()
        if isinstance(lib, str):
            raise NotImplementedError(f'attention(backend="native"): {lib}')
        B, H, L, D = query.shape
        _, Hkv, S, Dv = value.shape
        if key.shape != (B, Hkv, S, D) or len(value) != B:
            raise ValueError(
                f"clearhead::native: query, key and value have shapes {tuple(query.shape)}, "
                f"{tuple(key.shape)}, {tuple(value.shape)}; they need (B, H, L, D), (B, Hkv, S, D) "
                "and (B, Hkv, S, Dv)"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise TypeError(
                f"clearhead::native: query, key and value are {query.dtype}, {key.dtype} and "
                f"{value.dtype}; they must be alike"
            )
        q_b, q_h, q_i, q_d = query.stride()
        k_b, k_h, k_j, k_d = key.stride()
        v_b, v_h, v_j, v_d = value.stride()
        out = empty_out(query, q_h < q_i, B, H, L, Dv)
        o_b, o_h, o_i, _ = out.stride()
        if not q_d == k_d == v_d == 1:
            query, key, value = (
                t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value)
            )
            (q_b, q_h, q_i, _), (k_b, k_h, k_j, _) = query.stride(), key.stride()
            v_b, v_h, v_j, _ = value.stride()
        if packed is not None:
            B, L, S = packed
        memory, address, size = _kept.workspace
        while True:
            call = _HEAD.pack(
                B, H, Hkv, L, S, D, Dv, DTYPES[query.dtype],
                query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
                q_b, q_h, q_i, k_b, k_h, k_j, v_b, v_h, v_j, o_b, o_h, o_i,
                lib.parallel_for, threads(), address, size,
            ) + rules  # fmt: skip
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


def empty_out(query: Tensor, heads_in_rows: bool, B: int, H: int, L: int, Dv: int) -> Tensor:
    """out, of shape (B, H, L, Dv): in memory its heads lie within its rows where those of query do,
    so that joining the heads again is a view."""
    if heads_in_rows:
        return query.new_empty_strided((B, H, L, Dv), (L * H * Dv, Dv, H * Dv, 1))
    return query.new_empty(B, H, L, Dv)  # 0.5 us less than with a tuple


@functools.lru_cache(maxsize=256)
def bare_rules(
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
) -> bytes:
    """The part of a call that follows its head, where there are no other rules and nothing else is
    to be filled."""
    numbers = _NUMBERS.pack(
        scale, softcap or 0.0,
        NO_LIMIT if left is None else left, NO_LIMIT if right is None else right,
    )  # fmt: skip
    return numbers + _NO_RULES + _NO_STATISTICS


def rules_of(
    shape: tuple[int, int, int, int],
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    float_mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    doc_q: Tensor | None = None,
    doc_k: Tensor | None = None,
    head_mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    first_key: Tensor | None = None,
    found: dict[str, Tensor] | None = None,
) -> tuple[bytes, tuple]:
    """The part of a call of shape (B, H, L, S) that says what is added, who sees what and what else
    is to be filled, and the tensors that must live until the call. All that are given broadcast.

    Of B packed sequences offsets (2, B + 1), int64 and dense, has where their rows and their keys
    start and end. What is `found` has the struct's names, and is dense.
    """
    B, H, L, S = shape
    numbers = bare_rules(scale, left, right, softcap)[: _NUMBERS.size]
    statistics = _NO_STATISTICS if not found else _statistics(found, first_key, B, L)
    if (
        float_mask is bias is sinks is alibi_slopes is mask is None
        and key_mask is doc_q is doc_k is head_mask is offsets is None
    ):
        return numbers + _NO_RULES + statistics, ()
    float_mask, bias = _readable(float_mask), _readable(bias)
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    alibi_slopes, head_mask = (_in(torch.float32, t) for t in (alibi_slopes, head_mask))
    doc_q, doc_k = (_in(torch.int64, t) for t in (doc_q, doc_k))
    cu_q = _address(offsets)
    rules = _RULES.pack(
        *_dense(mask, *shape), *_dense(float_mask, *shape), *_dense(bias, *shape),
        *_spread(key_mask, B, S), _address(doc_q), _address(doc_k),
        *_spread(doc_q, B, L)[1:], *_spread(doc_k, B, S)[1:],
        _address(sinks), *_spread(alibi_slopes, B, H), *_spread(head_mask, B, H),
        cu_q, cu_q and cu_q + 8 * (B + 1),
    )  # fmt: skip
    alive = float_mask, bias, sinks, alibi_slopes, head_mask, doc_q, doc_k, offsets
    return numbers + rules + statistics, alive


def _statistics(found: dict[str, Tensor], first_key: Tensor | None, B: int, L: int) -> bytes:
    fields = [0] * len(_FIELD)
    for name, tensor in found.items():
        fields[_FIELD[name]] = tensor.data_ptr()
    if first_key is not None:
        fields[_FIELD["first_key"] : _FIELD["top_weights"]] = _spread(first_key, B, L)
    if "top_weights" in found:
        fields[_FIELD["top_k"]] = found["top_weights"].shape[-1]
    return _STATISTICS.pack(*fields)


def _readable(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype in DTYPES else tensor.to(torch.float32)


def _in(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None else tensor.to(dtype)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dense(tensor: Tensor | None, *shape: int) -> tuple[int, ...]:
    """The fields of clearhead_dense: address, strides with 0 where broadcast, dtype."""
    if tensor is None:
        return _NO_DENSE
    return (tensor.data_ptr(), *tensor.expand(shape).stride(), DTYPES[tensor.dtype])


def _spread(tensor: Tensor | None, *shape: int) -> tuple[int, int, int]:
    """Address and strides of a tensor with two axes, 0 where broadcast."""
    if tensor is None:
        return 0, 0, 0
    strides = tensor.expand(shape).stride()
    return tensor.data_ptr(), strides[0], strides[1]
