"""GPU tests: all of them are skipped, with the reason, where there is no GPU that kernels can be built for.

Several workers may share a card. Where there are several cards, workers begin with one after the other, and see the
others behind it; those of the last card wait until the file that ATTNGEN_TEST_ALONE names is there, if it is set: tests
that need a card for themselves have ended. A test after which the CUDA context is lost ends its
worker, and counts as failed; pytest-xdist starts another worker for the rest.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.events import NEARLY

#: Words in the names of tests that take long, the longest first: each worker begins with some.
LONG = (
    "test_parallel", "nothing_is_read", "barriers_are_right", "no_races_in_shared", "sanitizer", "example_runs",
    "test_package", "test_flash_grids", "generated_specs", "within_their_memory", "test_model_spec",
    "static_cache", "thousand", "test_models_first_call", "a_server_gives", "beyond_its_memory", "races_under_load",
    "every_divisor", "test_first_call",
)  # fmt: skip

#: Parts of the kernels compiled ahead, by a word in the names of the tests that call them; the first that fits counts.
#: Such tests wait for these parts alone, all others for nearly all kernels.
PARTS: dict[str, tuple[str, ...]] = {
    "example_runs[ship": (), "example_runs[train": (), "example_runs[port": (), "example_runs[add": (),
    "example_runs[route_sdpa": ("packages.sdpa",), "example_runs[transformers": ("packages.transformers",),
    "example_runs[use_flash_attn": ("packages.flash_attn",),
    "example_runs[serve_llama": ("packages.flash_attn_kvcache",),
    "test_a_server_gives": ("packages.flash_attn_kvcache", "packages.transformers"),
    "static_cache": ("packages.transformers",),
    "test_package.py": (), "test_model_spec.py": (), "test_models_first_call.py": (), "test_first_call.py": (),
    "test_flash_grids.py": (), "test_flash_attn_4.py": (), "test_trees.py": (),
    "test_memory.py": ("family",), "test_accuracy.py": ("family",), "test_hidden.py": ("family",),
    "test_stress.py": ("family",), "test_decode.py": ("test_decode",), "test_decode_stress.py": ("test_decode",),
    "test_cards.py": ("test_cards",), "test_divisions.py": ("test_divisions",),
    "test_generated.py": ("test_generated",), "test_parallel.py": ("test_parallel",),
    "test_listed.py": ("test_listed",), "test_random_masks.py": ("test_random_masks",),
    "test_backward.py": ("test_backward",), "test_backward_stress.py": ("test_backward",),
}  # fmt: skip

#: Share of the card's memory that a worker's allocator may keep between tests: many workers share the card.
_KEPT_BYTES = 3 * 2**29


def _first_card() -> None:
    """Give this worker a card of its own turn as the first: before CUDA is initialized, which reads the order once."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw").removeprefix("gw")
    cards = torch.cuda.device_count() if worker and "CUDA_VISIBLE_DEVICES" not in os.environ else 1
    if cards <= 1:
        return
    first = int(worker) % cards
    order = (first, *(card for card in range(cards) if card != first))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))
    if first != cards - 1:
        os.environ.pop("ATTNGEN_TEST_ALONE", None)  # of the last card alone


_first_card()


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU"
    from attngen.arch import arch_of

    major, minor = torch.cuda.get_device_capability()
    return None if arch_of(10 * major + minor) else f"no kernels can be built for sm{major}{minor}"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests before those that ``-m`` does not name are left out. Those of kernels that a run does not compile are
    ``exhaustive``."""
    item.add_marker(pytest.mark.gpu)
    rarely = getattr(item.module, "LEFT_OUT", frozenset())  # type: ignore[attr-defined]
    given = getattr(item, "callspec", None)
    if given is None:
        return
    if "only" in given.params and isinstance(given.params["only"], str):
        from tests.gpu.packages import near_duplicate

        if near_duplicate(given.params):
            item.add_marker(pytest.mark.exhaustive)
    if any(isinstance(value, str) and value in rarely for value in given.params.values()):
        item.add_marker(pytest.mark.exhaustive)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu" in item.path.as_posix()]
    reason = _reason() if here else None
    for item in here if reason is not None else ():
        item.add_marker(pytest.mark.skip(reason=reason))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = in_order(items, workers)


def in_order(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return tests so that each worker's share begins with its part of the long ones.

    ``--dist worksteal`` gives each worker a run of tests of the same length. Those of one kernel follow each other, so
    that few workers load it. Tests that wait for few kernels come before those that wait for nearly all.
    """
    long = sorted((item for item in items if _length(item) < len(LONG)), key=_length)
    chosen = set(map(id, long))
    short = sorted((item for item in items if id(item) not in chosen), key=_place)
    long_early, long_late = _by_wait(long)
    early, late = _by_wait(short)
    long = [*long_early, *long_late]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        own_early, own_late = _by_wait(long[worker::workers])
        # as xdist divides: what is left, evenly among the workers that are left
        share = (len(items) - len(ordered)) // (workers - worker)
        room = max(share - len(own_early) - len(own_late), 0)
        first = min(len(early) // (workers - worker), room)
        taken = room - first
        ordered += own_early + early[:first] + own_late + late[:taken]
        del early[:first], late[:taken]
    return ordered + early + late


def _by_wait(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests that wait for few kernels, and those that wait for nearly all."""
    early = [item for item in items if NEARLY not in parts_of(item)]
    return early, [item for item in items if NEARLY in parts_of(item)]


def _length(item: pytest.Item) -> int:
    """Place of a test among the long ones, or behind these."""
    return next((place for place, word in enumerate(LONG) if word in item.nodeid), len(LONG))


def parts_of(item: pytest.Item) -> tuple[str, ...]:
    """Parts of the kernels compiled ahead that a test waits for."""
    return next((parts for word, parts in PARTS.items() if word in item.nodeid), (NEARLY,))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the card, and for the kernels that a test calls, before its time counts."""
    alone_ended = os.environ.get("ATTNGEN_TEST_ALONE")
    while alone_ended is not None and not Path(alone_ended).exists():
        time.sleep(0.2)
    folder = os.environ.get("ATTNGEN_TEST_READY")
    if folder is not None:
        wait_for(Path(folder), parts_of(item))
    return (yield)


def wait_for(folder: Path, parts: Iterable[str]) -> None:
    """Wait until a folder names all parts as compiled, or nearly all kernels."""
    wanted = [folder / part for part in parts]
    while not (all(file.exists() for file in wanted) or (folder / NEARLY).exists()):
        time.sleep(0.2)


def _place(item: pytest.Item) -> tuple[str, str]:
    given = getattr(item, "callspec", None)
    name = given.params.get("name", "") if given is not None else ""
    return item.path.name, name if isinstance(name, str) else ""


@pytest.fixture(autouse=True)
def _clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Finish what a test started: an error of its kernels is its own, and nothing can run after one that loses all."""
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        lost = f"{request.node.nodeid} lost the CUDA context: {error}"
        if not hasattr(request.config, "workerinput"):
            pytest.exit(lost, returncode=1)
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(lost, file=sys.__stderr__, flush=True)
        os._exit(1)
    if torch.cuda.memory_reserved() > _KEPT_BYTES:
        gc.collect()  # tensors in reference cycles: Python counts objects, not the memory of the card that they hold
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="module")
def _nothing_known() -> None:
    """A module begins with no package, whatever other modules made known in this process.

    Programs that torch has compiled name the packages that were known then.
    """
    from attngen.runtime.registry.lookup import registry

    registry.clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _known(request: pytest.FixtureRequest, _nothing_known: None) -> None:
    """Packages that a module makes known stay known from one of its tests to the next."""
    for value in list(vars(request.module).values()):
        again = getattr(value, "known_again", None)
        if again is not None:
            again()


@pytest.fixture(autouse=True)
def _workers(fresh_workers: None) -> None:
    """Jobs run in processes of their own, as they do for users."""


@pytest.fixture
def only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Make the kernels of one shipped spec known, and no others."""
    from tests.gpu.family import only_known
    from tests.gpu.packages import package

    chosen = package(request.param)
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path))  # the user's builds are not seen
    with only_known(chosen):
        yield chosen
