"""The heads of models of transformers, which are built without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8stack.model.heads import find_heads

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip


def heads(model: nn.Module) -> set[str]:
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    return find_heads(
        model, linears, {path: (m.in_features, m.out_features) for path, m in linears.items()}
    )


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("ModernBertDecoder", "ForCausalLM", {"decoder", "lm_head.dense"}),
        ("ModernBertDecoder", "ForSequenceClassification", {"classifier", "head.dense"}),
        ("ModernBert", "ForTokenClassification", {"classifier", "head.dense"}),
        ("Bert", "ForMaskedLM", {"cls.predictions.decoder"}),
        ("Bert", "ForQuestionAnswering", {"qa_outputs"}),
        ("Roberta", "ForMaskedLM", {"lm_head.decoder", "lm_head.dense"}),
        ("Roberta", "ForSequenceClassification", {"classifier.out_proj", "classifier.dense"}),
        ("MPNet", "ForMaskedLM", {"lm_head.decoder", "lm_head.dense"}),
        ("Electra", "ForMaskedLM", {"generator_lm_head"}),
        ("DebertaV2", "ForMaskedLM", {"cls.predictions.decoder"}),
        ("Llama", "ForCausalLM", {"lm_head"}),
        ("Llama", "ForSequenceClassification", {"score"}),
    ],
)
def test_the_layers_of_the_head_are_found(name, kind, expected):
    import transformers

    options = SMALL | ({"layer_types": ["full_attention"]} if name == "ModernBertDecoder" else {})
    with torch.device("meta"):
        model = getattr(transformers, name + kind)(
            getattr(transformers, f"{name}Config")(**options)
        )
    assert heads(model) == expected


def test_all_layers_of_a_head_outside_the_blocks_are_heads():
    table = nn.Embedding(50, 64)
    several = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    blocks = nn.ModuleList([nn.ModuleDict({"head": nn.Linear(32, 32)})])
    model = nn.ModuleDict({"body": nn.Linear(64, 32), "table": table, "head": several})
    model["blocks"] = blocks
    assert heads(model) == {"head.0", "head.2"}
    # A layer of another width than the vocabulary is none, one with the embedding's weight is.
    wide = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(64, 50)})])
    tied = nn.ModuleDict({"table": table, "blocks": wide, "proj": nn.Linear(64, 96)})
    assert heads(tied) == set()
    tied.get_submodule("blocks.0.up").weight = table.weight
    assert heads(tied) == {"blocks.0.up"}
