"""The table of docs/drop_in_projects.md has a row for every project, and says of each what its test expects."""

from pathlib import Path

from _helpers.foreign import PROJECTS

PAGE = Path(__file__).parents[2] / "docs" / "drop_in_projects.md"


def test_the_table_is_that_of_the_tests():
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    table = {(row[1].split()[0], row[2].strip(" `")): row for row in rows if len(row) == 6 and "`" in row[2]}
    assert table.keys() == {(project.package, project.module) for project in PROJECTS}
    for project in PROJECTS:
        _, _, _, _, result, exactness = table[project.package, project.module]
        assert ("fails" in result) == bool(project.fails), project.id
        assert (exactness.strip() == "yes") == (not project.fails and not project.differs), project.id
        assert project.fails or ("FedPer" in result) == bool(project.head), project.id
