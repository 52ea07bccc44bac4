"""Made the bundle beside this file, of schema version 2, and what it predicts, in the words of then:
`PYTHONPATH=PARENT python make.py FOLDER` with the code of e97a7af in PARENT/foretune. Its families are real, so that
their features are tested with it."""

import json
import sys
from functools import partial
from pathlib import Path

from foretune.datasets import DeviceSpec, load
from foretune.kernels import families
from foretune.model import LightGBMRanker, load_bundle, train

if __name__ == "__main__":
    out = Path(sys.argv[1])
    dataset, h200 = load("h200"), DeviceSpec.named("h200")
    train(dataset, families(), partial(LightGBMRanker, trees=24)).save(out)
    bundle, scores = load_bundle(out), []
    for name, family in families().items():
        cases = [case for case in dataset.cases if case.problem.family == name]
        configs = family.space(h200)[::60]
        for problem in (cases[0].problem, cases[20].problem, cases[40].problem.without_sizes()):
            predicted = bundle.ranker(name).predict(family, problem, h200, configs)
            scores.append(
                {"problem": problem.to_json(), "configs": [config.to_json() for config in configs]}
                | {"scores": predicted.tolist()}
            )
    (out / "scores.json").write_text(json.dumps(scores, indent=0) + "\n")
