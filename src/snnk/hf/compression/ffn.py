r"""The fit of one feed-forward block: features in place of its neurons, and the matrix behind them in closed form.

With the inputs x of the block and the targets y, as blocks.py has them, atoms are chosen among the block's own neurons
(ridge/atoms.py) and moved by a few steps of Adam on this block alone. The matrix behind them is the ridge solution
A = (phi'Wphi + lam I)^-1 phi'Wy, where W has the weights of the tokens on its diagonal and lam is chosen by generalised
cross-validation.
"""

from __future__ import annotations

from contextlib import ExitStack

from snnk.hf.compression.plans import BlockPlan
from snnk.hf.compression.targets import Tokens, dtype_of
from snnk.hf.model_blocks import FFN
from snnk.hf.replace import Replacement, replace_
from snnk.maps import RANDOM_MAPS, FeatureMap, ProjectedURF, make_feature_map
from snnk.ridge.atoms import choose_atoms, refine_
from snnk.ridge.sums import RidgeStats

PENALTY = 1e-4  # while atoms are chosen, relative to the mean diagonal of the Gram matrix


def fit_ffn(ffn: FFN, block: BlockPlan, rows: Tokens, refine: int, seed: int, undo: ExitStack) -> Replacement:
    """Replace a block by the planned features, with the matrix that fits them to the rows; `undo` puts it back."""
    dtype, count = dtype_of(ffn), block.num_features or 0

    def put(kind: str | FeatureMap, num_features: int | None = None) -> Replacement:
        new = replace_(ffn, kind, num_features, new_bias=block.new_bias)
        undo.callback(new.restore_)
        return new

    if block.kind == "drop":
        mean = (rows.weight[:, None] * rows.y).sum(0) / rows.weight.sum()
        return put("drop").fill_(None, mean.to(dtype))
    if block.kind in RANDOM_MAPS:
        fm = make_feature_map(block.kind, ffn.in_features, count, seed=seed + ffn.index)
        if isinstance(fm, ProjectedURF):
            bias = ffn.up_bias()
            fm.calibrate(
                rows.x[:4096].cpu().float(), ffn.up_weight().cpu().float(), None if bias is None else bias.cpu().float()
            )
        new = put(fm.to(ffn.up_weight()))
    elif block.kind == "linear":
        new = put("linear")
    else:
        stats = rows.sums(lambda x: ffn.hidden(x.to(dtype)), ffn.width)
        gram, cross, _ = stats.centred()
        scaled = cross * rows.scale.double().cpu()
        order, _ = choose_atoms(gram, scaled, count, PENALTY * float(gram.diagonal().mean()))
        new = put("atoms", count).copy_rows_(order)
        _solve(new, stats.select(order))
        if not refine:
            return new
        modules = [module.float() for module in new.modules]  # steps are too small for bfloat16
        refine_(
            lambda x: ffn.forward(x.float()),
            [p for module in modules for p in module.parameters()],
            rows.x,
            rows.y,
            rows.weight,
            rows.scale,
            steps=refine,
            seed=seed,
        )
        for module in modules:
            module.to(dtype)
    size = new.down.weight.shape[1]
    _solve(new, rows.sums(lambda x: new.phi(x.to(dtype)), size))
    return new


def _solve(new: Replacement, stats: RidgeStats) -> None:
    bias = new.down.bias is not None  # with all neurons of a block without biases there is none
    solution = stats.solve("gcv", intercept=bias)
    new.fill_(solution.weight, solution.bias if bias else None)
