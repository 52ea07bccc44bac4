"""Collection: measures wide config spaces on GPUs, or replays recorded times without one.

`foretune.collect_dataset` and `foretune collect` use it. Importing this imports nothing else: each name is loaded when
it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
