"""Ranking: features in, predicted slowdowns out; the bundle that carries it; the evaluation that judges it.

Importing this imports nothing of it before it is asked for; who predicts needs NumPy alone, LightGBM is imported to
train, pandas to read a dataset.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
