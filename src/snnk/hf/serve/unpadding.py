"""Graphs of models with fewer dimensions per head, without the zeros that PyTorch's attention modules need.

Heads of queries and keys are padded with zeros to the size that the module reads (low_rank.py), and zeros add nothing
to dot products. In the graph of a compressed model,

    heads (n, tokens, heads, r) -> Pad -> Reshape -> Reshape (n, tokens, heads, s) -> Transpose -> MatMul,

on both sides of the product, the transposed heads are therefore those before the padding. `check_same` compares the
graph that is served with its model afterwards.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Heads:
    """One side of a product: the transposition to change, the heads before the padding, zeros, and axis of these."""

    transpose: Any
    source: str
    zeros: int
    axis: int


def drop_padding_(proto: Any) -> int:
    """Remove padding on both sides of dot products from a graph of ONNX, in place; returns the number of products."""
    from onnx import numpy_helper

    graph = proto.graph
    if any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute):
        return 0  # branches may read what this graph makes
    makers = {name: node for node in graph.node for name in node.output}
    constants = {x.name: x for x in graph.initializer}
    readers = Counter([*(name for node in graph.node for name in node.input), *(x.name for x in graph.output)])

    def follow(name: str, kind: str) -> Any:
        """The node of this kind that makes a value, if nothing else reads the value."""
        node = makers.get(name)
        return node if node is not None and node.op_type == kind and readers[name] == 1 else None

    def heads(name: str) -> _Heads | None:
        axes, transpose = [0, 1, 2, 3], None
        while (node := follow(name, "Transpose")) is not None:
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
            if len(order) != 4:
                return None
            # axes[i] is the axis of the deepest input that ends up as axis i
            axes, transpose, name = [order[i] for i in axes], node, node.input[0]
        reshaped = False
        while (node := follow(name, "Reshape")) is not None:
            reshaped, name = True, node.input[0]
        pad = follow(name, "Pad")
        if transpose is None or pad is None or not reshaped or len(pad.input) > 2 or pad.input[1] not in constants:
            return None
        if any(a.name == "mode" and a.s != b"constant" for a in pad.attribute):
            return None
        *others, zeros = numpy_helper.to_array(constants[pad.input[1]]).tolist()
        if len(others) != 7 or any(others) or zeros <= 0:  # zeros before and after each of four axes
            return None
        return _Heads(transpose, pad.input[0], zeros, axes.index(3))

    count = 0
    for node in graph.node:
        sides = [heads(name) for name in node.input] if node.op_type == "MatMul" else []
        left, right = sides if len(sides) == 2 else (None, None)
        if left is None or right is None or (left.axis, right.axis) != (3, 2) or left.zeros != right.zeros:
            continue
        for side in (left, right):
            side.transpose.input[0] = side.source
        count += 1
    if count:
        _remove_unread(graph)
    return count


def _remove_unread(graph: Any) -> None:
    """Remove nodes and weights that nothing reads."""
    while True:
        read = {*(name for node in graph.node for name in node.input), *(x.name for x in graph.output)}
        unread = [node for node in graph.node if read.isdisjoint(node.output)]
        if not unread:
            break
        for node in unread:
            graph.node.remove(node)
    for value in [x for x in graph.initializer if x.name not in read]:
        graph.initializer.remove(value)
