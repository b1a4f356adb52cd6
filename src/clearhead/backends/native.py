"""clearhead's own CPU kernels (csrc/), compiled when the package is installed.

The library is a plain C interface, reached through ctypes on the first call that needs it. Its
work runs on torch's own threads: torch's parallel loop is handed in as a function pointer, since a
second pool beside it would spin against the first. The forward pass is the op `clearhead::native`;
its backward is the op of `chunked`, from the row maximum m and sum z that the kernels save.
"""

import ctypes
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Problem, in_transform
from ..results import Aux

NAME = "native"
MAX_HEAD_SIZE = 512
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
NO_LIMIT = 2**63 - 1

# csrc/clearhead.h, struct clearhead_call: every field has eight bytes.
_DENSE = "P4qq"
_CALL = struct.Struct(
    f"@7qq 4P 12q 2P 2d 2q {_DENSE} {_DENSE} {_DENSE} P2q 2P4q P P2q P2q 2P 6P P2q 2PqP PqPq".replace(" ", "")
)
_WORKSPACE = struct.Struct("@Pq")  # its last two fields
_NO_DENSE = (0, 0, 0, 0, 0, 0)
_NO_AUX = (0,) * 18

# csrc/clearhead.h, enum clearhead_status: the last two.
_UNKNOWN_ISA, _UNSUPPORTED_ISA = 7, 8


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    p = problem
    if p.device.type != "cpu":
        return f"its kernels run on a CPU, and query is on {p.device.type}"
    if p.dtype == torch.float64:
        return "its kernels compute in float32, and query is float64"
    if p.dropout_p > 0:
        return "it has no dropout"
    if in_transform():
        return "it lacks the derivatives that a torch.func transform may ask for"
    if 0 in (p.B, p.H, p.L, p.S, p.D, p.Dv):  # min() would order them in a traced graph
        return "an axis of size 0 leaves its kernels nothing to do"
    if max(p.D, p.Dv) > MAX_HEAD_SIZE:
        name, size = ("head", p.D) if p.D > MAX_HEAD_SIZE else ("value head", p.Dv)
        return f"{name} size {size} is over {MAX_HEAD_SIZE}"
    library = _library()
    return library if isinstance(library, str) else None


def gives(problem: Problem) -> set[str]:
    """What this backend can return beside the output, by the names of AuxRequest."""
    return {"lse"}


def leaks(problem: Problem) -> bool:
    """Whether NaN or Inf could reach rows that must not see it: never."""
    return False


def describe(problem: Problem) -> str:
    """How this backend would run the call."""
    library = _library()
    assert isinstance(library, _Library)
    threads = torch.get_num_threads()
    return f"clearhead's CPU kernels, {library.isa}, {threads} thread{'s' * (threads > 1)}"


def forward(problem: Problem) -> tuple[Tensor, Aux]:
    """Compute out (B, H, L, Dv), in query's dtype, and the lse if it is asked for."""
    p = problem
    out, lse, _, _ = attend(*p.differentiable, p.mask, p.key_mask, p.doc_q, p.doc_k, p.left,
                            p.right, p.scale, p.softcap)  # fmt: skip
    return out, Aux(lse if p.aux.lse else None)


# -- the library ----------------------------------------------------------------------------------


class _Library(NamedTuple):
    forward: Any
    workspace: Any
    parallel_for: int
    isa: str


_loaded: dict[str, _Library | str] = {}


def _library() -> _Library | str:
    """The library, loaded once, or why there is none.

    Raises:
        ValueError: CLEARHEAD_ISA names an instruction set that cannot be had.
    """
    if NAME not in _loaded:
        _loaded[NAME] = _load()
    return _loaded[NAME]


# What torch.compiler.assume_constant_result does, without the seconds that it takes to import.
_library._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _load() -> _Library | str:
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
    return _Library(
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
        f'CLEARHEAD_ISA is "{wanted}"; it must be "generic", "avx2", "avx512" or "avx512bf16", or '
        "not be set"
    )


# -- the op ---------------------------------------------------------------------------------------


class _Kept(threading.local):
    """The workspace of a thread, kept for its next call: fresh pages would cost more than a small
    call does."""

    workspace = torch.empty(0, dtype=torch.uint8)


_kept = _Kept()


@torch.library.custom_op("clearhead::native", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    float_mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    key_mask: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward pass as an op: out, lse, m and z (B, H, L); m = -inf and z = 0 where empty."""
    library = _library()
    if isinstance(library, str):
        raise NotImplementedError(f'attention(backend="native"): {library}')
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    (B, H, L, D), (Hkv, S, Dv) = query.shape, value.shape[1:]
    out = query.new_empty(B, H, L, Dv)
    m = query.new_empty(B, H, L, dtype=torch.float32)
    z = torch.empty_like(m)
    float_mask, bias = _readable(float_mask), _readable(bias)
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.to(torch.float32)
    doc_q, doc_k = (None if t is None else t.to(torch.int64) for t in (doc_q, doc_k))

    threads = torch.get_num_threads()
    call = ctypes.create_string_buffer(_CALL.size)
    _CALL.pack_into(
        call, 0, B, H, Hkv, L, S, D, Dv, DTYPES[query.dtype],
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        m.data_ptr(), z.data_ptr(), scale, softcap or 0.0,
        NO_LIMIT if left is None else left, NO_LIMIT if right is None else right,
        *_dense(mask, B, H, L, S), *_dense(float_mask, B, H, L, S), *_dense(bias, B, H, L, S),
        *_spread(key_mask, B, S), _address(doc_q), _address(doc_k),
        *_spread(doc_q, B, L)[1:], *_spread(doc_k, B, S)[1:],
        _address(sinks), *_spread(slopes, B, H), *_NO_AUX, library.parallel_for, threads, 0, 0,
    )  # fmt: skip
    needed = ctypes.c_int64()
    _succeed(library.workspace(call, ctypes.byref(needed)))
    if _kept.workspace.numel() < needed.value:
        _kept.workspace = torch.empty(needed.value, dtype=torch.uint8)
    workspace = _kept.workspace
    place = _CALL.size - _WORKSPACE.size
    _WORKSPACE.pack_into(call, place, workspace.data_ptr(), workspace.numel())
    _succeed(library.forward(call))
    return out, z.log().add_(m), m, z


def _succeed(status: int) -> None:
    if status:
        raise RuntimeError(f"clearhead::native: its library refused the call with code {status}")


def _readable(tensor: Tensor | None) -> Tensor | None:
    return tensor.to(torch.float32) if tensor is not None and tensor.dtype not in DTYPES else tensor


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


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    B, H, L, _ = query.shape
    row = query.new_empty(B, H, L, dtype=torch.float32)
    out = query.new_empty(B, H, L, value.shape[-1])
    return out, row, torch.empty_like(row), torch.empty_like(row)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, m, z = output
    ctx.save_for_backward(*inputs[:11], m, z)
    ctx.numbers = inputs[11:]


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor, *_: Tensor) -> tuple:
    *tensors, m, z = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:7])
    no_seed, no_dropout, any_order = None, 0.0, False
    grads = torch.ops.clearhead.chunked_backward(
        d_out, d_lse, m, z, needs, *tensors, no_seed, *ctx.numbers, no_dropout, any_order
    )
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), *[None] * 8)


attend.register_autograd(_backward, setup_context=_save)
