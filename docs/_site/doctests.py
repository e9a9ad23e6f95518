"""Show the doctests of docstrings as code: they have no heading here."""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)


class Doctests(Extension):
    """Put a fence around each doctest, from `>>>` to the next empty line."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda match: f"\n```pycon\n{match[0].rstrip()}\n```", obj.docstring.value
            )
