import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from resroute.config import UserError
from resroute.model import GPT, GPTConfig, generate
from resroute.residual import WAV, BlockAttnRes, PreNorm, ReZero

V = 8


def chain(probabilities: Tensor, *, context: int = 16) -> GPT:
    """A model whose next token depends on the newest alone, by rows of a matrix (V, V).

    The layers of ReZero start closed, so that the final norm is given the one-hot embedding; it
    scales it to sqrt(V), and the head holds the logarithms.
    """
    config = GPTConfig(
        vocab_size=V,
        context=context,
        num_layers=1,
        num_heads=1,
        dim=V,
        residual=ReZero(),
        norm_eps=0.0,
    )
    model = GPT(config)
    assert model.head is not None
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(V))
        model.head.weight.copy_(probabilities.log().T / math.sqrt(V))
    return model


def counting(**options: Any) -> GPT:
    """0, 1, .., 7, 0, .. with hardly any doubt."""
    matrix = torch.full((V, V), 1e-12)
    matrix[torch.arange(V), (torch.arange(V) + 1) % V] = 1.0
    return chain(matrix, **options)


# equal rows: every draw is from this
LAW = torch.tensor([0.05, 0.30, 0.02, 0.25, 0.10, 0.08, 0.15, 0.05])


@pytest.fixture(scope="module")
def lottery() -> GPT:
    return chain(LAW.repeat(V, 1))


def frequencies(model: GPT, **options: Any) -> Tensor:
    prompts = torch.zeros(20_000, 1, dtype=torch.int64)
    drawn = generate(model, prompts, 1, seed=0, **options)[:, 1]
    return torch.bincount(drawn, minlength=V) / len(prompts)


def random_model(*, context: int = 8, **options: Any) -> GPT:
    """A float64 model that is far from uniform, so that the likeliest token is clear."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": V, "num_layers": 2, "num_heads": 2, "dim": 8}
    model = GPT(GPTConfig(**{**shape, **options}, context=context)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape))
    return model


def by_hand(model: GPT, prompts: Tensor, count: int) -> Tensor:
    """Greedy continuation without a cache; past the context the oldest half of it is dropped."""
    context = model.config.context
    tokens = window = prompts
    for _ in range(count):
        while window.shape[1] > context:
            window = window[:, math.ceil(context / 2) :]
        with torch.no_grad():
            logits = model(window)[0]
        assert logits is not None
        new = logits[:, -1:].argmax(-1)
        tokens, window = torch.cat([tokens, new], 1), torch.cat([window, new], 1)
    return tokens


METHODS = [PreNorm(), BlockAttnRes(num_blocks=2), WAV(num_blocks=1, details_in_readout=True)]


@pytest.mark.parametrize("residual", METHODS, ids=lambda residual: residual.type_name)
@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("context", [30, 8, 5, 1])
def test_greedy_equals_an_uncached_loop_within_and_past_the_context(
    context: int, position: str, residual: Any
) -> None:
    model = random_model(context=context, position=position, residual=residual)
    for length in (1, 5, 20):
        prompts = torch.randint(V, (2, length), generator=torch.Generator().manual_seed(length))
        rows = generate(model, prompts, 10, temperature=0.0)
        assert torch.equal(rows, by_hand(model, prompts, 10))


def test_the_test_model_does_not_repeat_itself() -> None:
    rows = generate(random_model(context=30), torch.tensor([[3]]), 20, temperature=0.0)
    assert len(set(rows[0].tolist())) > 2


def test_most_of_a_continuation_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = random_model(context=8), []
    embed = model.embedding.forward

    def spy(tokens: Tensor) -> Tensor:
        sizes.append(tokens.shape[1])
        return embed(tokens)

    monkeypatch.setattr(model.embedding, "forward", spy)
    generate(model, torch.zeros(1, 6, dtype=torch.int64), 9, temperature=0.0)
    # the tenth token is the first past the context: 5 of 9 are encoded again, then one each
    assert sizes == [6, 1, 1, 5, 1, 1, 1, 5, 1]


# dynamo asks every tensor for its gradient, and torch warns where that is not a leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_generate_the_same() -> None:
    model, prompts = random_model(context=32), torch.tensor([[1, 2], [3, 4]])
    expected = generate(model, prompts, 40, seed=0)
    torch._dynamo.reset()
    model.compile(backend="eager")
    assert torch.equal(generate(model, prompts, 40, seed=0), expected)
    torch._dynamo.reset()


def test_draws_follow_the_models_probabilities(lottery: GPT) -> None:
    torch.testing.assert_close(frequencies(lottery), LAW, rtol=0, atol=0.015)


def test_temperature_divides_the_logits(lottery: GPT) -> None:
    for temperature in (0.5, 2.0):
        expected = LAW ** (1 / temperature)
        drawn = frequencies(lottery, temperature=temperature)
        torch.testing.assert_close(drawn, expected / expected.sum(), rtol=0, atol=0.015)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, [1, 3, 6]),
        ({"top_k": V + 5}, list(range(V))),
        # 0.30, 0.25 and 0.15 make 0.70
        ({"top_p": 0.69}, [1, 3, 6]),
        ({"top_p": 0.71}, [1, 3, 6, 4]),
        ({"top_p": 0.31}, [1, 3]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 1.0}, list(range(V))),
        # of the three kept, 0.30 and 0.25 are 0.79 of 0.70
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),
        ({"top_k": 3, "top_p": 0.80}, [1, 3, 6]),
        # after the temperature: squared, 0.0900 and 0.0625 are 0.775 of 0.1968
        ({"temperature": 0.5, "top_p": 0.77}, [1, 3]),
        ({"temperature": 0.5, "top_p": 0.78}, [1, 3, 6]),
    ],
    ids=str,
)
def test_what_top_k_and_top_p_keep(lottery: GPT, options: dict[str, Any], kept: list[int]) -> None:
    law = LAW ** (1 / options.get("temperature", 1.0))
    expected = torch.zeros(V)
    expected[kept] = law[kept] / law[kept].sum()
    drawn = frequencies(lottery, **options)
    assert (drawn > 0).nonzero().flatten().tolist() == sorted(kept)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0.015)


def test_ties_never_let_more_than_top_k_through() -> None:
    even = chain(torch.full((V, V), 1 / V))
    assert frequencies(even, top_k=2).gt(0).sum() == 2
    assert frequencies(even, top_p=0.24).gt(0).sum() == 2
    # among equals the first, as without a draw
    assert frequencies(even, top_k=1)[0] == 1
    assert frequencies(even, temperature=0.0)[0] == 1


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}])
def test_the_narrowest_draws_are_greedy(options: dict[str, Any]) -> None:
    model, prompts = random_model(), torch.tensor([[1], [2], [3]])
    expected = generate(model, prompts, 12, temperature=0.0)
    assert torch.equal(generate(model, prompts, 12, seed=1, **options), expected)


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_tiny_temperatures_do_not_overflow(temperature: float, scale: float) -> None:
    model = counting()
    assert model.head is not None
    with torch.no_grad():
        model.head.weight.mul_(scale)
    rows = generate(model, torch.tensor([[0]]), 3, temperature=temperature, seed=0)
    assert rows.tolist() == [[0, 1, 2, 3]]


def test_seeds_reproduce_differ_and_leave_the_global_generator_alone(lottery: GPT) -> None:
    prompts = torch.zeros(4, 2, dtype=torch.int64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = generate(lottery, prompts, 12, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generate(lottery, prompts, 12, seed=3), first)
    assert not torch.equal(generate(lottery, prompts, 12, seed=4), first)
    # rows of a batch draw apart
    assert len({str(row) for row in first.tolist()}) == 4


def test_without_a_seed_the_global_generator_draws(lottery: GPT) -> None:
    prompts = torch.zeros(2, 1, dtype=torch.int64)
    torch.manual_seed(0)
    first, second = generate(lottery, prompts, 12), generate(lottery, prompts, 12)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(generate(lottery, prompts, 12), first)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], [6, 7, 0, 1, 2, 3, 4, 5]),
        ([[3]], [6, 7, 0, 1, 2, 3]),
        ([[2, 3]], [6, 7, 0, 1, 2, 3]),
        ([[5], [1], [3]], [6, 7, 0, 1]),
        ([[2, 4], (0, 1, 2)], [6, 7, 0, 1, 2]),
        # whatever type counts
        ([torch.tensor([1, 2])], [6, 7, 0, 1, 2]),
        (torch.tensor([[3, 2], [0, 1]]), [6, 7, 0, 1]),
        # the prompt takes no part, neither alone nor as a beginning
        ([[7]], [6, 7, 0, 1, 2, 3, 4, 5]),
        ([[7, 0]], [6, 7, 0, 1, 2, 3, 4, 5]),
        ([[0]], [6, 7, 0]),
    ],
)
def test_rows_end_with_a_stop_sequence_of_the_continuation(
    stop: list[list[int]], expected: list[int]
) -> None:
    rows = generate(counting(), torch.tensor([[6, 7]]), 6, temperature=0.0, stop=stop)
    assert rows.tolist() == [expected]


def test_rows_stop_apart_and_are_padded() -> None:
    seen: list[list[int]] = []
    rows = generate(
        counting(context=4),
        torch.tensor([[7, 0], [3, 4], [1, 2]]),
        20,
        temperature=0.0,
        stop=[[6], [2, 3]],
        stream=lambda new: seen.append(new.tolist()),
    )
    assert rows.tolist() == [
        [7, 0, 1, 2, 3, -1],
        [3, 4, 5, 6, -1, -1],
        [1, 2, 3, 4, 5, 6],
    ]
    assert seen == [[1, 5, 3], [2, 6, 4], [3, -1, 5], [-1, -1, 6]]


def test_every_token_is_streamed_once_and_in_order(lottery: GPT) -> None:
    columns: list[Tensor] = []
    rows = generate(lottery, torch.zeros(3, 2, dtype=torch.int64), 7, seed=0, stream=columns.append)
    assert torch.equal(torch.stack(columns, dim=1), rows[:, 2:])


def test_no_new_tokens_are_the_prompts() -> None:
    prompts = torch.tensor([[1, 2]])
    assert torch.equal(generate(counting(), prompts, 0), prompts)


def interrupt(new: Tensor) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stream", [None, interrupt])
@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_is_given_back_even_after_an_interruption(
    is_training: bool, stream: Callable[[Tensor], None] | None
) -> None:
    model, prompts = random_model(dropout=0.9), torch.tensor([[1]])
    expected = generate(model.eval(), prompts, 12, temperature=0.0)
    model.train(is_training)
    try:
        rows = generate(model, prompts, 12, temperature=0.0, stream=stream)
        # no dropout meanwhile
        assert torch.equal(rows, expected)
    except KeyboardInterrupt:
        assert stream is interrupt
    assert all(module.training is is_training for module in model.modules())


def test_what_is_generated_can_be_trained_on() -> None:
    model = random_model()
    rows = generate(model, torch.tensor([[1, 2]]), 6, seed=0)
    assert not rows.requires_grad
    loss = model(rows[:, :-1], rows[:, 1:])[1]
    assert loss is not None
    loss.backward()
    assert model.embedding.weight.grad is not None


def test_prompts_stay_as_they_are() -> None:
    prompts = torch.tensor([[6], [7]])
    generate(counting(), prompts, 3, temperature=0.0, stop=[[0]])
    assert prompts.tolist() == [[6], [7]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": torch.tensor([1, 2])}, r"shape \(batch, tokens\) .*, got shape \(2,\)"),
        ({"ids": torch.zeros(2, 0, dtype=torch.int64)}, r"at least one token .* \(2, 0\)"),
        ({"ids": torch.zeros(0, 2, dtype=torch.int64)}, r"at least one token .* \(0, 2\)"),
        ({"ids": torch.tensor([[1, -1]])}, "tokens 0 to 7, got -1 to 1 .*-1 pads"),
        ({"ids": torch.tensor([[1, 8]])}, "tokens 0 to 7, got 1 to 8"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be at least 0 and finite, got -0.5"),
        ({"temperature": math.inf}, "temperature must be at least 0 and finite, got inf"),
        ({"temperature": math.nan}, "temperature must be at least 0 and finite, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"stop": [[1], []]}, "a stop sequence needs at least one token"),
        (
            {"stop": ["ab"]},
            r"^stop takes sequences of token ids, .*encode\('ab'\)\], got 'ab' in it$",
        ),
        ({"stop": "ab"}, "^stop takes sequences of token ids, .* got 'a' in it$"),
        ({"stop": [3]}, "^stop takes sequences of token ids, .* got 3 in it$"),
        ({"stop": 3}, "^stop takes sequences of token ids, .* got 3 in it$"),
        ({"stop": [[1, 2.5]]}, r"^stop takes sequences of token ids, .* got \[1, 2.5\] in it$"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"ids": torch.tensor([[1]]), "max_new_tokens": 2, **changes}
    with pytest.raises(UserError, match=message):
        generate(counting(), **arguments)
