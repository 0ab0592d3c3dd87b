"""`snnk estimate`: the error of one layer against the number of features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snnk.cli import _options
from snnk.cli._printing import say, show_table, track, wrote

GROUP = _options.MEASURE
EXAMPLES = (
    "snnk estimate",
    "snnk estimate --activation gelu --in-features 128 --num-features 64,256,1024 --bias 0",
)


def command(
    activation: Annotated[
        str,
        typer.Option(
            help="Activation f, such as gelu, relu, sin or tanh.",
            autocompletion=_options.complete(*_options.WORDS["activation"]),
        ),
    ] = "sin",
    in_features: Annotated[int, typer.Option(help="Dimension of inputs and weights.")] = 64,
    x_norm: Annotated[float, typer.Option(help="Norm of the inputs x.")] = 1.0,
    w_norm: Annotated[float, typer.Option(help="Norm of the weights w.")] = 1.0,
    bias: Annotated[float, typer.Option(help="Bias b.")] = 0.5,
    num_features: Annotated[
        str, typer.Option(help="Numbers of features, separated by commas.")
    ] = "16,32,64,128,256,512,1024",
    draws: Annotated[int, typer.Option(help="Random feature maps per number of features.")] = 50,
    seed: _options.Seed = 0,
    out: _options.Results = Path("results/estimate"),
) -> None:
    """Measure the error of phi(x) . psi(w, b) against f(w.x + b), for our estimators and the paper's."""
    from snnk.experiments.lab import estimate

    config = estimate.Config(
        activation=activation,
        in_features=in_features,
        x_norm=x_norm,
        w_norm=w_norm,
        bias=bias,
        num_features=_numbers(num_features),
        draws=draws,
        seed=seed,
    )
    results, picture = estimate.estimate(config, out, track=track)
    show_table(
        f"{activation}(w.x + {bias:g}), d = {in_features}, |x| = {x_norm:g}, |w| = {w_norm:g}: "
        f"root mean squared error over {draws} draws",
        estimate.COLUMNS,
        results,
    )
    say(f"A constant would have an error of {results.rows[0]['spread']:.3g}.")
    wrote(picture, results.path)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"--num-features must be integers separated by commas, such as 16,64; got {text!r}") from None
