"""`foretune.spaces`: config spaces as plain dictionaries, and the lists that compilers tune matrix products over.

These functions are for users' own kernels; the families of this package declare their own spaces. Functions that take a
family use its `space` and `supports` and add no rules of their own. A family can build its space with `generate`, or
start from a compiler's list with `matmul_configs(device, "exhaustive", TMA=[0, 1])`, which combines each config of the
list with each value of the family's further knobs::

    def space(self, device=None):
        return generate({"BLOCK_M": [64, 128], "num_warps": [4, 8], "num_stages": [3]}, keep=lambda c: not spills(c))
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
