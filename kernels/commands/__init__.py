"""What people type: the commands, by what they are about. Each module adds its own to `groups.app`; those that need
collect/ too are in `foretune.__main__`.
"""

from . import cache, choosing, datasets, machine, training

__all__ = ["cache", "choosing", "datasets", "machine", "training"]
