"""The rules of the house: who may import whom, what loads without jax, how long things may be."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Rooms from top to bottom. A room may import those on lower lines; rooms on one line do not know
#: each other. A room is a package or module directly under jserve/, or a whole package beside it.
LAYERS = (
    ("__main__",),
    ("server", "bench"),
    ("lang",),
    ("engine",),
    ("scheduler", "runner", "tokenizer"),
    ("grammar", "sampling"),
    ("models",),
    ("layers",),
    ("weights", "cache"),
    ("batch",),
    ("plan",),
    ("config", "metrics", "parsers"),
    ("types", "processes"),
    ("errors",),
    ("pallas_kernels", "sharding"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

#: Third-party packages of the two packages that stand alone.
STANDALONE = {
    "pallas_kernels": {"jax", "numpy", "jax_triton", "triton"},
    "sharding": {"jax", "numpy"},
}

#: What must load without jax, also transitively. Packages stand for all their modules.
HOST_ONLY = (
    *("jserve.__main__", "jserve.config", "jserve.types", "jserve.plan", "jserve.errors"),
    *("jserve.metrics", "jserve.scheduler", "jserve.cache.manager", "jserve.cache.radix"),
    *("jserve.cache.pages", "jserve.processes", "jserve.grammar", "jserve.tokenizer"),
    *("jserve.server", "jserve.lang", "jserve.parsers", "jserve.engine.engine"),
    *("jserve.engine.ipc",),
)

#: Exempt from that, each file by name: the only importer of xgrammar, which imports torch.
HEAVY = {"jserve.grammar.xgrammar_backend"}

#: And the kernels of an extra, imported only where they are chosen.
LAZY_EXTRAS = {"pallas_kernels.attention.jax_triton", "pallas_kernels.attention.triton_kernels"}

#: Imports inside functions: where a command, the Python API or a grammar backend is chosen, and
#: where triton, which is an extra, is needed.
LAZY = {
    *("jserve", "jserve.__main__", "jserve.grammar.choice"),
    "pallas_kernels.attention.jax_triton",
}


@dataclasses.dataclass(frozen=True)
class Import:
    importer: str
    target: str  # the module named, e.g. `jserve.cache.pages`; third-party modules too
    line: int
    nested: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the three packages by dotted name."""
    found: dict[str, Path] = {}
    for package in ("jserve", "pallas_kernels", "sharding"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(module: str) -> Iterator[Import]:
    nested = {
        id(node)
        for outer in ast.walk(tree(modules()[module]))
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree(modules()[module])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            # `from jserve.cache import pages` names a module, `from jserve.plan import Kind` not
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else str(node.module) for name in whole]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
        else:
            continue
        for name in dict.fromkeys(names):
            yield Import(module, str(name), node.lineno, id(node) in nested)


@functools.cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for module in modules() for found in imports_of(module))


def room(module: str) -> str:
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "jserve" else top


def ours(target: str) -> bool:
    return target.partition(".")[0] in ("jserve", *STANDALONE)


def test_the_walk_sees_the_imports_of_the_house() -> None:
    seen = {(found.importer, found.target) for found in all_imports()}
    assert ("jserve.types.logprobs", "jserve.errors") in seen
    assert ("jserve.config.yaml_file", "yaml") in seen
    assert ("sharding.rules", "jax") in seen


def test_every_room_has_a_place_in_the_table_and_every_place_a_room() -> None:
    assert {room(module) for module in modules()} - {""} == set(LEVEL)


def test_every_name_of_the_rules_matches_something() -> None:
    whole = {".".join(name.split(".")[:size]) for name in modules() for size in range(1, 9)}
    assert sorted({*HOST_ONLY, *HEAVY, *STANDALONE} - whole) == []
    lazy = {found.importer for found in all_imports() if found.nested and ours(found.target)}
    assert sorted(LAZY - lazy) == []
    used = {found.target.partition(".")[0] for found in all_imports()}
    assert sorted({name for names in STANDALONE.values() for name in names} - used) == []


def test_imports_go_downward_only() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if ours(found.target)
        and room(found.importer)  # the package jserve itself exports from wherever it likes
        and room(found.target)
        and room(found.importer) != room(found.target)
        and LEVEL[room(found.importer)] >= LEVEL[room(found.target)]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in all_imports():
        if found.target in graph and found.importer not in ("jserve", found.target):
            graph[found.importer].add(found.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("package", STANDALONE)
def test_kernels_and_sharding_stand_alone(package: str) -> None:
    allowed = {package, *STANDALONE[package], *sys.stdlib_module_names}
    wrong = [
        str(found)
        for found in all_imports()
        if room(found.importer) == package and found.target.partition(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_that_is_imported_is_declared_and_in_the_base_unless_imported_late() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())

    def names(requirements: Iterable[str]) -> set[str]:
        found = {re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in requirements}
        return {re.sub(r"[-_.]+", "_", name).lower() for name in found}

    base = names(project["dependencies"])
    declared = base | names(extras)
    own_names = {"yaml": "pyyaml", "zmq": "pyzmq", "orbax": "orbax_checkpoint"}
    own_names["opentelemetry"] = "opentelemetry_sdk"
    wrong = []
    for found in all_imports():
        top = found.target.partition(".")[0]
        package = own_names.get(top, top).lower()
        optional = found.nested or found.importer in HEAVY | LAZY_EXTRAS
        if ours(found.target) or top in sys.stdlib_module_names:
            continue
        if package not in (declared if optional else base):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_triton_is_imported_by_its_own_kernels_only() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.target.partition(".")[0] in ("triton", "jax_triton")
        and "triton" not in found.importer.rpartition(".")[2]
    ]
    assert not wrong, "\n".join(wrong)


def test_sharding_is_never_imported_by_its_bare_name() -> None:
    wrong = [str(found) for found in all_imports() if found.target == "sharding"]
    assert not wrong, "\n".join(wrong)


def test_our_own_modules_are_imported_inside_functions_only_where_a_choice_is_made() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.nested and ours(found.target) and found.importer not in LAZY
    ]
    assert not wrong, "\n".join(wrong)


def host_only_modules() -> list[str]:
    return [
        module
        for module in modules()
        if any(module == name or module.startswith(name + ".") for name in HOST_ONLY)
        and module not in HEAVY
    ]


def test_host_rooms_load_without_jax_torch_or_xgrammar() -> None:
    wanted = host_only_modules()
    assert "jserve.config.tree" in wanted
    script = (
        "import importlib, sys\n"
        f"for name in {wanted!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'jax', 'jaxlib', 'flax', 'torch', 'xgrammar'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {sorted(heavy)}'\n"
        "print('loaded')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "loaded\n", done.stderr[-2000:]


def test_files_are_at_most_400_lines_and_kernels_900() -> None:
    wrong = []
    for module, path in modules().items():
        limit = 900 if room(module) == "pallas_kernels" else 400
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines, {limit} are allowed")
    assert not wrong, "\n".join(wrong)


def test_functions_are_at_most_60_lines_and_kernels_150() -> None:
    wrong = []
    for module, path in modules().items():
        limit = 150 if room(module) == "pallas_kernels" else 60
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > limit:
                    wrong.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {lines} lines"
                    )
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_owns() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in modules().values()
        if tree(path).body and not ast.get_docstring(tree(path))
    ]
    assert not wrong, "\n".join(wrong)


def bare_parts(function: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> list[str]:
    """Parameters without an annotation, and "return" without one; a method's first needs none."""
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    if any("triton.jit" in mark for mark in marks):
        return []
    given = function.args
    named = [*given.posonlyargs, *given.args][1 if method and "staticmethod" not in marks else 0 :]
    rest = [one for one in (given.vararg, given.kwarg) if one is not None]
    bare = [one.arg for one in (*named, *given.kwonlyargs, *rest) if one.annotation is None]
    return [*bare, *(["return"] if function.returns is None else [])]


def bare_functions(source: ast.Module) -> Iterator[str]:
    methods = {
        id(one) for node in ast.walk(source) if isinstance(node, ast.ClassDef) for one in node.body
    }
    for node in ast.walk(source):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if bare := bare_parts(node, id(node) in methods):
            yield f"{node.lineno} {node.name}: {', '.join(bare)}"


def test_every_parameter_and_result_is_annotated() -> None:
    sample = "class A:\n    def f(self, a, *b: int, c: int = 1, **d): ...\ndef g(x) -> int: ..."
    assert list(bare_functions(ast.parse(sample))) == ["3 g: x", "2 f: a, d, return"]
    wrong = [
        f"{path.relative_to(ROOT)}:{bare}"
        for path in modules().values()
        for bare in bare_functions(tree(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_and_comments_name_files_that_there_are() -> None:
    there = {
        path.name
        for top in ("jserve", "pallas_kernels", "sharding", "tests", "scripts")
        for path in (ROOT / top).rglob("*.py")
    }
    wrong = [
        f"{path.relative_to(ROOT)} names {name}"
        for path in modules().values()
        for name in re.findall(r"\b\w+\.py\b", path.read_text(encoding="utf-8"))
        if name not in there
    ]
    assert not wrong, "\n".join(wrong)
