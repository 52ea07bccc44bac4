"""`flag_of`: a value that is not a size as a flag of a problem, so that distinct values are distinct flags."""

from __future__ import annotations

import hashlib
import re
from enum import Enum
from typing import Any

from ..launching.source_hash import hash_of_kernel, is_kernel

#: A longer text is kept by its beginning and a digest.
_LONGEST = 100
#: Texts that could be mistaken for what stands for another value, such as a number, None or a dtype.
_MISTAKABLE = re.compile(
    r"none|true|false|[+-]?0x.*|['\"<(\[{].*|[lt]\(.*"
    r"|(torch\.)?(void|bool|u?int\d+|bfloat16|float\d+\w*|complex\d+|[bf]p?f?\d+|fp\d+e\d+\w*|pointer<.*)",
    re.IGNORECASE | re.DOTALL,
)


def flag_of(name: str, value: Any) -> str:
    """Return "name=value" for a value of which there is no other word.

    Numbers, None and texts stand for themselves. A text that could be mistaken for another value is quoted.

    >>> flag_of("bias", None), flag_of("bias", "None"), flag_of("mode", "fast"), flag_of("scale", 0.5)
    ('bias=None', "bias='None'", 'mode=fast', 'scale=0.5')
    """
    text = _text(value)
    if len(text) > _LONGEST or not text.isprintable():
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
        text = f"{''.join(c for c in text[: _LONGEST - 20] if c.isprintable())}...{digest}"
    return f"{name}={text}"


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return f"<{type(value).__module__}.{type(value).__qualname__}.{value.name or value.value}>"
    if isinstance(value, str):
        return repr(str(value)) if _MISTAKABLE.fullmatch(value) or _is_number(value) else str(value)
    if isinstance(value, int) and value.bit_length() > 300:
        return hex(value)  # Python may refuse to write it in decimal
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__[0]}({', '.join(map(_text, value))})" if _has_objects(value) else str(value)
    if is_kernel(value):
        return f"<{value.fn.__module__}.{value.fn.__qualname__} {hash_of_kernel(value)}>"
    return str(value)


def _has_objects(values: Any) -> bool:
    """Whether a list holds anything but numbers and texts, whose own representation may be that of another value."""
    return any(not isinstance(one, (int, float, str, type(None))) or isinstance(one, Enum) for one in values)


def _is_number(text: str) -> bool:
    try:
        complex(text)
    except ValueError:
        return False
    return True
