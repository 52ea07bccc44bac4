"""The contract of each example family: `pytest kernels/examples/test_families.py`, with or without a GPU."""

from attention import CausalAttention
from foretune.kernels.testing import FamilyContract
from in_place import BiasGelu
from softmax import RowSoftmax


class TestRowSoftmax(FamilyContract):
    """Run the tests of `FamilyContract` on the softmax family."""

    family = RowSoftmax


class TestBiasGelu(FamilyContract):
    """Run the tests of `FamilyContract` on the family whose kernel works in place."""

    family = BiasGelu


class TestCausalAttention(FamilyContract):
    """Run the tests of `FamilyContract` on the attention family."""

    family = CausalAttention
