"""Graphs of compressed attention have no padding on both sides of dot products, and the outputs stay the same."""

from collections import Counter

import pytest
import torch

from snnk.hf.finding import find_attentions
from snnk.hf.low_rank import replace_attention_
from snnk.hf.serve import graphs
from snnk.hf.serve.unpadding import drop_padding_

from helpers.architectures import make

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


def compressed(name, ranks):
    model = make(name)
    torch.manual_seed(0)
    for attention in find_attentions(model):
        for module in replace_attention_(attention, ranks).modules:
            for p in module.parameters():
                torch.nn.init.normal_(p, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "ranks", "pads"), [("bert", (1, 3), 0), ("bert", (3, 1), 1), ("vit", (2, 3), 0), ("bert", (2, 2), 0)]
)
def test_zeros_of_queries_and_keys_are_left_out(tmp_path, monkeypatch, name, ranks, pads):
    """Values are padded too if they are the shorter ones; their padding stays, one per layer."""
    model = compressed(name, ranks)
    batch = graphs.example(model, ["pixel_values"] if name == "vit" else ["input_ids", "attention_mask"], (2, 6))
    nodes, layers = {}, len(find_attentions(model))
    for way in ("without", "with"):
        if way == "with":
            monkeypatch.setattr(graphs, "drop_padding_", lambda proto: 0)
        folder = tmp_path / way
        folder.mkdir()
        path, _ = graphs.write_graph(model, batch, folder, "onnx")
        nodes[way] = Counter(node.op_type for node in onnx.load(path).graph.node)
        onnx.checker.check_model(path, full_check=True)
        assert graphs.check_same(model, graphs.open_onnx(path), [batch, graphs.alone(batch)]) < 1e-5
    assert nodes["without"]["Pad"] == pads * layers
    padded = {(1, 3): 2, (2, 3): 2, (3, 1): 1, (2, 2): 0}[ranks]
    assert nodes["with"]["Pad"] == padded * layers
    assert nodes["without"]["MatMul"] == nodes["with"]["MatMul"]


def test_padding_that_something_else_reads_stays():
    """Also if only one side of a product is padded, or the padding is along another axis."""
    helper, types = onnx.helper, onnx.TensorProto

    def graph(*, zeros=(0, 0, 0, 0, 0, 0, 0, 2), outputs=("out",), both=True):
        nodes = []
        for side, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1])):
            source = side
            if both or side == "q":
                nodes.append(helper.make_node("Pad", [side, "zeros"], [f"{side}1"]))
                source = f"{side}1"
            nodes.append(helper.make_node("Reshape", [source, "shape"], [f"{side}2"]))
            nodes.append(helper.make_node("Transpose", [f"{side}2"], [f"{side}3"], perm=order))
        nodes.append(helper.make_node("MatMul", ["q3", "k3"], ["out"]))
        values = [
            helper.make_tensor("zeros", types.INT64, [8], list(zeros)),
            helper.make_tensor("shape", types.INT64, [4], [0, 0, 2, 5]),
        ]
        inputs = [helper.make_tensor_value_info(name, types.FLOAT, [1, 4, 2, 3]) for name in ("q", "k")]
        made = [helper.make_tensor_value_info(name, types.FLOAT, None) for name in outputs]
        return helper.make_model(helper.make_graph(nodes, "g", inputs, made, values))

    assert drop_padding_(graph()) == 1
    assert drop_padding_(graph(outputs=("out", "k1"))) == 0
    assert drop_padding_(graph(both=False)) == 0
    assert drop_padding_(graph(zeros=(0, 0, 0, 0, 0, 0, 2, 0))) == 0
    assert drop_padding_(graph(zeros=(0, 0, 0, 1, 0, 0, 0, 1))) == 0
