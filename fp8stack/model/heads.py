"""The linears of any model that compute its logits."""

from collections.abc import Mapping

from torch import nn

_HEADS = {"lm_head", "head", "classifier", "classification_head", "score", "qa_outputs"}


def find_heads(
    model: nn.Module, linears: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, int]]
) -> set[str]:
    """Find the layers that compute logits: `get_output_embeddings` returns them, they are tied to
    an embedding, or they are outside the blocks and in a module with the name of a head, or have an
    output for each row of the largest embedding.

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
    for name, layer in linears.items():
        if id(layer) in of_answers or id(layer._parameters.get("weight")) in tied:
            heads.add(name)
        path = name.split(".")
        in_block = any(key.isdecimal() for key in path[:-1])
        if not in_block and (shapes[name][1] == vocabulary or not _HEADS.isdisjoint(path)):
            heads.add(name)
    return heads
