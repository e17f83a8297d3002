"""The shipped recipes and their variants."""

from __future__ import annotations

from hvdenv.model.recipe_files import read_layer, shipped_recipes, variants_of

OFFERED = {
    name: variants_of(read_layer("recipe", path).values) for name, path in shipped_recipes().items()
}
# Each recipe alone and with each of its variants, for parametrize().
CHOICES = [(name, variant) for name, offered in OFFERED.items() for variant in ("", *offered)]
