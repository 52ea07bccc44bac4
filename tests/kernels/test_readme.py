"""What the README tells whoever adds a kernel is what the third party's package has, which is taken through it all."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_adding_a_kernel_is_the_code_that_is_tested():
    section = (ROOT / "kernels" / "README.md").read_text().split("## Adding a kernel")[1].split("\n## ")[0]
    family, contract = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    package = ROOT / "tests" / "third_party"
    assert (package / "rowwise_kernels" / "softmax.py").read_text().endswith(family)
    tested = (package / "tests" / "test_contract.py").read_text()
    assert all(line in tested for line in contract.splitlines())
