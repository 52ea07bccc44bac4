"""FORETUNE_USE and `foretune run --use`: put Foretune into Inductor as soon as a program imports it.

Nothing is imported for it. A program that never compiles pays for a hook on imports alone.
"""

from __future__ import annotations

import os
from typing import Any

from ...datasets import ForetuneError
from ...datasets.errors import reason_of, shown
from ...runtime.arguments import Mode, resolve_mode, warn_once
from ...runtime.how_many import Length, check_length
from ...runtime.tuning.packages import follow_children, when_imported

#: The environment variable with the project's name, as `length_of` reads it.
VARIABLE = "FORETUNE_USE"
#: The module that `torch.compile` imports before it compiles anything with Inductor.
_COMPILER = "torch._inductor.compile_fx"


def length_of(text: str) -> Length | None:
    """Return the k of "inductor:K"; None for "inductor", which has the default k.

    Raises:
        ForetuneError: The text is neither.

    >>> length_of("inductor:4"), length_of("inductor:auto"), length_of("inductor")
    (4, 'auto', None)
    """
    project, colon, k = text.partition(":")
    if project != "inductor":
        raise ForetuneError(f"the project must be inductor or inductor:K but is {shown(text)}")
    return check_length(int(k) if k.isdecimal() else k) if colon else None


def use_named() -> None:
    """Use Foretune in Inductor, as FORETUNE_USE names it, when this process or a child of it imports Inductor.

    Then all matrix products are tuned as with the options max_autotune_gemm and
    max_autotune_gemm_search_space="EXHAUSTIVE". With FORETUNE_MODE=off nothing is done. After an error nothing is done
    either, with one warning.
    """
    try:
        if resolve_mode() is Mode.OFF:
            return
        k = length_of(os.environ[VARIABLE])
        follow_children()
        when_imported(_COMPILER, lambda _: _use_in_inductor(k))
    except Exception as error:  # noqa: BLE001 - importing Foretune must not fail
        warn_once(f"{VARIABLE}: {reason_of(error)}", ": it is not used")


def _use_in_inductor(k: Length | None) -> None:
    """Use Foretune in Inductor and let it tune matrix products; an error becomes one warning."""
    from . import use

    try:
        from torch._inductor import config

        settings: Any = config
        before = settings.inductor_choices_class
        use("inductor", **({} if k is None else {"k": k}))
        if settings.inductor_choices_class is not before:  # otherwise nothing would limit the exhaustive list
            settings.max_autotune_gemm, settings.max_autotune_gemm_search_space = True, "EXHAUSTIVE"
    except Exception as error:  # noqa: BLE001 - the program's import must not fail
        warn_once(f"{VARIABLE}: {reason_of(error)}", ": Inductor does not use Foretune")
