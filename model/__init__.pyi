from .baselines import (
    EstimateRanker as EstimateRanker,
    NearestRanker as NearestRanker,
    RandomRanker as RandomRanker,
    RegimeRanker as RegimeRanker,
    Rivals as Rivals,
    StaticRanker as StaticRanker,
    choose_rivals as choose_rivals,
)
from .bundle import (
    Bundle as Bundle,
    TrainedFamily as TrainedFamily,
    load_bundle as load_bundle,
    open_bundle as open_bundle,
)
from .cross_validation import cross_validate as cross_validate, evaluate_bundle as evaluate_bundle
from .evaluation import Evaluation as Evaluation
from .gbdt import LightGBMRanker as LightGBMRanker
from .metrics import (
    Summary as Summary,
    geomean as geomean,
    noise_floor as noise_floor,
    summarise as summarise,
    top_k_regret as top_k_regret,
)
from .ranker import Ranker as Ranker, UnseenCardRanker as UnseenCardRanker, ranker_on as ranker_on
from .scoring.trees import Forest as Forest
from .splits import split_folds as split_folds, split_groups as split_groups
from .train import adapt_bundle as adapt_bundle, train_bundle as train_bundle
from .training_set import (
    TrainingSet as TrainingSet,
    check_measured as check_measured,
    check_sources as check_sources,
    check_trained_source as check_trained_source,
)
