"""The amax of a tensor, and the history that turns amaxes into scales, against literal traces."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8stack.analysis.conform.oracles import DelayedSlot
from fp8stack.common.errors import UserError
from fp8stack.common.formats import AmaxAlgorithm
from fp8stack.numerics import AmaxHistory, Quantizer, amax
from tests.support.oracles import (
    FLOAT_DTYPES,
    FLT_MAX,
    STEADY,
)

INF, NAN = math.inf, math.nan
ALGORITHMS = ["max", "most_recent"]


def trace(history: AmaxHistory, amaxes: list[float], slot: str = "x") -> list[float]:
    """The scale after each of `amaxes` was recorded and the history updated."""
    scales = []
    for value in amaxes:
        history.record(slot, value)
        history.update()
        scales.append(history.scale(slot).item())
    return scales


def rows(history: AmaxHistory, slot: str = "x") -> list[float]:
    return history.state_dict()[f"{slot}.amax_history"].tolist()


def same_state(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return state.keys() == expected.keys() and all(
        torch.equal(state[k], expected[k]) for k in state
    )


# vectors


def vectors() -> tuple[AmaxHistory, AmaxHistory]:
    """A history with a vector between two slots, and one with the same slots and no vector."""
    slots = ["a", "x.0", "x.1", "x.2", "b"]
    quantizer = Quantizer(amax="delayed", history_length=3)
    with_vector, plain = AmaxHistory(length=1), AmaxHistory(length=1)
    with_vector.extend(dict.fromkeys(slots, quantizer), {"x": slots[1:4]})
    plain.extend(dict.fromkeys(slots, quantizer))
    return with_vector, plain


def test_slots_of_a_vector_are_updated_as_slots_by_themselves() -> None:
    for fresh in (vectors, lambda: tuple(copy.deepcopy(history) for history in vectors())):
        with_vector, plain = fresh()
        for step in range(5):
            with_vector.recorded("x").copy_(torch.tensor([1.0, 0.0, step]))
            with_vector.record("x.1", 0.5 * step)
            with_vector.record("b", 3.0)
            for slot, value in (("x.0", 1.0), ("x.1", 0.5 * step), ("x.2", step), ("b", 3.0)):
                plain.record(slot, value)
            assert torch.equal(with_vector.read(), plain.read())
            with_vector.update()
            plain.update()
            assert torch.equal(with_vector.scales, plain.scales)
            assert torch.equal(with_vector.scale("x"), plain.scales[1:4])


def test_a_vector_is_stored_as_one_tensor_and_loaded_again() -> None:
    history, plain = vectors()
    history.recorded("x").copy_(torch.tensor([1.0, 2.0, 4.0]))
    history.update()
    history.record("x.2", 7.0)
    state = history.state_dict()
    assert list(state) == [f"{s}.{suffix}" for s in "axb" for suffix in ("amax_history", "scale")]
    assert state["x.scale"].tolist() == [448.0, 224.0, 112.0]
    assert state["x.amax_history"].tolist() == [[0, 0, 7], [0, 0, 0], [1, 2, 4]]
    loaded, _ = vectors()
    loaded.load_state_dict(state)
    assert same_state(loaded.state_dict(), state)
    assert loaded.recorded("x.2") == 7
    with pytest.raises(UserError, match=r"'x\.0\.amax_history' is missing|is not a slot"):
        plain.load_state_dict(state)


def test_compiled_code_reads_and_writes_the_vector_as_one_tensor() -> None:
    history, _ = vectors()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double() -> torch.Tensor:
        before = history.read()
        history.write(2 * before)
        return before

    history.recorded("x").copy_(torch.tensor([1.0, 2.0, 4.0]))
    history.record("b", 3.0)
    assert double().tolist() == [0, 1, 2, 4, 3]
    assert history.all_recorded.tolist() == [0, 2, 4, 8, 6]


# amax


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_an_amax_is_the_largest_magnitude_and_ignores_nan(dtype):
    for values, expected in (
        ([1.0, NAN, -3.0], 3.0),
        ([-0.0, 0.0, -NAN], 0.0),
        ([NAN, -INF, 5.0], INF),
        ([2.0**-24, -(2.0**-23)], 2.0**-23),  # subnormal in float16
        ([], 0.0),
    ):
        largest = amax(torch.tensor(values, dtype=dtype))
        assert (largest.item(), largest.dtype, largest.shape) == (expected, torch.float32, ())
        assert not largest.signbit()
    x = torch.arange(-12.0, 12.0, dtype=dtype).reshape(4, 6)
    assert (amax(x[3, 5]).item(), amax(x.T[1::2, 1:]).item()) == (11.0, 11.0)


# AmaxHistory

# Computed by hand for E4M3, margin 1, length 3: an amax, and the scale and window after it.
BY_HAND = (
    (2.0, 112.0, (0, 0, 2)),
    (56.0, 4.0, (0, 2, 56)),
    (0.0, 4.0, (0, 2, 56)),  # no amax: nothing changes
    (NAN, 4.0, (0, 2, 56)),
    (1.0, 4.0, (0, 56, 1)),
    (0.5, 4.0, (0, 1, 0.5)),  # 56 still counts: it leaves the window in this update
    (INF, 4.0, (0, 0.5, INF)),  # a window with inf keeps its scale
    (0.25, 4.0, (0, INF, 0.25)),
    (0.25, 4.0, (0, 0.25, 0.25)),
    (0.25, 896.0, (0, 0.25, 0.25)),
    (1e-38, 896.0, (0, 0.25, 1e-38)),
)


def test_a_trace_by_hand_is_that_of_the_history_and_of_the_oracle():
    history = AmaxHistory({"x": "e4m3"}, length=3, margin=1)
    slot = DelayedSlot("e4m3", 3, 1)
    for largest, scale, window in BY_HAND:
        assert trace(history, [largest]) == [scale]
        assert rows(history) == torch.tensor(window, dtype=torch.float32).tolist()
        slot.record(largest)
        slot.update()
        assert (slot.scale, tuple(slot.window)) == (scale, window)


def test_a_slot_added_later_starts_fresh_and_leaves_the_others_alone():
    history = AmaxHistory(length=2)
    history.update()
    assert (history.slots, history.state_dict()) == ([], {})
    history.extend({"x": "e4m3"})
    scale = history.scale("x")
    trace(history, [7.0])
    history.record("x", torch.tensor(14.0, requires_grad=True))
    assert not history.recorded("x").requires_grad
    assert scale == 64.0  # a view
    history.extend({"w": "e5m2"})
    assert history.slots == ["x", "w"]
    assert rows(history, "w") == [0.0, 0.0]
    history.update()
    assert (history.scale("x").item(), history.scale("w").item()) == (32.0, 1.0)
    assert trace(history, [7.0], "w") == [8192.0]


def test_to_moves_the_state_in_place():
    history = AmaxHistory({"x": "e4m3"}, length=2)
    assert history.to("meta") is history
    assert {t.device.type for t in history.state_dict().values()} == {"meta"}
    history.to("cpu")  # which resets it
    assert trace(history, [7.0]) == [64.0]
    assert rows(history) == [0.0, 7.0]


def test_the_state_is_float32_by_name_and_a_copy():
    history = AmaxHistory({"block.0.x": "e4m3", "block.0.dy": "e5m2"}, length=2)
    trace(history, [7.0], "block.0.x")
    state = history.state_dict()
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    assert shapes == {
        "block.0.x.amax_history": ((2,), torch.float32),
        "block.0.x.scale": ((), torch.float32),
        "block.0.dy.amax_history": ((2,), torch.float32),
        "block.0.dy.scale": ((), torch.float32),
    }
    trace(history, [14.0], "block.0.x")
    assert state["block.0.x.scale"].item() == 64.0
    assert state["block.0.x.amax_history"].tolist() == [0.0, 7.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.scale": None}, "'x.scale' is missing"),
        ({"w.scale": torch.ones(())}, "'w.scale' is not a slot of this model"),
        ({"dy.amax_history": torch.ones(4)}, r"'dy.amax_history' is torch.float32 \(4,\)"),
        ({"dy.scale": torch.ones((), dtype=torch.float64)}, "'dy.scale' is torch.float64"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, message):
    history = AmaxHistory({"x": "e4m3", "dy": "e5m2"}, length=3)
    trace(history, [7.0])
    before = history.state_dict()
    wrong = {name: torch.full_like(tensor, 5.0) for name, tensor in before.items()} | change
    with pytest.raises(UserError, match=message):
        history.load_state_dict({name: t for name, t in wrong.items() if t is not None})
    assert same_state(history.state_dict(), before)


def test_bad_arguments_are_refused():
    history = AmaxHistory({"x": "e4m3"})
    with pytest.raises(UserError, match="length 0"):
        AmaxHistory(length=0)
    for length in (2**21, 4.0):
        with pytest.raises(UserError, match="The length of an amax history is a whole number from"):
            AmaxHistory(length=length)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="No amax algorithm 'mean'"):
        AmaxHistory(algorithm="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="No format 'e8m0'"):
        history.extend({"w": "e8m0"})
    with pytest.raises(UserError, match="a slot 'x' already"):
        history.extend({"x": "e4m3"})
    assert history.slots == ["x"]
    for use in (
        history.scale,
        lambda slot: history.record(slot, 1.0),
        lambda s: history.update([s]),
    ):
        with pytest.raises(UserError, match="no slot 'w'"):
            use("w")


def test_slots_of_which_one_is_refused_leave_the_history_as_it_was():
    """The slots before the refused one had names without columns."""
    history = AmaxHistory({"x": "e4m3"}, length=3)
    for wrong, message in (
        ("e2m1", "format = 'e2m1' needs a block"),
        (Quantizer(block=(1, 32), scale="e8m0"), "Slot 'b': a history has no scale for block"),
    ):
        with pytest.raises(ValueError, match=message):
            history.extend({"a": "e4m3", "b": wrong})
        assert history.slots == ["x"]
        assert set(history.state_dict()) == {"x.amax_history", "x.scale"}
    history.extend({"a": "e4m3"})
    assert history.slots == ["x", "a"]


some_amaxes = st.sampled_from(
    [0.0, 2.0**-149, 2.0**-100, 3.5, 7.0, 7.125, 448.0, FLT_MAX, INF, NAN]
)
slots = st.sampled_from(["x", "dy"])
actions = st.one_of(
    st.tuples(st.just("record"), slots, some_amaxes | st.floats(0, width=32)),
    st.tuples(st.just("update"), st.sampled_from([None, ["x"], ["dy"], ["dy", "x"], []])),
    st.tuples(st.just("reload")),
)


@pytest.mark.capability("B3")
@STEADY
@given(
    st.lists(actions, max_size=40),
    st.integers(1, 4),
    st.integers(-1, 2),
    st.sampled_from(ALGORITHMS),
)
def test_any_sequence_equals_the_algorithm_in_plain_python(sequence, length, margin, algorithm):
    formats = {"x": "e4m3", "dy": "e5m2"}
    history = AmaxHistory(formats, length=length, margin=margin, algorithm=algorithm)
    model = {slot: DelayedSlot(name, length, margin, algorithm) for slot, name in formats.items()}
    for action, *arguments in sequence:
        match action, arguments:
            case "record", (slot, value):
                history.record(slot, value)
                model[slot].record(value)
            case "update", (chosen,):
                history.update(chosen)
                for slot in formats if chosen is None else chosen:
                    model[slot].update()
            case "reload", _:
                state = history.state_dict()
                history = AmaxHistory(formats, length=length, margin=margin, algorithm=algorithm)
                history.load_state_dict(state)
        for slot, slot_model in model.items():
            assert history.scale(slot).item() == slot_model.scale
            assert rows(history, slot) == slot_model.window


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_amaxes_that_are_not_finite_are_cleared_and_the_others_give_the_scale(
    value: float, algorithm: AmaxAlgorithm
) -> None:
    history = AmaxHistory({"a": "e4m3", "b": "e5m2"}, length=5, algorithm=algorithm)
    for largest in (8.0, 2.0):
        history.record("a", largest)
        history.record("b", largest)
        history.update()
    before = history.history.clone()
    history.history[-1, 0] = value
    history.scales[0] = 123.0  # frozen by it
    assert history.clear_nonfinite().tolist() == [True, False]
    assert history.scale("a") == 448 / 8
    assert history.scale("b") == 57344 / (8 if algorithm == "max" else 2)
    assert history.history[-1, 0] == 0
    assert torch.equal(history.history[:, 1], before[:, 1])
    for scale in (value, 0.0, -1.0):  # computed again from the history
        history.scales.fill_(scale)
        assert history.clear_nonfinite().tolist() == [True, True]
        assert history.scale("a") == 448 / 8
