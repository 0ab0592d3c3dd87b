"""scikit-learn estimators: features of rows, and linear models on them in closed form (section 3.3 of the paper).

    make_pipeline(SNNKFeatures(1024), LogisticRegression())      # or in one estimator: SNNKClassifier(1024)

The options mean the same as those of `snnk fit` and `snnk.tabular.FitConfig`, and have the same values and defaults.
Where scikit-learn has a word of its own, it is used: n_components (--num-features, num_features), alpha (--lam, lam)
and random_state (--seed, seed).

X is an array, or a frame of pandas, Polars or pyarrow. A frame may have categories, texts, flags and dates, which
become inputs as in `snnk fit`; this needs pyarrow.

The regressor and the classifier keep float64 sums, not the data. `partial_fit` adds rows to the sums. The features, and
the means, scales and categories of the inputs, are those of the first batch, which should therefore be like the others;
however the rows after it are split into batches, the model is the same. `partial_fit` leaves the solution to the next
prediction, so that a batch may be too small to solve with. `fit` solves at once.

A row with a whole number as its weight counts as that number of equal rows. Other weights count as importances.

Numbers may have any size that float64 has. A target below about 1e-18 or above 1e18 is fitted in a unit of its own
(`unit_`). An input so far from the others that features would keep no digit of it raises a ValueError with its row and
column.
"""

try:
    from snnk.sklearn.features import SNNKFeatures
    from snnk.sklearn.models import SNNKClassifier, SNNKRegressor
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "sklearn":
        raise
    raise ImportError("snnk.sklearn needs scikit-learn; install it with: pip install 'snnk[sklearn]'") from error

__all__ = ["SNNKClassifier", "SNNKFeatures", "SNNKRegressor"]
