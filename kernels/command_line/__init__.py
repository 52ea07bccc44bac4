"""What people type: the commands, by what they are about. Each module adds its own to `groups.app`; those that need
collect/ too are in `foretune.__main__`.
"""

from . import choosing, learning, machine, remembered, stored

__all__ = ["choosing", "learning", "machine", "remembered", "stored"]
