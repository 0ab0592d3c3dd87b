"""Tables of any length, fitted in closed form: one pass for the statistics of the columns, one for the sums.

fit("train.parquet", "model", FitConfig(target="price"))                               # snnk fit
TableModel.load("model").write_predictions("test.parquet", "predictions.csv")          # snnk predict
"""

from snnk.tabular.config import FitConfig
from snnk.tabular.model import TableModel
from snnk.tabular.parts import Part, merge
from snnk.tabular.start import Start, prepare
from snnk.tabular.stream import fit
from snnk.tabular.teacher import teach

__all__ = ["FitConfig", "Part", "Start", "TableModel", "fit", "merge", "prepare", "teach"]
