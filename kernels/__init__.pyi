from . import spaces as spaces
from .registry import (
    families as families,
    find_family as find_family,
    find_measurable as find_measurable,
    register as register,
)
