"""Puts on the site what lies outside of docs/: the changelog, and the examples with their pages."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_files(files, config):
    """Add the files under the paths that they have here, from which nav and links lead to them."""
    for path in [ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("*"))]:
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links lead where the pages are on the site: docs/ is its top."""
    for at_home, on_site in (
        ("../../docs/", "../../"),
        ("docs/", ""),
        ("../examples/", "examples/"),
    ):
        markdown = markdown.replace("](" + at_home, "](" + on_site)
    return markdown
