"""The templates of the report and of model cards: files in templates/, filled in by jinja2."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from ups.common.text import markdown, number
from ups.metrics.intervals import Metric
from ups.report.tables import is_interval, label, value_of

ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_suffix("")),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {"number": number, "value_of": value_of, "label": label}
ENVIRONMENT.tests |= {"interval": is_interval, "metric": lambda value: isinstance(value, Metric)}


IN_MARKDOWN = ENVIRONMENT.overlay(
    finalize=lambda value: value if isinstance(value, Markup) else markdown(value)
)


def render(template: str, **values: Any) -> str:
    """The filled-in template, an .html or .md file. All values are escaped unless they are Markup, as is the
    HTML."""
    if template.endswith(".md"):
        return IN_MARKDOWN.get_template(template).render(values)
    return Markup(ENVIRONMENT.get_template(template).render(values))
