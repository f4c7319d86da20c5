"""Compiles kernels for this CPU and gives them to torch as operators, which traces call without Python.

A kind of product takes about 0.6 s to compile, once on a machine: code is kept in the user's cache folder. A file is
used only if it and its folder belong to this user, who alone may write to them, and its first bytes are the hash of the
rest.

Code calls torch's stable C interface
(`torch/csrc/stable/c/shim.h`, from torch 2.10 on), so that its tensors and its threads are torch's own: a second pool
of threads would fight with torch's.
"""

import ctypes
import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import llvmlite
import torch
from llvmlite import binding, ir

from llama_ssp.architectures import engine
from llama_ssp.catalogue import cache_dir
from llama_ssp.storage import formats

_HASH_BYTES = hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = 0o022
_FUNCTIONS = (
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_numel",
    "aoti_torch_get_sizes",
    "aoti_torch_empty_strided",
    "aoti_torch_delete_tensor_object",
    "torch_parallel_for",
    "torch_get_num_threads",
    "torch_list_size",
    "torch_list_get_item",
    "torch_delete_list",
)
_kept: list[object] = []
"""Compiled code and libraries of operators: torch calls them until the process ends."""


@cache
def _library_of_torch() -> ctypes.CDLL:
    """Load torch's C interface, and make it known to compiled code; OSError or AttributeError if there is none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    for name in _FUNCTIONS:
        binding.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return library


@cache
def machine() -> binding.TargetMachine:
    """This CPU."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )


@cache
def _decides_code() -> str:
    """Return a text with all that a kernel's code depends on: this CPU, LLVM, and the sources of its writers."""
    sources = [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]
    sources += [inspect.getsource(module) for module in (formats, engine)]
    features = binding.get_host_cpu_features().flatten()
    return "\n".join([llvmlite.__version__, machine().triple, binding.get_host_cpu_name(), features, *sources])


def optimized(module: ir.Module) -> binding.ModuleRef:
    """Check and optimize a module; RuntimeError if it is invalid."""
    module.triple = machine().triple
    module.data_layout = str(machine().target_data)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = binding.create_pass_builder(machine(), options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def add_operator(
    name: str, emit: Callable[[], ir.Module], entry: str, *, shared: tuple[str, ...] = (), key: str = ""
) -> None:
    """Compile a module, and make a function of it the CPU kernel of `llama_ssp::name`, which is defined.

    Modules that are compiled later may call its `shared` functions, as `llama_ssp_{name}_{function}`. `key` holds what
    else the code depends on.
    """
    library = _library_of_torch()
    code = keep(name, _decides_code() + key, lambda: bytes(machine().emit_object(optimized(emit()))))
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    handle = ctypes.c_void_p()
    library.aoti_torch_library_init_impl(b"llama_ssp", b"CPU", b"llama_ssp", 0, ctypes.byref(handle))
    address = ctypes.c_void_p(engine.get_function_address(entry))
    if library.aoti_torch_library_impl(handle, name.encode(), address):
        raise RuntimeError(f"torch does not take a kernel for llama_ssp::{name}")
    for function in shared:
        binding.add_symbol(f"llama_ssp_{name}_{function}", engine.get_function_address(function))
    _kept.extend((engine, handle))


def keep(name: str, key: str, make: Callable[[], bytes]) -> bytes:
    """Return the code that was kept under a name and a key; if there is none, make it, and keep it if possible.

    `key` holds whatever the code depends on.
    """
    folder = cache_dir() / "kernels"
    file = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    with suppress(OSError):
        if _is_own(folder) and _is_own(file):
            kept = file.read_bytes()
            code = kept[_HASH_BYTES:]
            if kept[:_HASH_BYTES] == hashlib.sha256(code).digest():
                return code
    code = make()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as unfinished:
            unfinished.write(hashlib.sha256(code).digest() + code)
        Path(unfinished.name).replace(file)
    return code


def _is_own(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & _OTHERS_MAY_WRITE
