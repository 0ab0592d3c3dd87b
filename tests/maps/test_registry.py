"""FEATURE_MAPS and make_feature_map."""

import pytest
import torch

from snnk import FEATURE_MAPS, URF, ArcCosine
from snnk.maps import make_feature_map
from snnk.maps.sampled import Sampled


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_named_map_can_be_made(name):
    fm = make_feature_map(name, 6, 16)
    assert fm.phi(torch.ones(2, 6)).shape == (2, 16) and "num_features=16" in repr(fm)


def test_make_feature_map_errors():
    with pytest.raises(ValueError, match="unknown feature map 'rleu'; did you mean 'relu'"):
        make_feature_map("rleu", 6, 16)
    with pytest.raises(ValueError, match="map is 6 -> 8; the layer needs 6 -> 16"):
        make_feature_map(ArcCosine(6, 8), 6, 16)
    with pytest.raises(TypeError, match="normalize cannot change a feature map that is given"):
        make_feature_map(ArcCosine(6, 8), 6, 8, normalize="dim")
    assert isinstance(URF.paper(6, 8, "sin").variant.spectrum, Sampled)
