"""The hook by which MkDocs builds the site: pages of the lab beside those of docs, and which page a
search finds first.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# files outside docs that a page links to, at their own paths in the site
OUTSIDE = (
    "CHANGELOG.md",
    "examples/*.py",
    "lab/*.md",
    "lab/studies/*.md",
    "lab/studies/*/*.png",
    "lab/studies/language-flops/study.json",
)
GUIDES = ("data.md", "environments.md", "evaluate.md", "quickstart.md", "text.md", "train.md")
BOOST = {"questions.md": 8.0, **dict.fromkeys(GUIDES, 2.0), "api.md": 0.3, "options.md": 0.5}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files of `OUTSIDE`."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links between docs and the folders beside it to their places in the site, whose root is
    docs; rank the page in searches.
    """
    uri = page.file.src_uri
    is_outside = uri.startswith(("lab/", "CHANGELOG"))
    page.meta["search"] = {"boost": 0.3 if is_outside else BOOST.get(uri, 1.0)}
    if uri in ("lab/LOG.md", "CHANGELOG.md"):
        page.meta["search"] = {"exclude": True}
    if not is_outside:
        return markdown.replace("](../", "](")
    return markdown.replace("](docs/", "](").replace("../docs/", "../")
