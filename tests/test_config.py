import inspect
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from resroute import config
from resroute.config import UserError, Variant, register
from resroute.model import tiny
from resroute.residual import HAARES, WAV, PreNorm, ResidualConfig
from resroute.training import TrainConfig


class Shape(Variant):
    """A family of the test's own."""


@register("circle")
@dataclass(frozen=True, kw_only=True)
class Circle(Shape):
    radius: float = 1.0


@register("polygon")
@dataclass(frozen=True, kw_only=True)
class Polygon(Shape):
    sides: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Box:
    width: int
    scale: float = 2.0
    is_open: bool = False
    label: str = "box"
    kind: Literal["plain", "round"] = "plain"
    size: int | None = None
    either: int | str = 0
    pair: tuple[int, float] = (1, 2.0)
    shape: Shape = field(default_factory=Circle)
    anything: Any = None

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"width must be at least 1, got {self.width}")


@dataclass(frozen=True, kw_only=True)
class Room:
    box: Box
    boxes: tuple[Box, ...] = ()


FULL = {
    "width": 3,
    "scale": 0.5,
    "is_open": True,
    "label": "\u00e9",
    "kind": "round",
    "size": 7,
    "either": "x",
    "pair": [4, 5.5],
    "shape": {"type": "polygon", "sides": 3, "names": ["a", "b"]},
    "anything": {"a": [1]},
}


def refuse(cls: Any, data: Any, where: str = "here") -> str:
    with pytest.raises(UserError) as caught:
        config.from_dict(cls, data, where=where)
    return str(caught.value)


def override(value: Any, **settings: str) -> str:
    named = {name.replace("__", "."): text for name, text in settings.items()}
    with pytest.raises(UserError) as caught:
        config.with_overrides(value, named)
    return str(caught.value)


def test_a_user_error_is_a_value_error() -> None:
    assert issubclass(UserError, ValueError)


def test_every_field_goes_there_and_back() -> None:
    box = config.from_dict(Box, FULL)
    assert box == Box(
        width=3,
        scale=0.5,
        is_open=True,
        label="\u00e9",
        kind="round",
        size=7,
        either="x",
        pair=(4, 5.5),
        shape=Polygon(sides=3, names=("a", "b")),
        anything={"a": [1]},
    )
    room = Room(box=Box(width=1), boxes=(Box(width=2, shape=Polygon(sides=9)),))
    assert config.from_dict(Room, config.to_dict(room)) == room


def test_to_dict_gives_plain_values_in_order() -> None:
    data = config.to_dict(Room(box=Box(width=1, pair=(3, 0.5)), boxes=()))
    assert data["boxes"] == []
    assert data["box"]["pair"] == [3, 0.5]
    assert data["box"]["shape"] == {"type": "circle", "radius": 1.0}
    assert list(data["box"])[:3] == ["width", "scale", "is_open"]
    assert config.to_dict(PreNorm()) == {"type": "pre_norm"}
    with pytest.raises(TypeError, match="complex is not a configuration value"):
        config.to_dict(1j)


def test_fields_left_out_take_their_defaults() -> None:
    assert config.from_dict(Box, {"width": 3}) == Box(width=3)
    assert config.from_dict(Room, {"box": {"width": 3}}) == Room(box=Box(width=3))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("width", True, "here.width: needs a whole number, got True"),
        ("width", 1.0, "here.width: needs a whole number, got 1.0"),
        ("width", "1", "here.width: needs a whole number, got '1'"),
        ("width", None, "here.width: needs a whole number, got None"),
        ("scale", True, "here.scale: needs a number, got True"),
        ("scale", "2", "here.scale: needs a number, got '2'"),
        ("scale", math.nan, "here.scale: needs a finite number, got nan"),
        ("scale", -math.inf, "here.scale: needs a finite number, got -inf"),
        ("is_open", 1, "here.is_open: needs true or false, got 1"),
        ("label", 3, "here.label: needs text, got 3"),
        ("kind", "rond", "here.kind: 'rond' is not one of 'plain', 'round'"),
        ("kind", ["plain"], "here.kind: ['plain'] is not one of 'plain', 'round'"),
        ("size", "x", "here.size: needs a whole number, got 'x'"),
        ("either", 1.5, "here.either: needs a whole number, got 1.5"),
        ("pair", [1], "here.pair: needs 2 values, got 1"),
        ("pair", [1, 2, 3], "here.pair: needs 2 values, got 3"),
        ("pair", [1.5, 2], "here.pair[0]: needs a whole number, got 1.5"),
        ("pair", "12", "here.pair: needs a list, got '12'"),
        ("shape", "circle", "here.shape: needs an object with a 'type', got 'circle'"),
        ("shape", {}, "here.shape: needs an object with a 'type', got {}"),
        ("shape", {"type": ["circle"]}, "here.shape: unknown type ['circle'] (did you mean"),
        (
            "shape",
            {"type": "circel"},
            "here.shape: unknown type 'circel' (did you mean 'circle'?); known: circle, polygon",
        ),
        ("shape", {"type": "wav"}, "here.shape: unknown type 'wav'; known: circle, polygon"),
        ("shape", {"type": "polygon"}, "here.shape: the field 'sides' is missing"),
        (
            "shape",
            {"type": "polygon", "sides": 3, "names": ["a", 1]},
            "here.shape.names[1]: needs text, got 1",
        ),
        ("shape", {"type": "circle", "radus": 1}, "unknown field 'radus' (did you mean 'radius'?)"),
        ("widht", 3, "here: unknown field 'widht' (did you mean 'width'?)"),
        ("zzz", 3, "here: unknown field 'zzz'"),
        ("width", 0, "here: width must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_refused(name: str, value: Any, says: str) -> None:
    message = refuse(Box, {**FULL, name: value})
    assert says in message
    assert "\n" not in message


def test_errors_name_the_way_to_a_nested_field() -> None:
    assert refuse(Room, {"box": FULL, "boxes": [FULL, {**FULL, "scale": "x"}]}) == (
        "here.boxes[1].scale: needs a number, got 'x'"
    )
    assert refuse(Room, {"box": {"width": 0}}) == "here.box: width must be at least 1, got 0"
    assert refuse(Room, {}) == "here: the field 'box' is missing"
    assert refuse(Room, []) == "here: needs an object, got []"
    assert refuse(Room, None) == "here: needs an object, got None"


def test_a_whole_number_will_do_for_a_number() -> None:
    box = config.from_dict(Box, {"width": 1, "scale": 3})
    assert box.scale == 3.0
    assert type(box.scale) is float
    assert "here.scale: needs a finite number" in refuse(Box, {"width": 1, "scale": 10**400})


def test_long_values_are_shortened() -> None:
    message = refuse(Box, {"width": "[" * 100_000})
    assert message.startswith("here.width: needs a whole number, got '[[[")
    assert len(message) < 120
    assert len(refuse(Box, {"width": 1, "shape": list(range(10_000))})) < 120


def test_families() -> None:
    assert config.variants(Shape) == {"circle": Circle, "polygon": Polygon}
    assert Circle.type_name == "circle"
    assert "wav" in config.variants(ResidualConfig)
    with pytest.raises(AssertionError, match="'circle' is registered twice"):
        register("circle")(Circle)


def test_a_member_accepts_its_own_type_alone() -> None:
    assert config.from_dict(Circle, {"type": "circle", "radius": 2}) == Circle(radius=2.0)
    assert "unknown type 'polygon'" in refuse(Circle, {"type": "polygon", "sides": 3})


def test_suggestion() -> None:
    assert config.suggestion("layres", ["layers", "steps"]) == " (did you mean 'layers'?)"
    assert config.suggestion("q", ["layers", "steps"]) == ""
    assert config.suggestion("", []) == ""


def test_overrides() -> None:
    room = Room(box=Box(width=1, shape=Polygon(sides=3)))
    changed = config.with_overrides(
        room,
        {
            "box.width": "4",
            "box.scale": "1",
            "box.is_open": "true",
            "box.label": "12 boxes",
            "box.size": "null",
            "box.either": '"7"',
            "box.pair": "[2, 0.25]",
            "box.shape.sides": "5",
            "box.shape.names": '["a"]',
        },
    )
    assert changed.box == Box(
        width=4,
        scale=1.0,
        is_open=True,
        label="12 boxes",
        either="7",
        pair=(2, 0.25),
        shape=Polygon(sides=5, names=("a",)),
    )
    assert room.box.width == 1
    assert config.with_overrides(room, {}) == room
    other = config.with_overrides(room, {"box.shape": '{"type": "circle", "radius": 3}'})
    assert other.box.shape == Circle(radius=3.0)


def test_overrides_that_name_no_field() -> None:
    room = Room(box=Box(width=1))
    assert override(room, bxo="1") == "--set bxo: no field 'bxo' (did you mean 'box'?)"
    assert override(room, box__shape__radus="1") == (
        "--set box.shape.radus: no field 'radus' (did you mean 'radius'?)"
    )
    assert override(room, box__width__x="1") == "--set box.width.x: no field 'x'"
    assert override(room, box__shape__type="polygon") == (
        "--set box.shape.type: no field 'type'; it has radius"
    )
    assert "no field ''" in override(room, box____width="1")
    assert "no field '0'" in override(room, boxes__0="1")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("box.width", "x", "--set box.width: needs a whole number, got 'x'"),
        ("box.width", "", "--set box.width: needs a whole number, got ''"),
        ("box.width", "1e3", "--set box.width: needs a whole number, got 1000.0"),
        ("box.width", "0", "--set box: width must be at least 1, got 0"),
        ("box.scale", "NaN", "--set box.scale: needs a finite number, got nan"),
        ("box.scale", "-Infinity", "--set box.scale: needs a finite number, got -inf"),
        ("box.label", "3", "--set box.label: needs text, got 3"),
        ("box.is_open", "yes", "--set box.is_open: needs true or false, got 'yes'"),
        ("box.width", "[" * 100_000, "--set box.width: needs a whole number, got '[[["),
        ("box.width", "9" * 5000, "--set box.width: needs a whole number, got '999"),
        ("box", "3", "--set box: needs an object, got 3"),
    ],
    ids=lambda text: text[:20],
)
def test_overrides_that_do_not_fit(name: str, text: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        config.with_overrides(Room(box=Box(width=1)), {name: text})


def test_differences() -> None:
    one = Room(box=Box(width=1), boxes=(Box(width=1),))
    assert config.differences(one, one) == []
    two = Room(box=Box(width=2, shape=Polygon(sides=3)), boxes=())
    assert config.differences(one, two) == [
        "box.width",
        "box.shape.type",
        "box.shape.radius",
        "box.shape.sides",
        "box.shape.names",
        "boxes",
    ]
    assert config.differences({"a": 1}, {"a": 1.0, "b": None}) == ["b"]
    assert config.differences({"a": {"b": 1}}, {"a": [1]}) == ["a"]
    assert config.differences([1, 2], [1, 3], path="x") == ["x"]


def test_fingerprints_are_pinned() -> None:
    # a change here parts people from their finished runs
    assert config.fingerprint({}) == "44136fa3"
    assert config.fingerprint({"b": [1, 2.5, None], "a": "\u00e9"}) == "84afbf1d"
    assert config.fingerprint(Box(width=1)) == "50c2bd21"
    assert config.fingerprint(WAV(num_blocks=4)) == "0de681d0"


def test_fingerprints_tell_values_apart_and_order_does_not_count() -> None:
    values = [Box(width=1), Box(width=2), Box(width=1, scale=1.0), Box(width=1, either="0")]
    assert len({config.fingerprint(value) for value in values}) == len(values)
    assert config.fingerprint({"a": 1, "b": 2}) == config.fingerprint({"b": 2, "a": 1})
    assert config.fingerprint([1, 2]) != config.fingerprint([2, 1])
    assert config.fingerprint(Box(width=1)) == config.fingerprint(config.to_dict(Box(width=1)))
    with pytest.raises(ValueError, match="JSON compliant"):
        config.fingerprint({"a": math.nan})


@pytest.mark.parametrize("residual", [PreNorm(), HAARES(rho_max=None), WAV(bases=(), gated=True)])
def test_real_configurations_go_there_and_back(residual: ResidualConfig) -> None:
    model = tiny(2, vocab_size=5, residual=residual)
    run = TrainConfig(model=model, data="data/x", seed=3)
    data = config.to_dict(run)
    assert data["model"]["residual"]["type"] == residual.type_name
    assert config.from_dict(TrainConfig, data) == run


def test_a_field_that_lies_deeper_is_pointed_to() -> None:
    run = TrainConfig(model=tiny(4, vocab_size=5, residual=WAV(num_blocks=2)), data="x")
    for name, path in (("dropout", "model.dropout"), ("rho_max", "model.residual.rho_max")):
        with pytest.raises(UserError, match=rf"no field '{name}' \(did you mean '{path}'\?\)"):
            config.with_overrides(run, {name: "0.1"})


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)], ids=repr)
def test_what_counts_is_whole_and_kept_as_an_int(value: Any) -> None:
    found = config.require_whole("size", value, 1, 3)
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("value", [True, 3.0, np.float64(3), "3", None, 0, 4], ids=repr)
def test_what_is_not_whole_or_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(UserError) as caught:
        config.require_whole("size", value, 1, 3)
    assert str(caught.value) == (
        f"size must be a whole number of at least 1 and at most 3, got {value!r}"
    )


def test_settled_fields_have_the_types_of_their_fields() -> None:
    given: dict[str, Any] = {"width": np.int32(2), "scale": 3, "size": np.int8(1), "either": "x"}
    box = Box(**given)
    config.settle(box)
    plain = Box(width=2, scale=3.0, size=1, either="x")
    assert config.fingerprint(box) == config.fingerprint(plain)
    empty = Box(width=1, size=None)
    config.settle(empty)
    assert empty.size is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("width", 1.0, "width must be a whole number, got 1.0"),
        ("size", "1", "size must be a whole number, got '1'"),
        ("scale", True, "scale must be a number, got True"),
        ("scale", 10**400, "scale must be a finite number, got 1000"),
        ("is_open", 1, "is_open must be True or False, got 1"),
        ("label", None, "label must be text, got None"),
        ("kind", "flat", "kind must be 'plain' or 'round', got 'flat'"),
    ],
)
def test_a_field_of_another_kind_does_not_settle(field: str, value: Any, message: str) -> None:
    box = Box(**{"width": 1, field: value})
    with pytest.raises(UserError) as caught:
        config.settle(box)
    assert str(caught.value).startswith(message)


@config.documented
@dataclass(frozen=True, kw_only=True)
class Ring(Circle):
    """A circle with a hole.

    Of any size.
    """

    hole: float = 0.5
    """Radius of the hole,
    less than the other."""
    count: int = 1
    colour: str = "red"
    """Of the rim."""

    def area(self) -> float:
        """No field."""
        return 3 * (self.radius**2 - self.hole**2)


def test_the_docstring_has_the_texts_below_the_fields() -> None:
    assert inspect.getdoc(Ring) == (
        "A circle with a hole.\n\nOf any size.\n\nAttributes:\n"
        "    hole: Radius of the hole,\n        less than the other.\n"
        "    colour: Of the rim."
    )


def test_texts_are_read_when_someone_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_source(cls: type) -> str:
        asked.append(cls)
        raise OSError("could not get source code")

    monkeypatch.setattr(config.inspect, "getsource", no_source)

    @config.documented
    @dataclass
    class Square:
        """Four sides."""

        side: float = 1.0
        """Of one."""

    assert asked == []
    assert inspect.getdoc(Square) == "Four sides."
    assert asked == [Square]
