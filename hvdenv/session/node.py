"""Asks a compute node, in a job, what `init --here --where compute` drafts a recipe from."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hvdenv.base.errors import StepError, UsageError
from hvdenv.base.places import find_places
from hvdenv.base.reading import STATE, read_json
from hvdenv.base.schema import Problem, decode
from hvdenv.drafting.draft import Draft, nested
from hvdenv.drafting.here import Seen, of_host
from hvdenv.drafting.values import Found
from hvdenv.model.cluster import Job, Partition
from hvdenv.model.dialect import Dialect, with_own
from hvdenv.session.job import OWN, submit_own, to_the_end
from hvdenv.sites.batch import BatchJob, check, own_job
from hvdenv.sites.jobs import OUTPUT_SECONDS, Submitted


def ask_node(draft: Draft, *, dry_run: bool) -> Found | None:
    """What a compute node shows, asked in a job; None for a dry run, which prints the script."""
    document = nested(draft.values)
    scheduler = document.get("scheduler", "")
    dialect = with_own(decode(dict[str, Dialect], document.get("schedulers", {}))).get(scheduler)
    if dialect is None:
        raise UsageError(
            "neither the page nor this machine shows which scheduler it has",
            remedy="name it: --set scheduler=slurm (or pbs, lsf, gridengine, cobalt)",
        )
    partitions = decode(dict[str, Partition], document.get("partitions", {}))
    job = decode(Job, document.get("job", {}))
    gpus = partitions.get(job.partition or "", Partition()).gpus
    job = own_job(job._replace(gpus_per_node=job.gpus_per_node or gpus), "init")
    places = find_places()
    answer = places.jobs / f"{job.name}-{os.urandom(6).hex()}.json"
    batch = BatchJob(
        job,
        check(job, dialect, partitions, where="{}".format),
        command=(*OWN, "hvdenv.drafting.here", str(answer)),
    )
    record = submit_own(scheduler, dialect, batch, dry_run=dry_run)
    return _answered(record, answer) if record else None


def _answered(record: Submitted, answer: Path) -> Found:
    try:
        code = to_the_end(record, as_json=True)
        end = time.monotonic() + OUTPUT_SECONDS  # a network file system may show it later
        while not code and not answer.exists() and time.monotonic() < end:
            time.sleep(0.1)
        seen = decode(Seen, read_json(answer, STATE))
    except (OSError, ValueError, Problem) as error:
        raise StepError(
            f"the job on a compute node did not answer (exit code {code})",
            where=f"job {record.id}",
            remedy=f"see the end of {record.log}; without a node: leave out --where compute",
        ) from error
    finally:
        answer.unlink(missing_ok=True)
    return of_host(seen, compute=True)
