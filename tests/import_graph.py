"""The import graph of every package, read from its source without importing it.

    python tests/import_graph.py    # one line per package: modules, edges, largest folder, longest chain, circles

An edge goes from a module to each module of the same package that it imports, at the top, in a function or for types.
`from titan_x.a import b` counts as `titan_x.a.b` where that is a module, else as `titan_x.a`; where the `__init__` of
`titan_x.a` names `b` under `if TYPE_CHECKING:`, to import it on first use, it counts as the module that `b` comes from.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
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
    homes = first_uses(named)
    found: dict[str, frozenset[str]] = {}
    for name, file in named.items():
        nodes = _nodes(ast.parse(file.read_text(encoding="utf-8")), types=file.name != "__init__.py")
        found[name] = frozenset(_imports(nodes, named, homes)) - {name}
    return found


def import_closure(package: Path, module: str) -> set[str]:
    """The modules of a package that importing one of them executes, without what its functions import when they run."""
    named = modules(package)
    homes = first_uses(named)
    loaded: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in named and name not in loaded:
            loaded.add(name)
            nodes = _nodes(ast.parse(named[name].read_text(encoding="utf-8")), types=False, functions=False)
            todo += [name.rpartition(".")[0], *_imports(nodes, named, homes)]
    return loaded


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


def _nodes(tree: ast.AST, *, types: bool, functions: bool = True) -> Iterator[ast.AST]:
    """All below ``tree``; what is under ``if TYPE_CHECKING:`` and in functions only where that is asked for."""
    for node in ast.iter_child_nodes(tree):
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _nodes(node, types=types, functions=functions)


def first_uses(named: Mapping[str, Path]) -> Mapping[str, str]:
    """`titan_x.a.b` to the module it comes from, for each name that an `__init__` imports on first use."""
    found: dict[str, str] = {}
    for name, file in named.items():
        if file.name == "__init__.py":
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for block in (node for node in tree.body if isinstance(node, ast.If)):
                for node in block.body:
                    if isinstance(node, ast.ImportFrom) and node.module:
                        found |= {f"{name}.{alias.name}": node.module for alias in node.names}
    return found


def _imports(nodes: Iterable[ast.AST], named: Mapping[str, Path], homes: Mapping[str, str]) -> Iterator[str]:
    for node in nodes:
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            targets = [_home(node.module, alias.name, named, homes) for alias in node.names]
        yield from (target for target in targets if target in named)


def _home(module: str, name: str, named: Mapping[str, Path], homes: Mapping[str, str]) -> str:
    """The module that `from module import name` takes the name from."""
    inner = f"{module}.{name}"
    if inner in named:
        return inner
    return _home(homes[inner], name, named, homes) if inner in homes else module


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
