"""The import graph of every package, read from its source without importing it.

    python tests/import_graph.py    # one line per package: modules, edges, largest folder, longest chain, circles

An edge goes from a module to each module of the same package that it imports, at the top, in a function or for types.
`from titan_x.a import b` counts as `titan_x.a.b` where that is a module, else as `titan_x.a`.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
Graph = Mapping[str, frozenset[str]]


def packages() -> list[Path]:
    """The source folder of every published package."""
    return sorted(path.parent for path in ROOT.glob("packages/*/src/titan_*/__init__.py"))


def modules(package: Path) -> dict[str, Path]:
    """Dotted name to file, of every module of a package."""
    named: dict[str, Path] = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def import_graph(package: Path) -> Graph:
    """Every module, and the modules of the same package that it imports."""
    named = modules(package)
    return {name: frozenset(_imports(name, file, named)) for name, file in named.items()}


def folder_graph(package: Path) -> Graph:
    """The same between concepts: a folder or file directly inside the package, and those that its modules import."""
    concept = {name: ".".join(name.split(".")[:2]) for name in modules(package)}
    graph: dict[str, set[str]] = {name: set() for name in concept.values()}
    for name, targets in import_graph(package).items():
        graph[concept[name]] |= {concept[target] for target in targets} - {concept[name], package.name}
    graph.pop(package.name)  # the public face imports what it shows
    return {name: frozenset(targets) for name, targets in graph.items()}


def circles(graph: Graph) -> list[list[str]]:
    """The groups of modules that reach each other (strongly connected components of more than one module)."""
    reach = {name: _reachable(graph, name) for name in graph}
    found: list[list[str]] = []
    seen: set[str] = set()
    for name in graph:
        group = sorted(other for other in reach[name] if name in reach[other])
        if group and name not in seen:
            found.append(group)
            seen.update(group)
    return found


def longest_chain(graph: Graph) -> list[str]:
    """The longest sequence of imports; a module inside a circle counts once."""
    best: dict[str, list[str]] = {}

    def chain(name: str, above: frozenset[str]) -> list[str]:
        if name not in best:
            tails = [chain(other, above | {name}) for other in graph[name] if other not in above and other != name]
            best[name] = [name, *max(tails, key=len, default=[])]
        return best[name]

    return max((chain(name, frozenset()) for name in graph), key=len)


def folder_sizes(package: Path) -> dict[str, int]:
    """Modules per folder, `__init__` not counted."""
    sizes: dict[str, int] = {}
    for file in package.rglob("*.py"):
        folder = file.parent.relative_to(package.parent).as_posix()
        sizes[folder] = sizes.get(folder, 0) + (file.name != "__init__.py")
    return sizes


def _imports(name: str, file: Path, named: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [target if target in named else node.module for target in inner]
        yield from (target for target in targets if target in named and target != name)


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += graph[name]
    return found


def main() -> None:
    """Print the table."""
    print("package         modules edges largest folder                        longest chain  circles")
    for package in packages():
        graph = import_graph(package)
        folder, size = max(folder_sizes(package).items(), key=lambda item: item[1])
        print(
            f"{package.name:15} {len(graph):7} {sum(map(len, graph.values())):5} {size:3} {folder:32} "
            f"{len(longest_chain(graph)):12}  {(circles(graph) + circles(folder_graph(package))) or 'none'}"
        )


if __name__ == "__main__":
    main()
