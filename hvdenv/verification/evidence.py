"""What verify finds out about an environment, in the order in which it does."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from hvdenv.environments.manifest import ChangedFile
from hvdenv.sites.launchers import MpiVersion
from hvdenv.standalone.ranks.events import RendezvousFacts
from hvdenv.verification import bench, inspection, rank_start
from hvdenv.verification.bench import Benchmark
from hvdenv.verification.inspection import BuildTable, Extension, Extensions, Observed
from hvdenv.verification.rank_judgement import judge_run
from hvdenv.verification.rank_run import RankRun
from hvdenv.verification.rank_start import PAIRS, Pair
from hvdenv.verification.setup import FRAMEWORKS, HostMpi, Parts, Setup

# TensorFlow takes longest to import, so that its ranks should not be the last ones to start.
_SLOWEST_FIRST = sorted(PAIRS, key=lambda pair: pair.framework != "tensorflow")

T = TypeVar("T")


class Evidence(NamedTuple):
    """What was found out, or the error that prevented it; None for what does not apply.

    Attributes:
        libraries: what the files of extensions show.
        extensions: what their imports show, by framework.
        runs: of ranks, where these could be started.
        benchmarks: of runs that were right.
    """

    mpi: Future[HostMpi]
    libraries: Future[Extensions]
    rendezvous: Future[RendezvousFacts]
    build_table: Future[BuildTable]
    extensions: dict[str, Future[Extension]]
    runs: dict[Pair, Future[RankRun]] = {}
    image_mpi: Future[MpiVersion] | None = None
    changed_files: Future[list[ChangedFile]] | None = None
    observed: Future[Observed] | None = None
    benchmarks: dict[Pair, Future[Benchmark]] = {}

    @property
    def all_extensions(self) -> Extensions:
        """By framework.

        Raises:
            Exception: one of them could not be found out.
        """
        return {name: each.result() for name, each in self.extensions.items()}

    @property
    def started_runs(self) -> dict[Pair, RankRun]:
        """Without those that could not be started."""
        return {pair: run for pair in PAIRS if (run := found(self.runs.get(pair)))}

    @property
    def done_benchmarks(self) -> list[Benchmark]:
        return [done for each in self.benchmarks.values() if (done := found(each))]


def found(future: Future[T] | None) -> T | None:
    """What was found out; None for an error as well."""
    return None if future is None or future.exception() else future.result()


def known(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def gather(setup: Setup, parts: Parts) -> Evidence:
    """Find out everything about an environment; what fails is an error in its future."""
    built, inside = setup.installation.generation, setup.installation.inside
    mpi = parts.start("mpirun --version", inspection.host_mpi)
    libraries = parts.start("extension files", inspection.extension_files)
    rendezvous = parts.start("servers of horovodrun", inspection.rendezvous)
    image = "mpirun --version in the image"
    image_mpi = parts.start(image, inspection.image_mpi) if inside else None
    build_table = parts.start("horovodrun --check-build", inspection.build_table, libraries)
    runs = _start_runs(setup, parts, mpi, libraries)
    imports = {
        name: _start_import(parts, library)
        for name, library in (found(libraries) or {}).items()
        if not any(pair.framework == name for pair in runs)
    }
    changed_files = observed = None
    if built:
        changed_files = parts.start("files against the manifest", inspection.changed_files)
        observed = parts.start("changes since the build", inspection.observed, mpi)
    parts.wait()
    extensions = _extensions(parts, libraries, runs, imports)
    parts.wait()
    benchmarks = _benchmarks(setup, parts, mpi, runs)
    return Evidence(
        mpi=mpi,
        libraries=libraries,
        rendezvous=rendezvous,
        build_table=build_table,
        extensions=extensions,
        runs=runs,
        image_mpi=image_mpi,
        changed_files=changed_files,
        observed=observed,
        benchmarks=benchmarks,
    )


def _start_runs(
    setup: Setup, parts: Parts, mpi: Future[HostMpi], libraries: Future[Extensions]
) -> dict[Pair, Future[RankRun]]:
    there, host = found(libraries), found(mpi)
    if there is None or host is None:
        return {}
    pairs = [
        pair
        for pair in _SLOWEST_FIRST
        if rank_start.can_run(setup, pair, there[pair.framework], host)
    ]
    setups = rank_start.setups_of_runs(setup, pairs)
    runs: dict[Pair, Future[RankRun]] = {}
    for pair, own in setups.items():
        left = len(setups) - len(runs)
        start = rank_start.start_ranks
        runs[pair] = parts.start(pair.subject, start, host, *pair, setup=own, runs=left)
    return runs


def _start_import(parts: Parts, library: Extension) -> Future[Extension]:
    return parts.start(f"extension of {library.framework}", inspection.import_extension, library)


def _extensions(
    parts: Parts,
    libraries: Future[Extensions],
    runs: Mapping[Pair, Future[RankRun]],
    imports: Mapping[str, Future[Extension]],
) -> dict[str, Future[Extension]]:
    """From ranks, or from a process of its own: an import takes seconds, and ranks import anyway."""
    if error := libraries.exception():
        failed: Future[Extension] = Future()
        failed.set_exception(error)
        return dict.fromkeys(FRAMEWORKS, failed)
    extensions = {}
    for name, library in libraries.result().items():
        of_framework = [found(run) for pair, run in runs.items() if pair.framework == name]
        facts = next((run.extension for run in of_framework if run and run.extension), None)
        if facts:
            extensions[name] = known(library._replace(facts=facts))
        else:
            extensions[name] = imports.get(name) or _start_import(parts, library)
    return extensions


def _benchmarks(
    setup: Setup, parts: Parts, mpi: Future[HostMpi], runs: Mapping[Pair, Future[RankRun]]
) -> dict[Pair, Future[Benchmark]]:
    """One after the other, after everything else: nothing may disturb them."""
    right = [
        pair
        for pair, each in runs.items()
        if setup.effort and (run := found(each)) and judge_run(run).status != "fail"
    ]
    benchmarks: dict[Pair, Future[Benchmark]] = {}
    for pair in right:
        label, left = f"speed of {pair.subject}", len(right) - len(benchmarks)
        benchmarks[pair] = parts.start(label, bench.measure, setup.effort, mpi, pair, runs=left)
        parts.wait()
    return benchmarks
