"""The table of models: what of it is shipped, and what is refused in somebody's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from foretune.datasets import Case, DatasetError, Problem
from foretune.kernels.grouped_gemm.models import load_models


def test_every_shipped_model_belongs_to_a_model_family() -> None:
    for model in load_models():
        (family,) = Case(Problem.of("toy"), (f"{model.model}/w13",), "balanced").model_families
        assert family


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "columns missing"),
        ("model,num_experts\nA,8\n", "columns missing: top_k"),
        ("model,num_experts,top_k,hidden_size,moe_intermediate_size\n", "no models"),
        ("model,num_experts,top_k,hidden_size,moe_intermediate_size\nA,8,2,wide,64\n", "line 2, hidden_size.*'wide'"),
        ("model,num_experts,top_k,hidden_size,moe_intermediate_size\nA,8,2\n", "line 2, hidden_size.*None"),
    ],
)
def test_a_wrong_table_of_models_is_refused_by_line_and_value(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(DatasetError, match=f"mine.csv.*{named}"):
        load_models(path)
