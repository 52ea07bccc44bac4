"""`foretune.spaces`, for users' own kernels: spaces as plain dictionaries, and the lists that compilers tune matrix
products over, as functions of a `DeviceSpec`.

Our families state their own spaces and use none of this. A family can state its space with `generate`, and says in
`supports` what is valid; everything here that takes a family asks those two and adds no rule of its own::

    def space(self, device=None):
        return generate({"BLOCK_M": [64, 128], "num_warps": [4, 8], "num_stages": [3]}, keep=lambda c: not spills(c))

A family of matrix products may start from a compiler's list: `matmul_configs(device, "exhaustive", TMA=[0, 1])` has
each config of the list with each value of the family's further knobs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
