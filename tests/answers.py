"""Print what a change of structure must not change, as JSON: `python tests/answers.py [--train] > before.json`.

It has the shortlists of about 300 problems (every family, both cards, the problem's own card and an H100), the source
hash of every kernel, the commands with their options, and with `--train` the SHA-256 of bundles that are trained on
shipped data (a minute). `test_answers.py` compares all but the last with `answers.json`, which
`python tests/answers.py > tests/answers.json` writes after a change that is meant to change them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import foretune
from foretune.datasets import DeviceSpec, Measurable, load

DATASETS = (
    "h200", "h100", "h200_matmul", "h200_scaled_gemm", "h200_gated_mlp", "h200_rms_norm_rope", "h200_fused_moe",
    "h200_inductor_mm", "h100_kernels",
)  # fmt: skip
PER_FAMILY, K = 8, 8
#: One quick family of each card.
TRAINED = {"h200_rms_norm_rope": "rms_norm_rope_bwd", "h100_kernels": "gated_mlp"}


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def shortlists() -> dict[str, str]:
    """Return a digest of each shortlist of `K` configs, by dataset, family, problem and device."""
    found = {}
    for name in DATASETS:
        dataset = load(name)
        for family in dataset.families:
            grid = dataset.grid(family)
            places = range(0, len(grid.cases), max(1, len(grid.cases) // PER_FAMILY))
            for place in list(places)[:PER_FAMILY]:
                problem = grid.cases[place].problem
                for device in {
                    grid.devices[place].name: grid.devices[place],
                    "h100": DeviceSpec.named("h100"),
                }.values():
                    chosen = foretune.shortlist(family, problem, k=K, device=device)
                    found[f"{name}, {family}: {problem} on {device.name}"] = digest(
                        [str(one) for one in chosen.configs]
                    )
    return found


def sources() -> dict[str, str]:
    """Return the source hash of each registered kernel, except that of serving engines, which may be missing."""
    from foretune.kernels import families

    measurable = {name: family for name, family in families().items() if isinstance(family, Measurable)}
    return {name: family.source_hash() for name, family in sorted(measurable.items()) if "fused_moe" not in name}


def commands() -> dict[str, list[str]]:
    """Return the options of each command."""
    import typer
    from foretune.__main__ import app

    def walk(command: Any, name: str) -> None:
        found[name] = sorted(option for parameter in command.params for option in parameter.opts)
        for below, one in getattr(command, "commands", {}).items():
            walk(one, f"{name} {below}")

    found: dict[str, list[str]] = {}
    walk(typer.main.get_command(app), "foretune")
    return dict(sorted(found.items()))


def bundles() -> dict[str, str]:
    """Return the digest of the bytes of a bundle trained on each of `TRAINED`."""
    from foretune.kernels import find_family
    from foretune.model import train_bundle

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for dataset, family in TRAINED.items():
            path = Path(folder) / dataset
            train_bundle(load(dataset), {family: find_family(family)}).save(path)
            files = sorted(one for one in path.rglob("*") if one.is_file())
            found[dataset] = digest([(str(one.relative_to(path)), digest(one.read_bytes().hex())) for one in files])
    return found


def answers() -> dict[str, Any]:
    """Return everything but the bundles."""
    return {"shortlists": shortlists(), "sources": sources(), "commands": commands()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = answers() | ({"bundles": bundles()} if "--train" in sys.argv else {})
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
