"""The house rules that a reader relies on: a folder is a concept, imports go one way, a name means one thing."""

import ast
import collections
from pathlib import Path

import import_graph
import pytest
import titan_testing

by_package = pytest.mark.parametrize("package", import_graph.packages(), ids=lambda p: p.name)


@by_package
def test_no_module_imports_itself_through_others(package):
    assert import_graph.circles(import_graph.import_graph(package)) == []


@by_package
def test_no_concept_folder_imports_itself_through_others(package):
    assert import_graph.circles(import_graph.folder_graph(package)) == []


@by_package
def test_no_folder_holds_more_than_twenty_five_modules(package):
    assert {folder: size for folder, size in import_graph.folder_sizes(package).items() if size > 25} == {}


def test_no_file_name_begins_with_an_underscore():
    helpers = Path(titan_testing.__file__).parent
    for package in (*import_graph.packages(), helpers):
        private = [f.name for f in package.rglob("_*.py") if f.name not in ("__init__.py", "__main__.py")]
        assert private == [], package


@by_package
def test_the_docstring_of_every_folder_is_its_map(package):
    for init in package.rglob("__init__.py"):
        doc = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        assert len(doc) > 40, f"{init.relative_to(package.parent)} says nothing about what the folder holds"


def test_a_public_class_name_means_one_thing_in_the_whole_repository():
    homes = collections.defaultdict(list)
    for package in import_graph.packages():
        for name, file in import_graph.modules(package).items():
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_a_name_that_a_package_imports_on_first_use_is_not_a_module_of_it_too():
    """Importing the module would put it in the place of the name."""
    for package in import_graph.packages():
        named = import_graph.modules(package)
        assert [name for name in import_graph.first_uses(named) if name in named] == []
