"""The house rules that a reader relies on: a folder is a concept, imports go one way, a name means one thing."""

import ast
import collections
import re
from pathlib import Path

import import_graph
import pytest
import titan_testing

# Ratchets: what a reader must open, and how deep. These numbers may only fall.
STEP_MODULES = 58  # of titan-train, that importing its training step executes
LONGEST_CHAIN = 20  # imports of titan-train, each of the next
SMALLEST = 40  # lines of a module that is worth a file of its own
SMALLER = {  # each stands alone for a reason, or waits to be folded in
    "titan_cp.methods.compiling",
    "titan_cp.models.flex",
    "titan_mesh.nearest",
    "titan_train.launch.node.preload",
}

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


def test_the_training_step_imports_few_modules():
    (train,) = (package for package in import_graph.packages() if package.name == "titan_train")
    loaded = import_graph.import_closure(train, "titan_train.train.step")
    assert len(loaded) <= STEP_MODULES, sorted(loaded)


def test_no_chain_of_imports_grows_longer():
    (train,) = (package for package in import_graph.packages() if package.name == "titan_train")
    chain = import_graph.longest_chain(import_graph.import_graph(train))
    assert len(chain) <= LONGEST_CHAIN, " > ".join(chain)


def test_no_module_is_a_shred():
    small: set[str] = set()
    for package in import_graph.packages():
        for name, file in import_graph.modules(package).items():
            exempt = file.name in ("__init__.py", "__main__.py", "tp.py")
            if not exempt and len(file.read_text(encoding="utf-8").splitlines()) < SMALLEST:
                small.add(name)
    assert small - SMALLER == set(), f"fold them into what uses them, or let them hold a concept of {SMALLEST} lines"
    assert SMALLER - small == set(), "these are gone or grown: take them off the list"


def test_the_road_of_one_step_is_at_most_twenty_two_files_and_every_file_on_the_map_exists():
    page = (import_graph.ROOT / "docs/concepts/architecture.md").read_text(encoding="utf-8")
    packages = (
        import_graph.ROOT / f"packages/{name}/src/{name.replace('-', '_')}" for name in ("titan-train", "titan-ckpt")
    )
    rooms = [import_graph.ROOT, *packages]
    files = re.findall(r"`([\w/-]+\.py)`", page)
    assert [file for file in files if not any((room / file).is_file() for room in rooms)] == []
    step = page.partition("## The road of one step")[2].partition("## The road of one shard")[0]
    assert 20 <= len(re.findall(r"^\|.*\.py` \|", step, flags=re.M)) <= 22
