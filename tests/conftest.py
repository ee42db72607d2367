"""The environment of all tests: two CPU devices, strict types, and rules for skipping tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# JAX reads these once, when it is imported. Commands that a test starts inherit them. Programs are
# compiled with few optimizations, in half the time, except in tests with the fixture `optimized`.
assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could configure it"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
FLAGS = (os.environ.get("XLA_FLAGS"), "--xla_force_host_platform_device_count=2")
os.environ["XLA_FLAGS"] = " ".join(filter(None, (*FLAGS, "--xla_cpu_use_fusion_emitters=false")))

import hypothesis  # noqa: E402
import jax  # noqa: E402

from entropix_jax.model import find, loading  # noqa: E402
from tests.support.browser import Watched  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

REQUIRE_ALL = bool(os.environ.get("ENTROPIX_REQUIRE_ALL"))
SHARED_DATA = os.environ.get("ENTROPIX_SHARED_DATA", "")
TASK_DATA = os.environ.get("ENTROPIX_DATA", "")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SLOW_SECONDS = 1200  # limit of slow tests. pyproject.toml has the limit of all others
BROWSER = os.environ.get("ENTROPIX_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), "")
NO_BROWSER = f"no browser: none of {', '.join(BROWSERS)} is there, ENTROPIX_BROWSER names none"

# Property tests have no deadline. A complete run draws the same examples each time. A thorough run
# draws ENTROPIX_THOROUGH times as many, and others each time.
hypothesis.settings.register_profile(
    "entropix", deadline=None, derandomize=REQUIRE_ALL, max_examples=100
)
TIMES = int(os.environ.get("ENTROPIX_THOROUGH") or 0)
hypothesis.settings.register_profile(
    "thorough", deadline=None, derandomize=False, max_examples=100 * TIMES or 100, print_blob=True
)
hypothesis.settings.load_profile("thorough" if TIMES else "entropix")

STARTED = time.time()
MAX_DECODE_PROGRAMS = 300  # in all tests, slow ones included; the goal is 60

# Settings of the cache of compiled programs, which is kept between runs.
PROGRAMS: dict[str, str | int | float] = {
    "jax_compilation_cache_max_size": 512 * 2**20,
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}

# The marker of tests with a fixture, and the packages that a marker needs.
MARKER_OF_FIXTURE = {"torch": "parity", "transformers": "parity"}
MARKER_OF_FIXTURE |= {name: name for name in ("shared_data", "task_data", "browser")}
NEEDS = (("parity", "torch"), ("parity", "transformers"), ("browser", "playwright"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run tests that are marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs between runs, next to pytest's own cache."""
    # Background processes of a shell ignore Ctrl-C, and child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "browser: opens pages in Chromium (the `browser` extra)")
    folder = config.cache.mkdir("jax")
    # Tests do not write to the user's own cache. Files of other libraries are kept between runs,
    # but calibrations are not, since tests check that they are made.
    own = config.cache.mkdir("user")
    os.environ["XDG_CACHE_HOME"] = str(own)
    if not hasattr(config, "workerinput"):  # once, not in each process of xdist
        shutil.rmtree(own / "entropix_jax", ignore_errors=True)
        # JAX writes the time of use last. If it is missing, the program may be incomplete.
        for program in folder.glob("*-cache"):
            if not program.with_name(f"{program.name.removesuffix('-cache')}-atime").exists():
                program.unlink(missing_ok=True)
    PROGRAMS["jax_compilation_cache_dir"] = str(folder)
    for name, value in PROGRAMS.items():
        jax.config.update(name, value)
        # Processes of tests inherit them, too. With another size limit they would keep another
        # index, and later programs would not be cached.
        os.environ[name.upper()] = str(value)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that used more decode programs than the limit. The cache notes each use."""
    folder = Path(str(PROGRAMS["jax_compilation_cache_dir"]))
    used = sum(path.stat().st_mtime >= STARTED for path in folder.glob("jit_decode-*-atime"))
    if used > MAX_DECODE_PROGRAMS and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\n{used} decode programs, at most {MAX_DECODE_PROGRAMS}: share their shapes")


@pytest.fixture
def optimized() -> Iterator[None]:
    """Compiles programs with all optimizations, as for a user."""
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _restore_compilation_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the cache of programs, since a command of a test may have chosen a temporary one. In
    this process no traced program is kept: a test may have replaced a function of it."""
    monkeypatch.setattr("entropix_jax.host.compile_cache.traced_folder", lambda: None)
    yield
    for name, value in PROGRAMS.items():
        if getattr(jax.config, name) != value:
            jax.config.update(name, value)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by their fixtures. Deselects slow tests, and those that compile for devices,
    unless they are requested. A complete run deselects tests whose data or browser is missing."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in MARKER_OF_FIXTURE:
                item.add_marker(MARKER_OF_FIXTURE[fixture])
        if item.get_closest_marker("slow") or item.get_closest_marker("devices"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    absent = {
        "devices": "devices" not in config.getoption("markexpr"),
        "slow": not (config.getoption("all") or "slow" in config.getoption("markexpr")),
        "shared_data": REQUIRE_ALL and not SHARED_DATA,
        "task_data": REQUIRE_ALL and not TASK_DATA,
        "browser": REQUIRE_ALL and not BROWSER,
    }
    markers = [marker for marker, is_absent in absent.items() if is_absent]
    left_out = [item for item in items if any(map(item.get_closest_marker, markers))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests whose package, data or browser is missing, with a reason."""
    for marker, name in NEEDS:
        if item.get_closest_marker(marker) and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e .[{marker}]")
    if item.get_closest_marker("shared_data") and not SHARED_DATA:
        pytest.skip("ENTROPIX_SHARED_DATA does not name a folder with llama3/tokenizer.model")
    if item.get_closest_marker("task_data") and not TASK_DATA:
        pytest.skip("ENTROPIX_DATA does not name a folder of tasks' published files")
    if item.get_closest_marker("browser") and not BROWSER:
        pytest.skip(NO_BROWSER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Turns a skipped test into a failed one if ENTROPIX_REQUIRE_ALL is set."""
    report = yield
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        where = report.longrepr
        reason = f"{where[0]}:{where[1]}: {where[2]}" if isinstance(where, tuple) else str(where)
        report.outcome = "failed"
        report.longrepr = f"ENTROPIX_REQUIRE_ALL is set, and {reason}"
    return report


pytest_make_collect_report = pytest_runtest_makereport  # for a module that skips itself


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    return importlib.import_module("torch")


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    return importlib.import_module("transformers")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return Path(SHARED_DATA)


@pytest.fixture(scope="session")
def task_data() -> Path:
    return Path(TASK_DATA)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by playwright. A test with this fixture is a browser test.

    There is one per module, since an event loop runs in this thread meanwhile.
    """
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        options = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
        options += " disable-component-update disable-sync"
        arguments = [f"--{option}" for option in options.split()]
        chromium = driver.chromium.launch(executable_path=BROWSER, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def watched(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Opens pages in windows of a size and colour scheme, and checks that they log no message."""
    opened: list[Watched] = []

    def watch(width: int = 1440, height: int = 900, scheme: str = "light") -> Watched:
        viewport = {"width": width, "height": height}
        opened.append(Watched(browser, viewport=viewport, color_scheme=scheme))
        return opened[-1]

    yield watch
    for one in opened:
        assert one.messages == []
        one.context.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder of random weights."""
    from tests.support.model_folders import write_model

    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], folder: str) -> Callable[..., Any]:
    """Returns a function that runs `generate` in this process, by default with the test's model."""
    from entropix_jax.__main__ import main
    from tests.support.commands import Result

    def run(*arguments: object, model: str | None = None) -> Any:
        capsys.readouterr()
        status = main(["generate", *map(str, arguments), "--model", model or folder])
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of a terminal, so that each test can set its own."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="session")
def _tiny_is_the_default() -> Iterator[None]:
    """Makes `tiny` the default model, even if another model is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "default_model", lambda: find.TINY)
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Frees the compiled programs of a module.

    They need some thousands of memory maps per module, and Linux limits a process to 65,530.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def model(folder: str) -> loading.LanguageModel:
    return loading.load(folder)


@pytest.fixture(scope="session")
def tiny() -> loading.LanguageModel:
    return loading.load("tiny")
