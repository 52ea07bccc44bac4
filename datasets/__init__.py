"""The values that all of Foretune uses (problems, configs, devices, measurements) and the files that keep them.

This package imports no other part of Foretune. pandas and pyarrow are imported only when a dataset is read or written.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
