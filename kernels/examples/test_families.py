"""The contract of each example family: `pytest kernels/examples/test_families.py`, with or without a GPU."""

from attention import CausalAttention
from foretune.kernels.testing import FamilyContract
from in_place import BiasGelu
from softmax import RowSoftmax


class TestRowSoftmax(FamilyContract):
    """Run the contract with the softmax."""

    family = RowSoftmax


class TestBiasGelu(FamilyContract):
    """Run the contract with the kernel that works in place."""

    family = BiasGelu


class TestCausalAttention(FamilyContract):
    """Run the contract with the attention kernel."""

    family = CausalAttention
