"""The house itself: its roots, what may load what, and how large it may grow."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import grimp
import pytest

from support.every import every
from support.house import AFTERNOON_FILES, ENGINE, ENGINE_FILES, code_lines

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = (ROOT, ROOT / "trace", ROOT / "cli")
HOUSE_FILES = sorted(
    file
    for folder in (ENGINE, ROOT / "trace", ROOT / "cli")
    for file in folder.rglob("*.py")
    if "assets" not in file.parts
)
MAX_AFTERNOON_LINES = 2_000
MAX_ENGINE_LINES = 6_350  # of 5,600 that are aimed at
MAX_FILE_LINES = 300
CATALOGUES = {"events.py", "recorder.py"}  # flat lists, one entry an event: looked up, not read


def modules_loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh Python has loaded after `statement`."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return {*done.stdout.split()}


# -- the tests themselves --------------------------------------------------------------------------


def test_one_test_over_many_names_reports_all_that_fail() -> None:
    def is_even(number: int) -> None:
        assert number % 2 == 0

    every("number", [2, 4])(is_even)()
    with pytest.raises(ExceptionGroup, match="2 of 3 fail") as found:
        every("number", [1, 2, 3])(is_even)()
    assert [failure.__notes__ for failure in found.value.exceptions] == [
        ["with {'number': 1}"],
        ["with {'number': 3}"],
    ]
    with pytest.raises(AssertionError, match="nothing to try"):
        every("number", [])(is_even)()


# -- roots -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["trace", "cli", "tests", "tests/support"])
def test_a_source_root_is_no_package(root: str) -> None:
    assert (ROOT / root).is_dir()
    assert not (ROOT / root / "__init__.py").exists()


def test_import_trace_is_the_standard_librarys() -> None:
    code = "import trace; print(trace.__file__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).parent == Path(sysconfig.get_path("stdlib"))


# -- what loads what -------------------------------------------------------------------------------


def test_reading_a_trace_loads_no_engine_and_no_torch() -> None:
    loaded = modules_loaded_by("import nvtrace.reader, nvtrace.replay; from nvtrace import State")
    assert "nvtrace" in loaded
    assert not loaded & {
        "torch",
        "transformers",
        "pandas",
        "numpy",
        "nanovllm",
        "structlog",
        "rich",
    }


def test_importing_the_engines_package_loads_no_torch() -> None:
    loaded = modules_loaded_by("import nanovllm; nanovllm.SamplingParams(), nanovllm.Observer()")
    assert "nanovllm" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "msgspec", "structlog", "nvtrace"}


def test_the_pure_core_loads_no_torch() -> None:
    core = ("sequence", "batch", "block_manager", "scheduler", "model_inputs")
    loaded = modules_loaded_by(
        "import nanovllm.observer, " + ", ".join(f"nanovllm.engine.{name}" for name in core)
    )
    assert not loaded & {"torch", "transformers", "numpy", "msgspec", "structlog", "nvtrace"}


@pytest.mark.parametrize("package", ["nanovllm", "nvtrace", "nvtrace_cli"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    """Imports inside of functions count; those for type checkers only do not."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    assert graph.modules
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            chain = graph.find_shortest_chain(importer=imported, imported=module)
            assert chain is None, f"{module} -> {' -> '.join(chain)}"


# -- size ------------------------------------------------------------------------------------------


def test_code_lines_counts_code_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        '"""Doc.\n\nMore.\n"""\n\n# why\nx = (\n    1  # one\n)\n\n\ndef f():\n    """D."""\n'
    )
    assert code_lines(file) == 4


def test_the_engine_can_be_read_in_an_afternoon() -> None:
    """What is in none of the rooms: the public face, engine/, layers/, models/."""
    sizes = {str(file.relative_to(ENGINE)): code_lines(file) for file in AFTERNOON_FILES}
    assert len(sizes) > 20
    assert sum(sizes.values()) <= MAX_AFTERNOON_LINES, sizes
    assert sum(map(code_lines, ENGINE_FILES)) <= MAX_ENGINE_LINES


@every("file", HOUSE_FILES)
def test_a_file_fits_the_mind(file: Path) -> None:
    assert code_lines(file) <= MAX_FILE_LINES or file.name in CATALOGUES


@every("file", HOUSE_FILES)
def test_a_module_says_what_it_knows(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if tree.body:
        assert ast.get_docstring(tree)


def test_no_two_public_classes_of_nvtrace_share_a_name() -> None:
    classes = Counter(
        node.name
        for file in (ROOT / "trace").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in classes.items() if count > 1]


# -- what an engine must not do --------------------------------------------------------------------


@every("file", ENGINE_FILES)
def test_the_engine_neither_prints_nor_logs_nor_looks_at_the_clock(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print")):
                pytest.fail(f"line {node.lineno} prints")
            case ast.Import(names=names):
                modules = {name.name for name in names}
                assert not modules & {"logging", "time", "datetime"}, f"line {node.lineno}"
            case ast.ImportFrom(module="datetime", names=[ast.alias(name="timedelta")]):
                pass  # a length of time, which torch's time limits are given in
            case ast.ImportFrom(module=module):
                assert module not in ("logging", "time", "datetime"), f"line {node.lineno}"
            case _:
                pass


@every("file", ENGINE_FILES)
def test_the_engine_never_reads_an_answer_of_its_observer(file: Path) -> None:
    """Each hook is called as a statement, with names (or attributes) that are in scope.

    The one that is a question, `for_workers`, is asked where processes are started.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_hook(node.func):
            assert id(node) in statements, f"line {node.lineno} uses what an observer answered"
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                computed = (ast.Call, ast.JoinedStr, ast.ListComp, ast.DictComp, ast.GeneratorExp)
                assert not isinstance(argument, computed), f"line {node.lineno} computes for it"


def is_hook(function: ast.expr) -> bool:
    """Is this `observer.something` or `self.observer.something`?"""
    match function:
        case ast.Attribute(attr="for_workers"):
            return False
        case ast.Attribute(value=ast.Name(id="observer") | ast.Attribute(attr="observer")):
            return True
        case _:
            return False


# -- what belongs to the caller --------------------------------------------------------------------

WORLD = '''
import gc, json, locale, logging, multiprocessing, os, random, signal, sys, tempfile, threading
import warnings
import numpy, torch


def world():
    root = logging.getLogger()
    return {
        "random": random.getstate(),
        "numpy": repr(numpy.random.get_state()[1].tolist()) + repr(numpy.random.get_state()[2:]),
        "numpy's errors": numpy.geterr(),
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
        "torch's settings": (
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        ),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "environment": dict(os.environ),
        "logging": (
            root.level, list(root.handlers), list(root.filters), root.manager.disable,
            logging.getLoggerClass(), logging.getLogRecordFactory(), warnings.showwarning,
        ),
        "the caller's warnings filters": [each for each in warnings.filters if each in FILTERS],
        "folder": os.getcwd(),
        "path": list(sys.path),
        "hooks": (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "limits": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "garbage": (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count(), gc.callbacks),
        "umask": [os.umask(before := os.umask(0)), before][1],
        "processes": multiprocessing.get_start_method(allow_none=True),
        "threads": threading.active_count(),
    }


class Meddler:
    """Each module that is imported while this is on changes the world, as some do."""

    is_on = False

    def find_spec(self, name, path=None, target=None):
        if self.is_on:
            random.random(), numpy.random.random()
            os.environ["MEDDLED"] = name
            meddled.append(name)


meddled, changed = [], {}
meddler = Meddler()
sys.meta_path.insert(0, meddler)
logging.basicConfig(level=logging.ERROR)
warnings.simplefilter("error", FutureWarning)
FILTERS = list(warnings.filters)
random.seed(1), numpy.random.seed(2), torch.manual_seed(3)


def stage(name, function, *, meddles=False):
    before = world()
    meddler.is_on = meddles
    result = function()
    meddler.is_on = False
    after = world()
    changed.update({f"{name}: {key}": 1 for key in after if after[key] != before[key]})
    return result


class Terminal:
    encoding, closed, text = "utf-8", False, ""
    isatty, flush, fileno = lambda self: True, lambda self: None, lambda self: 2
    def write(self, text): self.text += text


def on_a_terminal():
    kept, sys.stderr = sys.stderr, Terminal()
    llm.generate([[5, 6]], params)
    text, sys.stderr = sys.stderr.text, kept
    return text


stage("import nanovllm", lambda: __import__("nanovllm"))
import nanovllm
LLM = stage("nanovllm.LLM", lambda: nanovllm.LLM, meddles=True)
record = stage("nvtrace.record", lambda: __import__("nvtrace").record)
from nanovllm.assets import TINY_QWEN3
params = nanovllm.SamplingParams(max_tokens=4)
llm = stage("LLM()", lambda: LLM(TINY_QWEN3, num_kvcache_blocks=4), meddles=True)
num_meddled = len(meddled)
stage("generate", lambda: llm.generate(["hello", [5, 6]], params), meddles=True)
stage("stream", lambda: [*llm.stream(["hello"], params)], meddles=True)
text = stage("generate on a terminal", on_a_terminal)

def run_recorded():
    with record(tempfile.mkdtemp() + "/trace.jsonl") as observer:
        LLM(TINY_QWEN3, observer, num_kvcache_blocks=4).generate(["hello"], params)

stage("a recorded run", run_recorded)
print(json.dumps({"changed": changed, "num_meddled": num_meddled, "text": text}))
'''


def test_the_callers_world_stays_as_it_was() -> None:
    """Whatever the modules do that are imported on the way: they draw, and set variables."""
    done = subprocess.run(
        [sys.executable, "-c", WORLD],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_meddled"] > 100, "transformers is imported on the way"
    assert told["changed"] == {}
    assert "Requests: 100%" in told["text"], "the bar was there"
