"""Fine-tuning with labels: the paper's methods, ours and the usual ones, on one loop (sections 4.2 and 4.3).

`finetune` goes from files to a folder; `train` takes a ready model and tokenised rows.
"""

from snnk.finetune.config import FinetuneConfig
from snnk.finetune.data import Data, encode_images, encode_texts
from snnk.finetune.files import GLUE
from snnk.finetune.methods import METHODS, Method, Setup
from snnk.finetune.pooling import MeanPooled, mean_pooling_
from snnk.finetune.run import FinetuneResult, finetune, load
from snnk.finetune.scores import METRICS, score
from snnk.finetune.settings import TrainingSettings
from snnk.finetune.trainer import Trained, evaluate, train

__all__ = [
    "GLUE",
    "METHODS",
    "METRICS",
    "Data",
    "FinetuneConfig",
    "FinetuneResult",
    "MeanPooled",
    "Method",
    "Setup",
    "Trained",
    "TrainingSettings",
    "encode_images",
    "encode_texts",
    "evaluate",
    "finetune",
    "load",
    "mean_pooling_",
    "score",
    "train",
]
