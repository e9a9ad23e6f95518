"""Show the doctests of docstrings as code: they are paragraphs without a heading here."""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"(?:^|(?<=\n\n))>>> .*?(?=\n\n|\Z)", re.DOTALL)


class Doctests(Extension):
    """Put a fence around each paragraph that begins with `>>>`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda match: f"```pycon\n{match[0].rstrip()}\n```", obj.docstring.value
            )
