"""Pages made from the code are those of this code."""

from pathlib import Path

from workbench.recipe import iter_fields
from workbench.recipe.reference import render_reference

DOCS = Path(__file__).parents[2] / "docs"


def test_the_recipe_page_is_up_to_date() -> None:
    assert (DOCS / "recipe.md").read_text(encoding="utf-8") == render_reference(), "run: make docs"


def test_the_recipe_page_names_every_field() -> None:
    page = render_reference()
    assert all(f"`{info.name}`" in page for info in iter_fields())
