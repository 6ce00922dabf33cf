"""The compiled engine of the CPU: `engine/native.c`, built by the machine's own C compiler at first use.

Without a compiler everything still works, through oneDNN and Numba (`target/cpu.py`), only slower. The library is kept
in the user's cache folder under the hash of its source, its flags and the processor, so it is built once a machine.
"""

import ctypes
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from entmtp.kept import cache_folder
from entmtp.target.cache import KVCache
from entmtp.target.mask_adapter import Adapter
from entmtp.target.precision import processor_features

SOURCE = Path(__file__).with_name("engine") / "native.c"
FLAGS = ["-O3", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=fast", "-std=gnu11", "-Wno-psabi",
         "-fopenmp", "-fPIC", "-shared"]  # fmt: skip
LANES = 16  # as in engine/vectors.h
CHUNK = 64 << 20
PART = 512  # rows of a prefill in one call
DTYPES = (torch.float32, torch.bfloat16)
DEEP = {torch.float32: 1, torch.bfloat16: 32}  # as in engine/vectors.h
HEAD_DIMS, POINTER, INT = (16, 32, 64, 128), ctypes.c_void_p, ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER), ("inputs", INT), ("outputs", INT), ("paired", INT),
                ("unit", INT), ("rank", INT), ("down", POINTER)]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [("norm1", POINTER), ("norm2", POINTER), ("qkv", _Linear), ("out", _Linear), ("up", _Linear),
                ("down", _Linear)]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [("layers", ctypes.POINTER(_Layer)), ("final_norm", POINTER), ("cos", POINTER), ("sin", POINTER),
                ("depth", INT), ("hidden", INT), ("heads", INT), ("kv_heads", INT), ("dim", INT), ("inner", INT),
                ("rank", INT), ("eps", ctypes.c_double)]  # fmt: skip


def compiler() -> str | None:
    """The command of the C compiler: CC may hold options, or a wrapper before it."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")


def _processor() -> str:
    return " ".join(sorted(processor_features())) or platform.processor() or platform.machine()


def build(folder: Path, dtype: torch.dtype) -> Path:
    """The shared library in `folder`, compiled unless it is there. Raises OSError or SubprocessError."""
    flags = [*FLAGS, *(["-DHALF"] if dtype == torch.bfloat16 else [])]
    if os.environ.get("ENTMTP_TILES") == "c":
        flags.append("-DTILES")
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    key = "\x00".join([*sources, *flags, compiler() or "", _processor()])
    path = folder / f"native-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{path.name}.{os.getpid()}.partial"
        command = [*shlex.split(compiler()), *flags, str(SOURCE), "-o", str(partial), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        partial.rename(path)
    return path


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The engine for weights and cache of this dtype, or None (said once) where it cannot be had.

    ENTMTP_NATIVE=0 does without it. ENTMTP_TILES=c replaces the matrix unit's instructions by slow C (engine/tiles.h),
    for tests where the processor has none.
    """
    if os.environ.get("ENTMTP_NATIVE") == "0" or compiler() is None or dtype not in DTYPES:
        return None
    why = None
    for folder in (cache_folder, _own_folder):
        try:
            made = ctypes.CDLL(str(build(folder(), dtype)))
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip().splitlines()
            why = next((line for line in said if "error" in line), (said or [error])[0])
            print(f"warning: {compiler()} cannot compile {SOURCE.name} ({why}): decoding is slower", file=sys.stderr)
            return None
        except OSError as error:
            why = error
            continue  # a folder that cannot be written, or does not allow code; or no such compiler
        made.linear.argtypes = [POINTER, POINTER, INT, POINTER, INT]
        made.pack.argtypes = [POINTER, INT, INT, INT, POINTER]
        made.scratch_size.argtypes, made.scratch_size.restype = [POINTER, INT, INT, INT, INT], INT
        made.forward.argtypes = [POINTER, POINTER, POINTER, INT, INT, INT, POINTER, INT, POINTER, INT, POINTER, POINTER,
                                 INT]  # fmt: skip
        made.top1.argtypes = [POINTER, INT, INT, POINTER]
        made.first_largest.argtypes, made.first_largest.restype = [POINTER, INT], INT
        for function in (made.linear, made.pack, made.forward, made.top1):
            function.restype = None
        made.unit = bool(made.matrix_unit())
        return made
    print(f"warning: the compiled engine cannot be had ({why}): decoding is slower", file=sys.stderr)
    return None


def _own_folder() -> Path:
    """Where code is kept if the user's cache cannot be written. Its name is known to all, so it must be this user's
    own: what others may write into is not loaded. Raises OSError."""
    folder = Path(tempfile.gettempdir()) / f"entmtp-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="entmtp-"))


class Arena:
    """Memory for packed weights in large pieces, so that the kernel can back it with huge pages."""

    def __init__(self):
        self.size, self.used, self.memory = 0, 0, None
        self.lock = threading.Lock()  # models may be loaded side by side

    def room_for(self, count: int, dtype: torch.dtype) -> Tensor:
        size = -(-dtype.itemsize * count // 64) * 64
        with self.lock:
            if self.used + size > self.size:
                self.size, self.used = max(CHUNK, size), 0
                self.memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    self.memory.madvise(mmap.MADV_HUGEPAGE)
            made = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.used)
            self.used += size
        return made


ARENA = Arena()


class NativeLinear:
    """x [..., in] -> [..., out] in float32, by a weight of either dtype; a row's result does not depend on other rows.

    `paired`: blocks of both halves of the columns alternate (gates and what they gate), for the fused layers. A
    bfloat16 weight meets x rounded to bfloat16 in the processor's matrix unit where there is one, unless `exact`.
    `adapter`: what rows of masks add (only within NativeLayers).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        paired: bool = False,
        exact: bool = False,
        adapter: Adapter | None = None,
    ):
        self.outputs, self.inputs = weight.shape
        self.down = None if adapter is None else NativeLinear(adapter.down)
        if adapter is not None:
            weight = torch.cat((weight, adapter.up), dim=1)
        self.weight = self._packed(weight, paired)
        self.bias = None if bias is None else self._packed(bias[:, None].float(), paired)
        self.struct = _Linear(self.weight.data_ptr(), None if bias is None else self.bias.data_ptr(), self.inputs,
                              self.outputs, int(paired), int(library(weight.dtype).unit and not exact),
                              0 if adapter is None else len(adapter.down), self.down and self.down.at)  # fmt: skip
        self.at, self.function = ctypes.addressof(self.struct), library(weight.dtype).linear

    def _packed(self, weight: Tensor, paired: bool) -> Tensor:
        weight = weight.contiguous()
        outputs, inputs = weight.shape
        depth = -(-inputs // DEEP[weight.dtype]) * DEEP[weight.dtype]
        packed = ARENA.room_for(-(-outputs // (2 * LANES)) * 2 * LANES * depth, weight.dtype)
        library(weight.dtype).pack(weight.data_ptr(), inputs, outputs, int(paired), packed.data_ptr())
        return packed

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.outputs)
        self.function(self.at, x.data_ptr(), x.numel() // self.inputs, out.data_ptr(), torch.get_num_threads())
        return out


def covers(layers) -> bool:
    """Whether the engine computes these FusedLayers."""
    sizes = (layers.hidden_size, layers.intermediate_size, layers.head_dim)
    return (
        layers.device == "cpu" and layers.head_dim in HEAD_DIMS and not any(size % LANES for size in sizes)
        and library(layers.dtype) is not None
    )  # fmt: skip


class NativeLayers:
    """Runs a FusedLayers' weights: the whole stack in one call. `blocks` are as there, of NativeLinears."""

    def __init__(self, layers, blocks: list[tuple]):
        self.layers, self.library = layers, library(layers.dtype)
        made = (_Layer * layers.layers)()
        self.kept: list[object] = [blocks]  # what the structures point to
        for index, (norm1, qkv, out, norm2, up, down) in enumerate(blocks):
            made[index] = _Layer(self._at(norm1), self._at(norm2), qkv.struct, out.struct, up.struct, down.struct)
        cos, sin = layers.rotary
        self.made = made
        self.model = _Model(made, self._at(layers.final_norm), self._at(cos), self._at(sin), layers.layers,
                            layers.hidden_size, layers.heads, layers.kv_heads, layers.head_dim,
                            layers.intermediate_size, layers.rows.rank, layers.eps)  # fmt: skip
        self.at, self.scratch = ctypes.addressof(self.model), torch.empty(0)

    def _at(self, tensor: Tensor) -> int:
        values = tensor.detach().float().contiguous()
        self.kept.append(values)
        return values.data_ptr()

    def run(self, x: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor:
        """As FusedLayers.run. Masks are 0 or very negative, and 0 on the whole context, as all of ours are.

        A long prefill goes through in parts: each thread's scratch grows with the rows of a call.
        """
        if mask is not None or self.layers.rows.first is not None or len(x) <= PART:
            return self._run(x, positions, cache, mask, cache.length)
        starts = range(0, len(x), PART)
        return torch.cat([self._run(x[a : a + PART], positions[a : a + PART], cache, None, cache.length + a)
                          for a in starts])  # fmt: skip

    def _run(self, x: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | None, context: int) -> Tensor:
        n, threads, first = len(x), torch.get_num_threads(), self.layers.rows.first
        x, hidden = x.float().contiguous(), torch.empty(n, self.layers.hidden_size)
        size = self.library.scratch_size(self.at, n, cache.capacity, int(mask is not None), threads)
        if size > len(self.scratch):
            self.scratch = torch.empty(size)
        self.library.forward(
            self.at, x.data_ptr(), positions.data_ptr(), n, n if first is None else first, context,
            None if mask is None else mask.data_ptr(),
            0 if mask is None else mask.stride(0), cache.data.data_ptr(), cache.capacity, hidden.data_ptr(),
            self.scratch.data_ptr(), threads,
        )  # fmt: skip
        return hidden.to(self.layers.dtype)
