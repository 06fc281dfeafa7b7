"""The heads of models of transformers, which are built without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
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
        ("ModernBertDecoder", "ForCausalLM", {"decoder"}),
        ("ModernBertDecoder", "ForSequenceClassification", {"classifier"}),
        ("ModernBert", "ForMaskedLM", {"decoder"}),
        ("ModernBert", "ForSequenceClassification", {"classifier"}),
        ("ModernBert", "ForTokenClassification", {"classifier"}),
        ("Bert", "ForMaskedLM", {"cls.predictions.decoder"}),
        ("Bert", "LMHeadModel", {"cls.predictions.decoder"}),
        ("Bert", "ForTokenClassification", {"classifier"}),
        ("Bert", "ForQuestionAnswering", {"qa_outputs"}),
        ("Roberta", "ForMaskedLM", {"lm_head.decoder"}),
        ("Roberta", "ForCausalLM", {"lm_head.decoder"}),
        ("Roberta", "ForSequenceClassification", {"classifier.out_proj"}),
        ("XLMRoberta", "ForMaskedLM", {"lm_head.decoder"}),
        ("Camembert", "ForMaskedLM", {"lm_head.decoder"}),
        ("MPNet", "ForMaskedLM", {"lm_head.decoder"}),
        ("Esm", "ForMaskedLM", {"lm_head.decoder"}),
        ("Electra", "ForMaskedLM", {"generator_lm_head"}),
        ("Electra", "ForSequenceClassification", {"classifier.out_proj"}),
        ("Albert", "ForMaskedLM", {"predictions.decoder"}),
        ("DebertaV2", "ForMaskedLM", {"cls.predictions.decoder"}),
        ("Llama", "ForCausalLM", {"lm_head"}),
        ("Llama", "ForSequenceClassification", {"score"}),
    ],
)
def test_the_layer_that_makes_the_logits_is_the_head(name, kind, expected):
    options = SMALL
    if name == "ModernBertDecoder":
        options = {**SMALL, "layer_types": ["full_attention"]}
    with torch.device("meta"):
        model = getattr(transformers, name + kind)(
            getattr(transformers, f"{name}Config")(**options)
        )
    assert heads(model) == expected


def test_a_transform_before_the_logits_of_a_matrix_is_no_head():
    config = transformers.DebertaV2Config(**SMALL, legacy=False)
    with torch.device("meta"):
        model = transformers.DebertaV2ForMaskedLM(config)
    assert "lm_predictions.lm_head.dense" in dict(model.named_modules())
    assert heads(model) == set()


def test_a_classifier_with_as_many_classes_as_inputs_is_a_head():
    def model(**children: nn.Module) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(64, 32), **children})

    assert heads(model(head=nn.Sequential(nn.Linear(32, 32)))) == {"head.0"}
    table = nn.Embedding(50, 64)
    assert heads(model(table=table, head=nn.Linear(32, 32))) == {"head"}
    several = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    assert heads(model(table=table, head=several)) == {"head.2"}
