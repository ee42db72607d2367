"""Templates of the package's own pages, which escape all that they are given."""

from typing import Any

import jinja2


def page_template(package: str, name: str) -> jinja2.Template:
    """The template `name` in the folder `templates` of a package; a name that it is not given is an
    error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def as_text(value: Any) -> str:
    """A value of JSON as a line to read."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
