"""What the build of the site does beyond MkDocs: two things that its parts would get wrong.

Knows MkDocs' hooks. Does not know what the pages say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

_FENCE = re.compile(r"^ *(```+)")
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")


def on_post_template(output: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Leave the sitemap out where the site's address is not known."""
    return output if template_name != "sitemap.xml" or config.site_url else ""


def on_page_markdown(markdown: str, **_: object) -> str:
    r"""Take the backslash out of `int \| None` in tables.

    GitHub needs it there. Python-Markdown takes no `|` in code for the end of a cell, and would
    show the backslash.
    """
    lines, fence = markdown.split("\n"), ""
    for number, line in enumerate(lines):
        found = _FENCE.match(line)
        if found and fence in {"", found[1]}:
            fence = "" if fence else found[1]
        elif not fence and line.lstrip().startswith("|"):
            lines[number] = _CODE.sub(lambda code: code[0].replace(r"\|", "|"), line)
    return "\n".join(lines)
