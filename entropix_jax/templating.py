"""Templates of the package's own pages, which escape all that they are given."""

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
