"""Rank a kernel's configs: rankers, the bundles that store them, and their evaluation.

Submodules are imported when one of their names is first used. Predicting needs NumPy alone; LightGBM is imported only
for training and pandas only for reading a dataset.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
