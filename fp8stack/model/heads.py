"""The linears of any model that compute its logits."""

from collections.abc import Mapping

from torch import nn

_HEADS = {"lm_head", "head", "classifier", "classification_head", "score", "qa_outputs"}


def find_heads(
    model: nn.Module, linears: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, int]]
) -> set[str]:
    """Find the layers that compute logits: `get_output_embeddings` returns them, their name says
    so, they are tied to an embedding, or they are outside the blocks and have an output for each
    row of the largest embedding.

    Args:
        model: any model.
        linears: its linears by module path.
        shapes: their (in features, out features).
    """
    methods = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    answers = [head for ask in methods if callable(ask) and (head := ask()) is not None]
    of_answers = {id(module) for answer in answers for module in answer.modules()}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = {id(table.weight) for table in tables}
    vocabulary = max((table.num_embeddings for table in tables), default=None)
    heads: set[str] = set()
    named: dict[tuple[str, ...], list[str]] = {}
    for name, layer in linears.items():
        inputs, outputs = shapes[name]
        # DeBERTa-v2 returns the transform before the product with its embedding.
        transform = inputs == outputs and vocabulary not in (None, outputs)
        if id(layer) in of_answers and not transform:
            heads.add(name)
        if id(layer._parameters.get("weight")) in tied:
            heads.add(name)
        path = name.split(".")
        if any(key.isdecimal() for key in path[:-1]):
            continue  # in a block
        if outputs == vocabulary:
            heads.add(name)
        place = next((i for i, key in enumerate(path) if key in _HEADS), None)
        if place is not None:
            named.setdefault(tuple(path[: place + 1]), []).append(name)
    for place_of_head, names in named.items():
        # The last of several layers gives the logits, unless its outputs have the width of the
        # first one's inputs: a transform of hidden states before another head, as in ModernBert.
        transform = shapes[names[-1]][1] == shapes[names[0]][0]
        is_leaf = names[-1] == ".".join(place_of_head)
        if is_leaf or not transform or vocabulary is None:
            heads.add(names[-1])
    return heads
