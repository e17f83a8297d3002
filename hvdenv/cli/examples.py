"""Print the directory of the example training programs.

pytorch_mnist.py, tensorflow2_mnist.py and keras_mnist.py train on any number of ranks."""

from __future__ import annotations

import argparse

from hvdenv.model.recipe_files import recipe_folder

EXAMPLES = """\
examples:
  hvdenv examples
  hvdenv run local -n 2 -- python "$(hvdenv examples)/pytorch_mnist.py"
  cp "$(hvdenv examples)/keras_mnist.py" train.py
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(arguments: argparse.Namespace) -> int:
    print(recipe_folder().parent / "examples")
    return 0
