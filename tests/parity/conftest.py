"""The pool of ranks, the models, and the runs on one device, each made when first needed and kept for the session."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # test modules and ranks import `suite`

from suite import families
from suite.cases import Case
from suite.pool import Pool
from suite.training import Outcome, train


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Eight ranks."""
    made = Pool(tmp_path_factory.mktemp("pool") / "log.txt")
    yield made
    made.close()


@pytest.fixture(scope="session")
def run_job(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Return `run_job(function, case, ...)`: what `function(case, folder of the model, ...)` returns on each rank."""
    root = tmp_path_factory.mktemp("models")

    def on_ranks(function: Callable[..., Any], case: Case, *arguments: Any) -> list[Any]:
        folder = root / f"{case.family}-{case.layers}"
        if not folder.exists():
            families.build(case.family, case.layers, folder)
        return pool.run(function, case, str(folder), *arguments, ranks=case.ranks)

    return on_ranks


@pytest.fixture(scope="session")
def run(run_job: Callable[..., list[Any]]) -> Callable[[Case], list[Outcome]]:
    """Return `run(case)`: what each rank hands in."""
    return lambda case: run_job(train, case)


@pytest.fixture(scope="session")
def one_device(run: Callable[[Case], list[Outcome]]) -> Callable[[Case], Outcome]:
    """Return `one_device(case)`: the same run on one device, as it should be."""
    @cache
    def alone(case: Case) -> Outcome:
        return run(case)[0]

    return lambda case: alone(case.alone)
