import json

import numpy as np
import pytest

import resroute as rr
from resroute.config import to_dict


def test_identity_leaves_out_where_and_how_often(make_config, replaced):
    config = make_config()
    name = config.run_name("abc")
    assert name.startswith("wav-L2-s0-")
    for change in (
        {"out": "elsewhere"}, {"data": "x"}, {"log_every": 7}, {"evaluate_every": 9},
        {"checkpoint_every": 3}, {"device": "cuda"},
    ):  # fmt: skip
        assert replaced(config, **change).run_name("abc") == name
    for change in ({"steps": 7}, {"clip_norm": 2.0}, {"precision": "auto"}, {"seed": 1}):
        assert replaced(config, **change).run_name("abc") != name
    assert config.run_name("abd") != name
    assert make_config(rr.HAARES(num_blocks=1)).run_name("abc") != name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 0},
            "batch_size must be a whole number of at least 1 and at most .*, got 0",
        ),
        ({"steps": -1}, "steps must be a whole number of at least 0 and at most .*, got -1"),
        ({"log_every": 0}, "log_every must be a whole number of at least 1 and at most .*, got 0"),
        ({"batch_size": 6, "accumulation": 4}, "divisible by accumulation, got 6 and 4"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0, got 0"),
        ({"learning_rate": float("nan")}, "above 0, got nan"),
        ({"clip_norm": float("inf")}, "clip_norm must be a finite number above 0, got inf"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0 and at most .*, got nan"),
        ({"beta2": 1.0}, "beta2 must lie between 0 and 1, got 1.0"),
        ({"final_learning_rate": 1.5}, "final_learning_rate must lie between 0 and 1, got 1.5"),
    ],
)
def test_settings_out_of_range_name_rule_and_value(make_config, options, message):
    with pytest.raises(ValueError, match=message):
        make_config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 2.5}, "steps must be a whole number, got 2.5"),
        ({"steps": "6"}, "steps must be a whole number, got '6'"),
        ({"log_every": 1.5}, "log_every must be a whole number, got 1.5"),
        ({"keep": True}, "keep must be a whole number, got True"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a number, got '1e-3'"),
        ({"beta1": 10**400}, "beta1 must be a finite number, got 1000"),
        ({"compile": 1}, "compile must be True or False, got 1"),
        ({"device": 3}, "device must be text, got 3"),
        (
            {"precision": "float16"},
            "precision must be 'auto', 'float32' or 'bfloat16', got 'float16'",
        ),
    ],
)
def test_settings_of_another_type_are_refused(make_config, options, message):
    with pytest.raises(rr.UserError) as caught:
        make_config(**options)
    assert str(caught.value).startswith(message)


def test_a_model_of_another_type_is_refused():
    with pytest.raises(rr.UserError, match=r"^model must be a GPTConfig, got 'tiny'$"):
        rr.TrainConfig(model="tiny", data="x")


def test_equal_settings_of_other_types_are_the_same_run(make_config):
    plain = make_config(weight_decay=0.0, steps=6, seed=3, learning_rate=0.5, ema_decay=None)
    other = make_config(
        weight_decay=0, steps=np.int64(6), seed=np.uint8(3), learning_rate=np.float32(0.5)
    )
    assert json.dumps(to_dict(other)) == json.dumps(to_dict(plain))
    assert other.run_name("x") == plain.run_name("x")
    assert (type(other.steps), type(other.weight_decay)) == (int, float)


@pytest.mark.parametrize("config", [{}, rr.GPTConfig(vocab_size=2), None])
def test_training_takes_a_train_config_alone(config):
    name = type(config).__name__
    with pytest.raises(
        rr.UserError, match=rf"^train takes a TrainConfig, got {name}; resroute\.config\.from_dict"
    ):
        rr.train(config)
