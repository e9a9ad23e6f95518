"""The pages of the documentation, their code blocks, and the commands in them."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
_FENCE = re.compile(
    r"(?:^ *<!-- run: (?P<how>\w+)(?: because (?P<why>.+?))? -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_HEREDOC = re.compile(r"^cat > (\S+) <<END\n(.*?)^END\n", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `how` and `why` are an exception's, from the comment before it."""

    page: str
    line: int
    language: str
    text: str
    how: str | None
    why: str | None

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def heredocs(self):
        """The files that the block writes, by name."""
        return dict(_HEREDOC.findall(self.text))

    @property
    def commands(self):
        """The commands of a shell block, as lists of arguments."""
        joined = _HEREDOC.sub("", self.text).replace("\\\n", " ")
        return [
            words for line in joined.splitlines() if (words := shlex.split(line, comments=True))
        ]


def name_of(path):
    """Return the path of a page below the project's folder."""
    return path.relative_to(ROOT).as_posix()


def list_blocks(*languages):
    """Return the blocks of all pages in these languages, or all blocks."""
    found = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            block = Block(
                page=name_of(path),
                line=text.count("\n", 0, match.start("text")),
                language=match["language"],
                text=textwrap.dedent(match["text"]),
                how=match["how"],
                why=match["why"],
            )
            if not languages or block.language in languages:
                found.append(block)
    return found


def read_prose(path):
    """Return the text of a page without its code blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def list_spans(path):
    """Return the inline code of a page, each on one line."""
    return [" ".join(span.split()) for span in _SPAN.findall(read_prose(path))]
