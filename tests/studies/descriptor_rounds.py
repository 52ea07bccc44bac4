"""Print the cost of TMA descriptors in later rounds, from recorded times: `python tests/studies/descriptor_rounds.py`.

Until 2026-11-28, each program of a kernel made its own TMA descriptors. The gated MLP was recorded with and without TMA
(TMA), and with persistent programs, which made descriptors once, and others (PROGRAMS_PER_SM), which made them in every
round. So the difference of these two differences is the time of the descriptors in all rounds but the first one. The
table has its median, in microseconds per descriptor and further round, by the number of rounds and of programs that an
SM holds at once; and the number of pairs of pairs. `saved_by_descriptors` takes 0.9 for all.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pandas as pd
from foretune.datasets import load
from foretune.kernels import find_family

FAMILY, DATA = "gated_mlp", "h200_gated_mlp"
ROUNDS = (1, 2, 3, 4, 6, 10, 20, 50, np.inf)


def differences() -> pd.DataFrame:
    """Return a row for each four configs that differ in TMA and PROGRAMS_PER_SM alone, with equal residency."""
    family, dataset = find_family(FAMILY), load(DATA)
    device, names = dataset.devices[0], family.feature_names
    times = dataset.rows(FAMILY).groupby(["problem", "config"])["time_us"].median().dropna()
    found = []
    for problem, of_problem in times.groupby("problem"):
        numbers = of_problem.index.get_level_values("config")
        configs = [dataset.configs[number] for number in numbers]
        features = family.features(dataset.cases[problem].problem, device, configs)
        residents, log_rounds = (features[:, names.index(name)] for name in ("programs_per_sm", "log_rounds"))
        alike = defaultdict(dict)
        for config, time_us, resident, rounds in zip(configs, of_problem, residents, np.exp2(log_rounds), strict=True):
            knobs = config.to_json()
            kind = knobs.pop("TMA"), knobs.pop("PROGRAMS_PER_SM")
            alike[(resident, *sorted(knobs.items()))][kind] = time_us, rounds
        for (resident, *_), of_kinds in alike.items():
            for each in (1, 2):
                four = [(tma, programs) for tma in (1, 0) for programs in (0, each)]
                if all(kind in of_kinds for kind in four):
                    (own, rounds), (once, _), (plain, _), (persistent, _) = (of_kinds[kind] for kind in four)
                    found.append((resident, rounds, (own - once) - (plain - persistent)))
    return pd.DataFrame(found, columns=["residents", "rounds", "extra_us"])


def main() -> None:
    """Print the table."""
    rows, (_, descriptors) = differences(), find_family(FAMILY).descriptors["TMA"]
    rows = rows[rows["rounds"] > 1]
    each_us = rows["extra_us"] / descriptors / (rows["rounds"] - 1)
    of_rounds = pd.cut(rows["rounds"], ROUNDS)
    table = each_us.groupby([of_rounds, rows["residents"]], observed=True).agg(["median", "size"])
    print(table.round(2).unstack().to_string())  # noqa: T201


if __name__ == "__main__":
    main()
