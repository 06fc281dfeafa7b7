"""Models of other libraries, by their own code, which the test extra does not bring: each test is
skipped unless its library is installed. (peft cannot be imported where Transformer Engine is its
empty meta package, as in the test environment.)"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack import fp8_state, load_fp8_state
from tests.integrations.loops import CONTEXT, RECIPES, adamw, converted, gpt2, tokens, train
from tests.support.backend_models import same


def imported(name: str) -> Any:
    try:
        return pytest.importorskip(name)
    except RuntimeError as error:  # of the empty meta package
        pytest.skip(str(error))


def peft_lora(recipe: str, first: str = "convert") -> nn.Module:
    peft = imported("peft")
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM")
    if first == "convert":
        return peft.get_peft_model(converted(gpt2(None), recipe), lora)
    return converted(peft.get_peft_model(gpt2(None), lora), recipe, exclude="*lora_*")


def litgpt(recipe: str) -> nn.Module:
    library = imported("litgpt")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": CONTEXT}
    torch.manual_seed(0)
    config = library.Config.from_name("pythia-14m", padded_vocab_size=64, **sizes)
    return converted(library.GPT(config), recipe)


def torchtitan(recipe: str) -> nn.Module:
    library = imported("torchtitan.models.llama3")
    sizes = {"dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 64, "max_seq_len": CONTEXT}
    torch.manual_seed(0)
    model = library.Transformer(library.TransformerModelArgs(**sizes, multiple_of=32))
    with torch.no_grad():
        model.init_weights()
    return converted(model, recipe)


MODELS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "peft": (peft_lora, 4),
    "litgpt": (litgpt, 4),
    "torchtitan": (torchtitan, 7),
}


def loss_of(model: nn.Module, step: int) -> Tensor:
    ids = tokens(step)
    y = model(input_ids=ids).logits if hasattr(model, "peft_config") else model(ids)
    return F.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("library", MODELS)
def test_a_model_trains_and_resumes_to_the_bit(library, recipe):
    make, layers = MODELS[library]
    model = make(recipe)
    state = fp8_state(model)
    assert len({name.rpartition(".draws")[0] or name.rsplit(".", 2)[0] for name in state}) == layers
    optimizer = adamw(model)
    train(model, optimizer, range(3), loss_of)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fp8, moments = fp8_state(model), copy.deepcopy(optimizer.state_dict())
    assert not same(fp8, state)
    again = make(recipe)
    resumed = adamw(again)
    again.load_state_dict(saved)
    load_fp8_state(again, fp8)
    resumed.load_state_dict(moments)
    later = range(3, 6), loss_of
    assert train(again, resumed, *later) == train(model, optimizer, *later)
    assert same(again.state_dict(), model.state_dict())
    assert same(fp8_state(again), fp8_state(model))


def test_adapters_train_on_a_frozen_base_in_fp8_whichever_comes_first():
    first, peft_first = peft_lora("delayed"), peft_lora("delayed", first="peft")
    peft_first.load_state_dict(first.state_dict())
    base = {n: p.clone() for n, p in first.named_parameters() if not p.requires_grad}
    losses, two = (train(model, adamw(model), range(3), loss_of) for model in (first, peft_first))
    assert losses == two
    assert all("lora_" in n for n, p in first.named_parameters() if p.requires_grad)
    assert same(base, {n: p for n, p in first.named_parameters() if not p.requires_grad})
    assert len(fp8_state(first)) == len(fp8_state(peft_first)) == 24
