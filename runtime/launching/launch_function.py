"""`make_launch_function_ahead`: the function that launches a kernel's binaries, made while the first one is compiled.

Triton 3.6 writes that function in C for each signature and has a C compiler make it, 0.2 s, but only when it has a
binary to launch. It depends on nothing of the binary, so here a thread makes it meanwhile, and Triton finds it in its
cache folder. Later Tritons have one function for all, and nothing is to be done.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from .ahead import compile_ahead_of

#: What Triton looks up of a binary when it makes its launcher, besides what the C code is written from.
_NO_BINARY = SimpleNamespace(
    num_ctas=1,
    tensordesc_meta=None,
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)


def make_launch_function_ahead(kernel: Any, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Begins, in a thread, the launch function of a `triton.jit` kernel for such arguments, with constants and launch
    options among them, unless that was begun before. Whatever goes wrong, Triton makes it as ever."""
    with suppress(Exception):  # nothing of this is public
        from triton import knobs
        from triton.runtime import driver

        active = driver.active
        if not hasattr(sys.modules[type(active).__module__], "make_launcher"):
            return
        # Looked up here: of two threads that ask first, each would make one.
        *_, backend, bind = kernel.device_caches[active.get_current_device()]

        def make() -> None:
            bound, specialisation, options = bind(*args, **arguments)
            _, signature, constants, attributes = kernel._pack_args(backend, arguments, bound, specialisation, options)
            active.launcher_cls(kernel.ASTSource(kernel, signature, constants, attributes), _NO_BINARY)

        types = (getattr(value, "dtype", type(value)) for value in (*args, *arguments.values()))
        compile_ahead_of(("launch function", kernel, knobs.cache.dir, *types), make)
