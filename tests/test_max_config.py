"""`max.config`: dataclasses that YAML files and command lines set."""

from __future__ import annotations

import enum
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from max.config import (
    MAXConfig,
    convert_max_config_value,
    deep_merge_max_configs,
    get_default_max_config_file_section_name,
)


class Kind(enum.Enum):
    A = "a"
    B = "b"


@dataclass
class Own(MAXConfig):
    n: int = 128
    s: str = "x"
    f: float = 1.0
    b: bool = False
    e: Kind = Kind.A
    numbers: list[int] = field(default_factory=list)
    o: int | None = None
    _config_file_section_name = "own"

    @staticmethod
    def help() -> dict[str, str]:
        return {"n": "a number"}


def drawn(draw: random.Random) -> dict[str, Any]:
    values = {
        "n": draw.randrange(99), "s": draw.choice(["", "a b", "3"]), "f": draw.random(), "b": draw.random() < 0.5,
        "e": draw.choice(list(Kind)), "numbers": [draw.randrange(9) for _ in range(draw.randint(1, 3))],
        "o": draw.randrange(9),
    }  # fmt: skip
    return {k: values[k] for k in draw.sample(sorted(values), draw.randint(1, 7))}


@pytest.mark.parametrize("seed", range(8))
def test_files_and_options(seed: int, tmp_path: Path) -> None:
    """What was written is read: alone, as a section, through a base file, and from a command line."""
    draw = random.Random(seed)
    values, inherited = drawn(draw), drawn(draw)
    plain = {k: v.value if isinstance(v, Kind) else v for k, v in values.items()}
    base = {k: v.name if isinstance(v, Kind) else v for k, v in inherited.items()}
    expected = Own(**values)
    path, other = tmp_path / "own.yaml", tmp_path / "base.yaml"
    for content in (plain, {"own": plain, "more": {"n": 1}}):
        path.write_text(yaml.safe_dump(content))
        assert Own.from_config_file(path) == expected
    path.write_text(yaml.safe_dump({"named": plain}))
    assert Own.from_config_file(str(path), "named") == expected
    other.write_text(yaml.safe_dump(base))
    path.write_text(yaml.safe_dump({"depends_on": "base.yaml", **plain}))
    assert Own.from_config_file(path) == Own(**{**inherited, **values})
    options: list[str] = []
    for name, value in plain.items():
        if name == "b":
            options.append("--b" if value else "--no-b")
        else:
            options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    assert vars(Own().cli_arg_parsers().parse_args(options)) == asdict(expected)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("n: abc", ValueError, "Own.n is 'abc', expected int"),
        ("n: 2.5", ValueError, "Own.n is 2.5"),
        ("n: [1]", ValueError, "Own.n is"),
        ("e: zz", ValueError, r"expected Kind: \['a', 'b'\]"),
        ("b: 3", ValueError, "Own.b is 3"),
        ("numbers: [1, q]", ValueError, "Own.numbers is 'q'"),
        ("own: 3", ValueError, "expected a mapping of fields"),
        ("owm: {n: 3}", ValueError, "no section 'own'; did you mean 'owm'"),
        ("", ValueError, "expected a mapping"),
        ("- 1", ValueError, "expected a mapping"),
        ("n: [1", ValueError, "cannot be read as YAML"),
        ("!!python/object/apply:os.getcwd []", ValueError, "cannot be read as YAML"),
        ("depends_on: none.yaml\nn: 1", FileNotFoundError, "none.yaml does not exist"),
        ("depends_on: own.yaml\nn: 1", ValueError, "depends on itself"),
        ("depends_on: 3\nn: 1", ValueError, "expected the path"),
    ],
)
def test_mistakes_of_files(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(error, match=message):
        Own.from_config_file(path)


def test_unknown_fields_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("own: {n: 1, nubmers: [2]}")
    assert Own.from_config_file(path) == Own(n=1)
    assert "no field 'nubmers'; did you mean 'numbers'" in caplog.text


def test_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Own(n=5).cli_arg_parsers({"s": ["x", "y"]}, required_params={"f"})
    assert parser.parse_args(["--f", "2"]).n == 5
    for options in (
        ["--f", "2", "--s", "z"],
        [],
        ["--f", "2", "--n", "q"],
        ["--f", "2", "--e", "q"],
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(options)
    assert "a number" in parser.format_help()
    capsys.readouterr()


def test_functions() -> None:
    assert deep_merge_max_configs({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 3}, "e": 4}) == {
        "a": {"b": 3, "c": 2},
        "d": 1,
        "e": 4,
    }
    assert get_default_max_config_file_section_name(Own) == "own"
    with pytest.raises(ValueError, match="_config_file_section_name"):
        get_default_max_config_file_section_name(MAXConfig)
    assert convert_max_config_value(Own, "yes", bool, "b") is True
    assert convert_max_config_value(Own, None, int | None, "o") is None
