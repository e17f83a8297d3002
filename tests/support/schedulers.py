"""Small fake programs of each scheduler, for PATH: they run a job at once, on this machine.

They answer in the words of the real ones, of which tests/cases/jobs/answers has recordings.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.support.files import programs

# $id, $name, $out and $code are of the job.
_SUBMIT = """
cd {state}
for script; do :; done
[ $# -gt 0 ] || {{ script=$PWD/stdin; cat > "$script"; }}
id={id} out=$PWD/job.out
name=$(sed -nE 's/^#[^ ]+ (-J|-N|--jobname) //p' "$script" | head -n 1)
echo "id='$id' name='$name' out='$out'" > job
rm -f asked code cancelled forgotten pid
(
    until [ -e asked ]; do sleep 0.02; done
    export {variables}
    setsid bash "$script" > "$out" 2>&1 &
    echo $! > pid
    wait $!
    echo $? > code
) > /dev/null 2>&1 < /dev/null &
echo "{printed}"
"""
_QUERY = """
cd {state}
. ./job
if [ -e forgotten ]; then state=unknown; code=
elif [ -e cancelled ]; then state=cancelled code=137
elif [ -e code ]; then state=ended; code=$(cat code)
else state=running code=0; fi
{answer}
touch asked
"""
# The job may be about to begin, or have ended.
_CANCEL = """
cd {state} && touch cancelled
until [ -e code ] || kill -9 "-$(cat pid)"; do sleep 0.02; done 2> /dev/null
"""


class _Fake(NamedTuple):
    """Programs of a scheduler.

    Attributes:
        printed: by the program that submits.
        variables: in the job.
        answer: shell commands that print the answer about a job in $state.
        more: other programs, which answer too.
    """

    submit: str
    query: str
    cancel: str
    id: str
    printed: str
    variables: str
    answer: str
    more: tuple[tuple[str, str], ...] = ()


_SLURM = r"""
case $state in running) word=RUNNING ;; cancelled) word=CANCELLED ;; *)
    [ "$code" = 0 ] && word=COMPLETED || word=FAILED ;; esac
if [ $state = unknown ]; then echo "slurm_load_jobs error: Invalid job id specified"; exit 1; fi
echo "JobId=$id JobName=$name"
echo "   JobState=$word Reason=None Dependency=(null)"
echo "   Requeue=1 Restarts=0 ExitCode=$code:0"
echo "   NodeList=n1"
echo "   StdOut=$out"
"""
_PBS = r"""
if [ $state = unknown ]; then echo "qstat: Unknown Job Id $id"; exit 153; fi
echo "Job Id: $id"
echo "    Job_Name = $name"
case $state in running) echo "    job_state = R" ;; *)
    echo "    job_state = F"
    [ $state = cancelled ] || echo "    Exit_status = $code" ;; esac
echo "    exec_host = n1/0*4"
echo "    Output_Path = login1:$out"
"""
_COBALT = r"""
[ $state = running ] || exit 0
echo "JobID: $id"
echo "    JobName     : $name"
echo "    State       : running"
echo "    Location    : n1"
echo "    OutputPath  : $out"
"""
_LSF = r"""
if [ $state = unknown ]; then echo "Job <$id> is not found"; exit 255; fi
case $state in running) word=RUN code= ;; *) [ "$code" = 0 ] && word=DONE || word=EXIT ;; esac
[ $state = cancelled ] && why="TERM_OWNER: job killed by owner" || why=
echo "{ \"JOB_NAME\":\"$name\", \"STAT\":\"$word\", \"EXIT_CODE\":\"$code\","
echo "  \"EXIT_REASON\":\"$why\", \"EXEC_HOST\":\"n1\", \"OUTPUT_FILE\":\"$out\" }"
"""
_GRID_ENGINE = r"""
if [ $state != running ]; then printf 'Following jobs do not exist: \n%s\n' "$id"; exit 1; fi
case $1 in -j)
    echo "job_number:                 $id"
    echo "job_name:                   $name"
    echo "stdout_path_list:           NONE:NONE:$out"; exit 0 ;;
*)  echo "     $id 0.50000 $name ann r 11/23/2026 12:04:28 gpu.q@n1 MASTER" ;; esac
"""
_ACCOUNTING = r"""
if [ $state = unknown ]; then echo "error: job id $id not found"; exit 1; fi
echo "jobname      $name"
echo "failed       0"
echo "exit_status  $code"
"""
_FAKES = {
    "slurm": _Fake(
        submit="sbatch", query="scontrol", cancel="scancel", id="18", printed="$id",
        variables="SLURM_JOB_ID=18", answer=_SLURM, more=(("sacct", "exit 1"),),
    ),
    "pbs": _Fake(
        submit="qsub", query="qstat", cancel="qdel", id="18.pbs-01", printed="$id",
        variables="PBS_JOBID=18.pbs-01", answer=_PBS,
    ),
    "cobalt": _Fake(
        submit="qsub", query="qstat", cancel="qdel", id="18", printed="$id",
        variables="COBALT_JOBID=18", answer=_COBALT,
    ),
    "lsf": _Fake(
        submit="bsub", query="bjobs", cancel="bkill", id="18",
        printed="Job <$id> is submitted to queue <batch>.", variables="LSB_JOBID=18", answer=_LSF,
    ),
    "gridengine": _Fake(
        submit="qsub", query="qstat", cancel="qdel", id="18", printed="$id",
        variables="JOB_ID=18 SGE_TASK_ID=undefined", answer=_GRID_ENGINE,
        more=(("qacct", _ACCOUNTING),),
    ),
}  # fmt: skip
SCHEDULERS = tuple(_FAKES)


class Scheduler(NamedTuple):
    """The programs of a scheduler, in a directory for PATH."""

    name: str
    programs: Path
    state: Path
    cancel: Path

    def forget(self) -> None:
        """Like a scheduler that has no record of ended jobs."""
        (self.state / "forgotten").touch()


def install(name: str, folder: Path) -> Scheduler:
    fake, state = _FAKES[name], folder / "state"
    state.mkdir(parents=True)
    submit = _SUBMIT.format(state=state, id=fake.id, variables=fake.variables, printed=fake.printed)
    answers = {fake.query: fake.answer, **dict(fake.more)}
    scripts = {each: _QUERY.format(state=state, answer=text) for each, text in answers.items()}
    scripts |= {fake.submit: submit, fake.cancel: _CANCEL.format(state=state)}
    bin_folder = programs(folder / "bin", **scripts)
    return Scheduler(name, bin_folder, state, bin_folder / fake.cancel)
