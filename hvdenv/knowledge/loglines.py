"""What lines of a log have in common, whoever printed them: prefixes."""

from __future__ import annotations

import re

# Times, ranks (mpirun, horovodrun, srun, torchrun), hosts and pods, container builds, CI, workers of
# Ray and Determined, pip's and Spack's frames around the output of others, quotations and report titles.
# Horovod pads microseconds with spaces.
_PREFIX = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\. {1,5}\d{1,5}(?=:)|[.,\d]*)(?:Z|[+-]\d\d:?\d\d)?\]?:? ?"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}:?(?=\[)"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,64} [\w./-]{1,64}(?:\[\d+\])?: "
    r"|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]{1,200}:\d+\] "
    r"|\[(?:[\w.@-]+@)?\d+,(?P<mpirun>\d+)\](?:<std(?:err|out)>)?: ?"
    r"|\[(?:default)?(?P<gloo>\d+)\](?:<std(?:err|out)>)?: ?"
    r"|\[rank[=]?(?P<torch>\d+)\](?:: ?| \|\| )"
    r"| {0,4}(?P<srun>\d{1,5}): (?!\[[^\]]*\]$)"  # but not the tensors that a missing rank has yet to submit
    r"|(?:\d{1,6} )?#\d+ \d+\.\d+ "
    r"|\[\d{1,9}\.(?:\d{1,5}|batch|extern|interactive)\] "  # steps in the log of slurmd
    r"|##\[error\]"
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ?"
    r"|<\w*> +(?=\[\d{4}-)"
    r"|[0-9a-f]{8} \|\| ?"
    r"|\[pod/[\w./-]{1,200}\] "
    r"|\w[\w.-]{0,60}[-_]\d{1,4} +\| ?"
    r"| *[│┃] ?"
    r"| {2}(?:>>|  ) ?\d{1,7} {4}"
    r"|> ?"
    r"|# "
)


def without_prefix(line: str) -> tuple[str, str]:
    """A line without its prefixes, and the rank that they name."""
    rank, at = "", 0
    while found := _PREFIX.match(line, at):
        rank = rank or next((each for each in found.groups() if each), "")
        at = found.end()
    return line[at:], rank
