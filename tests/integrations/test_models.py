"""peft's LoRA on converted models. It is skipped where peft is not installed, or cannot be imported
because Transformer Engine is its empty meta package, as in the test environment."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fp8stack import fp8_state
from tests.integrations.loops import adamw, converted, gpt2, train
from tests.support.backend_models import same

pytestmark = pytest.mark.full


def peft_lora(first: str) -> nn.Module:
    try:
        peft: Any = pytest.importorskip("peft")
    except RuntimeError as error:
        pytest.skip(str(error))
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM")
    if first == "convert":
        return peft.get_peft_model(converted(gpt2(None), "delayed"), lora)
    return converted(peft.get_peft_model(gpt2(None), lora), "delayed", exclude="*lora_*")


def test_adapters_train_on_a_frozen_base_in_fp8_whichever_comes_first():
    first, peft_first = peft_lora("convert"), peft_lora("peft")
    peft_first.load_state_dict(first.state_dict())
    base = {n: p.clone() for n, p in first.named_parameters() if not p.requires_grad}
    losses, two = (train(model, adamw(model), range(3)) for model in (first, peft_first))
    assert losses == two
    assert all("lora_" in n for n, p in first.named_parameters() if p.requires_grad)
    assert same(base, {n: p for n, p in first.named_parameters() if not p.requires_grad})
    assert len(fp8_state(first)) == len(fp8_state(peft_first)) == 24
