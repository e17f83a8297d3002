"""Build an environment.

If nothing changed since the last build, build does nothing. After a build that was killed, it
starts again from caches of what was downloaded and compiled."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.building.state import Built, already_built
from hvdenv.cli.options import add, add_options, command_line, give, is_locked, read_request
from hvdenv.environments.generations import Environment, read_record
from hvdenv.model.observe import complete
from hvdenv.model.recipe import provided_by_modules
from hvdenv.session.chosen import command_for
from hvdenv.session.job import run_there
from hvdenv.session.prepare import Prepared, describe, prepare
from hvdenv.session.recipe import open_recipe

EXAMPLES = """\
examples:
  hvdenv build local
  hvdenv build local --variant torch --prefix ~/envs/horovod
  hvdenv build ./mine.toml --python 3.11
  hvdenv build local --locked                       exactly what the lock lists, or exit 4
  hvdenv build neuron --where compute               in a job; a second call follows it again

The environment is stored under $HVDENV_HOME (default: ~/.local/share/hvdenv), or at --prefix.
Activate it with `. PREFIX/activate.sh`.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "recipe", "python", "prefix", "json", "loudness", "where")
    add(parser, "--dry-run", "show what would be built, or the script of the job, and do nothing")
    add_options(parser, "allow", "locked")
    add(parser, "--rebuild", "build a new generation even if nothing changed")
    add_options(parser, "take-over", "trust")


def run(arguments: argparse.Namespace) -> int:
    request = read_request(arguments)
    if arguments.where == "compute":
        words = command_line(arguments, where="here", dry_run=False)
        return run_there(request, "build", words, dry_run=arguments.dry_run)
    resolved = open_recipe(request)
    workspace = resolved.recipe.places.workspace
    if workspace and not (request.prefix or arguments.dry_run):
        from hvdenv.session.build import allocate_workspace

        allocate_workspace(request, workspace, resolved)
    prepared = prepare(request, thorough=False, resolved=resolved)
    if is_locked(arguments):
        from hvdenv.session.lock import add_lock

        prepared = add_lock(request, prepared)
    environment = prepared.environment
    # A build changes what an earlier one made there.
    request.gate.refuse_path(str(environment.prefix))
    request.gate.refuse_prefix(environment.store)
    before, plan = environment.active(), prepared.plan()
    built = None if arguments.rebuild else already_built(environment, plan)
    if arguments.dry_run:
        print(describe(plan, prepared) if built is None else f"nothing to do: {built.prefix}")
        return 0
    if built is None:
        from hvdenv.session.build import build_prepared

        prepared = prepared._replace(facts=complete(prepared.facts, Runner()))
        built = build_prepared(
            request, prepared, plan, rebuild=arguments.rebuild, take_over=arguments.take_over
        )
    in_job = " --where compute" if resolved.recipe.dialect else ""
    give(
        arguments,
        encode(built),
        f"{_result(built, prepared)}: {built.prefix}",
        f"use it with: . {built.prefix}/activate.sh",
        f"prove that it works: {command_for(request, 'verify')}{in_job}",
        *([] if arguments.json or arguments.quiet else _dropped(environment, before)),
    )
    return 0


def _result(built: Built, prepared: Prepared) -> str:
    recipe = prepared.resolved.recipe
    if provided_by_modules(recipe):
        return f"nothing to build: modules provide Horovod {recipe.horovod.version}; wrote what loads them"
    return f"built in {built.seconds:.0f} s" if built.changed else "nothing to do"


def _dropped(environment: Environment, before: str) -> Iterator[str]:
    """The packages that the user had added to the generation that was active before."""
    if before in ("", environment.active()):
        return
    record = read_record(environment.record(before))
    if added := record.additions.requirements:
        yield (
            f"without what was added: {', '.join(added)}; to go back to that:"
            f" hvdenv envs rollback {environment.prefix} --generation {before}"
        )
