"""Config files that are no YAML: where, and what to do."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pfl_lightning.cli.options.config_files import check_config_files
from pfl_lightning.errors import UsageError

CONTROL = st.sampled_from([chr(code) for code in (*range(0, 9), 11, 12, *range(14, 32), 127)])


@given(before=st.text("aé😀 \n", max_size=30), control=CONTROL, quoted=st.booleans())
def test_a_control_character_is_named_with_its_place(tmp_path_factory, before, control, quoted):
    path = tmp_path_factory.mktemp("configs") / "config.yaml"
    comment = "".join(f"# {line}\n" for line in before.split("\n"))
    value = f'"x{control}y"' if quoted else f"x{control}y"
    path.write_text(f"{comment}seed_everything: {value}\n", encoding="utf-8", newline="")
    line = before.count("\n") + 2
    column = len("seed_everything: x") + quoted + 1
    with pytest.raises(UsageError) as refused:
        check_config_files(["fit", "--config", str(path)])
    said = str(refused.value)
    assert f"line {line}, column {column} has the control character {control!r}" in said
    assert yaml.safe_load(said[said.index('"\\u') : said.index(" in double quotes")]) == control  # as it is advised


def test_what_yaml_takes_is_not_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: 'é\t😀'\n", encoding="utf-8")
    check_config_files(["fit", f"--config={path}"])
