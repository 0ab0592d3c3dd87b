"""Static embedding models, to compare sentence encoders with: a text has the mean of the vectors of its tokens.

model2vec makes such a model from the encoder itself, by running its vocabulary through it. wordllama brings one of its
own. Both are optional, and neither is used to make anything that is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Static:
    """A static embedding model: its name, its bytes, and a function from texts to vectors (n, d)."""

    name: str
    bytes: int
    encode: Callable[[Sequence[str]], Tensor]


def _model2vec(folder: Path) -> Static:
    from model2vec.distill import distill

    model: Any = distill(model_name=str(folder), device="cpu")
    return _static("model2vec of the original", model, model.encode)


def _wordllama(folder: Path) -> Static:
    import wordllama

    own = Path(wordllama.__file__).parent  # has weights and a tokenizer: nothing is fetched
    model: Any = wordllama.WordLlama.load(cache_dir=own, disable_download=True)
    return _static("wordllama", model, model.embed)


def _static(name: str, model: Any, encode: Callable[[list[str]], Any]) -> Static:
    return Static(name, int(model.embedding.nbytes), lambda texts: torch.as_tensor(encode(list(texts))).float())


MAKERS: dict[str, Callable[[Path], Static]] = {"model2vec": _model2vec, "wordllama": _wordllama}


def static_models(folder: Path, say: Callable[[str], None]) -> Iterator[Static]:
    """The static models of the packages that are installed.

    Args:
        folder: files of the encoder, with its tokenizer.
        say: called with the reason if one cannot be made.

    Example:
        >>> [found.name for found in static_models(Path("no-such-model"), say=lambda text: None)]
        []
    """
    for package, make in MAKERS.items():
        if find_spec(package) is not None:
            try:
                yield make(folder)
            except Exception as error:  # of another package, whose model is not what was asked for
                say(f"note: there is no point of {package} to compare with: {error}")
