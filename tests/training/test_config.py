import pytest

import resroute as rr


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
        ({"batch_size": 0}, "batch_size must be at least 1 and at most .*, got 0"),
        ({"steps": -1}, "steps must be at least 0 and at most .*, got -1"),
        ({"log_every": 0}, "log_every must be at least 1 and at most .*, got 0"),
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
