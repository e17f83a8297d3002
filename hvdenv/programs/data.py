"""Whether the ranks of a training program read different data, and equally much of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from hvdenv.programs.program import Program, Steps, places
from hvdenv.reports.report import Finding
from hvdenv.standalone.ranks.events import DataSource, Joined
from hvdenv.verification.rank_judgement import listed
from hvdenv.verification.rank_run import Rank

# The part of its batches, or of its samples within a share, that a rank may share with another one
# by chance.
_SHARED = 0.1
# The part of its samples that it hardly shares by chance within half a pass, in any order.
_SAME_SAMPLES = 0.75
SAME_STEPS = (
    "start all ranks in the same epoch, and give them the same number of batches (drop_last, take,"
    " steps_per_epoch), or call hvd.join() after the last one"
)
_SHARE = (
    "give each rank its own share: DistributedSampler(dataset, num_replicas=hvd.size(),"
    " rank=hvd.rank()), dataset.shard(hvd.size(), hvd.rank()), or a seed by rank"
)


def judge_data(program: Program) -> Iterator[Finding]:
    """Whether ranks read different data."""
    found = [*_samplers(program)]
    yield from found
    if program.size > 1 and not any(each.status == "fail" for each in found):
        yield _batches(program)


def _samplers(program: Program) -> Iterator[Finding]:
    """What samplers were told about the ranks."""
    for rank, sources in program.sources():
        shares = [each for each in sources if each.replicas is not None]
        if shares and (wrong := _wrong_share(shares[0], rank.last(Joined), program.size)):
            kind = shares[0].kind
            right = f"{kind}(dataset, num_replicas=hvd.size(), rank=hvd.rank())"
            if kind == "shard()":
                right = "dataset.shard(hvd.size(), hvd.rank())"
            yield program.fail(
                "data", f"the {kind} of the loader in {shares[0].site} {wrong}", right
            )
            return
        epochs = [e.epoch for e in shares if e.shuffle and e.number == shares[0].number]
        if len(epochs) > 1 and epochs[0] == epochs[1]:
            yield program.note(
                "data",
                f"each pass over the loader in {shares[0].site} has the same order: call"
                " sampler.set_epoch(epoch) before it",
            )
            return


def _wrong_share(share: DataSource, joined: Joined | None, size: int) -> str:
    """What is wrong with the share of a rank; empty if nothing is."""
    if joined and 1 < joined.local_size == share.replicas != size:
        return ""  # each host reads all data
    if share.local:
        return "was given hvd.local_rank() as its rank, which repeats on each host"
    if share.replicas != size:
        return f"divides the data by {share.replicas}, not by the {size} ranks"
    if joined and share.rank != joined.rank:
        return f"was given rank {share.rank} on rank {joined.rank}"
    return ""


def _batches(program: Program) -> Finding:
    """Whether ranks read the same batches."""
    steps = max((each.steps for each in program.trained), key=len, default=[])
    if not steps or not all(step.batch for each in steps for step in each):
        why = next((end.unobserved for end in program.ends if end and end.unobserved), "")
        why = why or "the model reads them within compiled code, or by arguments of its own"
        return program.unproven("data", f"the batches could not be seen: {why}")
    passes = [each for _, each in program.sources() if each]
    where = f" (read in {passes[0][0].site})" if passes and passes[0][0].site else ""
    # A later pass has other shares.
    once = len(steps) <= min((each[0].batches or 0 for each in passes), default=0)
    read = [[each[at].batch for each in steps] for at in range(len(program.ranks))]
    for (one, mine), (other, theirs) in combinations(zip(program.ranks, read, strict=True), 2):
        if found := _compare(program, (one, other), (mine, theirs), where, once):
            return found
    firsts = [each[0] for each in passes]
    return _samples(program, steps, firsts, where) or _shares(program, steps, firsts, where)


def _compare(
    program: Program,
    ranks: tuple[Rank, Rank],
    read: tuple[Sequence[str], Sequence[str]],
    where: str,
    once: bool,
) -> Finding | None:
    """What is wrong with the batches of two ranks; None if nothing is."""
    names = " and ".join(rank.name for rank in ranks)
    mine, theirs = read
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    shared = len({*mine} & {*theirs}) / len({*mine})
    if len({*mine}) == 1 and len(mine) > 1 and same:
        return program.note("data", f"{names} read one batch in all steps: synthetic data")
    if same > len(mine) / 2:
        text = f"the same batches{where} in {same} of {len(mine)} steps"
    elif shared > _SHARED and once:
        text = f"shares that overlap{where}: {shared:.0%} of their batches"
    else:
        return None
    evidence = f"digests of {names}:\n{' '.join(mine)}\n{' '.join(theirs)}"
    return program.fail("data", f"{names} read {text}", _SHARE, evidence)


def _samples(
    program: Program, steps: Sequence[Steps], firsts: Sequence[DataSource], where: str
) -> Finding | None:
    """Whether two ranks read the same samples, in other batches; None if they do not."""
    own = [[x for each in steps for x in each[at].samples] for at in range(len(program.ranks))]
    if not all(own):
        return None
    pairs = combinations(zip(program.ranks, own, strict=True), 2)
    shared, mine, names = max(
        (len({*a} & {*b}) / min(len({*a}), len({*b})), a, f"{one.name} and {other.name}")
        for (one, a), (other, b) in pairs
    )
    shared -= 2 * (1 - len({*mine}) / len(mine))  # as ranks whose samples repeat do, by chance
    batches = min((each.batches or 0 for each in firsts), default=0)
    text = f"{names} read the same samples{where} in other batches: {shared:.0%} of them"
    divided = all(each.replicas == program.size for each in firsts)
    if divided and shared > _SHARED and len(steps) <= batches:
        return program.fail(
            "data", text, "shuffle with the same seed on all ranks before the division"
        )
    if shared > _SAME_SAMPLES:
        if 2 * len(steps) <= batches:
            return program.fail("data", text, _SHARE)
        return program.note("data", f"{text}. If they are not meant to, {_SHARE}")
    return None


def _shares(
    program: Program, steps: Sequence[Steps], firsts: Sequence[DataSource], where: str
) -> Finding:
    """What different batches are: shares of the data, or all of it in another order."""
    text = f"the ranks read different batches in {len(steps)} steps{where}"
    samples = {f"{each.samples} samples" for each in firsts if each.samples is not None}
    lengths = samples or {f"{each.batches} batches" for each in firsts if each.batches is not None}
    if any(each.replicas is not None for each in firsts) or len(lengths) != 1:
        return program.passed("data", text)
    share = "a DistributedSampler" if samples else "dataset.shard()"
    return program.note(
        "data",
        f"{text}; each rank reads {listed(list(lengths))} in an epoch. If these are the whole"
        f" data set rather than a share of it, use {share}",
    )


def judge_step_counts(program: Program) -> Iterator[Finding]:
    """Whether ranks take equally many steps."""
    if text := uneven(program):
        sites = places([each[0].site for _, each in program.sources() if each])
        text = (
            f"{text} (read in {sites}): at the end of the shorter one, the other ranks wait forever"
        )
        yield program.fail("steps", text, SAME_STEPS)
    elif _lengths(program) or _all_ended(program):
        yield program.passed("steps", "all ranks take the same number of steps")
    else:
        text = "no pass over the data ended in these steps, and its length is not known"
        yield program.skipped("steps", text)


def uneven(program: Program) -> str:
    """Ranks with different numbers of steps, in words; empty if there are none."""
    tables = {"batches in a pass": _lengths(program), "steps until the end": _all_ended(program)}
    for what, table in tables.items():
        if len(set(table.values())) > 1 and not program.calls("join"):
            return f"{listed([f'{name} has {count}' for name, count in table.items()])} {what}"
    return ""


def _lengths(program: Program) -> dict[str, int]:
    """The batches of each rank in a pass; empty if they are not known."""
    counts = {
        rank.name: each[0].batches or 0
        for rank, each in program.sources()
        if each and each[0].batches is not None and each[0].whole
    }
    return counts if len(counts) == len(program.ranks) else {}


def _all_ended(program: Program) -> dict[str, int]:
    """The steps of each rank; empty if not all ended by themselves."""
    done = program.ended()
    return done if len(done) == len(program.ranks) else {}
