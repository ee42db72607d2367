"""HTML templates, with escaping of everything that is inserted."""

import jinja2


def html_template(name: str) -> jinja2.Template:
    """The template `templates/{name}` of this package.

    Rendering raises `jinja2.UndefinedError` for a variable that is not given.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("entropix_jax.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
